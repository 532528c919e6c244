"""``mtpstats bench`` and ``info`` as processes, on the built-in model and a real libllama."""

import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtpstats import result as results
from mtpstats.prompts import builtin
from mtpstats.run import builtin_model

COMMAND = [sys.executable, "-m", "mtpstats"]


def mtpstats(*args, env=None, timeout=120, **kwargs):
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        **kwargs,
    )


def bench_json(*args):
    done = mtpstats("bench", "--json", "-t", "1", *args)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    result = json.loads(done.stdout)
    results.validate(result, "standard output")
    return result


def error_line(done, code):
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    text = done.stderr.decode()
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", text), text
    return text


# ---- table


def test_table_of_the_built_in_model_and_prompts():
    done = mtpstats("bench", "-n", "32", "-t", "1", "--baseline")
    assert done.returncode == 0
    assert done.stderr == b""
    text = done.stdout.decode("ascii")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    assert f"{len(builtin())} prompts" in text
    assert "temperature 0.7" in text
    positions = [int(line.split()[0]) for line in lines if re.match(r" +\d+ +\d+ +\d+ ", line)]
    assert positions[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    for words in ("tokens/s", "speed-up", "target", "head", "everything else", "4-grams", "miss"):
        assert words in text
    assert re.search(r"^Deeper or wider\? ", text, re.MULTILINE)


def test_table_without_statistics_still_shows_speed():
    done = mtpstats("bench", "-n", "16", "-t", "1", "-p", "def f(x):", "--no-stats")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "tokens/s" in text
    assert "miss" not in text


def test_temperature_0_when_asked():
    result = bench_json("-n", "16", "-p", "def f(x):", "--temp", "0")
    assert result["settings"]["temp"] == 0
    assert result["settings"]["temp_source"] == "asked"


# ---- JSON


def test_json_adds_up_and_repeats(tmp_path):
    args = ("-n", "24", "-p", r"def f(x):\n", "-p", "The :mod:`os` module", "--baseline")
    first, second = bench_json(*args), bench_json(*args)
    total = first["total"]
    assert first["settings"]["n_prompts"] == len(first["prompts"]) == 2
    for key in results.COUNTS:
        assert total[key] == sum(prompt[key] for prompt in first["prompts"])
    for result in (first, second):
        for prompt in result["prompts"]:
            counters = prompt["positions"]
            assert sum(counters["drafted"]) == prompt["drafted"]
            assert sum(counters["accepted"]) == prompt["accepted"]
            assert counters["verifications"] == prompt["verifications"]
            # One token per verification beside the accepted ones, the bonus token.
            assert prompt["tokens"] == prompt["accepted"] + prompt["verifications"]
            assert prompt["tokens"] >= 24
            for row, miss, reached in zip(
                counters["rank"], counters["miss"], counters["reached"], strict=True
            ):
                assert sum(row) + miss == reached
    for a, b in zip(first["prompts"], second["prompts"], strict=True):
        assert a["text"] == b["text"]
        assert a["positions"] == b["positions"]
    assert total["tokens_per_second"] > 0
    assert total["baseline_tokens_per_second"] > 0
    assert first["model"]["nextn_blocks"] == 1
    assert len(first["model"]["sha256"]) == 64
    assert first["environment"]["library"]["source"]


def test_file_and_standard_output_hold_the_same(tmp_path):
    path = tmp_path / "r.json"
    result = bench_json("-n", "8", "-p", "import os", "-o", path)
    assert results.read(path) == result
    assert os.listdir(tmp_path) == ["r.json"]


def test_draft_limits_reach_the_driver():
    result = bench_json("-n", "24", "-p", "import os", "--spec-draft-n-max", "2")
    drafted = result["prompts"][0]["positions"]["drafted"]
    assert drafted[0] > 0
    assert drafted[2:] == [0] * 14


def test_prompt_file_is_one_prompt(tmp_path):
    path = tmp_path / "p.py"
    path.write_text("def f(x):\n    return x\n")
    from_file = bench_json("-n", "8", "-f", path)["prompts"][0]
    from_text = bench_json("-n", "8", "-p", r"def f(x):\n    return x")["prompts"][0]
    assert from_file["id"] == "p.py"
    assert from_file["text"] == from_text["text"]
    assert from_file["prompt_sha256"] == from_text["prompt_sha256"]


# ---- streams


def test_head_takes_one_line_and_nobody_complains():
    pipeline = f"set -o pipefail; {shlex.join(COMMAND)} bench -n 8 -t 1 -p import | head -1"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_reader_gone_before_the_table_comes():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "bench", "-n", "8", "-t", "1", "-p", "import"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=120,
    )
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b""


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
def test_any_encoding_will_do(env):
    done = mtpstats("bench", "-n", "8", "-t", "1", "-p", "caf\u00e9 \u65e5", "--stream", env=env)
    assert done.returncode == 0, done.stderr
    assert b"--- prompt-1" in done.stderr
    assert b"tokens/s" in done.stdout


def test_closed_standard_output_with_a_file(tmp_path):
    path = tmp_path / "r.json"
    line = f"{shlex.join(COMMAND)} bench -n 8 -t 1 -p import -o {shlex.quote(str(path))} >&- <&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    results.read(path)


