"""Rollback and sequences: equal to a fresh decode or refused, never silently wrong."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from sessions import EXACT, Tiny, fresh, run, tokens

from mtpstats.errors import InputError, LlamaError
from mtpstats.llama import Batch, Context, Library, Model

DEPTH = 4


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 15, 16, 17, 20, 33])
def test_rollback_equals_a_fresh_decode_or_is_refused(
    either: Model, before: int, length: int
) -> None:
    """Case 13: by 1, by n_rs_seq, by n_rs_seq + 1, after batches around the ubatch's length."""
    ids, then = tokens(before + length), tokens(3, seed=9)
    with Context(either, n_ubatch=16, n_rs_seq=DEPTH, **EXACT) as context:
        allowed = set()
        for back in range(1, min(DEPTH + 2, before + length)):
            context.clear()
            if before:
                run(context, ids[:before])
            run(context, ids[before:], before)
            end = before + length - back
            try:
                context.seq_rm(0, end)
            except InputError:
                assert back > context.rollback_room()
                continue
            allowed.add(back)
            row = run(context, then, end)
            np.testing.assert_allclose(row, fresh(either, ids[:end] + then), atol=2e-5)
    possible = set(range(1, min(DEPTH + 2, before + length)))
    if either.is_hybrid:
        possible &= set(range(1, min(DEPTH, length - 1) + 1))
    assert allowed == possible


def test_a_rollback_is_good_for_one_decode(hybrid: Model) -> None:
    with Context(hybrid, n_rs_seq=DEPTH, **EXACT) as context:
        run(context, tokens(10))
        context.seq_rm(0, 8)
        with pytest.raises(InputError, match="rolled back already"):
            context.seq_rm(0, 7)
        assert context.seq_pos_max() == 7
        context.seq_rm(0)
        np.testing.assert_allclose(run(context, tokens(9)), fresh(hybrid, tokens(9)), atol=2e-5)


def test_without_snapshots_a_hybrid_takes_nothing_back(hybrid: Model) -> None:
    with Context(hybrid, **EXACT) as context:
        assert context.rollback == "none"
        run(context, tokens(10))
        with pytest.raises(InputError, match="without snapshots"):
            context.seq_rm(0, 9)
        context.seq_rm(0, 10)
        context.seq_rm(0)
        assert context.seq_pos_max() == -1


def many(model: Model, n_seq: int, **options: Any) -> Context:
    n_ctx = 512 if options.get("kv_unified") else 256 * n_seq
    return Context(
        model, n_ctx=n_ctx, n_seq_max=n_seq, n_rs_seq=DEPTH, n_ubatch=64, **EXACT, **options
    )


def decode(context: Context, parts: dict[int, tuple[list[int], int]]) -> dict[int, np.ndarray]:
    """Decode ``{seq: (tokens, position)}`` in one batch; logits of each sequence's last."""
    batch, last = Batch(128), {}
    for seq, (ids, pos) in parts.items():
        last[seq] = batch.extend(ids, pos, seq, "last")[-1]
    context.decode(batch)
    return {seq: context.logits(i).copy() for seq, i in last.items()}


@pytest.mark.parametrize("unified", [False, True])
def test_rollback_in_a_batch_of_equal_sequences(either: Model, unified: bool) -> None:
    with many(either, 4, kv_unified=unified) as context:
        decode(context, {s: (tokens(10, s), 0) for s in range(4)})
        decode(context, {s: (tokens(15, s)[10:], 10) for s in range(4)})
        for seq in range(4):
            context.seq_rm(seq, 15 - seq)
        then = tokens(3, seed=9)
        rows = decode(context, {s: (then, 15 - s) for s in range(4)})
        for seq, row in rows.items():
            expected = fresh(either, tokens(15, seq)[: 15 - seq] + then)
            np.testing.assert_allclose(row, expected, atol=5e-5)


def silently_wrong(context: Context, seq: int, end: int, kept: list[int]) -> float:
    """What libllama makes of the rollback when nobody refuses it: the error of the next logits."""
    context._fn.llama_memory_seq_rm(context._memory, seq, end, -1)
    context._next[seq] = end
    then = tokens(3, seed=9)
    row = decode(context, {seq: (then, end)})[seq]
    return float(np.abs(row - fresh(context.model, kept[:end] + then)).max())


