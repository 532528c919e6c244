"""The record command without libllama: what it asks for, what it shows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest

from mtpstats import cli, record
from mtpstats.cost import Costs, Curve, Point
from mtpstats.errors import InputError
from mtpstats.record import Recorded, RecordSettings, recorded_seed
from mtpstats.report.record import render
from mtpstats.run import BenchSettings, builtin_model
from mtpstats.trace import Trace, trace_header
from mtpstats.tracefile import TraceWriter

Calls = list[tuple[RecordSettings, list[Any], Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace ``record.record``; collects what it was asked for."""
    asked: Calls = []

    def fake(settings: RecordSettings, prompts: list[Any], path: Path, **_: Any) -> Recorded:
        asked.append((settings, prompts, path))
        return Recorded(path, trace_header(depth=settings.depth), 0, 1, 30, 25, 1.5, 2000)

    monkeypatch.setattr(record, "record", fake)
    return asked


def test_defaults_and_options(calls: Calls, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.trace"
    assert cli.main(["record", "-o", str(path)]) == 0
    settings, prompts, where = calls[-1]
    assert where == path
    assert (settings.depth, settings.every, settings.resume, settings.costs) == (8, 1, False, True)
    assert settings.run.model == builtin_model()
    assert (settings.run.n_predict, settings.run.sampling.temp) == (128, 0.7)
    assert len(prompts) == 15
    assert settings.width == 0
    args = "-m x.gguf -n 64 --depth 16 --width 3 --every 4 --resume --no-cost"
    args += " -p a -p b --temp 0.5 -ub 64"
    assert cli.main(["record", "-o", str(path), *args.split()]) == 0
    settings, prompts, _ = calls[-1]
    assert (settings.depth, settings.every, settings.resume, settings.costs) == (16, 4, True, False)
    assert settings.width == 3
    assert (settings.run.n_predict, settings.run.sampling.temp) == (64, 0.5)
    assert settings.run.n_ubatch == 64
    assert [prompt.text for prompt in prompts] == ["a", "b"]


def test_a_random_seed_is_that_of_the_trace_when_it_is_resumed(
    calls: Calls, tmp_path: Path
) -> None:
    path = tmp_path / "x.trace"
    assert recorded_seed(path, -1) == -1
    TraceWriter(path, trace_header(depth=2, sampling={"seed": 77})).close()
    assert recorded_seed(path, -1) == 77
    assert recorded_seed(path, 5) == 5
    for args, seed in ((["--resume", "-s", "-1"], 77), (["--resume", "-s", "3"], 3)):
        assert cli.main(["record", "-o", str(path), "-p", "x", *args]) == 0
        assert calls[-1][0].run.sampling.seed == seed


def test_settings_that_cannot_be() -> None:
    run = BenchSettings(Path("x.gguf"))
    for options in ({"depth": 0}, {"depth": 17}, {"every": 0}, {"width": -1}, {"width": 17}):
        with pytest.raises(InputError):
            RecordSettings(run, **options)  # type: ignore[arg-type]


def test_what_was_recorded_is_shown() -> None:
    curve = Curve({n: Point(*[n / 1000] * 4) for n in (1, 9, 17)})
    header = trace_header(depth=8, every=3)
    header["cost"] = Costs(verify=curve, draft=curve, n_past=1234).to_dict()
    done = Recorded(Path("a\x1b.trace"), header, 2, 3, 1234, 567, 12.34, 2_345_678)
    assert ", 8 deep and 4 wide at every" in render(
        replace(done, header=trace_header(depth=8, width=4))
    )
    assert render(done) == (
        "trace    a\\x1b.trace, 2.3 MB\n"
        "prompts  5 (2 were in it already), 8 deep at one position in 3\n"
        "now      3 prompts, 1,234 tokens, 567 roots in 12.3 s\n"
        "\n"
        "milliseconds, medians after 1,234 tokens\n"
        "rows                    1       2       3       4       5       9      17\n"
        "target pass          1.00    2.00    3.00    4.00    5.00    9.00   17.00\n"
        "head step            1.00    2.00    3.00    4.00    5.00    9.00   17.00\n"
        "\n"
        "next     mtpstats replay a\\x1b.trace\n"
    )


def test_json(calls: Calls, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.trace"
    assert cli.main(["record", "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "mtpstats.recorded/1"
    assert (told["trace"], told["prompts"], told["bytes"]) == (str(path), 1, 2000)
    assert told["recorded"] == {"prompts": 1, "tokens": 30, "roots": 25, "seconds": 1.5}
    assert told["header"]["depth"] == 8


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_an_interrupted_wait_for_the_disk_takes_no_record_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "x.trace"
    prompt = made.by_chance(1)
    with TraceWriter(path, trace_header(depth=prompt.depth)) as writer:
        begun = path.stat().st_size

        def interrupted(_: int) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupted)
            with pytest.raises(Exception if isinstance(error, OSError) else KeyboardInterrupt):
                writer.append(prompt)
        if isinstance(error, OSError):
            # What did not reach the disk is no record.
            assert (path.stat().st_size, writer.done_ids) == (begun, set())
            writer.append(prompt)
        assert writer.done_ids == {prompt.id}
    assert [one.id for one in Trace.load(path).prompts] == [prompt.id]
