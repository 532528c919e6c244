"""Probes against live runs of policies, and against a head that is driven a root at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chains
import numpy as np
import pytest
from archs import CASES, HEAD, PROMPTS, TRUNK, Loaded, loaded
from sessions import EXACT, tokens, with_eog, with_few

from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context, Library, Model
from mtpstats.probe import Prober
from mtpstats.prompts import builtin
from mtpstats.speculate import DraftSettings, Generation, Sampling, Speculator
from mtpstats.trace import MISS, UNKNOWN, TracedPrompt

# n_max, p_min, n_min
POLICIES = ((1, 0.0, 0), (2, 0.3, 0), (3, 0.0, 0), (4, 0.6, 2), (8, 0.9, 0), (8, 0.0, 0))
Tiny = Callable[..., Path]


def record(recorder: Speculator, prober: Prober, prompt: list[int], n_predict: int) -> TracedPrompt:
    """Record a text as far as a run of ``n_predict`` tokens may need it."""
    prober.begin(prompt, n_predict)
    run = recorder.generate(prompt, n_predict + prober.depth + 2 if n_predict >= 0 else -1)
    return TracedPrompt(
        id="text", category=None, n_prompt=len(prompt), stop=run.stop, n_ctx=recorder.n_ctx,
        seconds=0.0, tokens=np.int32(prompt + run.tokens), margin=np.float32(run.margins),
        **vars(prober.finish()),
    )  # fmt: skip


def agree(chain: chains.Chain, live: Generation) -> bool:
    """True when all verifications are equal; fails unless they part at a near tie."""
    for i, (mine, theirs) in enumerate(zip(chain.verifications, live.verifications, strict=False)):
        if mine != theirs:
            assert any(chain.doubtful[: i + 1]), (i, mine, theirs)
            return False
    assert len(chain.verifications) == len(live.verifications)
    return True


def compare(
    models: Loaded,
    prompts: tuple[str, ...],
    n_predict: int,
    policies: tuple[tuple[int, float, int], ...],
    sampling: Sampling | None = None,
    together: int = 5,
) -> None:
    """Record, replay and run every policy."""
    options: dict[str, Any] = {"sampling": sampling}
    prober = Prober(8, together=together)
    ids = [models.model.tokenize(text) for text in prompts]
    with models.speculator(draft=DraftSettings(2), prober=prober, **options) as recorder:
        texts = [record(recorder, prober, prompt, n_predict) for prompt in ids]
    assert prober.depth == (8 if prober.head_kind != "chain" else models.case.n_blocks)
    equal = []
    for n_max, p_min, n_min in policies:
        with models.speculator(draft=DraftSettings(n_max, n_min, p_min), **options) as live:
            for prompt, text in zip(ids, texts, strict=True):
                chain = chains.replay(
                    text, n_max=n_max, p_min=p_min, n_min=n_min, n_predict=n_predict,
                    heads=prober.head_kind, sampled=sampling is not None,
                )  # fmt: skip
                equal.append(agree(chain, live.generate(prompt, n_predict)))
    assert sum(equal) >= 0.8 * len(equal)


@pytest.mark.parametrize("name", ["glm4moe", "hy_v3-chain", "gemma4-assistant", "cohere2moe"])
def test_replays_what_live_runs_do(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as models:
        compare(models, PROMPTS[:3], 40, POLICIES)
        compare(models, PROMPTS[:1], 40, POLICIES[2:5:2], Sampling(temp=0.8, seed=3))


@pytest.mark.parametrize("name", CASES)
def test_every_memory_and_head_can_be_probed(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as models:
        compare(models, PROMPTS[1:2], 24, ((3, 0.3, 0),))


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_the_built_in_model_replays(model: Model, temp: float) -> None:
    texts = [prompt.text for prompt in builtin()][:4]
    sampling = Sampling(temp=temp, seed=5)
    options: dict[str, Any] = {"n_threads": 1, "n_ctx": 256, "sampling": sampling}
    prober = Prober(8)
    ids = [model.tokenize(text) for text in texts]
    with Speculator(model, draft=DraftSettings(3), prober=prober, **options) as recorder:
        recorded = [record(recorder, prober, prompt, 64) for prompt in ids]
    equal = 0
    for n_max, p_min in ((1, 0.0), (3, 0.6), (8, 0.3)):
        with Speculator(model, draft=DraftSettings(n_max, 0, p_min), **options) as live:
            for prompt, text in zip(ids, recorded, strict=True):
                chain = chains.replay(
                    text, n_max=n_max, p_min=p_min, n_predict=64, sampled=temp > 0
                )
                equal += agree(chain, live.generate(prompt, 64))
    assert equal >= 9


# ---- what is recorded at a root


def softmax(logits: np.ndarray) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) - logits.max())
    return wide / wide.sum()


def candidates(logits: np.ndarray) -> list[int]:
    return np.lexsort((np.arange(len(logits)), -logits)).tolist()[:10]


class OneByOne:
    """A head driven for one root at a time: the prefix decoded anew, then a token a step."""

    def __init__(self, model: Model, text: list[int], draft: Model | None = None) -> None:
        self.text = text
        self.target = Context(model, n_ctx=256, **EXACT)
        self.head = Context(draft or model, n_ctx=256, mtp=True, other=self.target, **EXACT)
        batch = Batch(len(text))
        batch.extend(text, 0, 0, "all")
        self.target.decode(batch)
        self.p = [softmax(self.target.logits(i)) for i in range(len(text))]
        self.rows = [self.target.nextn(i).copy() for i in range(len(text))]
        self.batch = Batch(256, n_embd=self.head.n_embd_out)

    def _step(self, token: int, position: int, row: np.ndarray) -> np.ndarray:
        self.batch.clear()
        index = self.batch.add(token, position, 0, True)
        self.batch.rows()[index] = row
        self.head.decode(self.batch)
        return self.head.logits(0)

    def _before(self, position: int) -> np.ndarray:
        return self.rows[position - 1] if position else np.zeros_like(self.rows[0])

    def draft(self, root: int, depth: int, forced: bool) -> list[np.ndarray]:
        """The head's logits at each step, fed with the text or with its own best tokens."""
        self.head.clear()
        for position in range(root):
            self._step(self.text[position], position, self._before(position))
        token, row, found = self.text[root], self._before(root), []
        for step in range(depth):
            found.append(self._step(token, root + step, row).copy())
            row = self.head.nextn(0).copy()
            token = self.text[root + 1 + step] if forced else candidates(found[-1])[0]
        return found


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
def test_a_root_holds_what_the_head_says_there(lib: Library, tiny: Tiny, arch: str) -> None:
    depth, n_predict = 5, 14
    with Model(lib, tiny(arch, f32=True, noise=0.5)) as model:
        prompt = model.tokenize(PROMPTS[1])
        prober = Prober(depth, together=4)
        with Speculator(
            model, draft=DraftSettings(2), n_ctx=256, prober=prober, **EXACT
        ) as recorder:
            text = record(recorder, prober, prompt, n_predict)
        single = OneByOne(model, text.tokens.tolist())
        tokens, first = text.tokens.tolist(), len(prompt) - 1
        assert text.roots.tolist() == list(range(first, first + n_predict + 1))
        off = dict(
            zip(text.off_index.tolist(), zip(text.off_p, text.off_top10, strict=True), strict=True)
        )
        near = {"rtol": 2e-4, "atol": 1e-6}
        for r, root in enumerate(text.roots.tolist()):
            for d, logits in enumerate(single.draft(root, depth, forced=False)):
                best, p = candidates(logits), softmax(logits)
                np.testing.assert_allclose(text.p[r, d], p[best[:8]], **near)
                np.testing.assert_allclose(text.top10[r, d], p[best].sum(), **near)
                np.testing.assert_allclose(text.p_min_p[r, d], p[best[0]] / p[best].sum(), **near)
            left, known = False, True
            for d, logits in enumerate(single.draft(root, depth, forced=True)):
                best, p, truth = candidates(logits), softmax(logits), tokens[root + 1 + d]
                if not known:
                    assert text.rank[r, d] == UNKNOWN
                    assert np.isnan(text.overlap[r, d])
                    continue
                rank = best[:8].index(truth) + 1 if truth in best[:8] else MISS
                assert text.rank[r, d] == rank
                overlap = np.minimum(p, single.p[root + d]).sum()
                np.testing.assert_allclose(text.overlap[r, d], overlap, rtol=1e-3)
                assert (r * depth + d in off) == left
                if left:
                    off_p, off_top10 = off[r * depth + d]
                    np.testing.assert_allclose(off_p, p[best[:8]], **near)
                    np.testing.assert_allclose(off_top10, p[best].sum(), **near)
                left |= rank != 1
                known = rank != MISS
        assert {1, 2, MISS} <= set(text.rank.ravel().tolist())
        assert off


