"""Conversations into prompts, by the chat template that the model carries.

A conversation becomes one prompt: everything before the assistant's last turn, and then what
makes the assistant answer. So the model gives its own last answer, to the history as it was.
Templates run in a process of their own, see :mod:`mtpstats.chat_process`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from mtpstats.closing import Closing
from mtpstats.conversation import Conversation
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.text import printable

PATIENCE_S = 30.0
"""For one answer. The process ends itself before; this is for when it cannot."""
MAX_ANSWER = 256 << 20
MAX_TEMPLATE = 4 << 20

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mtpstats.chat_process import main; main()"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it needs of the model.

    ``source`` is empty for a model that carries none. ``name`` says in errors whose it is.
    ``tool_use`` is the variant for conversations with tools, if the model has one. ``bos`` and
    ``eos`` are the texts of those tokens; ``add_bos`` and ``add_eos`` say whether the tokenizer
    adds them, so that a template's own must go.
    """

    source: str = ""
    name: str = "the model's chat template"
    tool_use: str | None = None
    bos: str = ""
    eos: str = ""
    add_bos: bool = False
    add_eos: bool = False


class Renderer(Closing):
    """A chat template at work. Close it, or use it as a context manager.

    Raises InputError, with the template's line where there is one, for a template that is wrong,
    refuses a conversation, takes too long, or needs too much memory.
    """

    def __init__(self, template: ChatTemplate, kwargs: Mapping[str, Any] | None = None) -> None:
        """Start nothing yet; ``kwargs`` are variables for the template."""
        self._template = template
        self._kwargs = dict(kwargs or {})
        self._processes: dict[str, _Process] = {}

    def check(self) -> None:
        """Raise InputError if the template cannot be read as one."""
        self._process(self._template.source)

    def render(self, conversation: Conversation) -> str:
        """Return the prompt of a conversation, without the BOS that the tokenizer will add."""
        template = self._template
        source = template.source
        if conversation.tools and template.tool_use is not None:
            source = template.tool_use
        question = {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "kwargs": conversation.kwargs or {},
        }
        text: str = self._process(source).ask(question)["text"]
        if template.add_bos and template.bos:
            text = text.removeprefix(template.bos)
        if template.add_eos and template.eos:
            text = text.removesuffix(template.eos)
        return text

    def _process(self, source: str) -> _Process:
        """Return the process that has this template, started at its first use."""
        process = self._processes.get(source)
        if process is None:
            template = self._template
            if len(source) > MAX_TEMPLATE:
                raise InputError(f"{printable(template.name)} is over {MAX_TEMPLATE >> 20} MiB")
            process = self._processes[source] = _Process(printable(template.name))
            settings = {"bos": template.bos, "eos": template.eos, "kwargs": self._kwargs}
            process.ask({"source": source, **settings})
        return process

    def close(self) -> None:
        """End the process."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()


class _Process:
    """The other process: a question and an answer are a JSON line each."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise MtpStatsError("chat templates need jinja2, which is missing: pip install jinja2")
        self._name = name
        path = [os.path.abspath(entry) for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            stdin = cast(IO[bytes], self._process.stdin)
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            answer = json.loads(self._line())
        except BrokenPipeError:
            raise self._failed(self._end()) from None
        if "error" in answer:
            raise self._failed(answer["error"], answer["line"])
        return cast(dict[str, Any], answer)

    def _line(self) -> bytes:
        fd = cast(IO[bytes], self._process.stdout).fileno()
        until = time.monotonic() + PATIENCE_S
        line = bytearray()
        while not line.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._failed(f"it did not end within {PATIENCE_S:g} s")
            piece = os.read(fd, 1 << 20)
            line += piece
            if not piece:
                raise self._failed(self._end())
            if len(line) > MAX_ANSWER:
                raise self._failed("it makes too much text")
        return bytes(line)

    def _end(self) -> str:
        """Return why the process ended by itself."""
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return "it takes too long"
        if code == -signal.SIGKILL:
            return "its process was killed; perhaps memory ran out"
        return f"its process died ({signal.Signals(-code).name if code < 0 else f'code {code}'})"

    def _failed(self, why: str, line: int | None = None) -> InputError:
        place = "" if line is None else f", line {line}"
        return InputError(f"{self._name}{place}: {printable(' '.join(why.split()))}")

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass
