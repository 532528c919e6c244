"""Tasks handed to workers as they become free; workers that die, and what made them die.

Knows no cluster: a :class:`Pool` starts workers and calls them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtpstats.errors import MtpStatsError

TRIES = 2  # workers that a task may kill, and starts in which a worker may die
TICK_S = 1.0


class WorkerDied(Exception):
    """The worker's process is gone, with what it was doing. The message says what is known."""


class Pool(Protocol):
    """Starts and calls workers. A handle or ticket is whatever the pool likes, but hashable."""

    def start(self) -> Any:
        """Begin to start a worker; return its handle at once."""

    def call(self, worker: Any, method: str, args: Sequence[Any]) -> Any:
        """Begin to call a worker's method; return a ticket at once."""

    def wait(self, tickets: Sequence[Any], timeout: float) -> list[Any]:
        """Return the tickets that are done, possibly none once the time is over."""

    def result(self, ticket: Any) -> Any:
        """Return what the call gave; raise what it raised, or :class:`WorkerDied`."""

    def kill(self, worker: Any) -> None:
        """End a worker's process."""


@dataclass(frozen=True)
class Task:
    """A call of ``method``, once for all ``items``; they come back one by one when it killed."""

    method: str
    items: tuple[Any, ...]
    args: tuple[Any, ...] = ()

    def call(self) -> tuple[Any, ...]:
        """Return the method's arguments."""
        return (list(self.items), *self.args)


@dataclass
class _Slot:
    """A place for a worker: its handle, what it is doing, and in how many starts it died."""

    number: int
    worker: Any = None
    loaded: bool = False
    ready: bool = False
    ticket: Any = None
    task: Task | None = None
    setup: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=deque)
    n_failed: int = 0


