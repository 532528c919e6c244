"""What a command shows on standard error while it works."""

from __future__ import annotations

import codecs
import shutil
import time
from collections.abc import Callable
from typing import TextIO

from mtpstats.cli.streams import abandon
from mtpstats.loop import Progress
from mtpstats.prompts import Prompt
from mtpstats.text import printable

QUIET_S = 2.0
REFRESH_S = 0.2


class ProgressLine:
    """One line on a terminal, rewritten in place; nothing anywhere else.

    A stage whose length is known stays silent for its first two seconds.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._unit: str | None = None
        self._began = self._drawn_at = clock()
        self._first = 0.0
        self._width = 0
        self.enabled = stream is not None and stream.isatty()

    def __call__(self, progress: Progress) -> None:
        """Show how far it is, if it is time to."""
        if not self.enabled:
            return
        now = self._clock()
        if progress.unit != self._unit:
            self._unit, self._began, self._first = progress.unit, now, progress.done
            self._drawn_at = now + QUIET_S - REFRESH_S
        if not progress.unit:
            self._draw(f"{progress.stage} ...")
        elif now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            self._draw(self._described(progress, now - self._began))

    def clear(self) -> None:
        """Take the line away."""
        if self.enabled and self._width:
            self._draw("")
            self._width = 0

    def _described(self, progress: Progress, elapsed: float) -> str:
        rate = (progress.done - self._first) / elapsed if elapsed > 0 else 0.0
        text = progress.stage
        if progress.total:
            text += f"  {100 * progress.done / progress.total:.0f} %"
        text += f"  {_amount(rate, progress.unit)}/s"
        if progress.total and rate > 0:
            left = max(progress.total - progress.done, 0.0) / rate
            text += f"  {_clock_time(left)} left"
        return text

    def _draw(self, text: str) -> None:
        assert self._stream is not None
        text = text[: shutil.get_terminal_size().columns - 1]
        try:
            self._stream.write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
            self._stream.flush()
        except OSError:  # the terminal is gone
            abandon(self._stream)
            self.enabled = False
        self._width = len(text)


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def _clock_time(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


class TextStream:
    """Writes prompts and the text that follows them as it comes, harmless to a terminal.

    Of several texts at once the one that began first is live; the others wait until it has ended.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._texts: dict[str, _Text] = {}  # in the order of their beginnings

    def __call__(self, prompt: Prompt, piece: bytes) -> None:
        """Take one piece, an empty one as the text's end."""
        if prompt.id not in self._texts:
            self._texts[prompt.id] = _Text(prompt)
        text = self._texts[prompt.id]
        text.add(piece)
        while self._texts:
            first = next(iter(self._texts.values()))
            self._write(first.take())
            if not first.ended:
                break
            del self._texts[first.id]

    def close(self) -> None:
        """Write what waits, and end every text."""
        for text in self._texts.values():
            text.add(b"")
            self._write(text.take())
        self._texts.clear()


class _Text:
    """What is to be written of one text; a character cut in two waits for its other half."""

    def __init__(self, prompt: Prompt) -> None:
        self.id = prompt.id
        self.ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = f"--- {printable(prompt.id)}\n"
        self._waiting += printable(prompt.text, keep_newlines=True)

    def add(self, piece: bytes) -> None:
        self.ended = not piece
        decoded = self._decoder.decode(piece, final=self.ended)
        self._waiting += printable(decoded, keep_newlines=True) + ("\n" if self.ended else "")

    def take(self) -> str:
        waiting, self._waiting = self._waiting, ""
        return waiting
