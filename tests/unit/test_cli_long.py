"""Long runs on the command line without libllama: what is asked for, kept and said."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click import BadParameter
from test_journal import PROMPTS, RECORDS, RUN, part, written

from mtpstats import cli, record, run
from mtpstats.cli import live, values
from mtpstats.errors import MtpStatsError
from mtpstats.record import Recorded
from mtpstats.run import BenchStopped, Progress
from mtpstats.trace import trace_header

ADVICE = "the same command with --resume goes on"


def bench_of(monkeypatch: pytest.MonkeyPatch, n: int, stop: Any = None) -> list[dict[str, Any]]:
    """Replace ``run.bench``: it has the first ``n`` prompts finished when it ends, or is stopped.

    The list receives what it was called with, and the settings' seed.
    """
    calls: list[dict[str, Any]] = []

    def fake(settings: Any, prompts: Any, *, keeper: Any, **hooks: Any) -> dict[str, Any]:
        calls.append({"keeper": keeper, "seed": settings.sampling.seed, **hooks})
        done = dict(keeper.begin(RUN, PROMPTS)) if keeper is not None else {}
        for index in range(n):
            if index not in done:
                done[index] = RECORDS[index]
                if keeper is not None:
                    keeper.append(index, RECORDS[index])
        result = {"settings": RUN["settings"], "prompts": [done[i] for i in sorted(done)]}
        if stop is not None:
            raise BenchStopped(result, stop if isinstance(stop, MtpStatsError) else None)
        return result

    monkeypatch.setattr(run, "bench", fake)
    return calls


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "r.json"


def finished(path: Path) -> list[str]:
    return [prompt["id"] for prompt in json.loads(path.read_text())["prompts"]]


def test_a_complete_run_leaves_no_journal(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any
) -> None:
    calls = bench_of(monkeypatch, 3)
    assert cli.main(["bench", "--json", "-o", str(output)]) == 0
    assert calls[-1]["time_limit"] is None
    assert finished(output) == ["a", "b", "c"]
    assert [path.name for path in output.parent.iterdir()] == ["r.json"]
    assert capsys.readouterr().err == ""


def test_without_a_file_there_is_no_journal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls = bench_of(monkeypatch, 3)
    for args in ([], ["-o", "/dev/null"]):
        assert cli.main(["bench", "--json", *args]) == 0
        assert calls[-1]["keeper"] is None


def test_the_time_limit_ends_well_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any
) -> None:
    calls = bench_of(monkeypatch, 1)
    assert cli.main(["bench", "--json", "-o", str(output), "--time-limit", "1.5h"]) == 0
    assert calls[-1]["time_limit"] == 5400
    captured = capsys.readouterr()
    said = "mtpstats: 1 of 3 prompts were finished within the time limit"
    assert captured.err == f"{said}; {ADVICE}\n"
    assert captured.out == output.read_text()
    assert finished(output) == ["a"]
    bench_of(monkeypatch, 2)
    assert cli.main(["bench", "--json", "--time-limit", "9"]) == 0
    assert capsys.readouterr().err == said.replace("1 of", "2 of") + "\n"


def test_a_time_limit_before_the_first_prompt_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any
) -> None:
    bench_of(monkeypatch, 0)
    assert cli.main(["bench", "-o", str(output), "--time-limit", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "mtpstats: error: 0 of 3 prompts were finished within the time limit; nothing was written\n"
    )
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("stop", "code", "words"),
    [(True, 130, "interrupted"), (MtpStatsError("the disk is full"), 1, "the disk is full")],
)
def test_a_run_that_was_stopped_is_delivered_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any, stop: Any, code: int, words: str
) -> None:
    bench_of(monkeypatch, 2, stop)
    assert cli.main(["bench", "--json", "-o", str(output)]) == code
    captured = capsys.readouterr()
    assert captured.err == f"mtpstats: error: {words}: 2 of 3 prompts were finished; {ADVICE}\n"
    assert finished(output) == ["a", "b"]
    assert part(output).exists()
    bench_of(monkeypatch, 3)
    assert cli.main(["bench", "--json", "-o", str(output), "--resume"]) == 0
    assert finished(output) == ["a", "b", "c"]
    assert not part(output).exists()


def test_a_result_that_cannot_be_written_at_last_keeps_the_journal(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any
) -> None:
    def full(*_: Any) -> None:
        raise MtpStatsError("r.json: not written: No space left on device")

    for stop in (None, MtpStatsError("the disk is full")):
        with monkeypatch.context() as patch:
            bench_of(patch, 3, stop)
            patch.setattr("mtpstats.result.write", full)
            assert cli.main(["bench", "--json", "-o", str(output), "--resume"]) == 1
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)["prompts"]) == 3
        assert captured.err.count("\n") == 1
        assert "r.json: not written: No space left on device" in captured.err
        assert part(output).exists()
    assert captured.err == (
        "mtpstats: error: the disk is full: 3 of 3 prompts were finished; r.json: not written: No "
        f"space left on device; {ADVICE}\n"
    )


def test_a_random_seed_is_that_of_the_journal(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any
) -> None:
    calls = bench_of(monkeypatch, 3)
    for args, seed in ((["-s", "-1"], 77), (["-s", "3"], 3)):
        written(output, 0)
        assert cli.main(["bench", "--json", "-o", str(output), "--resume", *args]) == 0
        assert calls[-1]["seed"] == seed
        output.unlink()
    bench_of(monkeypatch, 3)
    assert cli.main(["bench", "--json", "-o", str(output), "--resume", "-s", "-1"]) == 0


def test_trouble_with_the_journal_is_said_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Any
) -> None:
    def fake(settings: Any, prompts: Any, *, keeper: Any, **hooks: Any) -> dict[str, Any]:
        keeper.begin(RUN, PROMPTS)
        keeper.append(0, RECORDS[0])
        part(output).unlink()
        keeper.append(1, RECORDS[1])
        keeper.append(2, RECORDS[2])
        return {"settings": RUN["settings"], "prompts": RECORDS}

    monkeypatch.setattr(run, "bench", fake)
    assert cli.main(["bench", "--json", "-o", str(output)]) == 0
    err = capsys.readouterr().err
    assert err == f"mtpstats: {part(output)}: was removed by somebody; it is there again\n"
    assert not part(output).exists()


# ---- record


def recorded_of(monkeypatch: pytest.MonkeyPatch, n_before: int, n_done: int, n_left: int) -> Any:
    calls: list[dict[str, Any]] = []

    def fake(settings: Any, prompts: Any, path: Path, **hooks: Any) -> Recorded:
        calls.append(hooks)
        header = trace_header(depth=settings.depth)
        return Recorded(path, header, n_before, n_done, 30, 25, 1.5, 2000, n_left)

    monkeypatch.setattr(record, "record", fake)
    return calls


def test_record_has_a_time_limit_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    calls = recorded_of(monkeypatch, 2, 3, 4)
    args = ["record", "-o", str(tmp_path / "x.trace"), "--json", "--time-limit", "2m"]
    assert cli.main(args) == 0
    assert calls[-1]["time_limit"] == 120
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["prompts"], told["left"]) == (5, 4)
    said = f"prompts were finished within the time limit; {ADVICE}\n"
    assert captured.err == f"mtpstats: 5 of 9 {said}"
    recorded_of(monkeypatch, 0, 0, 4)
    assert cli.main(args) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"mtpstats: error: 0 of 4 {said}")


# ---- times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("0.5", 0.5), ("45m", 2700), ("1.5h", 5400), (".5m", 30)],
)
def test_times(text: str, seconds: float) -> None:
    assert values.duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0h", "-1", "+1", "1d", "h", "1 h", "1e3", "nan", "inf", "1_0", "\u0661s",
             "9" * 400]
)  # fmt: skip
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(BadParameter, match="is no time such as 90s, 45m or 2h"):
        values.duration(text)


def test_the_rate_of_a_resumed_run_is_its_own() -> None:
    """What an earlier run made counts in the share and not in the rate."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = [0.0]
    terminal = Terminal()
    line = live.ProgressLine(terminal, lambda: now[0])
    line(Progress("prompt 3/4", 200, 400, "tokens"))
    now[0] = 4.0
    line(Progress("prompt 4/4", 300, 400, "tokens"))
    assert terminal.getvalue() == "\rprompt 4/4  75 %  25 tokens/s  0:04 left"
