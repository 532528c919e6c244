"""A pool of workers in this process, for what spreads prompts over workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtpstats.dispatch import WorkerDied
from mtpstats.worker import Worker


class HerePool:
    """Workers that are objects; whoever is given ``deadly`` prompts dies.

    Calls are done in the order in which they were made, or the ``latest`` first once all are
    loaded.
    """

    def __init__(
        self, make: Callable[[], Worker], deadly: Sequence[str] = (), latest: bool = False
    ) -> None:
        self.make, self.deadly = make, deadly
        self.pick = max if latest else min
        self.killed: list[Worker] = []
        self.calls: list[tuple[Worker, str, Sequence[Any]]] = []

    def start(self) -> Worker:
        return self.make()

    def call(self, worker: Worker, method: str, args: Sequence[Any]) -> int:
        self.calls.append((worker, method, args))
        return len(self.calls) - 1

    def wait(self, tickets: Sequence[int], timeout: float) -> list[int]:
        loads = [ticket for ticket in tickets if self.calls[ticket][1] == "load"]
        return [min(loads) if loads else self.pick(tickets)]

    def result(self, ticket: int) -> Any:
        worker, method, args = self.calls[ticket]
        if method == "run" and any(prompt.id in self.deadly for prompt in args[0]):
            worker.close()
            raise WorkerDied("SIGSEGV")
        return getattr(worker, method)(*args)

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)
        worker.close()
