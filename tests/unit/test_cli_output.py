"""What commands write where, without libllama: results, progress, last words, odd streams."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import FAKE, error_line, process, settings_of

import mtpstats
from mtpstats import cli, run
from mtpstats.cli import live
from mtpstats.prompts import Prompt
from mtpstats.run import BenchStopped, Progress

# ---- output


def test_json_goes_to_standard_output(bench, capsys):
    assert cli.main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FAKE


def test_file_and_table(bench, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: f"table of {result}\n")
    path = tmp_path / "r.json"
    assert cli.main(["bench", "-o", str(path)]) == 0
    assert json.loads(path.read_text()) == FAKE
    assert capsys.readouterr().out == f"table of {FAKE}\n"


def test_table_survives_an_interruption_of_writing(bench, capsys, monkeypatch):
    def write(path, result):  # to a pipe that nobody reads
        raise KeyboardInterrupt

    monkeypatch.setattr("mtpstats.result.write", write)
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "table\n")
    assert cli.main(["bench", "-o", "/dev/null"]) == 130
    assert capsys.readouterr() == ("table\n", "mtpstats: error: interrupted\n")


def test_table_survives_a_file_that_cannot_be_written(bench, capsys, monkeypatch):
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "table\n")
    assert cli.main(["bench", "-o", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "table\n"
    assert captured.err == "mtpstats: error: /dev/full: not written: No space left on device\n"


def test_unwritable_output_is_noticed_before_the_run(bench, capsys):
    assert "/proc/r.json" in error_line(capsys, "bench", "-o", "/proc/r.json", code=2)
    assert bench == []


def test_interrupted_run_shows_and_writes_what_was_finished(monkeypatch, capsys, tmp_path):
    partial = {"prompts": [{}], "settings": {"n_prompts": 12}}

    def stop(*args, **kwargs):
        raise BenchStopped(partial)

    monkeypatch.setattr(run, "bench", stop)
    path = tmp_path / "r.json"
    assert cli.main(["bench", "--json", "-o", str(path)]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out) == partial == json.loads(path.read_text())
    assert captured.err == "mtpstats: error: interrupted: 1 of 12 prompts were finished\n"


def test_interrupted_before_anything_was_finished(monkeypatch, capsys, tmp_path):
    def stop(*args, **kwargs):
        raise BenchStopped({"prompts": [], "settings": {"n_prompts": 12}})

    monkeypatch.setattr(run, "bench", stop)
    path = tmp_path / "r.json"
    assert "0 of 12" in error_line(capsys, "bench", "-o", str(path), code=130)
    assert not path.exists()


RESCUE = """
import sys
from mtpstats import cli, run
from mtpstats.report import text
text.render = lambda result: f"table of {len(result['prompts'])}\\n"
def fake(settings, prompts, *, on_abort, **hooks):
    on_abort(sys.argv[1], eval(sys.argv[2]))
run.bench = fake
cli.main(["bench", *sys.argv[3:]])
"""
SOME = {"prompts": [{}, {}], "settings": {"n_prompts": 12}}


def gave_up(why, finished, *args):
    """Return exit code, standard output and the last line on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", RESCUE, why, repr(finished), *args],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stderr.count("\n") == 1
    return done.returncode, done.stdout, done.stderr


def test_what_was_finished_survives_an_abort_of_llama_cpp(tmp_path):
    path = tmp_path / "r.json"
    code, out, err = gave_up("/src/ggml/ggml.c:12: GGML_ASSERT(x) failed", SOME, "-o", str(path))
    assert (code, out) == (1, "table of 2\n")
    assert json.loads(path.read_text()) == SOME
    assert err.startswith("mtpstats: error: llama.cpp gave up (ggml.c:12: GGML_ASSERT(x) failed): ")
    assert err.endswith(f"; 2 of 12 prompts were finished and are in {path}\n")


@pytest.mark.parametrize(
    ("finished", "said"),
    [
        (None, "nothing was written"),
        ({**SOME, "prompts": []}, "0 of 12 prompts were finished, nothing was written"),
    ],
)
def test_an_abort_before_anything_was_finished(finished, said, tmp_path):
    path = tmp_path / "r.json"
    code, out, err = gave_up("no", finished, "-o", str(path))
    assert (code, out) == (1, "")
    assert err.endswith(f"; {said}\n")
    assert not path.exists()


def test_an_abort_and_a_file_that_cannot_be_written():
    code, out, err = gave_up("no", SOME, "-o", "/dev/full")
    assert (code, out) == (1, "table of 2\n")
    assert err.endswith("lost: /dev/full: not written: No space left on device\n")


@pytest.mark.parametrize(
    "why", ["rpc.cpp:1: Remote RPC server crashed or returned", "/x/rpc.cpp:2: Failed to connect"]
)
def test_a_server_that_died_is_not_taken_for_a_damaged_model(why):
    code, _, err = gave_up(why, SOME)
    assert code == 1
    assert "a server of --rpc ended" in err
    assert err.endswith("; 2 of 12 prompts were finished\n")


