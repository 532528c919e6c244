"""``bench`` over workers in this process, on the driver whose every number is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FOUR, FakeEngine, Kept
from herepool import HerePool

from mtpstats import loop, run, spread
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.prepare import Selection
from mtpstats.prompts import Prompt
from mtpstats.run import BenchSettings, BenchStopped
from mtpstats.worker import BenchWorker


def made(settings: BenchSettings, worker: type[BenchWorker] = BenchWorker) -> Callable[[], Any]:
    return lambda: worker(settings, FakeEngine)


def over(
    settings: BenchSettings,
    pool: HerePool,
    prompts: Sequence[Prompt] = FOUR,
    n: int = 2,
    **more: Any,
) -> dict[str, Any]:
    return spread.bench(settings, prompts, pool, n, **more)


def alone(settings: BenchSettings, prompts: Sequence[Prompt] = FOUR) -> dict[str, Any]:
    return run.bench(settings, prompts, engine=FakeEngine)


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
def test_what_comes_out_is_what_one_process_gives(
    settings: BenchSettings, monkeypatch: pytest.MonkeyPatch, latest: bool, baseline: bool
) -> None:
    monkeypatch.setattr(spread, "CHUNK", 1)  # prompts that are read by several
    settings = replace(settings, baseline=baseline)
    pool = HerePool(made(settings), latest=latest)
    result, whole = over(settings, pool), alone(settings)
    for key in ("model", "settings", "prompts", "total"):
        assert result[key] == whole[key], key
    assert {worker for worker, method, _ in pool.calls if method == "read"} == set(pool.killed)
    assert len(pool.killed) == 2
    # Each worker is set up and warmed up once.
    for worker in pool.killed:
        methods = [method for who, method, _ in pool.calls if who is worker]
        assert (methods.count("load"), methods.count("open")) == (1, 1)
        drafted = [name for name, *_ in worker._engine.calls].count("draft")
        assert drafted == methods.count("run") + bool(methods.count("run"))
        assert worker._engine.closed[-1] == "model"


def test_what_is_kept_is_not_run_again_and_what_is_run_is_kept(settings: BenchSettings) -> None:
    whole = alone(settings)
    keeper = Kept({index: whole["prompts"][index] for index in (2, 0)})
    pool = HerePool(made(settings))
    result = over(settings, pool, keeper=keeper)
    assert result["prompts"] == whole["prompts"]
    assert sorted(keeper.appended, key=lambda pair: pair[0]) == [
        (index, whole["prompts"][index]) for index in (1, 3)
    ]
    run_of = [prompt.id for _, method, args in pool.calls if method == "run" for prompt in args[0]]
    assert run_of == ["b", "d"]


def test_past_the_time_limit_nothing_is_handed_out(
    settings: BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Kept()
    monkeypatch.setattr(spread, "monotonic", lambda: 0)
    monkeypatch.setattr(loop, "monotonic", lambda: len(keeper.appended))
    result = over(settings, HerePool(made(settings)), n=1, time_limit=2, keeper=keeper)
    assert [prompt["id"] for prompt in result["prompts"]] == ["a", "b"]
    assert result["settings"]["n_prompts"] == 4


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MtpStatsError("no memory"), 1, "no memory: 2 of 4"),
        (InputError("no such"), 2, "no such: 2 of 4"),
        (KeyboardInterrupt(), 130, "interrupted: 2 of 4"),
    ],
)
def test_what_stops_it_leaves_what_is_finished(
    settings: BenchSettings, error: BaseException, code: int, words: str
) -> None:
    class Failing(BenchWorker):
        def run(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
            if prompts[0].id == "c":
                raise error
            return super().run(prompts)

    pool = HerePool(made(settings, Failing))
    with pytest.raises(BenchStopped, match=words) as stopped:
        over(settings, pool)
    assert stopped.value.exit_code == code
    assert [prompt["id"] for prompt in stopped.value.result["prompts"]] == ["a", "b"]
    assert len(pool.killed) == 2


def test_prompts_that_cannot_be_run_are_refused_before_anything_runs(
    settings: BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "CHUNK", 2)
    blank, long = Prompt("blank", None, " "), Prompt("long", None, "w " * 600)
    for prompts, words in (
        ([*FOUR, blank], "prompt blank: the model reads no token"),
        ([FOUR[0], blank, *FOUR[1:]], "prompt blank: the model reads no token"),
        ([*FOUR, long], "prompt long has 600 tokens, the context holds 512"),
        ([], "no prompt to run"),
    ):
        pool = HerePool(made(settings))
        with pytest.raises(InputError, match=words):
            over(settings, pool, prompts)
        assert "run" not in [method for _, method, _ in pool.calls]
    # Those behind the limit are nobody's business, those before it are.
    settings = replace(settings, selection=Selection(limit=3))
    monkeypatch.setattr(spread, "CHUNK", 9)
    with pytest.raises(InputError, match="prompt blank: the model reads no token"):
        over(settings, HerePool(made(settings)), [*FOUR[:2], blank, *FOUR[2:]])
    monkeypatch.setattr(spread, "CHUNK", 2)
    for prompts in ([*FOUR[:3], blank], [*FOUR, blank]):
        result = over(settings, HerePool(made(settings)), prompts)
        assert [prompt["id"] for prompt in result["prompts"]] == ["a", "b", "c"]


@pytest.mark.parametrize("latest", [False, True])
def test_the_template_of_any_chunk_is_recorded(
    settings: BenchSettings, monkeypatch: pytest.MonkeyPatch, latest: bool
) -> None:
    class Talking(BenchWorker):
        def read(self, prompts: Any, selection: Selection) -> Any:
            found = super().read(prompts, selection)
            if "b" in [prompt.id for prompt in prompts]:
                found = replace(found, settings={**found.settings, "chat_template": "model"})
            return found

    monkeypatch.setattr(spread, "CHUNK", 1)
    result = over(settings, HerePool(made(settings, Talking), latest=latest))
    assert result["settings"]["chat_template"] == "model"


def test_another_draft_model_is_another_worker(
    settings: BenchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = [tmp_path / "1", tmp_path / "2"]
    found = set()
    for content, draft in zip(("head 1", "head 2"), drafts, strict=True):
        draft.write_text(content)
        monkeypatch.setattr(FakeEngine, "draft_files", [draft])
        found.add(made(settings)().load([]).fingerprint)
    assert len(found) == 2


def test_a_worker_on_another_machine_is_refused_by_what_differs(settings: BenchSettings) -> None:
    cpus = iter(["fast", "slow"])

    class Elsewhere(BenchWorker):
        def load(self, command: Sequence[str]) -> Any:
            facts = super().load(command)
            return replace(facts, environment={**facts.environment, "cpu": next(cpus)})

    with pytest.raises(
        InputError, match=r"worker 2 .* worker 1 .*environment\.cpu is 'fast' there and 'slow' here"
    ):
        over(settings, HerePool(made(settings, Elsewhere)))
