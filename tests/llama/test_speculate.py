"""The driver against llama.cpp's own loop, plain decoding, and its own bookkeeping."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from oracle import speculative_simple
from sessions import with_eog

from mtpstats import Collector
from mtpstats.errors import InputError
from mtpstats.llama import Library, Model
from mtpstats.prompts import builtin
from mtpstats.speculate import NEAR_TIE, DraftSettings, Generation, Sampling, Speculator

TEXTS = [prompt.text for prompt in builtin()][:10]


def generate(
    model: Model, text: str, n: int, draft: DraftSettings | None, **options: object
) -> Generation:
    with Speculator(model, draft=draft, n_threads=1, **options) as speculator:  # type: ignore[arg-type]
        return speculator.generate(model.tokenize(text), n)


def same_up_to_a_near_tie(a: Generation, b: Generation) -> bool:
    """True when equal; fails unless the first difference is at a near tie of one of them."""
    for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            assert min(a.margins[i], b.margins[i]) < NEAR_TIE, (i, a.margins[i], b.margins[i])
            return False
    return True


@pytest.mark.parametrize("p_min", [0.0, 0.5])
@pytest.mark.parametrize("n_max", [1, 3, 8])
def test_text_and_counts_equal_llama_speculative_simple(
    lib: Library, model: Model, model_path: Path, n_max: int, p_min: float
) -> None:
    options = ("--spec-draft-n-max", str(n_max), "--spec-draft-p-min", str(p_min))
    equal = 0
    with Speculator(model, draft=DraftSettings(n_max, 0, p_min), n_threads=1) as speculator:
        for text in TEXTS:
            ours = speculator.generate(model.tokenize(text), 64)
            theirs = speculative_simple(lib.prefix, model_path, text, 64, *options)
            if ours.text.rstrip(b"\n") != theirs.text:
                # Only a near tie may tell them apart: the common part ends at one.
                common = len(
                    list(
                        itertools.takewhile(
                            lambda p: p[0] == p[1], zip(ours.text, theirs.text, strict=False)
                        )
                    )
                )
                length, index = 0, 0
                while length + len(model.piece(ours.tokens[index])) <= common:
                    length += len(model.piece(ours.tokens[index]))
                    index += 1
                assert min(ours.margins[index : index + 2]) < NEAR_TIE, text
                continue
            equal += 1
            assert (ours.drafted, ours.accepted) == (theirs.drafted, theirs.accepted), text
            assert len(ours.tokens) == theirs.decoded
    assert equal >= 8


@pytest.mark.parametrize("n_max", [1, 4, 8])
def test_text_equals_plain_greedy_decoding(model: Model, n_max: int) -> None:
    equal = 0
    for text in TEXTS[:6]:
        drafted = generate(model, text, 80, DraftSettings(n_max))
        plain = generate(model, text, 80, None)
        equal += same_up_to_a_near_tie(drafted, plain)
        assert plain.drafted == plain.accepted == 0
    assert equal >= 4


def test_sampled_text_does_not_depend_on_the_draft(model: Model) -> None:
    sampling = Sampling(temp=0.8, seed=7)
    runs = [
        generate(model, TEXTS[0], 60, draft, sampling=sampling)
        for draft in (None, DraftSettings(1), DraftSettings(5, p_min=0.4))
    ]
    assert same_up_to_a_near_tie(runs[0], runs[1]) or runs[0].near_ties
    assert same_up_to_a_near_tie(runs[0], runs[2]) or runs[0].near_ties
    other = generate(model, TEXTS[0], 60, DraftSettings(1), sampling=Sampling(temp=0.8, seed=8))
    assert other.tokens != runs[0].tokens


def test_counters_follow_from_the_verifications(model: Model) -> None:
    collector = Collector()
    run = generate(model, TEXTS[1], 100, DraftSettings(4, p_min=0.3), collector=collector)
    snapshot = run.snapshot
    assert snapshot is not None
    assert snapshot.verifications == len(run.verifications)
    for i in range(16):
        assert snapshot.drafted[i] == sum(n > i for n, _ in run.verifications)
        assert snapshot.accepted[i] == sum(a > i for _, a in run.verifications)
        assert snapshot.reached[i] == sum(n > i and a >= i for n, a in run.verifications)
        assert snapshot.rank[i].sum() + snapshot.miss[i] == snapshot.reached[i]
        # The head drafts its best token, so accepted means rank 1 and the other way round.
        assert snapshot.rank[i, 0] == snapshot.accepted[i]
    assert snapshot.unresolved == snapshot.discarded == 0


def test_statistics_do_not_change_the_run(model: Model) -> None:
    on = generate(model, TEXTS[2], 60, DraftSettings(3), collector=Collector())
    off = generate(model, TEXTS[2], 60, DraftSettings(3))
    assert on.tokens == off.tokens
    assert on.verifications == off.verifications
    assert off.snapshot is None


class Recording(Collector):
    """Remembers the draft it was last told of."""

    def verify(self, seq: int, tokens: Sequence[int], reason: str = "n_max") -> None:
        self.sent = list(tokens)
        super().verify(seq, tokens, reason)


@pytest.mark.parametrize("n_max", [1, 2, 3, 4, 6, 8])
def test_end_of_generation_inside_a_draft(
    lib: Library, model: Model, model_path: Path, tmp_path: Path, n_max: int
) -> None:
    text = TEXTS[0]
    plain = generate(model, text, 40, DraftSettings(n_max))
    # A token that first appears where a draft of several was accepted.
    eog = plain.tokens[12]
    path = with_eog(model_path, tmp_path / "eog.gguf", eog)
    collector = Recording()
    with Model(lib, path) as ending:
        run = generate(ending, text, 40, DraftSettings(n_max), collector=collector)
    theirs = speculative_simple(lib.prefix, path, text, 40, "--spec-draft-n-max", str(n_max))
    assert run.stop == "eog"
    assert run.tokens == plain.tokens[: plain.tokens.index(eog) + 1]
    assert run.text.rstrip(b"\n") == theirs.text
    assert (run.drafted, run.accepted) == (theirs.drafted, theirs.accepted)
    assert len(run.margins) == len(run.tokens)
    snapshot = run.snapshot
    assert snapshot is not None
    rounds = run.verifications[:-1]
    before = sum(accepted for _, accepted in rounds)
    last = run.tokens[before + len(rounds) :]
    matching = itertools.takewhile(lambda p: p[0] == p[1], zip(collector.sent, last, strict=False))
    # The last token counts where the head had drafted it, and nothing after it does.
    assert int(snapshot.accepted.sum()) == before + len(list(matching))
    assert int(snapshot.drafted.sum()) <= sum(n for n, _ in run.verifications)
    assert run.snapshot.unresolved == 0


def test_stops_when_the_context_is_full(model: Model) -> None:
    prompt = model.tokenize(TEXTS[0])
    with Speculator(model, draft=DraftSettings(4), n_threads=1, n_ctx=256) as speculator:
        n_ctx = speculator.n_ctx
        run = speculator.generate(prompt, -1)
    assert run.stop == "context"
    # The last token generated needs no place of its own.
    assert len(prompt) + len(run.tokens) == n_ctx + 1
    with Speculator(model, draft=None, n_threads=1, n_ctx=256) as plain:
        assert same_up_to_a_near_tie(run, plain.generate(prompt, -1))


def test_a_second_prompt_is_independent_of_the_first(model: Model) -> None:
    with Speculator(model, draft=DraftSettings(4), n_threads=1) as speculator:
        speculator.generate(model.tokenize(TEXTS[3]), 50)
        second = speculator.generate(model.tokenize(TEXTS[4]), 50)
    assert second.tokens == generate(model, TEXTS[4], 50, DraftSettings(4)).tokens


def test_text_streams_out(model: Model) -> None:
    parts: list[bytes] = []
    with Speculator(model, draft=DraftSettings(4), n_threads=1) as speculator:
        run = speculator.generate(model.tokenize(TEXTS[0]), 40, on_text=parts.append)
    assert b"".join(parts) == run.text
    assert len(parts) == len(run.verifications)


def test_n_min_throws_short_drafts_away(model: Model) -> None:
    collector = Collector()
    settings = DraftSettings(n_max=4, n_min=3, p_min=0.6)
    run = generate(model, TEXTS[5], 80, settings, collector=collector)
    lengths = {length for length, _ in run.verifications[:-3]}
    assert lengths <= {0, 3, 4}
    assert 0 in lengths
    assert run.snapshot is not None
    assert run.snapshot.dropped_drafts > 0
    assert run.snapshot.drafted[0] == sum(n > 0 for n, _ in run.verifications)


def test_refuses_what_cannot_run(model: Model) -> None:
    with Speculator(model, draft=DraftSettings(2), n_threads=1, n_ctx=256) as speculator:
        with pytest.raises(InputError, match="empty"):
            speculator.generate([], 5)
        with pytest.raises(InputError, match="300 tokens"):
            speculator.generate([1] * 300, 5)
    for bad in ({"n_max": 0}, {"n_max": 2, "n_min": 3}, {"p_min": 1.5}):
        with pytest.raises(InputError):
            DraftSettings(**bad)  # type: ignore[arg-type]


def test_seconds_add_up(model: Model) -> None:
    run = generate(model, TEXTS[0], 40, DraftSettings(4))
    seconds = run.seconds
    assert min(seconds.prompt, seconds.target, seconds.head, seconds.other) > 0
    assert np.isclose(seconds.generation, seconds.target + seconds.head + seconds.other)
