"""Every architecture and driver mode against llama.cpp's loop, plain decoding, plain Python."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archs import CASES, HEAD, LATER, PROMPTS, TRUNK, Loaded, loaded
from oracle import speculative_simple
from sessions import EXACT, Tiny, tokens, with_eog

from mtpstats import Collector, Snapshot
from mtpstats.errors import InputError, ModelError
from mtpstats.head import ChainHead, Head, SharedHead
from mtpstats.llama import Batch, Context, Library, Model, arch
from mtpstats.speculate import NEAR_TIE, DraftSettings, Generation, Speculator


@pytest.fixture(scope="module", params=list(CASES))
def one(request: pytest.FixtureRequest, lib: Library, tiny: Tiny) -> Iterator[Loaded]:
    with loaded(lib, tiny, CASES[request.param]) as models:
        yield models


def generate(
    one: Loaded, text: str, n: int, n_max: int, p_min: float = 0.0, **options: Any
) -> Generation:
    draft = DraftSettings(n_max, p_min=p_min) if n_max else None
    with one.speculator(draft=draft, **options) as speculator:
        return speculator.generate(one.model.tokenize(text), n)


def compare(a: Generation, b: Generation) -> bool:
    """True when one text begins the other; fails unless they part at a near tie."""
    for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            assert min(a.margins[i], b.margins[i]) < NEAR_TIE, (i, a.margins[i], b.margins[i])
            return False
    return True


@pytest.mark.parametrize("n_max", [1, 4])
def test_text_and_counts(lib: Library, one: Loaded, n_max: int) -> None:
    """Drafted and accepted are llama-speculative-simple's, the text is that of plain decoding."""
    compat = arch.of(one.model.arch, 1).rollback == "none"
    text, n = PROMPTS[0], 32
    ours = generate(one, text, n, n_max, compat_counts=compat)
    theirs = speculative_simple(
        lib.prefix, one.model.path, text, n, "--spec-draft-n-max", str(n_max), *one.oracle
    )
    # llama.cpp's log ends a piece at a zero byte.
    assert ours.text.replace(b"\0", b"").rstrip(b"\n") == theirs.text
    assert (ours.drafted, ours.accepted) == (theirs.drafted, theirs.accepted)
    assert len(ours.tokens) == theirs.decoded
    assert ours.accepted > 0
    assert compare(ours, generate(one, text, n, 0))
    if compat:
        assert ours.drafted == ours.accepted
        assert compare(generate(one, text, n, n_max), ours)
    else:
        assert ours.accepted < ours.drafted


def test_head_and_memory_are_what_the_table_says(one: Loaded) -> None:
    case, head_model = one.case, one.draft or one.model
    known = head_model.kind
    with one.speculator(draft=DraftSettings(4)) as speculator:
        head = speculator._head
        assert head is not None
        expected = {"single": Head, "chain": ChainHead, "shared": SharedHead}[known.heads]
        assert type(head) is (expected if case.n_blocks > 1 or known.target else Head)
        # One token per block of a chain, and the caller can see it.
        assert speculator.n_max == (3 if case.n_blocks == 3 else 4)
    if not known.target:
        assert known.rollback
        with Context(one.model, n_ctx=256, n_rs_seq=4, n_threads=1) as target:
            assert target.rollback == known.rollback
            assert known.memory.startswith("hybrid") <= one.model.is_hybrid
            # As llama.cpp finds out: of two tokens, can the second be removed?
            batch = Batch(2)
            batch.extend([0, 0], 0)
            target.decode(batch)
            seq_rm = one.model.lib._cdll["llama_memory_seq_rm"]
            seq_rm.argtypes, seq_rm.restype = target._fn.llama_memory_seq_rm.argtypes, bool
            assert seq_rm(target._memory, 0, 1, -1) == (known.rollback != "none")


def rank_in(row: list[float], token: int) -> int:
    """1 for the greatest logit; of equal ones the lower token is better."""
    better = sum(x > row[token] for x in row)
    return 1 + better + sum(x == row[token] for x in row[:token])


