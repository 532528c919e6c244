"""The pool of Ray's actors, over a stand-in for ray: shares of a cluster, deaths, errors."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mtpstats import raypool
from mtpstats.dispatch import WorkerDied
from mtpstats.errors import InputError, ModelError, MtpStatsError
from mtpstats.raypool import Actor, RayPool, Share


class RayError(Exception): ...


class RayActorError(RayError): ...


class WorkerCrashedError(RayError): ...


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("a long traceback")
        self.cause = cause


class FakeRay:
    """Answers are what ``get`` gives or raises."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, WorkerCrashedError=WorkerCrashedError,
        RayTaskError=RayTaskError,
    )  # fmt: skip

    def __init__(self, *resources: dict[str, float], dead: int = 0) -> None:
        self.resources, self.dead = resources, dead
        self.told: list[Any] = []

    def init(self, **options: Any) -> None:
        self.told.append(("init", options))
        signal.signal(signal.SIGTERM, lambda *_: None)

    def shutdown(self) -> None:
        self.told.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": i >= self.dead, "Resources": node} for i, node in enumerate(self.resources)
        ]

    def remote(self, **options: Any) -> Any:
        self.told.append(("remote", options))
        return lambda kind: kind

    def get(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


def pool(
    monkeypatch: pytest.MonkeyPatch,
    ray: FakeRay,
    share: Share,
    n: int | None,
    address: str = "auto",
) -> RayPool:
    monkeypatch.setattr(raypool, "_imported", lambda: ray)
    return RayPool(address, lambda cpus: lambda: cpus, share, n)


BIG, SMALL, NONE = {"CPU": 16.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 64.0}


@pytest.mark.parametrize(
    ("nodes", "share", "n", "expected"),
    [
        # A GPU each: 16 cores for 4 of them, 8 for 1.
        ((BIG, SMALL, NONE), Share(), None, (1.0, 4, 5)),
        ((BIG, SMALL, NONE), Share(gpus=0.5), None, (0.5, 2, 10)),
        ((BIG, SMALL), Share(gpus=2), None, (2, 8, 2)),
        ((BIG, SMALL), Share(cpus=8), None, (1.0, 8, 3)),
        ((BIG, SMALL), Share(), 3, (1.0, 4, 3)),
        # Without GPUs a worker has a machine for itself, or its part of the smallest.
        (({"CPU": 8.0}, {"CPU": 4.0}), Share(), None, (0.0, 4, 3)),
        (({"CPU": 8.0}, {"CPU": 4.0}), Share(), 4, (0.0, 1, 4)),
        ((BIG,), Share(gpus=0), None, (0, 16, 1)),
        ((BIG, {"object_store_memory": 1.0}, {"GPU": 2.0}), Share(), None, (1.0, 4, 4)),
    ],
)
def test_shares(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, share: Share, n: int | None, expected: Any
) -> None:
    with pool(monkeypatch, FakeRay(*nodes), share, n) as made:
        assert (made.gpus, made.cpus, made.n_workers) == expected


@pytest.mark.parametrize(
    ("ray", "share", "words"),
    [
        (FakeRay(SMALL, NONE), Share(gpus=2), "has 2 GPUs and 1 CPUs.* 0 shares of GPUs, 64 CPUs"),
        (FakeRay(SMALL, NONE), Share(cpus=9), "has 1 GPUs and 9 CPUs.* 1 shares of GPUs, 64 CPUs"),
        (FakeRay(BIG, SMALL, dead=1), Share(gpus=2), "0 shares of GPUs, 8 CPUs"),
    ],
)
def test_a_cluster_without_room_is_left_again(
    monkeypatch: pytest.MonkeyPatch, ray: FakeRay, share: Share, words: str
) -> None:
    stdout = sys.stdout
    with pytest.raises(InputError, match=words):
        pool(monkeypatch, ray, share, None)
    assert ray.told[-1] == "shutdown"
    assert sys.stdout is stdout


@pytest.fixture
def handler() -> Iterator[Any]:
    """Somebody's handler of SIGTERM."""

    def mine(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    yield mine
    signal.signal(signal.SIGTERM, before)


def test_what_it_changed_it_gives_back(monkeypatch: pytest.MonkeyPatch, handler: Any) -> None:
    monkeypatch.setenv("MTPSTATS_LIBLLAMA", "/x")
    monkeypatch.delenv("MTPSTATS_BUILDS", raising=False)
    stdout, ray = sys.stdout, FakeRay(BIG)
    with pool(monkeypatch, ray, Share(), None):
        assert signal.getsignal(signal.SIGTERM) is handler
        assert sys.stdout is not stdout
        options = dict(ray.told[1:])["remote"]
        assert (options["num_cpus"], options["num_gpus"], options["max_restarts"]) == (4, 1.0, 0)
        assert options["runtime_env"] == {"env_vars": {"MTPSTATS_LIBLLAMA": "/x"}}
    assert ray.told[-1] == "shutdown"
    assert sys.stdout is stdout
    with pool(monkeypatch, ray, Share(cpus=3), 50, "local"):
        assert ray.told[-2][1]["num_cpus"] == 150  # as many as there are to be
        assert "runtime_env" not in ray.told[-1][1]


def test_answers_deaths_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool(monkeypatch, FakeRay(BIG), Share(), None) as made:
        assert made.result((True, [1])) == [1]
        story = "The actor died.\n Worker exit detail: SIGSEGV\x1b Some common causes include: x"
        for error in (RayActorError(story), WorkerCrashedError(story)):
            with pytest.raises(WorkerDied, match=r"^SIGSEGV\\x1b$"):
                made.result(error)
        for error, words in (
            (RayTaskError(KeyError("a\n")), r"a worker failed: KeyError: 'a\\n'"),
            (RayError("lost\n it"), "Ray failed: lost it"),
        ):
            with pytest.raises(MtpStatsError, match=words) as raised:
                made.result(error)
            assert raised.value.exit_code == 1
        for kind, code in ((InputError, 2), (ModelError, 2), (MtpStatsError, 1)):
            with pytest.raises(MtpStatsError, match="no head") as raised:
                made.result((False, (kind, "no head")))
            assert raised.value.exit_code == code


def test_what_an_actor_sends_back() -> None:
    class Worker:
        def fine(self, number: int) -> int:
            return number + 1

        def wrong(self) -> None:
            raise ModelError("no head")

        def broken(self) -> None:
            raise KeyError("x")

    before = signal.getsignal(signal.SIGINT)
    try:
        actor = Actor(Worker)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert actor.call("fine", (2,)) == (True, 3)
    assert actor.call("wrong", ()) == (False, (ModelError, "no head"))
    with pytest.raises(KeyError):
        actor.call("broken", ())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        *((wrong, "neither HOST:PORT nor auto nor local")
          for wrong in ("here", "host:", ":5", "http://host:5", "host:x")),
        ("127.0.0.1:99999", "no Ray cluster there"),
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    ray = FakeRay(BIG)
    with pytest.raises(InputError, match=words):
        pool(monkeypatch, ray, Share(), None, address)
    assert ray.told == []
