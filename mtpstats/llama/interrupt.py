"""Ctrl-C, or a request to end, during a C call that calls back into Python."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class DeferredInterrupt:
    """Holds signals back while a C function runs that calls Python; delivers it afterwards.

    An exception raised inside a callback cannot pass through C: ctypes prints and drops it, and
    Python may raise KeyboardInterrupt before the callback's first line. ``pending`` tells a
    callback that the user wants out. Does nothing outside the main thread, where Python delivers
    no signals.
    """

    def __init__(self) -> None:
        """Nothing is changed before ``__enter__``."""
        self.pending = False
        self._previous: dict[int, Any] = {}
        self._came = 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.pending, self._came = True, number

    def __enter__(self) -> DeferredInterrupt:
        """Take over the signals that a Python handler has."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                if callable(previous):
                    self._previous[number] = previous
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Give them back; one that came meanwhile is handled now, the last if several did."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if self.pending:
            # Not the frame it came in: that may be a callback's, which no exception can leave.
            self._previous[self._came](self._came, sys._getframe())
