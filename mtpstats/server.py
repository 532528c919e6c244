"""``llama-server`` as a second opinion: started with a policy's flags, asked for completions.

It listens on 127.0.0.1 only and ends with its context manager.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from mtpstats.closing import Closing
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.text import printable

__all__ = ["Completion", "Server"]

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 600.0
HEALTH_SECONDS: Final = 5.0
STOP_SECONDS: Final = 10.0
LAST_WORDS: Final = 300
MAX_LOG: Final = 1 << 20
MAX_SECONDS: Final = 1e9


@dataclass(frozen=True)
class Completion:
    """What the server says of one completion."""

    tokens: int
    """Generated ones that ``seconds`` are about."""
    seconds: float
    drafted: int
    accepted: int


class Server(Closing):
    """A running ``llama-server``.

    Args:
        program: its file, or a name that is looked up as a shell does.
        flags: model and everything else but host and port.
        start_seconds: how long it may take to load.

    Raises:
        InputError: the program cannot be run.
        MtpStatsError: it ended, or was not ready in time; the message has its last words.
    """

    def __init__(
        self, program: Path, flags: Sequence[str], *, start_seconds: float = START_SECONDS
    ) -> None:
        self._name = printable(program.name)
        with socket.socket() as free:
            free.bind((HOST, 0))
            self._port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # A path loses its "./", without which it would be looked up.
        found = program.absolute() if program.exists() else program
        command = [str(found), *flags, "--host", HOST, "--port", str(self._port)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._log.close()
            raise InputError(
                f"{printable(str(program))}: cannot be run: {error.strerror or error}"
            ) from None
        try:
            self._wait(start_seconds)
        except BaseException:
            self.close()
            raise

    def _wait(self, seconds: float) -> None:
        end = monotonic() + seconds
        while True:
            code = self._process.poll()
            if code is not None:
                raise MtpStatsError(f"{self._name} ended with code {code}: {self._last_words()}")
            try:
                if self._ask("GET", "/health", timeout=HEALTH_SECONDS)[0] == 200:
                    return
            except OSError:
                pass
            if monotonic() > end:
                raise MtpStatsError(
                    f"{self._name} is not ready after {seconds:.0f} s: {self._last_words()}"
                )
            sleep(0.05)

    def _ask(
        self, method: str, path: str, body: Any = None, timeout: float | None = None
    ) -> tuple[int, Any]:
        # A proxy of the environment has no say: http.client knows of none.
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"no answer that can be read: {error}") from None
        finally:
            connection.close()

    def _last_words(self) -> str:
        # The server writes at the offset of this very file, which reading must not move.
        log = os.pread(self._log.fileno(), MAX_LOG, 0)
        lines = log.decode("utf-8", "replace").split("\n")
        telling = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        words = " ".join((telling or [line for line in lines if line.strip()])[-2:])
        return printable(words)[-LAST_WORDS:] or "it said nothing"

    def complete(self, prompt: Sequence[int], n_predict: int, **sampling: float) -> Completion:
        """Continue a prompt of token ids; nothing is kept from one prompt to the next.

        ``sampling`` are the server's own names: ``temperature``, ``top_k``, ``seed`` ...
        Raises ``MtpStatsError`` when the server does not answer with timings.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": n_predict,
            "cache_prompt": False,
            "return_tokens": False,
            **sampling,
        }
        try:
            status, answer = self._ask("POST", "/completion", body)
        except OSError as error:
            raise MtpStatsError(f"{self._name} gave no completion: {error}") from None
        timings = answer.get("timings") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(timings, dict):
            said = printable(json.dumps(answer))[:LAST_WORDS]
            raise MtpStatsError(f"{self._name} gave no completion (HTTP {status}): {said}")
        try:
            seconds = float(timings["predicted_ms"]) / 1e3
            if not 0 < seconds < MAX_SECONDS:
                raise ValueError
            # The first token comes with the prompt: its own rate leaves that one out.
            tokens = round(float(timings["predicted_per_second"]) * seconds)
            drafted = int(timings.get("draft_n", 0))
            return Completion(tokens, seconds, drafted, int(timings.get("draft_n_accepted", 0)))
        except (KeyError, TypeError, ValueError, OverflowError):
            said = printable(json.dumps(timings))[:LAST_WORDS]
            raise MtpStatsError(f"{self._name} gave timings without a speed: {said}") from None

    def close(self) -> None:
        """Stop it; closing twice is harmless."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
