"""Recorded beams against a head that is driven along one path of one root at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_replay
from archs import CASES, PROMPTS, Loaded, loaded
from sessions import EXACT
from test_probe import candidates, record, softmax

from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context, Library, Model
from mtpstats.policy import Eagle2, OptTree
from mtpstats.probe import Prober
from mtpstats.prompts import builtin
from mtpstats.replay import replay
from mtpstats.speculate import DraftSettings, Speculator
from mtpstats.trace import MISS, UNKNOWN, Trace, TracedPrompt, quantise, trace_header

Tiny = Callable[..., Path]
RankPath = tuple[int, ...]


class OnePath:
    """A head driven linearly: the prefix of a root, then the tokens of a path, one a step."""

    def __init__(self, models: Loaded, text: list[int]) -> None:
        self.text, self.kind = text, models.case
        exact: dict[str, Any] = {"n_ctx": 256, "swa_full": True, **EXACT}
        self.target = Context(models.model, **exact)
        self.head = Context(models.draft or models.model, mtp=True, other=self.target, **exact)
        batch = Batch(len(text))
        batch.extend(text, 0, 0, "all")
        self.target.decode(batch)
        self.rows = [self.target.nextn(i).copy() for i in range(len(text))]
        self.batch = Batch(256, n_embd=self.head.n_embd_out)
        self.shared = self.head.shares_memory
        self.root = len(text)

    def _decode(self, tokens: list[int], position: int, rows: list[np.ndarray]) -> np.ndarray:
        """Return the last token's logits."""
        self.batch.clear()
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            place = position + (0 if self.shared else i)
            index = self.batch.add(token, place, 0, i == len(tokens) - 1)
            self.batch.rows()[index] = row
        self.head.decode(self.batch)
        return self.head.logits(len(tokens) - 1).copy()

    def _before(self, position: int) -> np.ndarray:
        return self.rows[position - 1] if position else np.zeros_like(self.rows[0])

    def at(self, root: int) -> None:
        """Go to a root; descending."""
        assert root < self.root
        self.root = root
        if self.shared:
            self.target.seq_rm(0, root, -1)  # it reads the cells of what is before the root
            return
        for block in range(self.kind.n_blocks):
            self.head.seq_rm(0, 0, -1)
            if self.kind.n_blocks > 1:
                self.head.set_nextn_layer_offset(block)
            if root:
                self._decode(self.text[:root], 0, [self._before(i) for i in range(root)])

    def says(self, fed: list[int]) -> np.ndarray:
        """The head's logits after the root's token and then ``fed``."""
        tokens, rows = [self.text[self.root], *fed], [self._before(self.root)]
        if not self.shared:
            self.head.seq_rm(0, self.root, -1)
        for step in range(len(tokens)):
            if self.kind.n_blocks > 1:  # block by block, each over the whole draft
                self.head.seq_rm(0, self.root, -1)
                self.head.set_nextn_layer_offset(step)
                logits = self._decode(tokens[: step + 1], self.root, rows)
                rows.append(self.head.nextn(step).copy())
            else:
                place = self.root + (0 if self.shared else step)
                logits = self._decode([tokens[step]], place, rows[-1:])
                rows.append(self.head.nextn(0).copy())
        return logits


def offers(single: OnePath, root: int) -> Callable[[RankPath], list[float]]:
    """What the head offers after a rank path below a root, as a trace keeps it."""
    single.at(root)
    known: dict[RankPath, tuple[list[int], list[float]]] = {}

    def look(path: RankPath) -> tuple[list[int], list[float]]:
        if path not in known:
            fed = [look(path[:i])[0][rank - 1] for i, rank in enumerate(path)]
            logits = single.says(fed)
            best = candidates(logits)[:8]
            known[path] = best, quantise(softmax(logits)[best]).tolist()
        return known[path]

    return lambda path: look(path)[1]


def compare(models: Loaded, text: TracedPrompt, every: int = 1, rtol: float = 3e-4) -> None:
    """Recompute the beams of some roots."""
    single = OnePath(models, text.tokens.tolist())
    recorded = reference_replay.beams(text)
    same = 0
    chosen = range(len(text.roots))[::-every]
    for r in chosen:
        offered = offers(single, int(text.roots[r]))
        for path, p in recorded[r].items():
            np.testing.assert_allclose(offered(path), p, rtol=rtol, atol=1e-6)
        beams = [reference_replay.beam(offered, w + 1, text.depth) for w in range(text.width)]
        same += set(recorded[r]) == set().union(*beams)
    assert same >= 0.95 * len(chosen)  # but for equals in all but the last bits
    # A node on the text's own way is one row of the head, whichever path it is looked at from.
    for at, p in zip(text.off_index.tolist(), text.off_p, strict=True):
        r, d = divmod(at, text.depth)
        found = recorded[r].get(tuple(text.rank[r, :d].tolist()))
        assert found is None or found == p.tolist()