@pytest.mark.parametrize("name", ["glm4moe", "hy_v3-chain"])
def test_roots_probed_alone_together_and_in_a_small_batch_are_the_same(
    lib: Library, tiny: Tiny, name: str
) -> None:
    found = []
    shapes = ((1, 1, 2048), (32, 1, 2048), (32, 3, 17), (32, 2**31 - 1, 2048))
    with loaded(lib, tiny, CASES[name]) as models:
        prompt = models.model.tokenize(PROMPTS[1])
        for together, every, n_batch in shapes:
            prober = Prober(6, every, together, n_batch=n_batch)
            with models.speculator(
                draft=DraftSettings(2), n_batch=n_batch, prober=prober
            ) as recorder:
                found.append(record(recorder, prober, prompt, 40))
    one, many, third, first = found
    assert one.roots.tolist() == many.roots.tolist()
    assert third.roots.tolist() == one.roots.tolist()[::3]
    assert first.roots.tolist() == one.roots.tolist()[:1]
    for other, step in ((many, 1), (third, 3), (first, 2**31 - 1)):
        np.testing.assert_array_equal(other.rank, one.rank[::step])
        np.testing.assert_allclose(other.p, one.p[::step], atol=1e-5)
        np.testing.assert_allclose(other.overlap, one.overlap[::step], atol=1e-4)
    np.testing.assert_array_equal(many.off_index, one.off_index)
    np.testing.assert_allclose(many.off_p, one.off_p, atol=1e-5)


