"""What is left to do when llama.cpp aborts the process: tell one listener why."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

from mtpstats.llama.functions import ABORT
from mtpstats.text import printable

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class LastWords:
    """Calls ``listener`` once, on the thread that fails; meant to end the process its own way.

    ``callback`` is for ``ggml_set_abort_callback``: a failed assertion. While it is open, SIGABRT
    is heard as well, which is how a C++ exception that nobody caught or a damaged heap ends.
    """

    def __init__(self, listener: Callable[[str], None]) -> None:
        """Nothing is changed before ``open``."""
        self._listener = listener
        self._first = threading.Lock()
        self._teller = 0
        self.callback = ABORT(lambda text: self._tell(printable(text.strip())))
        self._handler = _HANDLER(lambda _number: self._tell("SIGABRT"))
        self._previous: int | None = None

    def open(self) -> None:
        """Hear SIGABRT."""
        self._previous = _set_handler(ctypes.cast(self._handler, ctypes.c_void_p).value)

    def close(self) -> None:
        """Leave SIGABRT to whoever had it before."""
        _set_handler(self._previous)

    def _tell(self, text: str) -> None:
        if self._teller == threading.get_ident():
            return  # told, and the listener came back: the abort takes its course
        if not self._first.acquire(blocking=False):
            # Several compute threads fail the same assertion. Going back would abort the process
            # under the listener's hands.
            threading.Event().wait()
        self._teller = threading.get_ident()
        self._listener(text)


def _set_handler(handler: int | None) -> int | None:
    # Python's own signal module would run the handler after abort() has returned: never.
    if os.name != "posix":
        return None
    set_handler = ctypes.CDLL(None)["signal"]
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    previous: int | None = set_handler(signal.SIGABRT, handler)
    return previous
