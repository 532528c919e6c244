"""Builds that are ended from outside, and two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llama import Sandbox


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing(
    box: Sandbox, tree: Path, sent: signal.Signals
) -> None:
    record = box.stub_cmake(f"sleep 300 & echo $! >'{box.top}/sleeper'; wait")
    process = box.start("--backend", "cpu", "--source", str(tree))
    wait_for(lambda: (box.top / "sleeper").exists())
    process.send_signal(sent)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err.splitlines()[-1]
    assert record.read_text() == "configure\nbuild\n"
    assert box.installed() == []
    assert box.leftovers() == []
    sleeper = int((box.top / "sleeper").read_text())
    wait_for(lambda: not alive(sleeper))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie nobody has waited for does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def test_a_killed_build_leaves_nothing_that_looks_installed(box: Sandbox, tree: Path) -> None:
    box.stub_cmake(f"[ -e '{box.top}/go' ] || exec sleep 2")
    process = box.start("--backend", "cpu", "--source", str(tree))
    wait_for(lambda: any(box.builds.glob(".mtpstats-work/*/build")))
    process.kill()
    process.communicate(timeout=30)
    assert box.installed() == []
    (box.top / "go").touch()
    done = box.run("--backend", "cpu", "--source", str(tree))
    assert done.returncode == 0, done.stderr
    assert len(box.installed()) == 1
    assert box.leftovers() == []


def test_of_two_at_once_one_builds_and_both_succeed(box: Sandbox, tree: Path) -> None:
    record = box.stub_cmake("sleep 1.5")
    args = ("--backend", "cpu", "--source", str(tree))
    processes = [box.start(*args), box.start(*args)]
    results = [(*p.communicate(timeout=60), p.returncode) for p in processes]
    assert [code for _, _, code in results] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert record.read_text() == "configure\nbuild\n"
    assert "waiting for the same build" in results[0][1] + results[1][1]
    assert box.leftovers() == []


def test_locks_of_dead_builds_and_of_other_machines(box: Sandbox, tree: Path) -> None:
    box.stub_cmake()
    args = ("--backend", "cpu", "--source", str(tree))
    key = Path(box.plan(*args)["prefix"]).name
    box.builds.mkdir()
    lock = box.builds / f".lock-{key}"
    lock.symlink_to("another-machine:1")
    refused = box.run(*args)
    assert refused.returncode == 1
    assert str(lock) in refused.stderr
    assert lock.is_symlink()
    lock.unlink()
    # Process 1 lives, but it is no build: a pid used again.
    lock.symlink_to(f"{os.uname().nodename}:1")
    assert box.run(*args).returncode == 0
    assert box.leftovers() == []