def recorded(one: Loaded, compat: bool) -> tuple[Generation, list[tuple[int, list[list[float]]]]]:
    """A run, and of each draft where in the generated text it starts and the head's logits."""
    prompt = one.model.tokenize(PROMPTS[1])
    drafts: list[tuple[int, list[list[float]]]] = []
    with one.speculator(
        draft=DraftSettings(4), collector=Collector(), compat_counts=compat
    ) as speculator:
        head = speculator._head
        assert head is not None
        draft, read, n_vocab = head.draft, head.context.logits_address, one.model.n_vocab

        def record_draft(slots: list[Any]) -> None:
            drafts.append((slots[0].n_past + 1 - len(prompt), []))
            draft(slots)

        def record_row(i: int) -> int:
            address = read(i)
            drafts[-1][1].append(list((ctypes.c_float * n_vocab).from_address(address)))
            return address

        head.draft = record_draft  # type: ignore[method-assign, assignment]
        head.context.logits_address = record_row  # type: ignore[method-assign]
        return speculator.generate(prompt, 40), drafts


def test_statistics_equal_a_recomputation_from_the_logits(one: Loaded) -> None:
    check_statistics(one, compat=False)


def test_statistics_do_not_depend_on_how_verifications_are_counted(
    lib: Library, tiny: Tiny
) -> None:
    with loaded(lib, tiny, CASES["qwen3next"]) as one:
        check_statistics(one, compat=True)


def check_statistics(one: Loaded, compat: bool) -> None:
    run, drafts = recorded(one, compat)
    rank = [[0] * 8 for _ in range(16)]
    miss, reached, accepted, drafted = ([0] * 16 for _ in range(4))
    sum_p = [[0.0] * 8 for _ in range(16)]
    verifications = []
    for place, rows in drafts:
        n_accepted, length = 0, len(rows)
        for i, row in enumerate(rows):
            if place + n_accepted == len(run.tokens):
                # The text ended with an accepted token, which llama.cpp takes for the target's own.
                n_accepted -= 1
                break
            drafted[i] += 1
            if i > n_accepted:
                continue
            reached[i] += 1
            place_in_row = rank_in(row, run.tokens[place + i])
            if place_in_row <= 8:
                rank[i][place_in_row - 1] += 1
            else:
                miss[i] += 1
            # The head drafts what it ranks first.
            if place_in_row == 1:
                n_accepted += 1
                accepted[i] += 1
            top = max(row)
            total = sum(math.exp(x - top) for x in row)
            for r, x in enumerate(sorted(row, reverse=True)[:8]):
                sum_p[i][r] += math.exp(x - top) / total
        if compat and n_accepted < length:
            n_accepted = length = n_accepted + 1
        verifications.append((length, n_accepted))
    assert verifications == run.verifications
    snapshot = run.snapshot
    assert snapshot is not None
    assert snapshot.verifications == len(drafts)
    assert snapshot.drafted.tolist() == drafted
    assert snapshot.reached.tolist() == reached
    assert snapshot.accepted.tolist() == accepted
    assert snapshot.rank.tolist() == rank
    assert snapshot.miss.tolist() == miss
    np.testing.assert_allclose(snapshot.sum_p, sum_p, atol=1e-4)
    assert snapshot.discarded == snapshot.unresolved == snapshot.invalid == 0


def test_texts_decoded_together_equal_those_decoded_alone(
    lib: Library, tiny: Tiny, one: Loaded, tmp_path: Path
) -> None:
    """Prompts of unequal length, more of them than places, some of which end early."""
    eog = generate(one, PROMPTS[1], 12, 3).tokens[5]
    with loaded(lib, tiny, one.case, with_eog(one.model.path, tmp_path / "eog.gguf", eog)) as ends:
        prompts = [ends.model.tokenize(text) for text in PROMPTS]
        assert len({len(prompt) for prompt in prompts}) == len(prompts)

        def together(n_parallel: int, prompts: list[list[int]]) -> list[Generation]:
            with ends.speculator(
                draft=DraftSettings(3), n_parallel=n_parallel, collector=Collector()
            ) as speculator:
                return speculator.generate_all(prompts, 20)

        alone = [together(1, [prompt])[0] for prompt in prompts]
        assert {run.stop for run in alone} == {"eog", "n_predict"}
        for n_parallel in (1, 2, 4):
            runs = together(n_parallel, prompts)
            same = [compare(a, b) for a, b in zip(alone, runs, strict=True)]
            assert sum(same) >= len(prompts) - 1
            for a, b in zip(alone, runs, strict=True):
                if compare(a, b):
                    assert a.tokens == b.tokens
                    assert a.verifications == b.verifications
                    assert a.stop == b.stop
                    assert a.snapshot is not None
                    assert b.snapshot is not None
                    assert a.snapshot.rank.tolist() == b.snapshot.rank.tolist()
            if all(same):
                merged = Snapshot.merge(*(run.snapshot for run in runs if run.snapshot))
                counts = [run.snapshot.rank for run in alone if run.snapshot]
                assert merged.rank.tolist() == np.sum(counts, axis=0).tolist()
                assert merged.verifications == sum(len(run.verifications) for run in alone)


