"""Runs ``mtpstats`` command lines in forked children of one process that has everything loaded.

A child costs milliseconds where a new process costs half a second, and dies as one would. Started
as a program of its own; ``ForkServer`` speaks to it: one JSON line per command, one per answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """``status`` is the exit code, or minus the signal that ended it; ``seconds`` it took."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool


class ForkServer:
    """The other end. ``memory``: bytes of address space a child may have.

    ``checks=False`` takes the bridge's checks of metadata, tensors and tokenizer out of the way.
    """

    def __init__(
        self, *, timeout: float = 20.0, memory: int = 6 << 30, checks: bool = True
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(timeout), str(memory), str(int(checks))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def run(self, *args: Any) -> Outcome:
        """Run ``mtpstats args...``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(arg) for arg in args]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server itself ended"
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def _child(args: list[str], out: int, err: int, memory: int) -> None:
    from mtpstats.__main__ import run

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["mtpstats", *args]
    code: Any = 120
    try:
        run()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Freeing is a part of it.
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def _without_checks() -> None:
    from mtpstats.llama import hparams, tensors, vocabulary

    for owner, name in (
        (hparams, "check"),
        (tensors, "check"),
        (vocabulary.Vocabulary, "check"),
        (vocabulary.Vocabulary, "obstacle"),
    ):
        setattr(owner, name, lambda *_: None)


def _serve(timeout: float, memory: int, checks: bool) -> None:
    from mtpstats import llama, run  # noqa: F401
    from mtpstats.cli import bench, cli, info  # noqa: F401
    from mtpstats.report import text  # noqa: F401

    # Whatever else is installed meanwhile: a process can hold one library only.
    os.environ["MTPSTATS_LIBLLAMA"] = str(llama.load().path)
    if not checks:
        _without_checks()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            start = time.monotonic()
            pid = os.fork()
            if pid == 0:
                try:
                    _child(json.loads(line), out.fileno(), err.fileno(), memory)
                finally:
                    os._exit(121)
            ended = os.pidfd_open(pid)
            timed_out = not select.select([ended], [], [], timeout)[0]
            if timed_out:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            os.close(ended)
            seconds = time.monotonic() - start
            for stream in (out, err):
                stream.seek(0)
            outcome = Outcome(
                os.waitstatus_to_exitcode(status),
                out.read().decode("utf-8", "replace"),
                err.read().decode("utf-8", "replace"),
                seconds,
                timed_out,
            )
        answers.write(json.dumps(outcome.__dict__) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
