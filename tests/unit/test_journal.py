"""The journal of a run: what is in it whatever happens."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtpstats import journal as journals
from mtpstats import result as results
from mtpstats.appending import seal, unsealed
from mtpstats.errors import InputError
from mtpstats.journal import SCHEMA, Journal
from mtpstats.prompts import Prompt
from mtpstats.stats import Snapshot

PROMPTS = [Prompt("a", "code", "one two"), Prompt("b", None, "three"), Prompt("c", None, "four")]

RUN: dict[str, Any] = {
    "environment": {
        "mtpstats": "1", "time": "now", "library": {"version": "5", "path": "/x"},
        "devices": [{"name": "CPU", "free": 5}], "cpu": "fast",
    },
    "model": {
        "file": "m.gguf", "sha256": "abc", "architecture": "x", "quantisation": "F16",
        "size": 1, "parameters": 2, "vocabulary": 3, "nextn_blocks": 1,
    },
    "settings": {
        "n_predict": 8, "temp_source": "asked", "temp": 0.5, "top_p": 1.0, "min_p": 0.0,
        "p_min": 0.0, "n_prompts": 3, "n_max": 2, "n_max_asked": 2, "n_min": 0, "top_k": 40,
        "seed": 77, "n_ctx": 256, "n_threads": 2, "n_parallel": 1,
    },
}  # fmt: skip


def record(name: str, **changes: Any) -> dict[str, Any]:
    seconds = {"prompt": 0.1, "target": 1 / 3, "head": 1e-9, "other": 2.0}
    return {
        "id": name, "category": None, "prompt_sha256": "00", "n_prompt": 2, "tokens": 9,
        "verifications": 3, "drafted": 6, "accepted": 6, "near_ties": 0, "text": "caf\u00e9 \ud800",
        "repeated_4grams": None, "stop": "n_predict", "seconds": seconds,
        "positions": Snapshot().to_dict(), "baseline": None, **changes,
    }  # fmt: skip


RECORDS = [record(prompt.id) for prompt in PROMPTS]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "r.json"


def part(output: Path) -> Path:
    return output.with_name("r.json.part")


def written(output: Path, *indices: int, run: dict[str, Any] = RUN) -> bytes:
    """Leave the journal of a run that was cut off after these prompts; return what is in it."""
    with Journal(output) as journal:
        assert journal.begin(run, PROMPTS) == {}
        for index in indices:
            journal.append(index, RECORDS[index])
    return part(output).read_bytes() if indices else b""


def changed(**changes: Any) -> dict[str, Any]:
    """A run of which one value is another; names are dotted with two underscores."""
    run = json.loads(json.dumps(RUN))
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = run
        for key in path:
            inner = inner[key]
        inner[last] = value
    return run


# ---- what is in it


def test_its_lines_are_what_the_documents_say(output: Path) -> None:
    lines = written(output, 1, 0).splitlines()
    first, *rest = [json.loads(line) for line in lines]
    assert first["schema"] == "mtpstats.journal/1"
    assert {key: first[key] for key in RUN} == RUN
    # printf '["a", "code", "%s"]' $(printf 'one two' | sha256sum | cut -c 1-64) | sha256sum
    assert first["prompts"][0].startswith("59d1e807")
    assert len(first["prompts"]) == 3
    assert [(line["index"], line["record"]) for line in rest] == [(1, RECORDS[1]), (0, RECORDS[0])]
    files = (Path(__file__).parents[2] / "docs" / "files.md").read_text()
    assert f"`{SCHEMA}`" in files
    for key in (*first, *rest[0]):
        assert f"`{key}`" in files


def test_what_is_finished_is_there_again(output: Path) -> None:
    written(output, 2, 0)
    with Journal(output, resume=True) as journal:
        assert (journal.seed, journal.n_kept) == (77, 2)
        assert journal.begin(RUN, PROMPTS) == {2: RECORDS[2], 0: RECORDS[0]}
        journal.append(1, RECORDS[1])
        assert journal.n_kept == 3
    with Journal(output, resume=True) as journal:
        assert journal.begin(RUN, PROMPTS) == dict(enumerate(RECORDS))
        journal.remove()
    assert os.listdir(output.parent) == []


def test_a_record_is_on_disk_when_append_returns(output: Path) -> None:
    with Journal(output) as journal:
        journal.begin(RUN, PROMPTS)
        for index in range(3):
            journal.append(index, RECORDS[index])
            last = part(output).read_bytes().splitlines(keepends=True)[-1]
            line = unsealed(last)
            assert line is not None
            assert line["index"] == index


def test_resuming_begins_a_run_that_is_not_there(output: Path) -> None:
    with Journal(output, resume=True) as journal:
        assert journal.seed is None
        assert journal.begin(RUN, PROMPTS) == {}
        assert part(output).exists()
    # Nothing was finished, so nothing is left.
    assert not part(output).exists()


# ---- cuts and damage


def test_a_torn_last_line_is_dropped_wherever_it_is_torn(output: Path) -> None:
    whole = written(output, 0, 1)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 3
    for size in sorted({0, 1, *range(9, len(whole), 97), *ends, *(end - 1 for end in ends)}):
        part(output).write_bytes(whole[:size])
        with Journal(output, resume=True) as journal:
            done = journal.begin(RUN, PROMPTS)
            assert list(done) == list(range(max(sum(end <= size for end in ends) - 1, 0)))
            for index in range(3):
                if index not in done:
                    journal.append(index, RECORDS[index])
        with Journal(output, resume=True) as journal:
            assert journal.begin(RUN, PROMPTS) == dict(enumerate(RECORDS))
            journal.remove()


def test_zeros_after_a_power_failure_are_dropped(output: Path) -> None:
    whole = written(output, 0)
    part(output).write_bytes(whole + bytes(4096))
    with Journal(output, resume=True) as journal:
        assert list(journal.begin(RUN, PROMPTS)) == [0]
    assert part(output).read_bytes() == whole


def refused(output: Path, words: str, run: dict[str, Any] = RUN, prompts: Any = PROMPTS) -> None:
    """Resuming is refused in one line that begins with the file, which is left as it is."""
    before = part(output).read_bytes()
    with pytest.raises(InputError, match=words) as error, Journal(output, True) as journal:
        journal.begin(run, prompts)
    assert str(error.value).startswith(f"{part(output)}: ")
    assert part(output).read_bytes() == before


def test_every_damaged_byte_is_noticed(output: Path) -> None:
    whole = written(output, 0, 1)
    header = whole.index(b"\n") + 1
    last = whole.rindex(b"\n", 0, -1) + 1
    for at in range(0, last, 61):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        part(output).write_bytes(damaged)
        words = "damaged|not a journal|is unknown" if at < header else r"damaged: the checksum"
        refused(output, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello\n", "not a journal of mtpstats"),
        (b"hello", "not a journal of mtpstats"),
        (b'{"schema": "mtpstats.journal/2"}\n', "'mtpstats.journal/2' is unknown; this version"),
        (b'{"schema": "mtpstats.result/1"}\n', "'mtpstats.result/1' is unknown"),
        (b'{"schema": "mtpstats.journal/1"}\n', "damaged: the checksum of its first line"),
        (seal({"schema": SCHEMA}), "environment is missing"),
        (seal({**RUN, "schema": SCHEMA}), "not a journal|damaged|prompts is missing"),
        (b"\xff\xfe\n", "not a journal"),
        (b"[" * 100_000 + b"\n", "not a journal"),
    ],
)
def test_what_is_no_journal_is_refused(output: Path, content: bytes, words: str) -> None:
    part(output).write_bytes(content)
    refused(output, words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"index": 3, "record": RECORDS[0]}, "line 3 is of a prompt that cannot be there"),
        ({"index": 0, "record": RECORDS[0]}, "line 3 is of a prompt that cannot be there"),
        ({"index": -1, "record": RECORDS[0]}, "line 3: index is -1"),
        ({"index": 1}, "line 3: record is missing"),
        ({"index": 1, "record": record("b", tokens="x")}, "line 3: record.tokens is 'x'"),
    ],
)
def test_lines_that_cannot_be(output: Path, line: dict[str, Any], words: str) -> None:
    part(output).write_bytes(written(output, 0) + seal(line))
    refused(output, words)


def test_a_directory_and_a_pipe_are_no_journal(output: Path) -> None:
    part(output).mkdir()
    for resume in (False, True):
        with pytest.raises(InputError, match="cannot be opened: Is a directory"):
            Journal(output, resume)
    part(output).rmdir()
    part(output).symlink_to("nowhere")
    for resume in (False, True):
        with pytest.raises(InputError, match="cannot be opened: No such file"):
            Journal(output, resume)
    part(output).unlink()
    os.mkfifo(part(output))
    with pytest.raises(InputError, match="not a regular file"):
        Journal(output, True)


def test_a_line_that_is_too_long_is_damage_and_not_what_a_crash_left(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(output, 0, 1)
    monkeypatch.setattr(journals, "MAX_LINE", len(whole) - 2)
    part(output).write_bytes(whole + b"9" * len(whole))
    refused(output, "damaged: a line does not end")


# ---- another run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__sha256": "abd"}, "begun with model.sha256 'abc', not 'abd': it cannot be"),
        ({"settings__n_predict": 9}, "begun with settings.n_predict 8, not 9"),
        ({"settings__temp": 0.0}, r"begun with settings.temp 0.5, not 0.0"),
        ({"settings__seed": 1}, "begun with settings.seed 77, not 1"),
        ({"settings__n_threads": 4}, "begun with settings.n_threads 2, not 4"),
        ({"settings__n_parallel": 2}, "begun with settings.n_parallel 1, not 2"),
        ({"settings__n_ctx": 512}, "begun with settings.n_ctx 256, not 512"),
        ({"settings__new": 1}, "begun with settings.new null, not 1"),
        ({"environment__mtpstats": "2"}, "begun with environment.mtpstats '1', not '2'"),
        ({"environment__cpu": "slow"}, "begun with environment.cpu 'fast', not 'slow'"),
        ({"environment__library": {"version": "6"}}, "environment.library.version '5', not '6'"),
    ],
)
def test_another_run_is_named_by_its_field(
    output: Path, changes: dict[str, Any], words: str
) -> None:
    written(output, 0)
    refused(output, words, changed(**changes))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (PROMPTS[:2], "begun with settings.n_prompts 3, not 2"),
        ([*PROMPTS[:2], Prompt("c", None, "five")], "name or category of prompt 3, which is c now"),
        ([*PROMPTS[:2], Prompt("d\x1b", None, "four")], r"prompt 3, which is d\\x1b now"),
        ([*PROMPTS[:2], Prompt("c", "x", "four")], "prompt 3, which is c now"),
        ([PROMPTS[0], PROMPTS[2], PROMPTS[1]], "prompt 2, which is c now"),
    ],
)
def test_other_prompts_are_refused(output: Path, prompts: list[Prompt], words: str) -> None:
    written(output, 0)
    refused(output, words, prompts=prompts)


def test_what_may_be_another(output: Path) -> None:
    """Time, free memory, where the library lies; and the model's name, when its hash is known."""
    written(output, 0)
    run = changed(
        environment__time="later", environment__library={"version": "5", "path": "/y"},
        environment__devices=[{"name": "CPU", "free": 6}], model__file="n.gguf",
    )  # fmt: skip
    with Journal(output, resume=True) as journal:
        assert list(journal.begin(run, PROMPTS)) == [0]


