"""Ownership of llama.cpp's objects: freed once, children before their parent."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mtpstats.errors import InputError


class Handle:
    """A pointer that is freed once; closing it closes its children first.

    Model and Context hold one; the finalizers of both hold it as well, never the owner. So the
    order is right however the garbage collector comes by: a context before its model, a context
    that reads another's memory before that one.
    """

    __slots__ = ("__weakref__", "_free", "_parents", "children", "ptr", "what")

    def __init__(
        self, what: str, ptr: int, free: Callable[[int], Any], parents: tuple[Handle, ...] = ()
    ) -> None:
        """Take over ``ptr``."""
        self.what = what
        self.ptr: int | None = ptr
        self._free = free
        # Weak would not do: the child may outlive the parent's owner.
        self._parents = parents
        self.children: list[Handle] = []
        for parent in parents:
            parent.children.append(self)

    def get(self) -> int:
        """Return the pointer; raises InputError after ``close``."""
        if self.ptr is None:
            raise InputError(f"the {self.what} is closed")
        return self.ptr

    def close(self) -> None:
        """Free children, then the object itself. Does nothing the second time."""
        while self.children:
            self.children[-1].close()
        ptr, self.ptr = self.ptr, None
        if ptr is None:
            return
        for parent in self._parents:
            parent.children.remove(self)
        self._parents = ()
        self._free(ptr)

    def own(self, owner: Any) -> None:
        """Close when ``owner`` is collected, and at exit."""
        weakref.finalize(owner, self.close)