@pytest.mark.parametrize("name", LATER)
def test_an_architecture_of_later_versions(
    lib: Library, tiny: Tiny, name: str, tmp_path: Path
) -> None:
    """As the others where llama.cpp asks for its block's tensors, else refused."""
    with loaded(lib, tiny, LATER[name]) as one:
        if not one.model.has_mtp:
            with pytest.raises(ModelError, match=r"cannot draft with MTP.*holds the trunk only"):
                one.speculator(draft=DraftSettings(2))
            return
        for n_max in (1, 4):
            test_text_and_counts(lib, one, n_max)
        test_head_and_memory_are_what_the_table_says(one)
        check_statistics(one, compat=False)
        test_texts_decoded_together_equal_those_decoded_alone(lib, tiny, one, tmp_path)


@pytest.mark.parametrize("name", ["qwen3next", "glm4moe"])
def test_every_text_has_the_whole_context(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as one:
        for draft in (None, DraftSettings(2)):
            options = {**EXACT, "draft": draft, "n_parallel": 3}
            with Speculator(one.model, **options) as speculator:
                assert speculator.n_ctx == one.model.n_ctx_train == 512
            with Speculator(one.model, n_ctx=256, **options) as speculator:
                assert speculator.n_ctx == 256
                runs = speculator.generate_all([tokens(250, seed) for seed in range(4)], -1)
            assert [len(run.tokens) for run in runs] == [7] * 4


MODES = ["qwen3next", "deepseek4", "hy_v3-chain", "gemma4-assistant"]


@pytest.mark.parametrize("place", [2, 4, 6, 7, 8, 9])
@pytest.mark.parametrize("name", MODES)
def test_end_of_generation(lib: Library, tiny: Tiny, tmp_path: Path, name: str, place: int) -> None:
    """Wherever it comes: accepted, the target's own after a rejection, or after all of a draft."""
    with loaded(lib, tiny, CASES[name]) as one:
        plain = generate(one, PROMPTS[0], 24, 0)
        eog = plain.tokens[place]
        with loaded(
            lib, tiny, CASES[name], with_eog(one.model.path, tmp_path / "e.gguf", eog)
        ) as ends:
            run = generate(
                ends, PROMPTS[0], 24, 4, collector=Collector(), compat_counts=name == "qwen3next"
            )
            theirs = speculative_simple(
                lib.prefix, ends.model.path, PROMPTS[0], 24,
                "--spec-draft-n-max", "4", *ends.oracle,
            )  # fmt: skip
    assert run.stop == "eog"
    assert run.tokens == plain.tokens[: plain.tokens.index(eog) + 1]
    assert run.text.replace(b"\0", b"").rstrip(b"\n") == theirs.text
    assert (run.drafted, run.accepted) == (theirs.drafted, theirs.accepted)
    assert run.snapshot is not None
    assert run.snapshot.verifications == len(run.verifications)
    assert run.snapshot.discarded == run.snapshot.unresolved == 0


@pytest.mark.parametrize("name", MODES)
def test_end_of_the_context(lib: Library, tiny: Tiny, name: str) -> None:
    prompt = tokens(220)
    with loaded(lib, tiny, CASES[name]) as one:
        with one.speculator(draft=DraftSettings(4)) as speculator:
            assert speculator.n_ctx == 256
            run = speculator.generate(prompt, -1)
        with one.speculator(draft=None) as speculator:
            plain = speculator.generate(prompt, -1)
    assert run.stop == plain.stop == "context"
    # The last token needs no place of its own.
    assert len(run.tokens) == len(plain.tokens) == 256 - len(prompt) + 1
    assert compare(run, plain)


@pytest.mark.parametrize("text", ["on and on", "a house on the hill"])
def test_counts_of_long_drafts_that_are_verified_again(lib: Library, tiny: Tiny, text: str) -> None:
    """After these the row that llama.cpp goes on from makes a difference."""
    with loaded(lib, tiny, CASES["qwen3next"]) as one:
        run = generate(one, text, 48, 8, compat_counts=True)
        theirs = speculative_simple(
            lib.prefix, one.model.path, text, 48, "--spec-draft-n-max", "8", *one.oracle
        )
    assert (run.drafted, run.accepted) == (theirs.drafted, theirs.accepted)


@pytest.mark.parametrize("name", ["step35-chain", "gemma4-assistant"])
def test_confident_drafts_only(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as one:
        run = generate(one, PROMPTS[0], 32, 4, p_min=0.4)
        theirs = speculative_simple(
            lib.prefix, one.model.path, PROMPTS[0], 32,
            "--spec-draft-n-max", "4", "--spec-draft-p-min", "0.4", *one.oracle,
        )  # fmt: skip
    assert len({length for length, _ in run.verifications}) > 2
    assert (run.drafted, run.accepted) == (theirs.drafted, theirs.accepted)


def test_a_chain_is_not_asked_for_more_than_it_has_heads_for(lib: Library, tiny: Tiny) -> None:
    with loaded(lib, tiny, CASES["step35-chain"]) as one:
        with pytest.raises(InputError, match="n_min is 4: this model has heads for 3 tokens"):
            one.speculator(draft=DraftSettings(8, n_min=4))
        with one.speculator(draft=DraftSettings(8, n_min=3)) as whole:
            run = whole.generate(one.model.tokenize(PROMPTS[0]), 12)
    assert {length for length, _ in run.verifications[:-3]} == {3}


def test_a_shared_head_has_nothing_to_go_on_before_the_first_token(
    lib: Library, tiny: Tiny
) -> None:
    with loaded(lib, tiny, CASES["gemma4-assistant"]) as one:
        run = generate(one, "x", 8, 3, collector=Collector())
    assert run.verifications[0] == (0, 0)
    assert run.verifications[1][0] == 3
    assert run.snapshot is not None
    assert run.snapshot.nan_rows == run.snapshot.invalid == 0


@pytest.mark.parametrize("draft", [None, DraftSettings(3)])
def test_a_target_without_a_finite_logit_ends_the_text(
    lib: Library, tiny: Tiny, draft: DraftSettings | None
) -> None:
    """Its rows leave the head without one too: the round is invalid, and that once."""
    with Model(lib, tiny("glm4moe", f32=True, nan_in="output_norm.weight")) as model:
        one = Loaded(CASES["glm4moe"], model, None)
        with one.speculator(draft=draft, n_parallel=2, collector=Collector()) as driver:
            runs = driver.generate_all([model.tokenize(text) for text in PROMPTS[:3]], 8)
    for run in runs:
        assert (run.stop, run.tokens, run.verifications) == ("nan", [], [])
        assert run.snapshot is not None
        assert (run.snapshot.invalid, run.snapshot.unresolved) == (1, 0)


def test_heads_and_targets_that_do_not_go_together(lib: Library, tiny: Tiny) -> None:
    def refused(target: Path, draft: Path | None, message: str) -> None:
        with Model(lib, target) as model, ExitStack() as stack:
            other = stack.enter_context(Model(lib, draft)) if draft else None
            with pytest.raises(ModelError, match=message):
                Speculator(model, draft=DraftSettings(2), draft_model=other, **EXACT)

    f32 = {"f32": True}
    gemma, assistant = tiny("gemma4", **f32), tiny("gemma4-assistant", **f32)
    trunk, head = tiny("glm4moe", **f32, without=TRUNK), tiny("glm4moe", **f32, only=HEAD)
    refused(gemma, None, "gemma4.*its head is a gemma4-assistant GGUF of its own")
    refused(assistant, None, "gemma4-assistant.*cannot generate.*a head for gemma4 models")
    refused(trunk, None, "holds the trunk only.*name the file that has it as the draft model")
    refused(head, None, r"cannot generate: it holds NextN blocks only")
    refused(trunk, assistant, "drafts for gemma4 models only; .* is glm4moe")
    refused(tiny("hy_v3", **f32, without=TRUNK), head, "drafts for glm4moe models only; .*hy_v3")
    refused(trunk, trunk, "holds the trunk only")


def test_an_unknown_architecture_is_taken_for_what_it_looks_like() -> None:
    assert arch.of("tomorrow", 1).heads == "single"
    assert arch.of("tomorrow", 2).heads == "chain"
    assert arch.of("tomorrow", 1).rollback == ""
    assert arch.of("hy_v3", 1) is arch.KNOWN["hy_v3"]
    tested = {case.arch for case in (*CASES.values(), *LATER.values())}
    assert set(arch.KNOWN) == tested - {"gemma4"} | {"gemma4-assistant"}
