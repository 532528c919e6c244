"""What is closed at the end of a ``with`` block."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing:
    """Base of what owns something: ``with`` gives the object itself, its end calls ``close``."""

    def close(self) -> None:
        """Free what it owns."""

    def __enter__(self: T) -> T:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