@pytest.mark.parametrize(
    ("name", "width", "depth", "together"),
    [
        *(("glm4moe", 4, 4, 3), ("qwen35", 3, 4, 3), ("step35-chain", 3, 4, 3)),
        *(("gemma4-assistant", 3, 4, 3), ("glm4moe", 1, 4, 3), ("glm4moe", 16, 2, 1)),
        ("glm4moe", 2, 9, 1),  # so deep that sequences are used again
    ],
)
def test_beams_are_those_of_a_head_driven_path_by_path(
    lib: Library, tiny: Tiny, name: str, width: int, depth: int, together: int
) -> None:
    with loaded(lib, tiny, CASES[name]) as models:
        prompt = models.model.tokenize(PROMPTS[1])
        prober = Prober(depth, together=together, width=width)
        with models.speculator(draft=DraftSettings(2), prober=prober) as recorder:
            text = record(recorder, prober, prompt, 10)
        assert text.width == width
        compare(models, text)
        # Something was found off both paths.
        paths = {path for root in reference_replay.beams(text) for path in root}
        assert any(set(path) - {1} for path in paths) == (width > 1)


def test_the_built_in_model(model: Model) -> None:
    models = Loaded(CASES["qwen35"], model, None)
    options: dict[str, Any] = {"n_ctx": 256, **EXACT}
    prober = Prober(5, width=4)
    with Speculator(model, draft=DraftSettings(2), prober=prober, **options) as recorder:
        text = record(recorder, prober, model.tokenize(builtin()[0].text)[-12:], 12)
    compare(models, text, every=2, rtol=5e-3)  # its weights are F16


@pytest.mark.parametrize("name", CASES)
def test_a_width_changes_nothing_else_and_every_head_has_it(
    lib: Library, tiny: Tiny, name: str
) -> None:
    found = []
    with loaded(lib, tiny, CASES[name]) as models:
        prompt = models.model.tokenize(PROMPTS[1])
        for width in (0, 3):
            prober = Prober(4, width=width)
            with models.speculator(draft=DraftSettings(2), prober=prober) as recorder:
                found.append(record(recorder, prober, prompt, 10))
            header = trace_header(
                depth=prober.depth, width=width, heads=prober.head_kind, n_blocks=prober.n_blocks
            )
    plain, wide = found
    assert plain.tokens.tolist() == wide.tokens.tolist()
    # Other batches round otherwise; a rank can change between equals.
    assert (plain.rank != wide.rank).mean() <= 0.02
    same = plain.rank[:, 0] == wide.rank[:, 0]
    np.testing.assert_allclose(plain.p[same, 0], wide.p[same, 0], atol=2e-5)
    assert wide.width == 3
    for r, root in enumerate(reference_replay.beams(wide)):
        for d in range(wide.depth):
            p = root.get((1,) * d)
            assert p is None or p == wide.p[r, d, : len(p)].tolist()
    trees = replay(Trace(header, [wide]), OptTree(6, wide.depth, 3))
    assert trees.n_verifications
    assert replay(Trace(header, [wide]), Eagle2(6, wide.depth, 3)).n_verifications


def test_a_head_without_a_finite_logit_has_no_beams(lib: Library, tiny: Tiny) -> None:
    with Model(lib, tiny("glm4moe", f32=True, nan_in="blk.2.nextn.eh_proj.weight")) as model:
        prober = Prober(3, together=4, width=2)
        with Speculator(model, draft=DraftSettings(2), n_ctx=256, prober=prober, **EXACT) as one:
            text = record(one, prober, model.tokenize(PROMPTS[0]), 10)
    assert text.beam_node.tolist() == [[0, 0, 0]] * len(text.roots)
    assert np.isnan(text.beam_p).all()
    found = replay(Trace(trace_header(depth=3, width=2), [text]), OptTree(4, 3, 2))
    assert set(map(tuple, found.prompts[0].verifications.tolist())) == {(0, 0)}
    assert found.snapshot.invalid == found.n_verifications
    assert {MISS, UNKNOWN} == set(text.rank.ravel().tolist())


def test_a_batch_that_a_root_does_not_fit_in(attention: Model) -> None:
    with pytest.raises(InputError, match="may take 37 tokens: raise --batch-size or record less"):
        Speculator(
            attention, draft=DraftSettings(2), n_ctx=256, n_batch=32,
            prober=Prober(3, width=8, n_batch=32), **EXACT,
        )  # fmt: skip