def test_trap_rollback_after_another_batch(hybrid: Model) -> None:
    with many(hybrid, 4, kv_unified=True) as context:
        decode(context, {s: (tokens(10, s), 0) for s in range(4)})
        decode(context, {1: (tokens(15, 1)[10:], 10)})
        decode(context, {0: (tokens(15, 0)[10:], 10), 2: (tokens(15, 2)[10:], 10)})
        with pytest.raises(InputError, match="can take back 0"):
            context.seq_rm(1, 12)
        assert silently_wrong(context, 1, 12, tokens(15, 1)) > 1e-2


def test_trap_rollback_in_a_batch_of_unequal_sequences(hybrid: Model) -> None:
    # The order of the prompts puts sequence 0's cell between those of 1 and 2.
    with many(hybrid, 3) as context:
        for seq in (1, 0, 2):
            decode(context, {seq: (tokens(10, seq), 0)})
        decode(context, {s: (tokens(16, s)[10 : 16 if s == 0 else 13], 10) for s in range(3)})
        with pytest.raises(InputError, match="equal length"):
            context.seq_rm(0, 14)
        assert silently_wrong(context, 0, 14, tokens(16, 0)) > 1e-2


def test_batches_of_one_sequence_leave_the_others_their_snapshots(hybrid: Model) -> None:
    for unified in (False, True):
        with many(hybrid, 3, kv_unified=unified) as context:
            for seq in (1, 0, 2):
                decode(context, {seq: (tokens(10, seq), 0)})
            for seq in (1, 2, 0):
                decode(context, {seq: (tokens(14 + seq, seq)[10:], 10)})
            assert [context.rollback_room(seq) for seq in range(3)] == [3, 4, 4]
            then = tokens(3, seed=9)
            for seq in range(3):
                context.seq_rm(seq, 11 + seq)
            for seq in (2, 0, 1):
                row = decode(context, {seq: (then, 11 + seq)})[seq]
                expected = fresh(hybrid, tokens(14 + seq, seq)[: 11 + seq] + then)
                np.testing.assert_allclose(row, expected, atol=5e-5)


@pytest.mark.parametrize("unified", [False, True])
def test_groups_of_unequal_sequences_can_all_be_rolled_back(either: Model, unified: bool) -> None:
    lengths = {0: 5, 1: 3, 2: 4, 3: 3}
    with many(either, 4, kv_unified=unified) as context:
        for seq in (2, 0, 3, 1):
            decode(context, {seq: (tokens(10, seq), 0)})
        groups = context.groups(lengths)
        if not either.is_hybrid:
            assert groups == [[0, 1, 2, 3]]
        else:
            assert groups == ([[1, 3], [2], [0]] if unified else [[1], [3], [2], [0]])
        for group in groups:
            decode(context, {s: (tokens(10 + lengths[s], s)[10:], 10) for s in group})
            for seq in group:
                context.seq_rm(seq, 11)
        then = tokens(3, seed=9)
        rows = decode(context, dict.fromkeys(range(4), (then, 11)))
        for seq, row in rows.items():
            expected = fresh(either, tokens(10 + lengths[seq], seq)[:11] + then)
            np.testing.assert_allclose(row, expected, atol=5e-5)


def test_groups_fit_a_ubatch(hybrid: Model) -> None:
    with Context(hybrid, n_ctx=1024, n_seq_max=4, n_rs_seq=4, n_ubatch=8, n_threads=1) as context:
        assert context.groups(dict.fromkeys(range(4), 3)) == [[0, 1], [2, 3]]
    with Context(hybrid, n_ctx=1024, n_seq_max=4, n_threads=1) as context:
        assert context.groups({0: 1, 2: 3}) == [[0, 2]]


@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_rollback_is_what_llama_cpp_measures(either: Model, n_rs_seq: int) -> None:
    """llama.cpp decodes two tokens and looks whether the second can be removed."""
    with Context(either, n_rs_seq=n_rs_seq, **EXACT) as target:
        head = Context(either, mtp=True, other=target, **EXACT)
        rows = Batch(2, n_embd=either.n_embd_out)
        for context, batch in ((target, Batch(2)), (head, rows)):
            batch.extend([0, 0], 0)
            context.decode(batch)
            try:
                possible = context._fn.llama_memory_seq_rm(context._memory, 0, 1, -1)
            except LlamaError:
                possible = False
            assert possible == (context.rollback != "none")
            assert (context.rollback == "snapshots") == (context.n_rs_seq > 0)


