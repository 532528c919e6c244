"""llama.cpp's log: captured through its callback, kept bounded, quoted in exceptions."""

from __future__ import annotations

import _thread
import ctypes
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from mtpstats.llama.structs import CONSTANTS
from mtpstats.text import printable

NONE, DEBUG, INFO, WARN, ERROR, CONT = (
    CONSTANTS[f"GGML_LOG_LEVEL_{name}"]
    for name in ("NONE", "DEBUG", "INFO", "WARN", "ERROR", "CONT")
)
LEVELS = {NONE: "none", DEBUG: "debug", INFO: "info", WARN: "warning", ERROR: "error"}

# void (*)(enum ggml_log_level level, const char * text, void * user_data)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

_KEPT_LINES = 400
_LONGEST_LINE = 2000


class Log:
    """The last lines llama.cpp logged; ``listener`` sees every line as it is completed.

    llama.cpp sends text in chunks: a line ends at its newline, and level CONT continues the chunk
    before. Lines are single, printable, at most 2,000 characters long.
    """

    def __init__(self) -> None:
        """Start empty. The object must outlive its use as llama.cpp's callback."""
        self.lines: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self.count = 0
        self.listener: Callable[[int, str], None] | None = None
        self._level = INFO
        self._partial = ""
        # ctypes frees the C side of a callback with the Python object: keep it.
        self.callback = CALLBACK(self._receive)

    def _receive(self, level: int, text: bytes | None, _user_data: Any) -> None:
        # An exception cannot pass through C. Ctrl-C may land here as well as anywhere else:
        # raise it again as soon as control is back in Python.
        try:
            self.feed(level, (text or b"").decode("utf-8", "replace"))
        except KeyboardInterrupt:
            _thread.interrupt_main()
        except Exception:
            self.listener = None

    def feed(self, level: int, text: str) -> None:
        """Take one chunk as llama.cpp's callback gets it."""
        if level != CONT:
            if self._partial:
                self._finish_line()
            self._level = level
        *complete, self._partial = (self._partial + text).split("\n")
        rest = self._partial[:_LONGEST_LINE]
        for line in complete:
            self._partial = line
            self._finish_line()
        self._partial = rest

    def _finish_line(self) -> None:
        line, self._partial = printable(self._partial[:_LONGEST_LINE].rstrip()), ""
        if not line:
            return
        self.lines.append((self._level, line))
        self.count += 1
        if self.listener is not None:
            self.listener(self._level, line)

    def since(self, mark: int, limit: int = 3) -> str:
        """Return the last warnings and errors after the line count ``mark`` as one line.

        Errors win over warnings: ``limit`` lines at most, empty if there were none.
        """
        if self._partial:
            self._finish_line()
        new = list(self.lines)[-(self.count - mark) :] if self.count > mark else []
        chosen = [text for level, text in new if level >= ERROR]
        if not chosen:
            chosen = [text for level, text in new if level == WARN]
        return "; ".join(chosen[-limit:])


def called_from_c(frame: FrameType | None) -> bool:
    """Whether llama.cpp called what runs in ``frame``: no exception can leave it."""
    while frame is not None and frame.f_code is not Log._receive.__code__:
        frame = frame.f_back
    return frame is not None