@pytest.mark.parametrize("part", ["target", "head"])
def test_overlap_leaves_out_tokens_without_a_logit(
    lib: Library, tiny: Tiny, tmp_path: Path, part: str
) -> None:
    few = (70, 71, 72)
    files = {
        "target": tiny("glm4moe", f32=True, without=TRUNK),
        "head": tiny("glm4moe", f32=True, only=HEAD),
    }
    files[part] = with_few(files[part], tmp_path / "few.gguf", few)

    def shares(logits: np.ndarray) -> np.ndarray:
        return softmax(np.where(np.isnan(logits), -np.inf, logits))

    with Model(lib, files["target"]) as model, Model(lib, files["head"]) as draft:
        prober = Prober(3, together=4)
        with Speculator(
            model, draft=DraftSettings(2), draft_model=draft, n_ctx=256, prober=prober, **EXACT
        ) as recorder:
            text = record(recorder, prober, model.tokenize(PROMPTS[0]), 8)
        single = OneByOne(model, text.tokens.tolist(), draft)
        p = [shares(single.target.logits(i)) for i in range(len(text.tokens))]
        for r, root in enumerate(text.roots.tolist()):
            for d in np.flatnonzero(text.rank[r] != UNKNOWN):
                q = shares(single.draft(root, d + 1, forced=True)[d])
                expected = np.minimum(p[root + d], q).sum()
                np.testing.assert_allclose(text.overlap[r, d], expected, rtol=1e-3, atol=1e-6)


# ---- how a text can end


