"""Runs that are split up: workers of a Ray cluster on this machine, shards and their merger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from herepool import HerePool

from mtpstats import cli, run, spread
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.prompts import Prompt
from mtpstats.record import RecordSettings, RecordStopped, run_of
from mtpstats.run import BenchSettings, builtin_model
from mtpstats.speculate import Sampling
from mtpstats.trace import Trace, TracedPrompt
from mtpstats.worker import BenchWorker, RecordWorker

COMMAND = [sys.executable, "-m", "mtpstats"]
WORKERS = ["--ray", "local", "--workers", "2", "--cpus-per-worker", "1"]
CHOICE = ["-t", "1", "--shuffle", "--limit", "8"]
ARRAYS = ("tokens", "margin", "rank", "p", "p_min_p", "off_p", "off_top10", "overlap")


def timeless(value: Any) -> Any:
    """A result's part without what a clock gave."""
    if isinstance(value, dict):
        left_out = ("seconds", "tokens_per_second")
        return {key: timeless(inner) for key, inner in value.items() if key not in left_out}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def same(first: Path, second: Path) -> None:
    one, two = (json.loads(path.read_text()) for path in (first, second))
    for key in ("model", "settings", "prompts", "total"):
        assert timeless(one[key]) == timeless(two[key]), key


def same_texts(first: Path, second: Path, *, ordered: bool) -> None:
    one, two = (Trace.load(path).prompts for path in (first, second))
    if not ordered:
        one, two = (sorted(prompts, key=lambda prompt: prompt.id) for prompts in (one, two))
    assert [prompt.id for prompt in one] == [prompt.id for prompt in two]
    for mine, other in zip(one, two, strict=True):
        for name in ARRAYS:
            assert np.array_equal(getattr(mine, name), getattr(other, name), equal_nan=True), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one local run each of bench and record gives."""
    folder = tmp_path_factory.mktemp("whole")
    assert cli.main(["bench", *CHOICE, "-n", "96", "-o", str(folder / "run.json")]) == 0
    record = ["record", *CHOICE, "-n", "16", "--no-cost", "-o", str(folder / "run.trace")]
    assert cli.main(record) == 0
    return folder


# ---- shards


def test_shards_of_bench_make_the_whole_run(whole: Path, tmp_path: Path) -> None:
    parts = [str(tmp_path / f"{i}.json") for i in (1, 2, 3)]
    for i, part in enumerate(parts, 1):
        args = ["bench", *CHOICE, "-n", "96", "--shard", f"{i}/3", "-o", part]
        assert cli.main(args) == 0
    merged = tmp_path / "all.json"
    # In two steps and out of order: what is known of the whole run must survive that.
    assert cli.main(["merge", parts[2], parts[0], "-o", str(tmp_path / "two.json")]) == 0
    assert json.loads((tmp_path / "two.json").read_text())["settings"]["shard"]["numbers"] == [1, 3]
    assert cli.main(["merge", str(tmp_path / "two.json"), parts[1], "-o", str(merged)]) == 0
    same(whole / "run.json", merged)


def test_shards_of_record_make_the_whole_trace(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [str(tmp_path / f"{i}.trace") for i in (1, 2)]
    for i, part in enumerate(parts, 1):
        args = ["record", *CHOICE, "-n", "16", "--no-cost", "--shard", f"{i}/2", "-o", part]
        assert cli.main(args) == 0
    merged = tmp_path / "all.trace"
    assert cli.main(["merge", *reversed(parts), "-o", str(merged)]) == 0
    same_texts(whole / "run.trace", merged, ordered=True)
    header = Trace.load(merged).header
    assert header["prompts"] == Trace.load(whole / "run.trace").header["prompts"]
    capsys.readouterr()
    for args, line in (
        ([parts[0], parts[0]], "it would count twice"),
        ([parts[0], str(whole / "run.json")], "is a trace and others are not"),
        ([parts[0]], "at least two traces"),
    ):
        assert cli.main(["merge", *args, "-o", str(tmp_path / "no.trace")]) == 2
        assert line in capsys.readouterr().err
    assert cli.main(["merge", *parts, "-o", str(merged)]) == 2
    assert "exists already" in capsys.readouterr().err
    data = Path(parts[1]).read_bytes()
    Path(parts[1]).write_bytes(data[:-9])
    assert cli.main(["merge", *parts, "-o", str(tmp_path / "no.trace")]) == 2
    assert "is cut off: go on with the recording first" in capsys.readouterr().err
    args = ["record", *CHOICE, "-n", "15", "--no-cost", "--shard", "1/2"]
    assert cli.main([*args, "-o", str(tmp_path / "other.trace")]) == 0
    capsys.readouterr()
    assert (
        cli.main(["merge", str(tmp_path / "other.trace"), parts[0], "-o", str(tmp_path / "no")])
        == 2
    )
    assert "settings.n_predict is 15 in the first and 16 in the second" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "no.trace").exists()


def test_a_random_seed_and_shards_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--shard", "1/2", "-s", "-1"]) == 2
    assert "--shard needs one --seed for all shards" in capsys.readouterr().err
    for wrong in ("0/2", "3/2", "2", "1/2/3", "-1/2"):
        assert cli.main(["bench", f"--shard={wrong}"]) == 2
        assert "is not of the form I/N" in capsys.readouterr().err


# ---- workers in this process


PROMPTS = [Prompt(name, None, f"def {name}(x):\n    ") for name in ("one", "two", "three", "four")]
RUN = BenchSettings(
    builtin_model(), n_predict=12, n_threads=1, sampling=Sampling(temp=0.7, seed=3), n_parallel=2
)


def test_a_prompt_that_kills_is_left_out_of_a_result_and_named() -> None:
    pool = HerePool(partial(BenchWorker, RUN), ["two"])
    notes: list[str] = []
    result = spread.bench(RUN, PROMPTS, pool, 2, on_note=notes.append)
    assert [prompt["id"] for prompt in result["prompts"]] == ["one", "three", "four"]
    assert result["settings"]["n_prompts"] == 4
    assert result["environment"]["set_aside"] == [{"id": "two", "why": "SIGSEGV"}]
    assert result["environment"]["workers"]["died"] == len(notes) == 2
    alone = run.bench(RUN, PROMPTS)
    expected = [prompt for prompt in alone["prompts"] if prompt["id"] != "two"]
    assert [prompt["text"] for prompt in result["prompts"]] == [p["text"] for p in expected]
    # Who shares a batch is another matter now: counts are the same, probabilities nearly.
    for name in ("drafted", "accepted", "rank"):
        assert [prompt["positions"][name] for prompt in result["prompts"]] == [
            prompt["positions"][name] for prompt in expected
        ]
    assert result["settings"] == alone["settings"]


def test_a_prompt_that_kills_is_named_in_a_trace_until_it_no_longer_does(tmp_path: Path) -> None:
    path = tmp_path / "x.trace"
    settings = RecordSettings(RUN, depth=3, costs=False)
    settings = replace(settings, run=run_of(settings))
    pool = HerePool(partial(RecordWorker, settings), ["two"])
    done = spread.record(settings, PROMPTS, path, pool, 2)
    assert (done.n_done, done.n_left, done.set_aside) == (3, 0, ("two",))
    found = Trace.load(path)
    assert found.header["set_aside"] == [{"id": "two", "why": "SIGSEGV"}]
    assert sorted(prompt.id for prompt in found.prompts) == ["four", "one", "three"]
    settings = replace(settings, resume=True)

    class Failing(RecordWorker):
        def run(self, prompts: Sequence[Prompt]) -> list[TracedPrompt]:
            raise MtpStatsError("no memory")

    with pytest.raises(RecordStopped, match="no memory: 3 of 4 prompts") as stopped:
        spread.record(settings, PROMPTS, path, HerePool(partial(Failing, settings)), 1)
    assert (stopped.value.exit_code, stopped.value.n_done) == (1, 3)
    pool = HerePool(partial(RecordWorker, settings), [])
    done = spread.record(settings, PROMPTS, path, pool, 1)
    assert (done.n_before, done.n_done, done.set_aside) == (3, 1, ())
    found = Trace.load(path)
    assert found.header["set_aside"] == []
    assert len(found.prompts) == 4


def test_workers_of_another_model_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "tiny-qwen35-mtp.gguf"
    data = bytearray(builtin_model().read_bytes())
    data[-5] ^= 1  # a weight
    other.write_bytes(data)
    models = iter([builtin_model(), other])
    pool = HerePool(lambda: BenchWorker(replace(RUN, model=next(models))), [])
    with pytest.raises(InputError, match=r"worker 2 .* is not like worker 1 .*the model file tiny"):
        spread.bench(RUN, PROMPTS, pool, 2)


# ---- Ray


def children(pid: int) -> Iterator[int]:
    """Every process below one."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    below = {pid}
    for _ in pairs:
        below |= {child for child, parent in pairs if parent in below}
    yield from below - {pid}


