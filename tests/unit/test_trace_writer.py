"""Writing traces: appending, resuming, and what is in the file when that fails."""

from __future__ import annotations

import pytest
from made import by_chance
from test_trace import HEADER, small, written

from mtpstats import tracefile
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.trace import Trace
from mtpstats.tracefile import TraceWriter, check_new


def test_resume_goes_on_where_a_cut_file_ends(tmp_path):
    prompts = [small(name, seed) for seed, name in enumerate("abc")]
    whole = written(tmp_path / "whole.trace", *prompts).read_bytes()
    path = tmp_path / "resumed.trace"
    for size in [0, 10, whole.index(b"\n") + 1, *range(20, len(whole), 331), len(whole)]:
        path.write_bytes(whole[:size])
        with TraceWriter(path, HEADER, resume=True) as writer:
            for one in prompts:
                if one.id not in writer.done_ids:
                    writer.append(one)
            assert writer.done_ids == {"a", "b", "c"}
        assert path.read_bytes() == whole


def test_resume_begins_a_file_that_is_not_there(tmp_path):
    with TraceWriter(tmp_path / "new.trace", HEADER, resume=True) as writer:
        assert writer.done_ids == set()
    assert Trace.load(tmp_path / "new.trace").prompts == []


def test_an_existing_file_is_not_touched_without_resume(tmp_path):
    path = written(tmp_path / "a.trace", small("a"))
    before = path.read_bytes()
    (tmp_path / "link").symlink_to("nowhere")
    for there in (path, tmp_path / "link"):
        with pytest.raises(InputError, match="exists already; go on with it"):
            check_new(there)
        with pytest.raises(InputError, match="exists already; go on with it"):
            TraceWriter(there, HEADER)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 5}, "recorded with depth 4, not 5"),
        ({"every": 2}, "recorded with every 1, not 2"),
        ({"n_predict": 9}, "recorded with n_predict 20, not 9"),
        ({"sampling": {"temp": 0.8}}, r"recorded with sampling.temp 0.0, not 0.8"),
        ({"model": {"sha256": "abd"}}, "another model"),
    ],
)
def test_another_recording_cannot_be_resumed(change, words, tmp_path):
    path = written(tmp_path / "a.trace", small("a"))
    before = path.read_bytes()
    with pytest.raises(InputError, match=words):
        TraceWriter(path, {**HEADER, **change}, resume=True)
    assert path.read_bytes() == before


def test_what_may_differ_when_resuming(tmp_path):
    path = written(tmp_path / "a.trace", small("a"))
    with TraceWriter(path, {**HEADER, "environment": {"time": "later"}}, resume=True) as writer:
        assert writer.header == HEADER


def test_damage_is_not_resumed(tmp_path):
    path = written(tmp_path / "a.trace", small("a"))
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(InputError, match="not a trace"):
        TraceWriter(path, HEADER, resume=True)


def test_a_full_disk_leaves_the_whole_prompts(tmp_path, monkeypatch):
    path = tmp_path / "a.trace"
    with TraceWriter(path, HEADER) as writer:
        writer.append(small("a"))
        before = path.read_bytes()

        class Full:
            """Takes a few bytes, then has no room."""

            def __init__(self, file):
                self.file, self.room = file, 100

            def write(self, data):
                if self.room <= 0:
                    raise OSError(28, "No space left on device")
                self.room -= 60
                return self.file.write(bytes(data[:60]))

            def __getattr__(self, name):
                return getattr(self.file, name)

        file = writer._file
        real, file._file = file._file, Full(file._file)
        with pytest.raises(MtpStatsError, match="not written: No space left on device"):
            writer.append(small("b"))
        assert path.read_bytes() == before
        file._file = real
        writer.append(small("c"))
    assert [one.id for one in Trace.load(path).prompts] == ["a", "c"]


def test_a_file_that_cannot_be_begun_is_not_left(tmp_path, monkeypatch):
    path = tmp_path / "a.trace"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(InputError, match=r"a\.trace: cannot be written: No space left"):
            TraceWriter(path, HEADER)
    assert not path.exists()
    before = written(path, small("a")).read_bytes()
    with pytest.raises(InputError, match="was recorded with"):
        TraceWriter(path, {**HEADER, "n_predict": 9}, resume=True)
    assert path.read_bytes() == before


def test_a_trace_that_cannot_be_put_back_ends_the_recording(tmp_path):
    path = tmp_path / "there" / "a.trace"
    path.parent.mkdir()
    with TraceWriter(path, HEADER) as writer:
        writer.append(small("a"))
        path.unlink()
        path.parent.rmdir()
        with pytest.raises(MtpStatsError, match=r"a\.trace: somebody removed it, and it cannot"):
            writer.append(small("b"))
        assert writer.done_ids == set()


def test_a_line_without_an_end_is_damage_and_not_what_a_crash_left(tmp_path, monkeypatch):
    path = written(tmp_path / "a.trace", small("a"))
    whole = path.read_bytes()
    monkeypatch.setattr(tracefile, "MAX_LINE", 2000)
    path.write_bytes(whole + b"{" + b"9" * 1998)
    with TraceWriter(path, HEADER, resume=True) as writer:
        assert writer.done_ids == {"a"}
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"{" + b"9" * 1999)
    with pytest.raises(InputError, match="damaged: no line of JSON"):
        TraceWriter(path, HEADER, resume=True)
    assert path.stat().st_size == len(whole) + 2000


def test_a_prompt_of_another_depth_is_refused(tmp_path):
    with (
        TraceWriter(tmp_path / "a.trace", HEADER) as writer,
        pytest.raises(InputError, match="depth is 3, the header says 4"),
    ):
        writer.append(by_chance(1, depth=3))