def test_closed_standard_output_needs_a_file(monkeypatch, capsys, bench, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["bench"]) == 2
    assert "standard output is closed" in capsys.readouterr().err
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "table\n")
    assert cli.main(["bench", "-o", str(tmp_path / "r.json")]) == 0


def test_text_outside_the_terminals_encoding_is_escaped(monkeypatch, bench, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "é\n")
    assert cli.main(["bench"]) == 0
    assert raw.getvalue() == b"\\xe9\n"


def test_statistics_on_the_way_go_to_standard_error(monkeypatch, capsys):
    from mtpstats.stats import Snapshot

    def fake(settings, prompts, *, on_stats, **hooks):
        on_stats(Snapshot())
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    assert cli.main(["bench", "--json", "--stats-every", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("mtpstats: 0 verifications")
    assert json.loads(captured.out) == FAKE


def test_stream_and_log_go_to_standard_error_without_control_characters(monkeypatch, capsys):
    def fake(settings, prompts, *, on_text, on_log, **hooks):
        prompt = Prompt("a", None, "one\ntwo\x1b]0;x\x07")
        on_log("info", "loading\x1b[2J")
        for piece in (b"caf\xc3", b"\xa9\x1b[31m", b" \xff", b""):
            on_text(prompt, piece)
        on_text(Prompt("b", None, "three"), b"\n")
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    assert cli.main(["bench", "--json", "--stream", "-v"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "llama.cpp info: loading\\x1b[2J\n"
        "--- a\none\ntwo\\x1b]0;x\\x07café\\x1b[31m �\n"
        "--- b\nthree\n\n"
    )
    assert json.loads(captured.out) == FAKE


def test_several_texts_at_once_are_shown_one_after_the_other():
    shown = []
    stream = live.TextStream(shown.append)
    a, b, c = (Prompt(name, None, f"{name}:") for name in "abc")
    for prompt, piece in [(a, b"1"), (b, b"1"), (c, b"\xc3"), (a, b"2"), (b, b"2"), (b, b"")]:
        stream(prompt, piece)
    # The first is live, also when another has ended.
    assert "".join(shown) == "--- a\na:12"
    stream(c, b"\xa9")
    stream(a, b"")
    # Then b, which is whole, and what there is of c, live from now on.
    assert "".join(shown) == "--- a\na:12\n--- b\nb:12\n--- c\nc:\u00e9"
    stream(c, b"2\xc3")
    assert shown[-1] == "2"
    stream.close()
    assert "".join(shown).endswith("\u00e92\ufffd\n")


def test_a_stream_that_is_closed_early_shows_what_was_held_back():
    shown = []
    stream = live.TextStream(shown.append)
    stream(Prompt("a", None, "a:"), b"1")
    stream(Prompt("b", None, "b:"), b"2")
    stream.close()
    assert "".join(shown) == "--- a\na:1\n--- b\nb:2\n"


def test_without_terminal_nobody_asks_for_progress(bench):
    settings_of(bench)
    hooks = bench[-1][2]
    assert hooks["on_progress"] is None
    assert hooks["on_text"] is None
    assert hooks["on_stats"] is None
    assert hooks["on_log"] is None


# ---- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(times_and_events):
    """Return what a progress line wrote for (time, event) pairs."""
    now = [0.0]
    terminal = Terminal()
    line = live.ProgressLine(terminal, lambda: now[0])
    for at, event in times_and_events:
        now[0] = at
        line(event)
    return terminal.getvalue(), line


def test_progress_is_silent_for_two_seconds():
    text, _ = shown([(t / 10, Progress("prompt 1/2", t, 100, "tokens")) for t in range(20)])
    assert text == ""


def test_progress_shows_share_rate_and_time_left():
    events = [(0, Progress("prompt 1/2", 0, 400, "tokens"))]
    events.append((4, Progress("prompt 2/2", 100, 400, "tokens")))
    text, _ = shown(events)
    assert text == "\rprompt 2/2  25 %  25 tokens/s  0:12 left"


def test_progress_without_a_known_end_shows_the_rate():
    text, _ = shown([(0, Progress("prompt 1/1", 0, None, "tokens")),
                     (4, Progress("prompt 1/1", 10, None, "tokens"))])  # fmt: skip
    assert text == "\rprompt 1/1  2.5 tokens/s"


def test_a_stage_without_length_is_shown_at_once_and_cleared():
    text, line = shown([(0, Progress("warming up"))])
    assert text == "\rwarming up ..."
    line.clear()
    assert line._stream.getvalue() == text + "\r" + " " * len("warming up ...") + "\r"


def test_a_shorter_line_leaves_nothing_of_a_longer_one():
    text, _ = shown([(0, Progress("a long stage")), (1, Progress("b"))])
    assert text.split("\r")[-1] == "b ...".ljust(len("a long stage ..."))


def test_a_file_is_no_terminal():
    stream = io.StringIO()
    line = live.ProgressLine(stream)
    assert not line.enabled
    line(Progress("warming up"))
    line.clear()
    assert stream.getvalue() == ""
    assert not live.ProgressLine(None).enabled


def test_a_terminal_that_is_gone_is_no_error():
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        line = live.ProgressLine(stream)
        assert line.enabled
        os.close(ours)
        line(Progress("warming up"))
        assert not line.enabled
        line.clear()
        assert os.path.samestat(os.fstat(theirs), os.stat(os.devnull))


# ---- as a process


@pytest.mark.parametrize("gone", [False, True], ids=["full", "not read"])
def test_standard_error_that_takes_nothing_stops_nothing(gone):
    code = (
        "import sys; from mtpstats.cli import streams; streams.prepare();"
        "[streams.to_stderr('x' * 9000) for _ in range(9)]; print('done')"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, open(writing, "wb") as unread:
        stderr = unread if gone else full
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_a_directory_that_is_gone_is_named(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    code = (
        "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]);"
        "from mtpstats.cli import main; sys.exit(main(['merge', '/a.json', '-o', 'b.json']))"
    )
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True)
    assert done.returncode == 2
    assert done.stderr == (
        b"mtpstats: error: b.json: cannot be found from here: No such file or directory\n"
    )


def test_head_gets_its_line_and_nobody_complains():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = process("bench", "--help", stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b""


def test_full_disk_under_standard_output_is_one_line():
    with open("/dev/full", "wb") as full:
        done = process("bench", "--help", stdout=full)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"output: No space left on device" in done.stderr


ENDED = """
import sys
from mtpstats import cli, run
from mtpstats.cli import streams
from mtpstats.errors import CheckFailed, Interrupted
from mtpstats.report import text
text.render = lambda result: "table" * int(sys.argv[2])
def fake(*args, **hooks):
    if sys.argv[1] == "stopped":
        raise run.BenchStopped({"prompts": [{}], "settings": {"n_prompts": 2}})
    streams.to_stdout("table" * int(sys.argv[2]))
    raise CheckFailed("worse") if sys.argv[1] == "worse" else Interrupted("interrupted")
run.bench = fake
sys.exit(cli.main(["bench"]))
"""


SAID = {
    "stopped": (130, "interrupted: 1 of 2 prompts were finished"),
    "interrupted": (130, "interrupted"),
    "worse": (3, "worse"),
}


@pytest.mark.parametrize("full", [False, True], ids=["nobody reads", "disk full"])
@pytest.mark.parametrize(
    ("how", "times"),  # once stays in a buffer to the end; so many times is beyond all buffers
    [("stopped", 1), ("stopped", 100_000), ("interrupted", 1), ("worse", 1)],
)
def test_a_lost_table_does_not_change_how_a_run_ended(how, times, full):
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as disk, open(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", ENDED, how, str(times)],
            stdout=disk if full else pipe, stderr=subprocess.PIPE, text=True, check=False,
            timeout=60,
        )  # fmt: skip
    code, said = SAID[how]
    lost = "; standard output: No space left on device" if full else ""
    assert done.stderr == f"mtpstats: error: {said}{lost}\n"
    assert done.returncode == code


CTRL_C = "import signal; signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    ("when", "code"),
    [
        # while the command line is still being imported
        (f"sys.modules.pop('click', 0); sys.addaudithook(lambda event, args: exec({CTRL_C!r}) "
         "if event == 'import' and args[0] == 'click' else None)", 130),
        # in a dataclass in the making: CPython would die of SIGINT at its end
        (f"from mtpstats import cli; cli.cli.make_context = lambda *args: exec({CTRL_C!r})", 130),
        # in the error's own line
        ("from mtpstats import cli; cli.cli.make_context = None; "
         f"cli._failed = lambda *args: exec({CTRL_C!r})", 130),
        # when everything is done
        (f"import atexit; atexit.register(lambda: exec({CTRL_C!r}))", 0),
    ],
)  # fmt: skip
def test_ctrl_c_at_odd_moments_is_at_most_one_line(when, code, tmp_path):
    (tmp_path / "driver.py").write_text(
        f"import sys; sys.argv[1:] = ['--version']\n{when}\n"
        "from mtpstats.__main__ import run\nrun()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "driver"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(mtpstats.__file__).parents[1])},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code
    assert done.stderr == (b"mtpstats: error: interrupted\n" if code else b"")


def test_closed_streams_do_not_matter():
    closed = 'exec "$0" -m mtpstats --version <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", closed, sys.executable], check=False, timeout=60)
    assert done.returncode == 0
