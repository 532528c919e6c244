"""Trace files: round trips, the reader in five lines, cuts, damage, resuming."""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from made import by_chance, prompt, trace

from mtpstats import trace as traces
from mtpstats import tracefile
from mtpstats.appending import seal, unsealed
from mtpstats.errors import InputError
from mtpstats.policy import Chain, Tree
from mtpstats.replay import replay
from mtpstats.trace import (
    MISS,
    UNKNOWN,
    Trace,
    TracedPrompt,
    quantise,
    trace_header,
)
from mtpstats.tracefile import TraceWriter

HEADER = trace_header(depth=4, n_predict=20, model={"sha256": "abc"}, sampling={"temp": 0.0})


def small(name: str, seed: int = 1) -> TracedPrompt:
    return by_chance(seed, n_generated=3, name=name)


def written(path: Path, *prompts: TracedPrompt) -> Path:
    with TraceWriter(path, HEADER) as writer:
        for one in prompts:
            writer.append(one)
    return path


def assert_same(a: TracedPrompt, b: TracedPrompt) -> None:
    """Equal in all that a file keeps."""
    for name in ("id", "category", "n_prompt", "stop", "n_ctx", "seconds", "facts"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("tokens", "margin", "roots", "rank", "p_min_p", "off_index", "off_p", "off_top10"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
    np.testing.assert_array_equal(a.overlap, np.where(b.rank == UNKNOWN, np.nan, b.overlap))


# ---- what comes back


def test_a_file_holds_what_was_appended(tmp_path):
    prompts = [by_chance(seed, name=f"p{seed}", stop="eog") for seed in (1, 2)]
    path = written(tmp_path / "a.trace", *prompts)
    line = json.loads(path.read_bytes().split(b"\n", 2)[1])
    assert (line["id"], line["n_roots"]) == ("p1", len(prompts[0].roots))
    loaded = Trace.load(path)
    assert loaded.header == HEADER
    assert (loaded.depth, loaded.every, loaded.n_predict) == (4, 1, 20)
    assert loaded.incomplete is None
    assert [one.id for one in loaded.prompts] == ["p1", "p2"]
    assert loaded.n_roots == sum(len(one.roots) for one in prompts)
    for mine, original in zip(loaded.prompts, prompts, strict=True):
        assert_same(mine, original)


def test_probabilities_are_kept_in_full_on_the_forced_path_and_for_gates_beyond(tmp_path):
    original = prompt([[1, 2, 1], [2, MISS], [1]], depth=3)
    mine = Trace.load(_saved(tmp_path, original)).prompts[0]
    # root 0: ranks at d 0 and 1 were seen on the greedy path, d 2 lies below rank 2
    np.testing.assert_array_equal(mine.p[0, :2], original.p[0, :2])
    np.testing.assert_array_equal(mine.off_index, [2, 4])
    np.testing.assert_array_equal(mine.off_p, original.off_p)
    np.testing.assert_array_equal(mine.p[0, 2, :3], np.float16([0.5, 0.25, 0.0625]))
    assert np.isnan(mine.p[0, 2, 3:]).all()
    assert np.isnan(mine.p[2, 1, 3:]).all()  # past the known text
    np.testing.assert_array_equal(mine.p_min_p, original.p_min_p)
    np.testing.assert_allclose(mine.top10[0, :2], original.top10[0, :2], rtol=1e-6)
    assert np.isnan(mine.top10[0, 2])


def test_a_loaded_trace_replays_as_the_recorded_one(tmp_path):
    prompts = [by_chance(seed, n_generated=60, name=f"p{seed}") for seed in range(3)]
    before = Trace(HEADER, prompts)
    after = Trace.load(written(tmp_path / "a.trace", *prompts))
    for policy in (Chain(4, 0.3), Tree([(1,), (2,), (1, 1), (2, 1), (2, 2)])):
        a, b = replay(before, policy).snapshot.to_dict(), replay(after, policy).snapshot.to_dict()
        # quotients of rounded numbers: an eighth of a millionth each
        assert np.allclose(a.pop("sum_p_top10"), b.pop("sum_p_top10"), rtol=0, atol=1e-5)
        assert a == b


def _saved(tmp_path: Path, *prompts: TracedPrompt) -> Path:
    path = tmp_path / "made.trace"
    with TraceWriter(path, trace_header(depth=prompts[0].depth)) as writer:
        for one in prompts:
            writer.append(one)
    return path


def test_a_reader_needs_no_mtpstats(tmp_path):
    original = by_chance(3, name="p3")
    path = written(tmp_path / "a.trace", original, small("p4"))
    prompts = []
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        while line := file.readline():
            prompts.append(json.loads(line) | {name: np.load(file) for name in header["arrays"]})
    first = prompts[0]
    assert [one["id"] for one in prompts] == ["p3", "p4"]
    np.testing.assert_array_equal(first["tokens"], original.tokens)
    np.testing.assert_array_equal(first["rank"], original.rank)
    root, depth = np.nonzero(first["rank"] != 255)
    assert len(first["path_p"]) == len(root)
    greedy = [(original.rank[r, :d] == 1).all() for r, d in zip(root, depth, strict=True)]
    np.testing.assert_array_equal(first["path_p"][greedy], original.p[root[greedy], depth[greedy]])


def test_the_documented_reader_is_this_one():
    text = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    for line in (
        "header = json.loads(file.readline())",
        "while line := file.readline():",
        'json.loads(line) | {name: np.load(file) for name in header["arrays"]}',
    ):
        assert line in text
    for name in traces.ARRAYS:
        assert f"`{name}`" in text, name


def test_the_documented_places_of_sparse_arrays(tmp_path):
    original = by_chance(3, name="p3")
    with open(written(tmp_path / "a.trace", original), "rb") as file:
        header = json.loads(file.readline())
        file.readline()
        arrays = {name: np.load(file) for name in header["arrays"]}
    rank = arrays["rank"]
    known = rank != 255
    left = np.cumsum(rank != 1, axis=1) > (rank != 1)
    np.testing.assert_array_equal(np.flatnonzero(known & left), original.off_index)
    assert len(arrays["off_top10"]) == len(original.off_index)
    np.testing.assert_array_equal(arrays["path_overlap"], original.overlap[known])
    np.testing.assert_array_equal(
        arrays["greedy_p"], original.p[~known | left][:, :3].astype(np.float16)
    )
    text = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    assert "left = np.cumsum(rank != 1, axis=1) > (rank != 1)" in text


def test_bytes_a_root(tmp_path):
    ranks = [[1, 1, 1, 2, 1, 1, 2, 1]] * 1000  # every depth known, half of it off the greedy path
    path = _saved(tmp_path, prompt([*ranks, *([[MISS]] * 8)], depth=8))
    # rank 8, p_min_p 32, path_p 8 * 32, overlap 8 * 4, off the greedy path 4 * 4 and 4 * 6,
    # 4 each for token, margin, root
    assert path.stat().st_size / 1000 == pytest.approx(380, abs=5)


def test_select_shares_prompts_and_may_repeat():
    loaded = trace(by_chance(1, name="a"), by_chance(2, name="b"))
    chosen = loaded.select(["b", 0, 0])
    assert [one.id for one in chosen.prompts] == ["b", "a", "a"]
    assert chosen.prompts[1] is loaded.prompts[0]
    for key in ("c", 2):
        with pytest.raises(InputError, match="has no prompt"):
            loaded.select([key])


def test_quantise_gives_multiples_of_the_live_counters_unit():
    p = np.random.default_rng(0).random(1000)
    units = quantise(p).astype(float) * 2**24
    assert (units == np.floor(units)).all()
    assert units.tolist() == np.floor(p * 2**24 + 0.5).tolist()
    assert np.isnan(quantise([np.nan])).all()


# ---- cut and damaged files


def test_cut_anywhere_it_holds_the_whole_prompts_or_says_one_line(tmp_path):
    whole = written(tmp_path / "whole.trace", small("a"), small("b", 2)).read_bytes()
    header_end = whole.index(b"\n") + 1
    first_end = written(tmp_path / "first.trace", small("a")).stat().st_size
    path = tmp_path / "cut.trace"
    path.write_bytes(whole)
    for size in range(len(whole) - 1, -1, -1):
        os.truncate(path, size)
        if size < header_end:
            with pytest.raises(InputError, match=r"cut off inside its header|file is empty"):
                Trace.load(path)
            continue
        loaded = Trace.load(path)
        assert len(loaded.prompts) == (size >= first_end)
        ends_whole = size in (header_end, first_end)
        assert (loaded.incomplete is None) == ends_whole
        if not ends_whole:
            assert f"prompt {len(loaded.prompts) + 1} is cut off at byte {size}" in (
                loaded.incomplete
            )


def test_a_changed_byte_is_found_wherever_it_is(tmp_path):
    whole = written(tmp_path / "whole.trace", small("a"), small("b", 2)).read_bytes()
    path = tmp_path / "damaged.trace"
    rng = np.random.default_rng(0)
    for at in [*range(0, len(whole), 17), *range(whole.index(b"\n") + 1)]:
        changed = bytearray(whole)
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        with pytest.raises(InputError) as error:
            Trace.load(path)
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)


def test_damage_names_its_place(tmp_path):
    path = written(tmp_path / "a.trace", small("a"), small("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="prompt 2: damaged: the checksum of its arrays"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "not a trace of mtpstats"),
        (b"{\n", "not a trace of mtpstats"),
        (b"[1]\n", "not a trace of mtpstats"),
        (b'{"schema": "other/1"}\n', "not a trace of mtpstats"),
        (b'{"schema": "mtpstats.result/1"}\n', "schema 'mtpstats.result/1' is unknown"),
        (b'{"schema": "mtpstats.trace/2", "x": 1}\n', "this version reads mtpstats.trace/1"),
        (b'{"schema": "mtpstats.trace/1"}\n', "the header is damaged"),
        (b"", "the file is empty"),
        (b"\x80" * 200, "not a trace of mtpstats"),
        (b"[" * 100_000 + b"\n", "not a trace of mtpstats"),
    ],
)
def test_foreign_and_future_files(content, words, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        Trace.load(path)
    assert "\n" not in str(error.value)


def test_the_end_of_a_text_is_a_token_of_it():
    with pytest.raises(InputError, match="stop is 'eog', and no token was generated"):
        prompt([], depth=3, stop="eog")


def test_missing_directory_and_pipe(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Trace.load(tmp_path / "none.trace")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        Trace.load(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(InputError, match="not a regular file"):
            Trace.load(pipe)
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("depth", 17), ("depth", 0), ("depth", True), ("depth", "4"), ("every", 0),
        ("n_predict", -2), ("arrays", ["tokens"]), ("head", None), ("head", {"kind": "two"}),
        ("head", {"kind": "chain", "blocks": -1}),
    ],
)  # fmt: skip
def test_headers_that_no_trace_has(key, value, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(seal({**HEADER, key: value}))
    with pytest.raises(InputError, match=f"{path}: {key} is "):
        Trace.load(path)


# ---- hostile records, with checksums that are right


def record(changes: dict[str, bytes] | None = None, extra: bytes = b"", **facts: object) -> bytes:
    """A record whose arrays or facts were made up."""
    line, _, data = tracefile._packed(small("a")).partition(b"\n")
    values = unsealed(line + b"\n")
    assert values is not None
    arrays = io.BytesIO(data)
    pieces = []
    for name in traces.ARRAYS:
        start = arrays.tell()
        np.load(arrays)
        pieces.append((changes or {}).get(name, data[start : arrays.tell()]))
    data = b"".join(pieces) + extra
    values.update(bytes=len(data), crc32=zlib.crc32(data))
    values.update(facts)
    return seal(values) + data


def npy(descr: str, shape: str, data: bytes = b"", order: str = "False") -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"changes": {"tokens": npy("'<i4'", "(1000000000000,)")}}, "tokens is larger than"),
        ({"changes": {"rank": npy("'|u1'", "(99999999, 99999999)")}}, "rank is larger than"),
        ({"changes": {"rank": npy("'|u1'", "(-1, -4)", bytes(4))}}, "rank is uint8"),
        ({"changes": {"tokens": npy("'|O'", "(1,)", b"cos\nsystem\n")}}, "tokens is object"),
        ({"changes": {"tokens": npy("'<i8'", "(1,)", bytes(8))}}, "tokens is int64"),
        ({"changes": {"rank": npy("'|u1'", "(4,)", bytes(4))}}, "rank is uint8"),
        ({"changes": {"rank": npy("'|u1'", "(2, 4)", bytes(8), "True")}}, "rank is uint8"),
        ({"changes": {"tokens": npy("'<i4'", "'x'")}}, "tokens: "),
        ({"changes": {"tokens": b"\x93NUMPY\x07\x00" + bytes(100)}}, "npy version"),
        ({"changes": {"tokens": b""}}, "is int32|is float32"),
        ({"changes": {"greedy_p": npy("'<f2'", "(0, 3)")}}, "greedy_p has shape"),
        ({"changes": {"p_min_p": npy("'<f4'", "(0, 4)")}}, "p_min_p has shape"),
        ({"changes": {"path_p": npy("'<f4'", "(0, 8)")}}, "path_p has shape"),
        ({"changes": {"margin": npy("'<f4'", "(0,)")}}, "margin has shape"),
        ({"changes": {"tokens": npy("'<i4'", "(6,)", b"\xff" * 24)}}, "negative id"),
        ({"extra": b"more"}, "bytes follow the last array"),
        ({"n_prompt": 99}, "n_prompt 99 does not fit|margin has shape"),
        ({"n_prompt": True}, "n_prompt is True"),
        ({"id": 3}, "id is 3"),
        ({"stop": "tired"}, "stop 'tired' is none of"),
        ({"facts": None}, "facts is None"),
        ({"bytes": "many"}, "bytes is 'many'"),
        ({"bytes": -5}, "bytes is -5"),
    ],
)
def test_hostile_records(made, words, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(seal(HEADER) + record(**made))
    with pytest.raises(InputError, match=words) as error:
        Trace.load(path)
    assert str(error.value).startswith(f"{path}: prompt 1")


def test_a_record_of_another_depth(tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(seal({**HEADER, "depth": 5}) + record())
    with pytest.raises(InputError, match=r"prompt 1: rank has shape \(3, 4\), expected \(3, 5\)"):
        Trace.load(path)


# ---- arrays that do not fit each other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": [[9, 255], [255, 255]]}, "above 8"),
        ({"rank": [[0, 1], [255, 255]]}, "after a miss or a gap"),
        ({"rank": [[255, 1], [255, 255]]}, "after a miss or a gap"),
        ({"rank": [[1, 1], [1, 1]]}, "past the end of the text"),
        ({"rank": [[2, 1], [255, 255]]}, "off_index is not where"),
        ({"rank": [1, 2]}, "rank has shape"),
        ({"roots": [1, 1]}, "not ascending"),
        ({"roots": [0, 9]}, "not ascending"),
        ({"roots": [0]}, "roots has shape"),
        ({"margin": [1.0]}, "margin has shape"),
        ({"p": np.zeros((2, 2, 7))}, "p has shape"),
        ({"n_ctx": -1}, "n_ctx is -1"),
    ],
)
def test_a_prompt_checks_itself(changes, words):
    with pytest.raises(InputError, match=f"prompt made: .*{words}"):
        prompt([[1, 1], [1]], depth=2, **changes)


def test_a_trace_checks_its_prompts():
    one = by_chance(1, every=2)
    with pytest.raises(InputError, match="roots are not every 1 positions"):
        trace(one)
    with pytest.raises(InputError, match="depth is 4, the header says 5"):
        Trace(trace_header(depth=5), [by_chance(1)])