def test_progress_only_where_a_person_looks():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "bench", "-n", "16", "-t", "1", "-p", "import"],
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    table = process.communicate(timeout=120)[0]
    shown = b""
    while select.select([ours], [], [], 0)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    os.close(ours)
    assert b"warming up" in shown
    assert b"warming up" not in table
    assert b"\r" not in table
    # What was drawn is taken away again.
    assert shown.rstrip(b"\r").endswith(b" ")


def test_verbose_shows_llama_cpps_log():
    done = mtpstats("bench", "-n", "8", "-t", "1", "-p", "import", "-v")
    assert done.returncode == 0
    assert done.stderr.count(b"llama.cpp ") > 20


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_keeps_what_was_finished(tmp_path, sent):
    path = tmp_path / "r.json"
    process = subprocess.Popen(
        [*COMMAND, "bench", "-n", "300", "-t", "1", "--json", "-o", path, "--stream"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    seen = b""
    deadline = time.monotonic() + 120
    # The second prompt has begun: the first one is finished.
    while seen.count(b"--- ") < 2 and time.monotonic() < deadline:
        seen += os.read(process.stderr.fileno(), 1 << 16)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    result = json.loads(out)
    results.validate(result, "standard output")
    assert 1 <= len(result["prompts"]) < result["settings"]["n_prompts"] == len(builtin())
    assert results.read(path) == result
    assert b"Traceback" not in err
    assert err.splitlines()[-1].startswith(b"mtpstats: error: interrupted: ")


# ---- refusals


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"# Not a model\n" * 100, "not a GGUF file"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, ""),
    ],
)
def test_bad_model_is_one_line_and_2(tmp_path, content, word):
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    line = error_line(mtpstats("bench", "-m", path, "-p", "x"), 2)
    assert "bad.gguf" in line
    assert word in line


def test_truncated_model_is_one_line_and_2(tmp_path):
    path = tmp_path / "half.gguf"
    data = builtin_model().read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert "truncated" in error_line(mtpstats("bench", "-m", path, "-p", "x"), 2)


def test_an_assertion_of_llama_cpp_is_one_line_and_1(tmp_path):
    path = tmp_path / "odd.gguf"
    data = bytearray(builtin_model().read_bytes())
    key = b"qwen35.attention.layer_norm_rms_epsilon" + struct.pack("<I", 6)
    at = data.index(key) + len(key)
    data[at : at + 4] = struct.pack("<f", -1.0)
    path.write_bytes(data)
    assert "epsilon is -1.0" in error_line(mtpstats("bench", "-p", "x", "-m", path), 2)
    # The same with the check out of the way: only the graph's operators know better.
    code = """
from mtpstats.llama import hparams
hparams.check = lambda *_: None
from mtpstats.__main__ import run
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "-p", "x", "-m", path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    line = error_line(done, 1)
    assert "GGML_ASSERT(eps >= 0.0f) failed" in line
    assert "/" not in line


def test_directory_as_model_is_one_line_and_2(tmp_path):
    error_line(mtpstats("bench", "-m", tmp_path, "-p", "x"), 2)


def test_prompt_longer_than_the_context_is_named(tmp_path):
    (tmp_path / "ok.txt").write_text("import os\n")
    (tmp_path / "long.txt").write_text("import os, sys, re\n" * 400)
    done = mtpstats("bench", "-f", tmp_path / "ok.txt", "-f", tmp_path / "long.txt")
    assert "long.txt" in error_line(done, 2)


@pytest.mark.parametrize(
    "args",
    [
        ("-n", "many"), ("--nonsense",), ("-c", "100000000"), ("-ub", "4"), ("-ctv", "q9_9"),
        ("-ctv", "q8_0", "-fa", "off"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line_and_2(args):
    error_line(mtpstats("bench", "-p", "x", *args), 2)


def test_without_library_bench_says_where_it_looked(tmp_path):
    env = {"MTPSTATS_LIBLLAMA": "", "MTPSTATS_BUILDS": str(tmp_path / "none")}
    line = error_line(mtpstats("bench", "-p", "x", env=env), 1)
    assert str(tmp_path / "none") in line
    assert "build_llama.sh" in line


# ---- info


def test_info_names_the_library_and_its_devices():
    done = mtpstats("info", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert Path(record["library"]["path"]).exists()
    assert record["problem"] is None
    assert record["devices"]
    text = mtpstats("info").stdout.decode()
    assert record["library"]["version"] in text
    assert record["devices"][0]["name"] in text


def test_info_says_how_the_built_in_model_can_be_driven():
    done = mtpstats("info", "-m", builtin_model(), "--json")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)["model"]
    assert model["architecture"] == "qwen35"
    assert model["nextn_blocks"] == 1
    assert model["size"] == builtin_model().stat().st_size
    assert model["drive"] == {
        "possible": True,
        "heads": "single",
        "rollback": "snapshots",
        "reason": None,
    }
    assert b"can be driven" in mtpstats("info", "-m", builtin_model()).stdout


def test_info_works_without_any_library(tmp_path):
    env = {"MTPSTATS_LIBLLAMA": "", "MTPSTATS_BUILDS": str(tmp_path / "none")}
    done = mtpstats("info", "-m", builtin_model(), env=env)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "build_llama.sh" in text
    assert "qwen35" in text
    record = json.loads(mtpstats("info", "--json", env=env).stdout)
    assert record["library"] is None
    assert record["builds"] == []
    assert str(tmp_path / "none") in record["problem"]


def test_info_of_a_bad_model_is_one_line_and_2(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_text("no model")
    assert "bad.gguf" in error_line(mtpstats("info", "-m", path), 2)