def actors(pid: int) -> list[int]:
    """Processes of workers below a command."""
    found = []
    for child in children(pid):
        try:
            title = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::Actor"):
            found.append(child)
    return found


def wait_for(condition: Any, seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)
    return found


def finished(path: Path) -> int:
    """Lines of a journal behind its first."""
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


@pytest.fixture
def ray() -> None:
    pytest.importorskip("ray")


@pytest.mark.usefixtures("ray")
def test_a_killed_worker_costs_nothing(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "ray.json"
    args = [*COMMAND, "bench", *WORKERS, *CHOICE, "-n", "96", "-o", str(path), "--json"]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        part = path.with_name("ray.json.part")
        pids = wait_for(lambda: found if len(found := actors(process.pid)) == 2 else [])
        wait_for(lambda: finished(part) >= 1)
        os.kill(pids[0], signal.SIGKILL)
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert json.loads(out) == json.loads(path.read_text())  # and nothing of Ray's beside it
    same(whole / "run.json", path)
    workers = json.loads(out)["environment"]["workers"]
    assert (workers["number"], workers["died"]) == (2, 1)
    assert err.startswith("mtpstats: worker ")
    assert err.count("\n") == 1
    assert not part.exists()


@pytest.mark.usefixtures("ray")
def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "ray.trace"
    args = [*COMMAND, "record", *WORKERS, *CHOICE, "-n", "16", "--no-cost", "-o", str(path)]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: path.exists() and path.read_bytes().count(b'"check"') >= 2)
        below = list(children(process.pid))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert "the same command with --resume goes on" in err
    left = [pid for pid in below if Path(f"/proc/{pid}").exists()]
    wait_for(lambda: not [pid for pid in left if Path(f"/proc/{pid}").exists()], 10)
    before = len(Trace.load(path).prompts)
    assert 1 <= before < 8
    done = subprocess.run([*args, "--resume", "--json"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recorded"]["prompts"] == 8 - before
    same_texts(whole / "run.trace", path, ordered=False)


@pytest.mark.usefixtures("ray")
def test_no_cluster_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for address, line in (
        ("127.0.0.1:9", "--ray 127.0.0.1:9: no Ray cluster there: Connection refused"),
        ("nowhere", "--ray nowhere: neither HOST:PORT nor auto nor local"),
    ):
        assert cli.main(["bench", "--ray", address]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert line in err
    assert cli.main(["bench", "--workers", "2"]) == 2
    assert "--workers says what --ray uses" in capsys.readouterr().err
    assert cli.main(["bench", "--ray", "local", "--stream"]) == 2
    assert "--stream shows what happens in this process" in capsys.readouterr().err