class Dispatcher:
    """Keeps ``n_workers`` workers at work. Close it, whatever happens.

    Args:
        pool: where the workers are.
        setup: (method, arguments) that each worker is called with first.
        on_ready: receives (number of the worker, what the first call of its setup gave); what it
            raises ends the run.
        on_note: hears, in a line, of a worker that died.
    """

    def __init__(
        self,
        pool: Pool,
        n_workers: int,
        setup: Sequence[tuple[str, tuple[Any, ...]]],
        *,
        on_ready: Callable[[int, Any], None],
        on_note: Callable[[str], None],
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self._pool, self._setup = pool, list(setup)
        self._on_ready, self._on_note = on_ready, on_note
        self._on_tick = on_tick or (lambda: None)
        self._slots = [_Slot(number) for number in range(1, n_workers + 1)]
        self._in_a_row = 0
        self.n_died = 0
        self.set_aside: list[tuple[Any, str]] = []
        """Items that killed a worker twice, and what is known of the last death."""

    @property
    def n_ready(self) -> int:
        """Workers that can take a task, or are at one."""
        return sum(slot.ready for slot in self._slots)

    def first(self, method: str, *args: Any) -> Any:
        """Call one worker, the first to be ready, and return what it gave."""
        ((_, given),) = self.run([Task(method, (), args)], whole=True)
        return given

    def extend(self, *setup: tuple[str, tuple[Any, ...]]) -> None:
        """Call all workers, those that are ready too, with more before their next task."""
        self._setup += setup
        for slot in self._slots:
            if slot.worker is not None:
                slot.setup.extend(setup)

    def run(self, tasks: Iterable[Task], *, whole: bool = False) -> Iterator[tuple[Task, Any]]:
        """Yield (task, what it gave) as they come; the order is that of time.

        A task whose worker died is tried again, each of its items alone, on whichever worker is
        free first; an item that kills ``TRIES`` workers is set aside. With ``whole`` a task is
        kept in one piece, and one that kills as often ends the run.
        """
        waiting, again = iter(tasks), deque[Task]()
        deaths: dict[int, list[Any]] = {}  # by id, with the item itself, whose id none else gets
        exhausted = False
        while True:
            for slot in self._slots:
                if slot.worker is None and slot.n_failed < TRIES:
                    self._start(slot)
                if slot.ready and slot.ticket is None:
                    if slot.setup:
                        self._next_setup(slot)
                        continue
                    task = None
                    if not exhausted:
                        task = next(waiting, None)
                        exhausted = task is None
                    if task is None and again:
                        task = again.popleft()
                    if task is not None:
                        self._give(slot, task, whole)
            busy = [slot for slot in self._slots if slot.task is not None]
            if exhausted and not again and not busy:
                return
            for slot, given in self._arrived():
                if isinstance(given, WorkerDied):
                    task, slot.task = slot.task, None
                    self._mourn(slot, given, task)
                    if task is not None:
                        again.extend(self._retried(task, given, deaths, whole))
                elif slot.task is not None:
                    task, slot.task = slot.task, None
                    self._in_a_row = 0
                    yield task, given
            self._on_tick()

    def close(self) -> None:
        """End all workers."""
        for slot in self._slots:
            if slot.worker is not None:
                self._pool.kill(slot.worker)
                slot.worker = slot.ticket = slot.task = None
                slot.ready = False

    def _start(self, slot: _Slot) -> None:
        slot.worker = self._pool.start()
        slot.setup = deque(self._setup)
        self._next_setup(slot)

    def _next_setup(self, slot: _Slot) -> None:
        method, args = slot.setup.popleft()
        slot.ticket = self._pool.call(slot.worker, method, args)

    def _give(self, slot: _Slot, task: Task, whole: bool) -> None:
        slot.task = task
        args = task.args if whole else task.call()
        slot.ticket = self._pool.call(slot.worker, task.method, args)

    def _arrived(self) -> Iterator[tuple[_Slot, Any]]:
        """Yield (slot, what its call gave or the death of its worker) for calls that are over."""
        called = {slot.ticket: slot for slot in self._slots if slot.ticket is not None}
        if not called:
            raise MtpStatsError("no worker is left: each died while it started, twice")
        for ticket in self._pool.wait(list(called), TICK_S):
            slot = called[ticket]
            slot.ticket = None
            try:
                given = self._pool.result(ticket)
            except WorkerDied as death:
                yield slot, death
                continue
            if not slot.ready:
                if not slot.loaded:
                    slot.loaded = True
                    self._on_ready(slot.number, given)
                if slot.setup:
                    self._next_setup(slot)
                else:
                    slot.ready, slot.n_failed = True, 0
            else:
                yield slot, given

    def _mourn(self, slot: _Slot, death: WorkerDied, task: Task | None) -> None:
        """Note a death, and leave the slot for another worker."""
        if not slot.ready:
            slot.n_failed += 1
        slot.worker, slot.loaded, slot.ready = None, False, False
        self.n_died += 1
        self._in_a_row += 1
        doing = "while it started" if task is None else f"in {_named(task)}"
        self._on_note(f"worker {slot.number} died {doing}: {death}")
        most = 2 * len(self._slots) + 8
        if self._in_a_row >= most:
            raise MtpStatsError(f"{most} workers died one after another; the last: {death}")

    def _retried(
        self, task: Task, death: WorkerDied, deaths: dict[int, list[Any]], whole: bool
    ) -> Iterator[Task]:
        items: Sequence[Any] = (task,) if whole else task.items
        for item in items:
            # Others of its group may be to blame, so only what it does alone is final.
            died = deaths.setdefault(id(item), [])
            died.append(item)
            if len(died) < TRIES:
                yield task if whole else Task(task.method, (item,), task.args)
            elif whole:
                raise MtpStatsError(f"{_named(task)} killed {TRIES} workers: {death}")
            else:
                self.set_aside.append((item, str(death)))


def _named(task: Task) -> str:
    names = [str(getattr(item, "id", item)) for item in task.items]
    return f"{task.method} of {', '.join(names)[:200]}" if names else task.method
