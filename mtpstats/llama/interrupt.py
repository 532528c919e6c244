"""Ctrl-C during a C call that calls back into Python."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """Holds SIGINT back while a C function runs that calls Python; delivers it afterwards.

    An exception raised inside a callback cannot pass through C: ctypes prints and drops it, and
    Python may raise KeyboardInterrupt before the callback's first line. ``pending`` tells a
    callback that the user wants out. Does nothing outside the main thread, where Python delivers
    no signals.
    """

    def __init__(self) -> None:
        """Nothing is changed before ``__enter__``."""
        self.pending = False
        self._previous: Any = None
        self._frame: FrameType | None = None

    def _note(self, _signal: int, frame: FrameType | None) -> None:
        self.pending, self._frame = True, frame

    def __enter__(self) -> DeferredInterrupt:
        """Take over SIGINT, if a Python handler has it."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Give SIGINT back; a signal that came meanwhile is handled now."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if self.pending:
                self._previous(signal.SIGINT, self._frame)
