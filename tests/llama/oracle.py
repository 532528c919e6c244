"""llama.cpp's own binaries from the same build, as the other side of a comparison."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Reference:
    """What ``llama-speculative-simple`` printed; ``text`` without newlines at its end."""

    text: bytes
    drafted: int
    accepted: int
    decoded: int
    tokens_per_second: float


def tool(prefix: Path, name: str) -> Path:
    """Path of one of llama.cpp's programs; fails, never skips, when the build has no tools."""
    path = prefix / "bin" / name
    assert path.exists(), f"{name} is missing: build with ./build_llama.sh --tools"
    return path


@contextmanager
def server(prefix: Path, model: Path, *options: str) -> Iterator[Callable[[str, Any], Any]]:
    """Run ``llama-server``; yields ``post(path, body) -> answer``, a string if it is an error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [
        *(str(tool(prefix, "llama-server")), "-m", str(model), "--jinja"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("-c", "256", "-np", "1", "-t", "1", "--no-warmup"),
        *options,
    ]

    def post(path: str, body: Any) -> Any:
        request = urllib.request.Request(
            base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return error.read().decode(errors="replace")

    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None, f"llama-server ended: {' '.join(command)}"
            assert time.monotonic() < until, "llama-server does not answer"
            try:
                with urllib.request.urlopen(f"{base}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.02)
        yield post
    finally:
        process.kill()
        process.wait()


def speculative_simple(
    prefix: Path, model: Path, prompt: str, n_predict: int, *options: str, threads: int = 1
) -> Reference:
    """Run ``llama-speculative-simple --spec-type draft-mtp`` greedily on one prompt."""
    command = [
        *(str(tool(prefix, "llama-speculative-simple")), "-m", str(model)),
        *("--spec-type", "draft-mtp", "--temp", "0", "-n", str(n_predict)),
        *("-t", str(threads), "-p", prompt, "--no-escape"),
        *options,
    ]
    for _ in range(50):  # on a busy machine most are lost
        done = subprocess.run(command, capture_output=True, check=True, timeout=300)
        log = done.stderr.decode(errors="replace")
        # The log's own thread may lose the end of the log at exit. It writes in order: with the
        # counts there, the text is whole.
        if "n_accept " in log:
            break

    def number(pattern: str) -> str:
        found = re.search(pattern, log)
        assert found, f"no {pattern!r} in the log:\n{log[-2000:]}"
        return found[1]

    # stdout: two newlines, the prompt's pieces, the generated text, then newlines of which some may
    # be lost: where the text's own end cannot be told.
    head = b"\n\n" + prompt.encode()
    assert done.stdout.startswith(head), done.stdout[:200]
    return Reference(
        text=done.stdout[len(head) :].rstrip(b"\n"),
        drafted=int(number(r"n_drafted\s*=\s*(\d+)")),
        accepted=int(number(r"n_accept\s*=\s*(\d+)")),
        decoded=int(number(r"decoded\s+(\d+) tokens")),
        tokens_per_second=float(number(r"decoded.*speed:\s*([\d.]+) t/s")),
    )
