"""A call on a stack of another size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mtpstats.llama.interrupt import DeferredInterrupt

T = TypeVar("T")


def call_with_stack(size: int, call: Callable[[], T]) -> T:
    """Return ``call()``, made in a thread with a stack of ``size`` bytes.

    What it raises comes out here. Signals wait: nobody may free what a running call uses. Raises
    MemoryError where there is no room for the stack.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    with DeferredInterrupt():
        before = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run)
            thread.start()
        except RuntimeError:
            raise MemoryError(f"no room for a stack of {size} bytes") from None
        finally:
            threading.stack_size(before)
        thread.join()
    if errors:
        raise errors[0]
    return results[0]
