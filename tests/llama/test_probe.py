"""Recordings against live runs: the same verifications, policy by policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chains
import numpy as np
import pytest
from archs import CASES, PROMPTS, Loaded, loaded

from mtpstats.llama import Library
from mtpstats.probe import Prober
from mtpstats.speculate import DraftSettings, Sampling, Speculator
from mtpstats.trace import UNKNOWN, TracedPrompt

POLICIES = ((1, 0.0, 0), (2, 0.3, 0), (3, 0.0, 0), (4, 0.6, 2), (8, 0.9, 0), (8, 0.0, 0))


def record(
    speculator: Speculator, prober: Prober, prompt: list[int], n_predict: int
) -> TracedPrompt:
    """Record a text as far as a run of ``n_predict`` tokens may need."""
    prober.begin(prompt, n_predict)
    run = speculator.generate(prompt, n_predict + prober.depth + 2 if n_predict >= 0 else -1)
    found = prober.finish()
    return TracedPrompt(
        id="text", category=None, n_prompt=len(prompt), stop=run.stop, n_ctx=speculator.n_ctx,
        seconds=0.0, tokens=np.int32(prompt + run.tokens), margin=np.float32(run.margins),
        **vars(found),
    )  # fmt: skip


def heads_of(case: str) -> str:
    return {"chain": "chain", "assistant": "shared"}.get(case.rpartition("-")[2], "single")


def compare(models: Loaded, sampling: Sampling, prompts: list[str], n_predict: int) -> None:
    heads = heads_of(
        "chain" if models.case.n_blocks > 1 else models.case.draft[0] if models.case.draft else ""
    )
    prober = Prober(8, width=4)
    ids = [models.model.tokenize(text) for text in prompts]
    with models.speculator(draft=DraftSettings(2), prober=prober, sampling=sampling) as recorder:
        texts = [record(recorder, prober, prompt, n_predict) for prompt in ids]
    same = 0
    for n_max, p_min, n_min in POLICIES:
        with models.speculator(draft=DraftSettings(n_max, n_min, p_min), sampling=sampling) as live:
            for prompt, text in zip(ids, texts, strict=True):
                run = live.generate(prompt, n_predict)
                chain = chains.replay(
                    text, n_max=n_max, p_min=p_min, n_min=n_min, n_predict=n_predict, heads=heads
                )
                assert chain.verifications == run.verifications, (n_max, p_min)


@pytest.mark.parametrize("name", CASES)
def test_replays_what_live_runs_do(lib: Library, tiny: Callable[..., Path], name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as models:
        compare(models, Sampling(), list(PROMPTS), 60)