def test_finished_prompts_are_never_overwritten(output: Path) -> None:
    before = written(output, 0)
    with pytest.raises(InputError, match=r"finished 1 of 3 prompts; go on with it \(--resume\)"):
        Journal(output)
    assert part(output).read_bytes() == before
    part(output).write_bytes(b"something else\n")
    with pytest.raises(InputError, match="not a journal"):
        Journal(output)
    assert part(output).read_bytes() == b"something else\n"


def test_a_run_that_was_killed_before_it_finished_anything_is_no_hindrance(output: Path) -> None:
    header = written(output, 0).split(b"\n")[0] + b"\n"
    for left in (b"", header[:50], header, header + b'{"index'):
        part(output).write_bytes(left)
        with Journal(output) as journal:
            assert journal.seed is None
            assert journal.begin(changed(settings__seed=5), PROMPTS) == {}
            journal.append(2, RECORDS[2])
        with Journal(output, resume=True) as journal:
            assert journal.seed == 5
            journal.remove()


def complete(output: Path) -> list[dict[str, Any]]:
    """Write the result of ``RUN``; return the records in it."""
    texts = [hashlib.sha256(prompt.text.encode()).hexdigest() for prompt in PROMPTS]
    done = [
        record(prompt.id, category=prompt.category, prompt_sha256=text)
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    whole = results.make(RUN["environment"], RUN["model"], RUN["settings"], done)
    output.write_text(json.dumps(whole))
    return done


def test_a_run_that_is_complete_has_nothing_left_to_run(output: Path) -> None:
    done = complete(output)
    said: list[str] = []
    with Journal(output, resume=True, tell=said.append) as journal:
        assert journal.seed == 77
        assert journal.begin(RUN, PROMPTS) == {0: done[0], 1: done[1], 2: done[2]}
    assert said == [f"{output} is complete: nothing is left to run"]
    assert journal.complete == json.loads(output.read_text())
    assert not part(output).exists()


def test_a_complete_result_of_damaged_counters_is_refused_by_name(output: Path) -> None:
    complete(output)
    for damage, message in (
        ({"drafted": 1}, r"r\.json: counters: key '\w+' is missing"),
        (None, r"r\.json: prompts\[1\]\.positions and total\.positions: only one is null"),
    ):
        whole = json.loads(output.read_text())
        whole["prompts"][1]["positions"] = damage
        output.write_text(json.dumps(whole))
        with pytest.raises(InputError, match=message):
            Journal(output, resume=True)


@pytest.mark.parametrize(
    ("run", "prompts", "message"),
    [
        (changed(settings__n_predict=9), PROMPTS, r"settings.n_predict 8, not 9: it cannot be res"),
        (RUN, [*PROMPTS[:2], Prompt("c", None, "five")], r"another text, name .* of prompt 3"),
        (RUN, PROMPTS[:2], r"settings.n_prompts 3, not 2"),
    ],
)
def test_another_run_is_not_taken_for_complete(
    output: Path, run: dict[str, Any], prompts: list[Prompt], message: str
) -> None:
    complete(output)
    said: list[str] = []
    with (
        Journal(output, resume=True, tell=said.append) as journal,
        pytest.raises(InputError, match=rf"r\.json: was begun with {message}"),
    ):
        journal.begin(run, prompts)
    assert said == []


def test_part_of_a_result_without_its_journal_is_not_resumed(output: Path) -> None:
    one = results.make(RUN["environment"], RUN["model"], RUN["settings"], RECORDS[:1])
    output.write_text(json.dumps(one))
    with pytest.raises(InputError, match=r"no r.json.part to go on with, .* has 1 of 3 prompts"):
        Journal(output, resume=True)
    output.write_text("{}")
    with pytest.raises(InputError, match=r"r.json: "):
        Journal(output, resume=True)


def test_two_runs_cannot_have_one_journal(output: Path) -> None:
    with Journal(output) as journal:
        journal.begin(RUN, PROMPTS)
        for resume in (False, True):
            with pytest.raises(InputError, match="another run is writing to it"):
                Journal(output, resume)
        journal.append(0, RECORDS[0])
    assert part(output).exists()


def test_two_runs_cannot_begin_one_journal(output: Path) -> None:
    with Journal(output) as first, Journal(output) as second:
        first.begin(RUN, PROMPTS)
        with pytest.raises(InputError, match="cannot be written: File exists"):
            second.begin(RUN, PROMPTS)
        first.append(0, RECORDS[0])
    assert part(output).exists()


# ---- disks and people


def test_a_directory_that_cannot_be_written_is_noticed_at_the_beginning(output: Path) -> None:
    with (
        Journal(output.parent / "none" / "r.json") as journal,
        pytest.raises(InputError, match="cannot be written: No such file"),
    ):
        journal.begin(RUN, PROMPTS)


FULL = """
import resource, signal, sys
sys.path[:0] = [sys.argv[1]]
from test_journal import *
from mtpstats.errors import MtpStatsError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
output = Path(sys.argv[2])
with Journal(output) as journal:
    journal.begin(RUN, PROMPTS)
    journal.append(0, RECORDS[0])
    size = part(output).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, -1))
    try:
        journal.append(1, RECORDS[1])
    except MtpStatsError as error:
        print(type(error).__name__, error)
    assert part(output).stat().st_size == size
    assert journal.n_kept == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    journal.append(2, RECORDS[2])
"""


def test_a_record_that_does_not_fit_leaves_the_others(output: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(Path(__file__).parent), str(output)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"MtpStatsError {part(output)}: not written: File too large\n"
    with Journal(output, resume=True) as journal:
        assert journal.begin(RUN, PROMPTS) == {0: RECORDS[0], 2: RECORDS[2]}


def test_a_journal_that_somebody_removes_is_put_back_with_all_it_held(output: Path) -> None:
    told: list[str] = []
    with Journal(output, tell=told.append) as journal:
        journal.begin(RUN, PROMPTS)
        journal.append(0, RECORDS[0])
        part(output).unlink()
        journal.append(1, RECORDS[1])
        assert told == [f"{part(output)}: was removed by somebody; it is there again"]
        journal.append(2, RECORDS[2])
        assert len(told) == 1
        with pytest.raises(InputError, match="another run is writing"):
            Journal(output, resume=True)
    with Journal(output, resume=True) as journal:
        assert journal.begin(RUN, PROMPTS) == dict(enumerate(RECORDS))


def test_a_run_goes_on_without_a_journal_that_cannot_be_put_back(tmp_path: Path) -> None:
    told: list[str] = []
    output = tmp_path / "there" / "r.json"
    output.parent.mkdir()
    with Journal(output, tell=told.append) as journal:
        journal.begin(RUN, PROMPTS)
        journal.append(0, RECORDS[0])
        part(output).unlink()
        output.parent.rmdir()
        for index in (1, 2):
            journal.append(index, RECORDS[index])
        assert told == [
            f"{part(output)}: somebody removed it, and it cannot be put back: No such file or "
            "directory; the run goes on without it"
        ]
        assert journal.n_kept == 0
        journal.remove()


def test_a_file_system_without_locks_will_do(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_file: object, _how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    written(output, 0)
    with Journal(output, resume=True) as journal:
        assert journal.begin(RUN, PROMPTS) == {0: RECORDS[0]}


def test_an_interruption_while_the_disk_is_waited_for_loses_nothing(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_fd: int) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), Journal(output) as journal:
        journal.begin(RUN, PROMPTS)
        monkeypatch.setattr(os, "fsync", interrupted)
        journal.append(0, RECORDS[0])
    monkeypatch.undo()
    with Journal(output, resume=True) as journal:
        assert journal.begin(RUN, PROMPTS) == {0: RECORDS[0]}
