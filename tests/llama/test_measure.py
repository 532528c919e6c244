"""Measured costs on every kind of memory and head, by a clock that only decodes move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from archs import CASES, PROMPTS, loaded
from sessions import EXACT

from mtpstats import head, speculate, treedraft
from mtpstats import measure as measuring
from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context, Library, Model
from mtpstats.loop import Progress
from mtpstats.measure import FEWER_ROWS, MOST_ROWS, WIDTHS, measure, sample_tree
from mtpstats.speculate import DraftSettings, Speculator
from mtpstats.treedraft import TreeSpeculator

TARGET, HEAD = 0.004, 0.001  # seconds a row takes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, now = Context.decode, [0.0]

    def timed(self: Context, batch: Batch) -> None:
        now[0] += (HEAD if self.mtp else TARGET) * batch.n_tokens
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", timed)
    monkeypatch.setattr(measuring, "perf_counter", lambda: now[0])
    for module in (head, speculate, treedraft):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: round(now[0] * 1e9))
    monkeypatch.setattr(measuring, "LEAST", 1)
    monkeypatch.setattr(measuring, "MOST_SECONDS", 0)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "name", ["glm4moe", "qwen3next", "bailingmoe3", "hy_v3-chain", "gemma4-assistant"]
)
def test_rows_take_what_they_take(lib: Library, tiny: Callable[..., Path], name: str) -> None:
    told: list[Progress] = []
    with loaded(lib, tiny, CASES[name]) as models:
        text = [token for prompt in PROMPTS for token in models.model.tokenize(prompt)]
        with models.speculator(draft=DraftSettings(6), n_rows=MOST_ROWS) as driver:
            n_max = driver.n_max
            costs = measure(driver, text, 40, seconds=0, on_progress=told.append)
            # It leaves a driver that works.
            after = driver.generate(text[:10], 8)
        with models.speculator(draft=DraftSettings(6)) as fresh:
            assert after.tokens == fresh.generate(text[:10], 8).tokens
    chain, shared = name.endswith("chain"), name.startswith("gemma4")
    assert set(costs.verify.points) == set(FEWER_ROWS)
    assert set(costs.draft.points) == set(WIDTHS)
    assert costs.n_past == 40
    assert {progress.stage for progress in told} == {"measuring costs"}
    assert (costs.follow is None) == shared
    for rows in FEWER_ROWS:
        # Where nothing can be taken back, the token that is kept is decoded again.
        again = name == "qwen3next" and rows > 1
        assert costs.verify(rows) == pytest.approx(TARGET * (rows + again))
        if costs.follow is not None:
            # A chain follows with each of its blocks.
            assert costs.follow(rows) == pytest.approx(HEAD * rows * (3 if chain else 1))
    for width in WIDTHS[1:]:
        assert costs.draft(width) == pytest.approx(HEAD * width)
    # The later steps of a chain decode two and three tokens.
    assert costs.draft(1) == pytest.approx(HEAD * (2.5 if chain else 1), rel=0.3 if chain else 1e-6)
    assert costs.other_draft == costs.other_token == costs.other_plain == 0
    assert costs.other_verification == 0
    # Real runs take what their parts do.
    assert set(costs.facts["check"]) == {str(n) for n in {1, min(4, n_max), min(8, n_max)}}
    if name == "qwen3next":
        return  # but for decoding again, which a draft that is accepted whole does not need
    for one in costs.facts["check"].values():
        off = 0.25 if chain else 1e-6
        assert one["by_medians"] == pytest.approx(one["measured"], rel=off)
        assert one["by_means"] == pytest.approx(one["measured"], rel=off)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("name", ["glm4moe", "bailingmoe3", "gemma4-assistant"])
def test_a_tree_takes_what_its_rows_and_steps_do(
    lib: Library, tiny: Callable[..., Path], name: str
) -> None:
    with loaded(lib, tiny, CASES[name]) as models:
        text = [token for prompt in PROMPTS for token in models.model.tokenize(prompt)]
        branching = DraftSettings.branching(sample_tree(6))
        with (
            models.speculator(draft=DraftSettings(6), n_rows=MOST_ROWS) as driver,
            TreeSpeculator(
                models.model, draft=branching, draft_model=models.draft, n_ctx=256, **EXACT
            ) as tree,
        ):
            costs = measure(driver, text, 40, tree=tree, seconds=0)
    check = costs.facts["check"]
    for part in ("tree_target", "tree_rest"):
        assert check[part]["by_medians"] == pytest.approx(check[part]["measured"])
        assert check[part]["by_means"] == pytest.approx(check[part]["measured"])
    # 6 nodes and the root, or 3 leaves of 3 tokens and one more each; steps of 1, 2 and 1 rows.
    rows = 12 if name == "bailingmoe3" else 7
    passes = check["tree_target"]["measured"] / TARGET / rows
    assert passes == pytest.approx(round(passes))
    steps = 4 * HEAD * passes
    assert check["tree_rest"]["measured"] >= steps * (1 if name.startswith("gemma4") else 1.25)


def test_a_short_context_is_refused() -> None:
    driver: Any = SimpleNamespace(n_ctx=66)
    with pytest.raises(InputError, match="a context of 66 is too short to measure costs in"):
        measure(driver, [1, 2, 3], 10)


def test_more_time_gives_more_samples_and_all_rows(
    attention: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_rows": MOST_ROWS}
    monkeypatch.setattr(measuring, "LEAST", 1)
    monkeypatch.setattr(measuring, "MOST", 2)
    text = attention.tokenize(PROMPTS[1])
    with Speculator(attention, draft=DraftSettings(8), **options) as driver:
        costs = measure(driver, text, 30, seconds=1e9)
    assert list(costs.verify.points) == list(range(1, 34))
    assert {point.samples for point in costs.verify.points.values()} == {2}
