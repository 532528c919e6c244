"""Measured costs on every kind of memory and head, with delays of known length in the decodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from archs import CASES, PROMPTS, loaded

from mtpstats import measure as measuring
from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context, Library, Model
from mtpstats.loop import Progress
from mtpstats.measure import FEWER_ROWS, MOST_ROWS, WIDTHS, measure
from mtpstats.speculate import DraftSettings, Speculator

TARGET, HEAD = 0.004, 0.001  # seconds of delay for a row


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Context.decode

    def slow(self: Context, batch: Batch) -> None:
        time.sleep((HEAD if self.mtp else TARGET) * batch.n_tokens)
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", slow)
    monkeypatch.setattr(measuring, "LEAST", 1)
    monkeypatch.setattr(measuring, "MOST_SECONDS", 0)


@pytest.mark.usefixtures("delayed")
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
    for rows in FEWER_ROWS:
        assert costs.verify(rows) >= TARGET * rows
        if costs.follow is not None:
            # A chain follows with each of its blocks.
            assert costs.follow(rows) >= HEAD * rows * (3 if chain else 1)
    assert (costs.follow is None) == shared
    # The target's delay is not in the head's: it would be four times as long.
    assert costs.draft(32) < TARGET * 32
    for width in WIDTHS:
        assert costs.draft(width) >= HEAD * width * 0.999
    # Real runs take what their parts do.
    assert set(costs.facts["check"]) == {str(n) for n in {1, min(4, n_max), min(8, n_max)}}
    if name != "qwen3next":  # there rejected drafts are decoded again
        for one in costs.facts["check"].values():
            assert one["by_medians"] == pytest.approx(one["measured"], rel=0.4)
            assert one["by_means"] == pytest.approx(one["measured"], rel=0.4)


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
