"""A ``llama-server`` of a few lines: started, asked, stopped, and what goes wrong with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpstats.errors import InputError, MtpStatsError
from mtpstats.server import Server

PROGRAM = """\
#!{python} -S
import http.server, json, sys
port, log = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[1]
if log == "fail":
    print("loading\\nerror: \\x1b[31mno such model")
    sys.exit(3)
answers = {answers!r}

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        self.answer(503 if log == "slow" else 200, "{{}}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(log, "a") as file:
            file.write(json.dumps([sys.argv[2:], self.path, body]) + "\\n")
        status, text = answers[body["n_predict"]]
        self.answer(status, text)

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

GOOD = {
    "timings": {
        "predicted_n": 5, "predicted_ms": 2000.0, "predicted_per_second": 2.0,
        "draft_n": 6, "draft_n_accepted": 2,
    }
}  # fmt: skip
PLAIN = {"timings": {"predicted_n": 5, "predicted_ms": 500.0, "predicted_per_second": 8.0}}
ANSWERS = {
    5: (200, json.dumps(GOOD)),
    6: (200, json.dumps(PLAIN)),
    7: (500, '{"error": {"message": "no\\u001b slot"}}'),
    8: (200, "not JSON"),
    9: (200, '{"timings": {}}'),
    10: (200, '{"timings": {"predicted_ms": 0, "predicted_per_second": 1}}'),
    11: (200, '{"timings": {"predicted_ms": NaN, "predicted_per_second": 1}}'),
    12: (200, '{"timings": {"predicted_ms": 1, "predicted_per_second": Infinity}}'),
}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(PROGRAM.format(python=sys.executable, answers=ANSWERS))
    path.chmod(0o755)
    return path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_completions_and_the_end(program: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Server(program, [str(log), "-c", "64"]) as server:
        pid = server._process.pid
        assert alive(pid)
        got = server.complete([1, 2], 5, temperature=0)
        assert (got.tokens, got.seconds, got.drafted, got.accepted) == (4, 2.0, 6, 2)
        got = server.complete([1, 2], 6)
        assert (got.tokens, got.seconds, got.drafted, got.accepted) == (4, 0.5, 0, 0)
        for n_predict, words in (
            (7, r"HTTP 500.*no\\u001b slot"),
            (8, "no answer that can be read"),
            *((n, "timings without a speed") for n in (9, 10, 11, 12)),
        ):
            with pytest.raises(MtpStatsError, match=words) as caught:
                server.complete([1], n_predict)
            assert "\n" not in str(caught.value)
            assert "\x1b" not in str(caught.value)
    assert not alive(pid)
    server.close()
    arguments, path, body = json.loads(log.read_text().splitlines()[0])
    assert arguments[:4] == ["-c", "64", "--host", "127.0.0.1"]
    assert path == "/completion"
    assert body == {
        "prompt": [1, 2], "n_predict": 5, "cache_prompt": False, "return_tokens": False,
        "temperature": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "error", "words"),
    [
        ("fail", MtpStatsError, r"llama-server ended with code 3: error: \\x1b\[31mno such model"),
        ("slow", MtpStatsError, "llama-server is not ready after 1 s: it said nothing"),
    ],
)
def test_a_server_that_does_not_start(program: Path, flag: str, error: Any, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        Server(program, [flag], start_seconds=1)
    assert "\n" not in str(caught.value)


def test_a_program_is_found_as_a_shell_finds_it(program: Path, monkeypatch: Any) -> None:
    ended = pytest.raises(MtpStatsError, match="llama-server ended with code 3")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(program.parent)
    with ended:
        Server(Path("./llama-server"), ["fail"])
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.chdir("/")
    with ended:
        Server(Path("llama-server"), ["fail"])


def test_a_server_that_never_answers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mtpstats.server.HEALTH_SECONDS", 0.2)
    path = tmp_path / "silent"
    path.write_text(
        f"#!{sys.executable} -S\nimport socket, sys, time\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "with socket.create_server(('127.0.0.1', port)):\n    time.sleep(60)\n"
    )
    path.chmod(0o755)
    with pytest.raises(MtpStatsError, match="silent is not ready after 1 s: it said nothing"):
        Server(path, [], start_seconds=1)


def test_a_program_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: cannot be run: No such file"):
        Server(tmp_path / "absent", [])
    (tmp_path / "text").write_text("")
    with pytest.raises(InputError, match="text: cannot be run: Permission denied"):
        Server(tmp_path / "text", [])
