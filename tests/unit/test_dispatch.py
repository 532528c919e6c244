"""Handing out tasks, over workers that are plain functions and die when told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest

from mtpstats.dispatch import Dispatcher, Task, WorkerDied
from mtpstats.errors import MtpStatsError

DIES = "dies"


class FakePool:
    """Calls are done in the order in which they were made, one for each ``wait``."""

    def __init__(self, answer: Callable[[int, str, Sequence[Any]], Any]) -> None:
        self.answer = answer
        self.started: list[int] = []
        self.killed: list[int] = []
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []

    def start(self) -> int:
        self.started.append(len(self.started))
        return self.started[-1]

    def call(self, worker: int, method: str, args: Sequence[Any]) -> int:
        assert worker not in self.killed
        self.calls.append((worker, method, tuple(args)))
        return len(self.calls) - 1

    def wait(self, tickets: Sequence[int], timeout: float) -> list[int]:
        return [min(tickets)]

    def result(self, ticket: int) -> Any:
        given = self.answer(*self.calls[ticket])
        if given == DIES:
            raise WorkerDied("killed by a test")
        if isinstance(given, Exception):
            raise given
        return given

    def kill(self, worker: int) -> None:
        self.killed.append(worker)


def made(pool: FakePool, n: int = 2) -> tuple[Dispatcher, list[tuple[int, Any]], list[str]]:
    ready: list[tuple[int, Any]] = []
    notes: list[str] = []
    dispatcher = Dispatcher(
        pool,
        n,
        [("load", ("x",))],
        on_ready=lambda number, facts: ready.append((number, facts)),
        on_note=notes.append,
    )
    return dispatcher, ready, notes


def tasks(*groups: str) -> list[Task]:
    return [Task("run", tuple(group)) for group in groups]


def doubled(worker: int, method: str, args: Sequence[Any]) -> Any:
    return worker if method != "run" else [item * 2 for item in args[0]]


def dies_of_k(worker: int, method: str, args: Sequence[Any]) -> Any:
    """Answers as ``doubled``, but whoever runs k dies."""
    return DIES if method == "run" and "k" in args[0] else doubled(worker, method, args)


def dies_once(killed: int | None = None) -> Callable[[int, str, Sequence[Any]], Any]:
    """Answers as ``doubled``, but the first run kills its worker: any, or only ``killed``."""
    died: list[int] = []

    def answer(worker: int, method: str, args: Sequence[Any]) -> Any:
        if method == "run" and killed in (None, worker) and not died:
            died.append(worker)
            return DIES
        return doubled(worker, method, args)

    return answer


def test_every_task_is_done_once_by_workers_that_were_set_up() -> None:
    pool = FakePool(doubled)
    dispatcher, ready, notes = made(pool)
    done = [given for _, given in dispatcher.run(tasks("a", "b", "cd", "e"))]
    assert sorted(chain(*done)) == ["aa", "bb", "cc", "dd", "ee"]
    assert ready == [(1, 0), (2, 1)]
    assert [call for call in pool.calls if call[1] == "load"] == [
        (0, "load", ("x",)),
        (1, "load", ("x",)),
    ]
    assert {worker for worker, method, _ in pool.calls if method == "run"} == {0, 1}
    assert notes == []
    dispatcher.close()
    assert pool.killed == [0, 1]


def test_setup_that_comes_later_reaches_every_worker_before_its_next_task() -> None:
    pool = FakePool(dies_once())
    dispatcher, ready, _ = made(pool)
    assert dispatcher.first("facts") in (0, 1)
    dispatcher.extend(("open", (5,)))
    done = [given for _, given in dispatcher.run(tasks("a", "b", "c", "d"))]
    assert sorted(chain(*done)) == ["aa", "bb", "cc", "dd"]
    assert len(pool.started) == 3  # one died and was replaced
    assert sorted(facts for _, facts in ready) == [0, 1, 2]
    for worker in pool.started:
        called = [method for who, method, _ in pool.calls if who == worker and method != "facts"]
        assert called[:3] == ["load", "open", "run"]
        assert called.count("open") == 1


def test_what_was_lost_with_a_worker_runs_again_alone_and_only_the_killer_is_set_aside() -> None:
    pool = FakePool(dies_of_k)
    dispatcher, _, notes = made(pool)
    done = [given for _, given in dispatcher.run(tasks("ab", "ck", "de", "fg"))]
    assert sorted(chain(*done)) == ["aa", "bb", "cc", "dd", "ee", "ff", "gg"]
    assert dispatcher.set_aside == [("k", "killed by a test")]
    runs = [args[0] for _, method, args in pool.calls if method == "run"]
    assert [group for group in runs if "k" in group] == [["c", "k"], ["k"]]
    assert dispatcher.n_died == 2
    assert len(pool.started) == 4
    assert "in run of c, k: killed by a test" in notes[0]


def test_a_worker_that_dies_by_itself_costs_no_prompt() -> None:
    dispatcher, _, _ = made(FakePool(dies_once(1)))
    done = [given for _, given in dispatcher.run(tasks(*"abcdef"))]
    assert sorted(chain(*done)) == ["aa", "bb", "cc", "dd", "ee", "ff"]
    assert (dispatcher.set_aside, dispatcher.n_died) == ([], 1)


def test_the_last_task_of_the_only_worker_is_not_lost_with_it() -> None:
    dispatcher, _, _ = made(FakePool(dies_of_k), 1)
    done = [given for _, given in dispatcher.run(tasks("a", "kb"))]
    # Nothing else is left when k dies again, and b is still to come.
    assert sorted(chain(*done)) == ["aa", "bb"]
    assert dispatcher.set_aside == [("k", "killed by a test")]


def test_deaths_between_which_work_is_done_are_no_reason_to_end() -> None:
    died: list[str] = []

    def answer(worker: int, method: str, args: Sequence[Any]) -> Any:
        if method == "run" and args[0][0].isupper() and args[0][0] not in died:
            died.append(args[0][0])
            return DIES
        return doubled(worker, method, args)

    dispatcher, _, notes = made(FakePool(answer), 1)
    names = "AbCdEfGhIjKlMnOpQrStUvWxYz"
    done = [given for _, given in dispatcher.run(tasks(*names))]
    assert sorted(chain(*done)) == sorted(name * 2 for name in names)
    assert len(notes) == dispatcher.n_died == 13  # ten one after another would have been too many


def test_a_start_that_fails_now_and_then_costs_no_worker() -> None:
    def answer(worker: int, method: str, args: Sequence[Any]) -> Any:
        if worker == 1 and method == "run":
            return DIES
        return DIES if worker in (0, 2) else doubled(worker, method, args)

    dispatcher, _, _ = made(FakePool(answer), 1)
    assert [given for _, given in dispatcher.run(tasks("a"))] == [["aa"]]
    assert dispatcher.n_died == 3


def test_workers_that_cannot_start_end_the_run() -> None:
    pool = FakePool(lambda *_: DIES)
    dispatcher, _, notes = made(pool)
    with pytest.raises(MtpStatsError, match="no worker is left: each died while it started, twice"):
        list(dispatcher.run(tasks("a")))
    assert len(pool.started) == len(notes) == 4
    assert notes[0] == "worker 1 died while it started: killed by a test"


def test_a_start_is_over_when_all_of_the_setup_is_done() -> None:
    pool = FakePool(lambda w, m, a: DIES if m == "open" else w)
    dispatcher, _, _ = made(pool, 1)
    assert dispatcher.first("facts") == 0
    dispatcher.extend(("open", ()))
    with pytest.raises(MtpStatsError, match="no worker is left"):
        list(dispatcher.run(tasks("a")))
    assert len(pool.started) == 3  # the first one had started before


def test_whoever_waits_is_told_that_time_goes_on() -> None:
    ticks: list[int] = []
    dispatcher = Dispatcher(
        FakePool(doubled), 1, [("load", ())], on_ready=lambda *_: None, on_note=lambda _: None,
        on_tick=lambda: ticks.append(1),
    )  # fmt: skip
    list(dispatcher.run(tasks("a")))
    assert ticks


def test_deaths_without_end_end_the_run() -> None:
    pool = FakePool(lambda w, m, a: DIES if m == "run" else doubled(w, m, a))
    dispatcher, _, notes = made(pool)
    with pytest.raises(MtpStatsError, match="12 workers died one after another"):
        list(dispatcher.run(tasks(*"abcdefghijkl")))
    assert len(notes) == 12


def test_what_every_item_needs_goes_with_each_of_them_again() -> None:
    pool = FakePool(dies_once())
    dispatcher, _, _ = made(pool)
    list(dispatcher.run([Task("run", ("a", "b"), (5,))]))
    calls = [args for _, method, args in pool.calls if method == "run"]
    assert calls == [(["a", "b"], 5), (["a"], 5), (["b"], 5)]


def test_a_task_in_one_piece_is_tried_again_as_it_was_and_ends_the_run_the_second_time() -> None:
    deaths: list[int] = []

    def answer(worker: int, method: str, args: Sequence[Any]) -> Any:
        if method == "read" and len(deaths) < n_deaths:
            deaths.append(worker)
            return DIES
        return [method, *args]

    task = Task("read", (7,), ("chunk", "how"))
    n_deaths = 1
    dispatcher, _, _ = made(FakePool(answer))
    assert list(dispatcher.run([task], whole=True)) == [(task, ["read", "chunk", "how"])]
    deaths.clear()
    dispatcher, _, notes = made(FakePool(answer), 1)
    assert dispatcher.first("read", 5) == ["read", 5]
    assert notes == ["worker 1 died in read: killed by a test"]
    deaths.clear()
    n_deaths = 2
    dispatcher, _, _ = made(FakePool(answer))
    with pytest.raises(MtpStatsError, match="read of 7 killed 2 workers: killed by a test"):
        list(dispatcher.run([task], whole=True))


def test_errors_of_a_worker_end_the_run() -> None:
    pool = FakePool(lambda w, m, a: MtpStatsError("no room") if m == "run" else w)
    dispatcher, _, _ = made(pool)
    with pytest.raises(MtpStatsError, match="no room"):
        list(dispatcher.run(tasks("a")))
