"""A headless Chromium over its debugging pipe: no driver, no port, no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def binary() -> str:
    """The browser; without one the tests that need it fail."""
    found = [path for path in map(shutil.which, NAMES) if path]
    assert found, f"these tests need Chromium under one of the names {', '.join(NAMES)}"
    return found[0]


class Browser:
    """One page of one browser. ``events`` holds everything it reported so far."""

    def __init__(self, profile: Path) -> None:
        command_read, self._write = os.pipe()
        self._read, event_write = os.pipe()

        def wire() -> None:  # the browser reads 3 and writes 4
            for source, target in ((os.dup(command_read), 3), (os.dup(event_write), 4)):
                os.dup2(source, target)

        self._process = subprocess.Popen(
            [
                *(binary(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *(f"--user-data-dir={profile}", "--disable-dev-shm-usage"),
                *("--remote-debugging-pipe", "about:blank"),
            ],
            pass_fds=(3, 4, command_read, event_write),
            preexec_fn=wire,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(event_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    _session = None

    def send(self, method: str, **params: Any) -> Any:
        """Call a method and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        end = time.monotonic() + 60
        while not self.heard("Page.loadEventFired"):
            assert time.monotonic() < end
            self.events.append(self._next())
        time.sleep(0.2)  # whatever a script would do after
        self.value("0")

    def heard(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)