def test_runs_of_sequence_ids_without_a_shared_cache(hybrid: Model) -> None:
    with many(hybrid, 4) as context:
        decode(context, {s: (tokens(10, s), 0) for s in (3, 0, 1, 2)})
        decode(context, {s: (tokens(13, s)[10:], 10) for s in (0, 2, 3)})
        # Two ubatches, {0} and {2, 3}: the second may move the cell of 0.
        assert [context.rollback_room(s) for s in range(4)] == [0, 0, 2, 2]


@pytest.mark.parametrize("unified", [False, True])
def test_copied_sequences_go_their_own_ways(either: Model, unified: bool) -> None:
    with many(either, 2, kv_unified=unified) as context:
        decode(context, {0: (tokens(10), 0)})
        context.seq_cp(0, 1)
        assert context.seq_pos_max(1) == 9
        a, b = tokens(4, 5), tokens(4, 6)
        rows = decode(context, {0: (a, 10), 1: (b, 10)})
        np.testing.assert_allclose(rows[0], fresh(either, tokens(10) + a), atol=5e-5)
        np.testing.assert_allclose(rows[1], fresh(either, tokens(10) + b), atol=5e-5)
        context.seq_keep(1)
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (-1, 13)
        row = decode(context, {0: (tokens(5, 7), 0)})[0]
        np.testing.assert_allclose(row, fresh(either, tokens(5, 7)), atol=5e-5)


def test_trap_a_copy_after_a_rollback(hybrid: Model) -> None:
    with many(hybrid, 2) as context:
        decode(context, {0: (tokens(10), 0)})
        context.seq_rm(0, 8)
        with pytest.raises(InputError, match="state before the rollback"):
            context.seq_cp(0, 1)
        context._fn.llama_memory_seq_cp(context._memory, 0, 1, -1, -1)
        context._next[1] = 8
        then = tokens(3, seed=9)
        row = decode(context, {1: (then, 8)})[1]
        assert np.abs(row - fresh(hybrid, tokens(8) + then)).max() > 1e-2


def test_trap_a_rollback_after_a_copy(hybrid: Model) -> None:
    with many(hybrid, 2) as context:
        decode(context, {0: (tokens(10), 0)})
        context.seq_cp(0, 1)
        for seq in (0, 1):
            with pytest.raises(InputError, match="can take back 0"):
                context.seq_rm(seq, 8)


def test_trap_sequences_kept_after_a_rollback(hybrid: Model) -> None:
    expected = fresh(hybrid, tokens(9, 1))
    for guarded in (True, False):
        with many(hybrid, 3, kv_unified=True) as context:
            decode(context, {s: (tokens(10, s), 0) for s in range(3)})
            context.seq_rm(1, 8)
            if guarded:
                context.seq_keep(2)
            else:
                hybrid.lib._cdll["llama_memory_seq_keep"](ctypes.c_void_p(context._memory), 2)
                context._next[1] = 0
            row = decode(context, {1: (tokens(9, 1), 0)})[1]
            assert (np.abs(row - expected).max() < 5e-5) == guarded


def test_copies_libllama_would_abort_on_or_mix(either: Model) -> None:
    with many(either, 2) as context:
        decode(context, {0: (tokens(10), 0)})
        with pytest.raises(InputError, match="only whole sequences"):
            context.seq_cp(0, 1, 0, 5)
        with pytest.raises(InputError, match="only whole sequences"):
            context.seq_cp(0, 1, 2)
    with many(either, 2, kv_unified=True) as context:
        decode(context, {0: (tokens(10), 0), 1: (tokens(4, 1), 0)})
        with pytest.raises(InputError, match="not empty there"):
            context.seq_cp(0, 1)


def test_part_of_a_sequence_is_copied_where_the_cache_is_shared(attention: Model) -> None:
    with many(attention, 2, kv_unified=True) as context:
        decode(context, {0: (tokens(10), 0)})
        context.seq_cp(0, 1, 0, 6)
        assert context.seq_pos_max(1) == 5
        then = tokens(3, seed=9)
        row = decode(context, {1: (then, 6)})[1]
        np.testing.assert_allclose(row, fresh(attention, tokens(6) + then), atol=5e-5)


