"""Merging traces of shards, and giving a trace another header."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import by_chance

from mtpstats import tracemerge
from mtpstats.appending import seal
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.trace import Trace, TracedPrompt, trace_header
from mtpstats.tracefile import TraceWriter
from mtpstats.tracemerge import merge_traces, rewrite_header

WHOLE = ("e", "d", "c", "b", "a")  # the prompts of the whole run, in its order
COST = {"n_past": 5}
ASIDE = [{"id": "x", "why": "SIGSEGV"}]


def traced(name: str, **facts: Any) -> TracedPrompt:
    index = WHOLE.index(name)
    known = {"prompt_sha256": name * 4, "index": index, **facts}
    return replace(by_chance(index, n_generated=5 + index, name=name), facts=known)


def header(*numbers: int, n_ctx: int = 256, **rest: Any) -> dict[str, Any]:
    """That of a shard of two."""
    return trace_header(
        depth=4,
        model={"sha256": "ab", "file": "m.gguf"},
        settings={"n_ctx": n_ctx, "n_threads": 2},
        environment={"mtpstats": "1", "time": f"t{numbers}", "library": None, "devices": []},
        prompts={"shard": {"numbers": list(numbers), "of": 2, "prompts": 5}, "shuffle": True},
        **rest,
    )


def written(path: Path, head: dict[str, Any], *names: str, **facts: Any) -> Path:
    with TraceWriter(path, head) as writer:
        for name in names:
            writer.append(traced(name, **facts))
    return path


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """Two shards of one run."""
    place = tmp_path / "parts"
    place.mkdir()
    return (
        written(place / "1.trace", header(1, n_ctx=512), "e", "c", "a"),
        written(place / "2.trace", header(2, cost=COST, set_aside=ASIDE), "b", "d"),
    )


def records(path: Path) -> bytes:
    """What stands behind the header."""
    return path.read_bytes().partition(b"\n")[2]


def test_the_whole_has_the_order_of_the_run_and_the_facts_of_all(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    before = [path.read_bytes() for path in parts]
    mask = _umask()
    for number, order in enumerate((parts, parts[::-1])):
        done = merge_traces(order, tmp_path / f"{number}.trace")
        whole = Trace.load(done.path)
        assert [prompt.id for prompt in whole.prompts] == list(WHOLE)
        assert (done.n_prompts, done.size) == (5, done.path.stat().st_size)
        assert whole.header == done.header
        assert whole.header["cost"] == COST
        assert whole.header["set_aside"] == ASIDE
        assert whole.header["settings"] == {"n_ctx": 512, "n_threads": 2}
        assert whole.header["prompts"] == {"shuffle": True}
        assert [one["prompts"] for one in whole.header["environment"]["merged"]] == [3, 2]
    # Record by record as they were written in one go.
    at_once = written(tmp_path / "once.trace", header(1, 2), *WHOLE)
    assert records(done.path) == records(at_once)
    assert before == [path.read_bytes() for path in parts]
    assert stat.S_IMODE(done.path.stat().st_mode) == 0o666 & ~mask
    assert _umask() == mask


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_without_a_place_in_a_run_the_order_is_that_of_the_names(tmp_path: Path) -> None:
    names = ("c", "a"), ("e", "b", "d")
    paths = [
        written(tmp_path / f"{i}.trace", header(1), *some, index=None)
        for i, some in enumerate(names)
    ]
    whole = Trace.load(merge_traces(paths, tmp_path / "all.trace").path)
    assert [prompt.id for prompt in whole.prompts] == ["a", "b", "c", "d", "e"]


def test_some_of_the_shards_know_which_they_are(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{i}.trace", header(i), name) for i, name in ((1, "e"), (2, "d"))]
    found = merge_traces(paths, tmp_path / "two.trace").header["prompts"]
    assert found["shard"] == {"numbers": [1, 2], "of": 2, "prompts": 5}


def test_costs_are_those_of_the_first_that_has_some(tmp_path: Path) -> None:
    heads = header(1), header(2, cost=COST), header(3, cost={"n_past": 6})
    paths = [
        written(tmp_path / f"{i}.trace", head, name)
        for i, (head, name) in enumerate(zip(heads, "abc", strict=True))
    ]
    assert merge_traces(paths, tmp_path / "all.trace").header["cost"] == COST


def refused(tmp_path: Path, words: str, *paths: Path) -> None:
    output = tmp_path / "no.trace"
    with pytest.raises(InputError, match=words):
        merge_traces(paths, output)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_what_does_not_belong_together(parts: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = parts
    place = one.parent
    refused(tmp_path, "at least two", one)
    refused(
        tmp_path, r"prompt e is in .*1\.trace and in .*1\.trace, it would count twice", one, one
    )
    other = written(place / "3.trace", header(2), "e", prompt_sha256="x")
    refused(tmp_path, r"1\.trace and in .*3\.trace, with another text: give each an id", one, other)
    other = written(place / "4.trace", header(2), "e", prompt_sha256=None)
    refused(tmp_path, "with another text", other, other)
    for number, (key, value, name) in enumerate(
        (
            ("n_predict", 9, "settings.n_predict is -1 in the first and 9 in the second"),
            ("every", 2, "settings.every is 1 in the first and 2"),
            ("model", {"sha256": "ac"}, "model.sha256 is 'ab' in the first and 'ac'"),
            ("prompts", {"shuffle": False}, "settings.shuffle is True in the first and False"),
            ("sampling", {"temp": 1.0}, "settings.temp is null in the first and 1.0"),
        ),
        5,
    ):
        other = written(place / f"{number}.trace", {**header(2), key: value})
        refused(tmp_path, name, one, two, other)
    refused(tmp_path, "cannot be read: No such file", one, place / "none")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("environment", {"cpu": "x"}, "environment.mtpstats is missing"),
        ("environment", {**header(2)["environment"], "devices": 5}, "environment.devices is 5"),
        (
            "environment",
            {**header(2)["environment"], "set_aside": [5]},
            r"environment.set_aside\[0\] is 5",
        ),
        (
            "environment",
            {**header(2)["environment"], "source": {}},
            "environment.source.kind is missing",
        ),
        ("settings", {"n_ctx": [256]}, "settings.n_ctx is a list"),
        ("prompts", [], "prompts is a list"),
        ("prompts", {"shard": {"numbers": [1]}}, "prompts.shard.of is missing"),
        ("set_aside", 5, "set_aside is 5"),
        ("facts", {"index": "x"}, "facts.index is 'x', expected a count"),
        ("facts", {"prompt_sha256": 5}, "facts.prompt_sha256 is 5"),
    ],
)
def test_what_no_trace_of_ours_holds(
    parts: tuple[Path, Path], tmp_path: Path, key: str, value: Any, words: str
) -> None:
    head, facts = (header(2), value) if key == "facts" else ({**header(2), key: value}, {})
    other = written(parts[0].parent / "x.trace", head, "b", **facts)
    refused(tmp_path, rf"x\.trace[^:]*: {words}", parts[0], other)


def test_damage_and_cuts_leave_nothing_behind(parts: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = parts
    data = two.read_bytes()
    two.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(tmp_path, r"2\.trace: prompt 2: damaged: the checksum of its arrays", one, two)
    two.write_bytes(data[:-1])
    refused(tmp_path, r"2\.trace: prompt 2 is cut off: go on with the recording first", one, two)


def test_a_file_that_is_missing_is_not_called_one_of_another_kind(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.trace"
    for paths in ((parts[0], missing), (missing, parts[0])):
        with pytest.raises(InputError, match=r"missing\.trace: cannot be read: No such file"):
            tracemerge.kind_of(paths)
    other = tmp_path / "r.json"
    other.write_text("{}")
    with pytest.raises(InputError, match="is a trace and others are not"):
        tracemerge.kind_of((parts[0], other))
    assert tracemerge.kind_of((other, Path("-"))) == "result"


def test_what_stands_there_is_not_written_over(parts: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "all.trace"
    output.symlink_to("nowhere")
    with pytest.raises(InputError, match="exists already"):
        merge_traces(parts, output)
    assert os.readlink(output) == "nowhere"


def test_a_disk_that_is_full_keeps_what_was_there(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = parts[0].read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MtpStatsError, match=r"all\.trace: not written: No space") as raised:
        merge_traces(parts, tmp_path / "all.trace")
    assert raised.value.exit_code == 1
    with pytest.raises(MtpStatsError, match=r"1\.trace: not written: No space"):
        rewrite_header(parts[0], header(1, set_aside=[]))
    assert parts[0].read_bytes() == before
    assert sorted(os.listdir(parts[0].parent)) == ["1.trace", "2.trace"]
    assert os.listdir(tmp_path) == ["parts"]


def test_another_header_leaves_the_prompts_as_they_are(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracemerge, "BLOCK", 1000)
    path = parts[0]
    before = records(path)
    assert len(before) % 1000 > 0
    assert len(before) > 3000
    other = header(1, set_aside=ASIDE)
    rewrite_header(path, other)
    assert path.read_bytes() == seal(other) + before
    assert len(Trace.load(path).prompts) == 3
