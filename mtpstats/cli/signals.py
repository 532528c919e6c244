"""Signals that must not wait for a C function to return.

Python runs its handlers between bytecodes: Ctrl-C in a decode would be heard when that is over. A
thread that sleeps until a signal comes tells the core at once, and llama.cpp asks the core between
the nodes of a graph.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

ENDING = frozenset(
    int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Watch:
    """While it is open, a signal that ends the run also stops the decode it comes in.

    The handlers that were there raise as ever. A second Ctrl-C ends the process at once, with exit
    code 130; repeated requests of another kind, which a closing terminal makes, do not. Does
    nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        """Nothing is changed before ``__enter__``."""
        self._thread: threading.Thread | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Watch:
        """Start to listen."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._previous = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in ENDING:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Listen no more; what was stopped may go on."""
        if self._thread is None:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)
        _stop(False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        log = sys.modules.get("mtpstats.llama.log")
        # From there an exception would be lost; this decode, or the next, is stopped anyway.
        if log is None or not log.called_from_c(frame):
            self._handlers[number](number, frame)

    def _listen(self) -> None:
        asked = False
        while numbers := os.read(self._reading, 64):
            for number in filter(ENDING.__contains__, numbers):
                if asked and number == signal.SIGINT:
                    os._exit(130)
                asked = True
                _stop(True)


def _stop(asked: bool) -> None:
    # Where the core was not imported there is no decode to stop.
    core = sys.modules.get("mtpstats._core")
    if core is not None:
        core.stop(asked)