def test_coupled_tokens_leave_no_rollback(hybrid: Model, attention: Model) -> None:
    for model in (hybrid, attention):
        with many(model, 2, kv_unified=True) as context:
            decode(context, {0: (tokens(10), 0)})
            context.seq_cp(0, 1)
            batch = Batch(4, n_seq_max=2)
            batch.add(1, 10, (0, 1), True)
            batch.add(2, 11, 0, True)
            batch.add(3, 11, [1], True)
            context.decode(batch)
            for i, path in ((0, [1]), (1, [1, 2]), (2, [1, 3])):
                expected = fresh(model, tokens(10) + path)
                np.testing.assert_allclose(context.logits(i), expected, atol=5e-5)
            if model.is_hybrid:
                assert context.rollback_room(0) == context.rollback_room(1) == 0
                with pytest.raises(InputError, match="can take back 0"):
                    context.seq_rm(0, 11)
                assert silently_wrong(context, 0, 11, [*tokens(10), 1]) > 2e-4


@pytest.mark.parametrize("unified", [False, True])
def test_coupled_tokens_where_they_cannot_be(lib: Library, tiny: Tiny, unified: bool) -> None:
    arch = "deepseek4" if unified else "glm4moe"
    with Model(lib, tiny(arch, f32=True)) as model, many(model, 2, kv_unified=unified) as context:
        batch = Batch(1, n_seq_max=2)
        batch.add(1, 0, (0, 1), True)
        why = "cannot have a token in several" if unified else "without kv_unified a token belongs"
        with pytest.raises(InputError, match=why):
            context.decode(batch)
        decode(context, {0: (tokens(10), 0)})
        with pytest.raises(InputError, match="only whole sequences"):
            context.seq_cp(0, 1, 0, 5)
        context.seq_cp(0, 1)
        row = decode(context, {1: (tokens(3, 9), 10)})[1]
        np.testing.assert_allclose(row, fresh(model, tokens(10) + tokens(3, 9)), atol=5e-5)


def test_trap_a_rollback_behind_a_sliding_window(lib: Library, tiny: Tiny) -> None:
    """Cells that left the window are given to later tokens: going back there finds others'."""
    with Model(lib, tiny("step35", f32=True, n_ctx=1024)) as model:
        assert model.n_swa == 16
        ids, then = tokens(400), tokens(3, seed=9)
        for swa_full, end in ((True, 40), (False, 390), (False, 40)):
            with Context(model, n_ubatch=32, swa_full=swa_full, **EXACT) as context:
                run(context, ids)
                expected = fresh(model, ids[:end] + then)
                if end == 40 and not swa_full:
                    with pytest.raises(InputError, match="its sliding window of 16 would begin"):
                        context.seq_rm(0, end)
                    assert silently_wrong(context, 0, end, ids) > 1e-2
                else:
                    context.seq_rm(0, end)
                    np.testing.assert_allclose(run(context, then, end), expected, atol=5e-5)


@pytest.mark.parametrize("kept", [3, 5])
def test_chains_on_recurrent_memory(hybrid: Model, kept: int) -> None:
    """Equally long chains, a sequence each; the winner's accepted part becomes everyone's."""
    start, end, winner = 10, 15, 1
    with many(hybrid, 3, kv_unified=True) as context:
        decode(context, {0: (tokens(start), 0)})
        for seq in (1, 2):
            context.seq_cp(0, seq)
        chains = {seq: tokens(end - start, seq) for seq in range(3)}
        decode(context, {seq: (chain, start) for seq, chain in chains.items()})
        cut = start + kept
        for seq in range(3):
            if cut == end and seq != winner:
                context.seq_rm(seq)
            if cut < end:
                if seq != winner:
                    context.seq_rm(seq, start, cut)
                context.seq_rm(seq, cut)
        for seq in (0, 2):
            context.seq_cp(winner, seq, *((start, cut) if cut < end else ()))
        then = {seq: (tokens(4, 20 + seq), cut) for seq in range(3)}
        rows = decode(context, then)
        for seq, row in rows.items():
            ids = tokens(start) + chains[winner][:kept] + then[seq][0]
            np.testing.assert_allclose(row, fresh(hybrid, ids), atol=5e-5)