@pytest.mark.parametrize("n_max", [1, 3, 8])
def test_a_text_that_ends_itself(
    lib: Library, model: Model, model_path: Path, tmp_path: Path, n_max: int
) -> None:
    options: dict[str, Any] = {"n_threads": 1, "n_ctx": 256}
    ids = model.tokenize(builtin()[0].text)
    with Speculator(model, draft=DraftSettings(3), **options) as plain:
        eog = plain.generate(ids, 40).tokens[17]
    with Model(lib, with_eog(model_path, tmp_path / "eog.gguf", eog)) as ending:
        prober = Prober(8, together=4)
        with Speculator(ending, draft=DraftSettings(3), prober=prober, **options) as recorder:
            text = record(recorder, prober, ids, 64)
        with Speculator(ending, draft=DraftSettings(n_max), **options) as live:
            run = live.generate(ids, 64)
    assert text.stop == run.stop == "eog"
    assert text.tokens.tolist() == ids + run.tokens
    assert text.roots[-1] == len(text.tokens) - 2
    # Nothing is known past the end.
    for r, root in enumerate(text.roots.tolist()):
        assert (text.rank[r, len(text.tokens) - 1 - root :] == UNKNOWN).all()
    assert agree(chains.replay(text, n_max=n_max, n_predict=64), run)


def test_a_text_that_fills_its_context(model: Model) -> None:
    ids = model.tokenize(builtin()[1].text)
    options: dict[str, Any] = {"n_threads": 1, "n_ctx": 256}
    prober = Prober(8)
    with Speculator(model, draft=DraftSettings(3), prober=prober, **options) as recorder:
        n_ctx = recorder.n_ctx
        text = record(recorder, prober, ids, -1)
    assert text.stop == "context"
    assert len(text.tokens) == n_ctx + 1
    assert text.roots.tolist() == list(range(len(ids) - 1, n_ctx))
    for n_max in (2, 8):
        with Speculator(model, draft=DraftSettings(n_max), **options) as live:
            agree(chains.replay(text, n_max=n_max), live.generate(ids, -1))


def test_a_shared_head_says_nothing_at_the_first_position(lib: Library, tiny: Tiny) -> None:
    """It has no cells to read there."""
    prober = Prober(3, together=4)
    with (
        loaded(lib, tiny, CASES["gemma4-assistant"]) as one,
        one.speculator(draft=DraftSettings(2), prober=prober) as recorder,
    ):
        text = record(recorder, prober, one.model.tokenize("x"), 6)
    assert text.roots[:2].tolist() == [0, 1]
    assert np.isnan(text.p[0]).all()
    assert (text.rank[0] == UNKNOWN).all()
    assert np.isfinite(text.p[1]).all()


def test_a_text_that_fills_the_cells_it_shares_with_its_head(lib: Library, tiny: Tiny) -> None:
    """Drafts take cells of the target there, beside those of a text that has all of its own."""
    ids = tokens(230, 3)
    prober = Prober(3)
    with loaded(lib, tiny, CASES["gemma4-assistant"]) as one:
        with one.speculator(draft=DraftSettings(2), prober=prober) as recorder:
            text = record(recorder, prober, ids, -1)
        assert text.stop == "context"
        assert text.roots.tolist() == list(range(len(ids) - 1, 256))
        with one.speculator(draft=DraftSettings(3)) as live:
            agree(chains.replay(text, n_max=3, heads="shared"), live.generate(ids, -1))


def test_a_head_without_a_finite_logit_has_no_candidates(lib: Library, tiny: Tiny) -> None:
    with Model(lib, tiny("glm4moe", f32=True, nan_in="blk.2.nextn.eh_proj.weight")) as model:
        prober = Prober(3, together=4)
        with Speculator(model, draft=DraftSettings(2), n_ctx=256, prober=prober, **EXACT) as one:
            text = record(one, prober, model.tokenize(PROMPTS[0]), 10)
    assert np.isnan(text.p).all()
    assert np.isnan(text.p_min_p).all()
    assert (text.rank[:, 0] == MISS).all()
    assert (text.rank[:, 1:] == UNKNOWN).all()
    assert np.isnan(text.overlap).all()
    assert set(chains.replay(text, n_max=3, n_predict=10).verifications) == {(0, 0)}


def test_only_one_text_that_is_drafted_for_can_be_probed(model: Model) -> None:
    for options in ({"draft": None}, {"draft": DraftSettings(2), "n_parallel": 2}):
        with pytest.raises(InputError, match="one at a time"):
            Speculator(model, prober=Prober(4), n_threads=1, **options)  # type: ignore[arg-type]
