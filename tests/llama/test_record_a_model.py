"""``mtpstats record`` as a process: what is in the file, and that nothing finished is ever lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from mtpstats import replay
from mtpstats.cost import Costs
from mtpstats.errors import InputError
from mtpstats.policy import Chain, OptTree
from mtpstats.prompts import builtin
from mtpstats.result import sha256
from mtpstats.run import builtin_model
from mtpstats.trace import UNKNOWN, Trace
from mtpstats.tracefile import TraceWriter

TEXTS = [prompt.text for prompt in builtin()][:6]
ARGS = ("-n", "24", "-t", "1", "--no-cost", "--depth", "4")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "mtpstats", "record", *map(str, args)]


def record(*args: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*args), stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=300
    )


def error_line(done: subprocess.CompletedProcess[bytes], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    text = done.stderr.decode()
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", text), text
    return text


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "six.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": text}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(prompts: Path) -> tuple[Path, float]:
    """An undisturbed recording, and how long it took."""
    path = prompts.with_name("whole.trace")
    began = time.monotonic()
    done = record(*ARGS, "--prompts", prompts, "-o", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    return path, time.monotonic() - began


def same(a: Trace, b: Trace) -> None:
    """Everything but the time of day and how long it took."""
    assert {**a.header, "environment": 0} == {**b.header, "environment": 0}
    assert [prompt.id for prompt in a.prompts] == [prompt.id for prompt in b.prompts]
    for one, other in zip(a.prompts, b.prompts, strict=True):
        for field in fields(one):
            x, y = getattr(one, field.name), getattr(other, field.name)
            if isinstance(x, np.ndarray):
                assert x.tobytes() == y.tobytes(), field.name
            elif field.name == "facts":
                assert {**x, "seconds": 0} == {**y, "seconds": 0}
            elif field.name != "seconds":
                assert x == y, field.name


def test_what_is_in_a_trace(whole: tuple[Path, float]) -> None:
    trace = Trace.load(whole[0])
    assert trace.incomplete is None
    header = trace.header
    assert (header["depth"], header["every"], header["n_predict"]) == (4, 1, 24)
    assert header["head"] == {"kind": "single", "blocks": 1}
    assert header["sampling"] == {
        "temp": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0
    }  # fmt: skip
    assert header["model"]["sha256"] == sha256([builtin_model()])
    assert header["settings"]["n_threads"] == 1
    assert header["environment"]["library"]["version"]
    assert "cost" not in header
    for prompt in trace.prompts:
        # As far as the last verification of 24 tokens can reach, and no verification is cut.
        assert prompt.n_generated >= 24 + 4 + 2
        assert prompt.roots.tolist() == list(range(prompt.n_prompt - 1, prompt.n_prompt + 24))
        parts = prompt.facts["seconds"]
        assert set(parts) == {"prompt", "target", "head", "other", "probe"}
        assert min(parts.values()) > 0
        assert sum(parts.values()) <= prompt.seconds
    assert replay(trace, Chain(4)).verifications > 0


def test_with_a_width_cut_and_resumed(prompts: Path) -> None:
    path = prompts.with_name("wide.trace")
    args = (*ARGS, "--prompts", prompts, "--limit", "3", "--width", "3", "-o", path)
    assert record(*args).returncode == 0
    before = Trace.load(path)
    assert (before.width, len(before.prompts)) == (3, 3)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)  # inside the beams, which come last
    assert len(Trace.load(path).prompts) == 2
    assert record(*args, "--resume").returncode == 0
    same(before, Trace.load(path))
    assert replay(before, OptTree(6, 4, 3)).verifications > 0
    narrower = record(*args, "--resume", "--width", "2")
    assert "was recorded with width 3, not 2: it cannot be resumed so" in error_line(narrower, 2)


def test_kill_at_any_moment_then_resume(whole: tuple[Path, float], prompts: Path) -> None:
    path, took = prompts.with_name("killed.trace"), whole[1]
    rng = random.Random(1)
    kept = []
    for _ in range(3):
        process = subprocess.Popen(
            command(*ARGS, "--prompts", prompts, "-o", path, "--resume"),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        # Wherever that is: in the start, in a prompt, in a write, or after the end.
        time.sleep(took * rng.uniform(0.3, 0.9))
        process.kill()
        process.wait()
        kept.append(len(Trace.load(path).prompts) if path.exists() else 0)
    assert kept == sorted(kept)
    # And one that is cut off inside its last record.
    if path.exists() and kept[-1]:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 100)
        assert Trace.load(path).incomplete
    done = record(*ARGS, "--prompts", prompts, "-o", path, "--resume")
    assert done.returncode == 0, done.stderr
    same(Trace.load(path), Trace.load(whole[0]))


def held(path: Path) -> int:
    """Prompts in a trace that is being written."""
    try:
        return len(Trace.load(path).prompts)
    except InputError:  # not even its header
        return 0


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(
    whole: tuple[Path, float], prompts: Path
) -> None:
    path = prompts.with_name("stopped.trace")
    process = subprocess.Popen(
        command(*ARGS, "--prompts", prompts, "-o", path),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not held(path):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    n = len(Trace.load(path).prompts)
    assert 1 <= n < 6
    assert err.decode() == (
        f"mtpstats: error: interrupted: {n} of 6 prompts are in {path}; the same command with "
        "--resume goes on\n"
    )
    done = record(*ARGS, "--prompts", prompts, "-o", path, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["prompts"], told["recorded"]["prompts"]) == (6, 6 - n)
    assert told["bytes"] == path.stat().st_size
    same(Trace.load(path), Trace.load(whole[0]))


def test_a_time_limit_ends_in_good_order(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "limited.trace"
    args = (*ARGS, "--prompts", prompts, "-o", path, "--resume")
    n, limit = 0, whole[1] / 2
    while n < 6:
        # Each time a little longer, so that it ends on any machine.
        done = record(*args, "--time-limit", f"{limit:.2f}s")
        limit *= 1.25
        before, n = n, held(path)
        assert done.returncode == (0 if n else 1), done.stderr
        assert before <= n
        said = f"{n} of 6 prompts were finished within the time limit; the same command with"
        assert said.encode() in done.stderr or n == 6
    same(Trace.load(path), Trace.load(whole[0]))


def test_a_trace_removed_in_the_middle_is_put_back(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "removed.trace"
    process = subprocess.Popen(
        command(*ARGS, "--prompts", prompts, "-o", path),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not held(path):
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(InputError, match="another run is writing to it"):
        TraceWriter(path, Trace.load(path).header, resume=True)
    path.unlink()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.decode() == f"mtpstats: {path}: was removed by somebody; it is there again\n"
    same(Trace.load(path), Trace.load(whole[0]))


def test_a_trace_is_never_overwritten(whole: tuple[Path, float], prompts: Path) -> None:
    path = whole[0]
    before = path.read_bytes()
    said = error_line(record(*ARGS, "--prompts", prompts, "-o", path), 2)
    assert f"{path}: exists already; go on with it (--resume)" in said
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--depth", "5"), "was recorded with depth 4, not 5"),
        (("-n", "25"), "was recorded with n_predict 24, not 25"),
        (("--temp", "0"), "was recorded with sampling.temp 0.7, not 0.0"),
        (("-t", "2"), "was recorded with settings.n_threads 1, not 2"),
        (("--every", "2"), "was recorded with every 1, not 2"),
    ],
)
def test_another_recording_is_not_resumed(
    whole: tuple[Path, float], prompts: Path, args: tuple[str, ...], words: str
) -> None:
    before = whole[0].read_bytes()
    done = record(*ARGS, "--prompts", prompts, "-o", whole[0], "--resume", *args)
    assert words in error_line(done, 2)
    assert whole[0].read_bytes() == before


def test_other_prompts_are_not_resumed(whole: tuple[Path, float], tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"id": "p0", "prompt": "something else"}) + "\n")
    done = record(*ARGS, "--prompts", path, "-o", whole[0], "--resume")
    assert "prompt p0 was recorded with another text" in error_line(done, 2)


def test_a_random_seed_is_drawn_once(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "random.trace"
    args = (*ARGS, "-p", "def", "-n", "4", "-s", "-1", "-o", path)
    assert record(*args).returncode == 0
    assert Trace.load(path).header["sampling"]["seed"] >= 0
    # One more prompt, under the same seed.
    assert record(*args, "-p", "class", "--resume").returncode == 0
    assert len(Trace.load(path).prompts) == 2


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def refused(*args: object) -> str:
        return error_line(record("-p", "x", *args), 2)

    assert "Missing option '-o'" in refused()
    assert "cannot be written to standard output" in refused("-o", "-")
    assert "is a directory" in refused("-o", tmp_path, "--resume")
    assert "cannot be written" in refused("-o", tmp_path / "none" / "x.trace")
    foreign = tmp_path / "foreign"
    foreign.write_text("hello\n")
    assert "not a trace of mtpstats" in refused("-o", foreign, "--resume")
    assert "--no-cost measures nothing" in refused(
        "-o", tmp_path / "x.trace", "--no-cost", "--cost-out", tmp_path / "c.json"
    )
    assert "is not in the range 1 to 16" in refused("-o", tmp_path / "x.trace", "--depth", "17")
    assert not (tmp_path / "x.trace").exists()


def test_costs_are_measured_first_and_can_be_shared(tmp_path: Path) -> None:
    path, costs_at = tmp_path / "x.trace", tmp_path / "costs.json"
    done = record("-p", "import", "-n", "8", "-t", "1", "-o", path, "--cost-out", costs_at)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode()
    assert re.search(r"^rows +1 +2 +3 +4 +5 +9 +17 +33$", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= max(80, len(str(path)) + 25)
    header = Trace.load(path).header
    costs = Costs.load(costs_at)
    assert {k: v for k, v in costs.to_dict().items() if k in header["cost"]} == header["cost"]
    assert costs.facts["model"]["sha256"] == sha256([builtin_model()])
    assert 0 < costs.verify(1) < costs.verify(33)
    assert 0 < costs.draft(1) < costs.draft(32)
    assert costs.follow is not None
    assert costs.verify.last == 33
    assert costs.draft.last == 32
    # A second prompt measures nothing anew.
    assert (
        record("-p", "import", "-p", "def", "-n", "8", "-t", "1", "-o", path, "--resume").returncode
        == 0
    )
    assert Trace.load(path).header["cost"] == header["cost"]


def test_a_head_of_its_own_file(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    models = ("-m", tiny("gemma4", f32=True), "-md", tiny("gemma4-assistant", f32=True))
    done = record(*models, "-p", "the time of", "-n", "12", "-t", "1", "-o", path)
    assert done.returncode == 0, done.stderr
    assert b"head follows" not in done.stdout
    trace = Trace.load(path)
    assert trace.header["head"]["kind"] == "shared"
    assert trace.header["model"]["draft_model"]["sha256"]
    assert Costs.from_dict(trace.header["cost"]).follow is None
    assert (trace.prompts[0].rank[:13, 0] != UNKNOWN).all()


def test_small_batches_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    args = ("-p", "import", "-n", "6", "-t", "1", "-b", "12", "-ub", "10", "--depth", "16")
    done = record(*args, "-o", path)
    assert done.returncode == 0, done.stderr
    trace = Trace.load(path)
    assert Costs.from_dict(trace.header["cost"]).verify.last == 12
    other = tmp_path / "y.trace"
    assert record(*args[:6], "--depth", "16", "--no-cost", "-o", other).returncode == 0
    one, two = trace.prompts[0], Trace.load(other).prompts[0]
    np.testing.assert_array_equal(one.tokens, two.tokens)
    # F16 weights: batch shape moves probabilities by as much.
    np.testing.assert_allclose(one.p_min_p[:, 0], two.p_min_p[:, 0], atol=0.02)


def test_an_abort_of_llama_cpp_says_what_is_kept(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "aborted.trace"
    code = f"""
import os, sys
from mtpstats import cli, probe
finish, done = probe.Prober.finish, []

def finish_two(self):
    done.append(1)
    if len(done) > 2:
        os.abort()  # as an assertion inside llama.cpp ends
    return finish(self)

probe.Prober.finish = finish_two
sys.exit(cli.main({[*map(str, ("record", *ARGS, "--prompts", prompts, "-o", path))]!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, check=False,
        timeout=120, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert b"2 of 6 prompts are in" in done.stderr
    assert len(Trace.load(path).prompts) == 2
