"""Model, Context and Batch on real models; what a context refuses is in ``test_refusals``."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import EXACT, Tiny, fresh, run, tokens

from mtpstats.errors import InputError, ModelError
from mtpstats.llama import Batch, Context, Library, Model

DATA = Path(__file__).parents[1] / "data"


# -- the model ------------------------------------------------------------------------------------


def test_facts_of_a_model(hybrid: Model, attention: Model) -> None:
    assert (hybrid.arch, hybrid.n_vocab, hybrid.n_layer, hybrid.n_layer_nextn) == (
        "qwen35",
        512,
        2,
        1,
    )
    assert (hybrid.n_embd, hybrid.n_embd_out, hybrid.n_ctx_train) == (64, 64, 512)
    assert (hybrid.is_hybrid, hybrid.is_recurrent, hybrid.has_mtp) == (True, False, True)
    assert (attention.arch, attention.is_hybrid, attention.has_mtp) == ("glm4moe", False, True)
    sizes = [int(np.prod(t.shape)) for t in hybrid.header.first.tensors.values()]
    assert hybrid.n_params == sum(sizes)
    assert hybrid.size == sum(t.size for t in hybrid.header.first.tensors.values())
    assert "F32" in hybrid.ftype
    assert hybrid.meta("general.name") == "tiny-qwen35"
    assert hybrid.meta("nothing.here") is None
    assert hybrid.metadata()["qwen35.block_count"] == "3"
    assert hybrid.chat_template() is None
    assert hybrid.bos in range(-1, 512)


def test_tokens_and_pieces_round_trip(model: Model, hybrid: Model) -> None:
    for one in (model, hybrid):
        for text in ("def f(x):\n    return x\n", "the time\tof", "ümläut 中文 🙂", "nul\0nul", ""):
            ids = one.tokenize(text, add_special=False)
            assert b"".join(map(one.piece, ids)) == text.encode()
            assert all(0 <= i < one.n_vocab for i in ids)


def test_merges_are_applied(hybrid: Model) -> None:
    # 23 merges after 256 bytes and the end token: "th" is the first, "he" the second.
    assert hybrid.tokenize("the") == [257, ord("e")]
    assert hybrid.tokenize("he") == [258]


def test_special_tokens(hybrid: Model) -> None:
    assert hybrid.tokenize("a<|end|>", parse_special=True)[-1] == 256
    assert 256 not in hybrid.tokenize("a<|end|>", parse_special=False)
    assert hybrid.is_eog(256)
    assert not hybrid.is_eog(0)
    assert hybrid.piece(256) == b"<|end|>"
    assert hybrid.piece(256, special=False) == b""
    for bad in (-1, 512, 2**31):
        with pytest.raises(InputError, match="vocabulary"):
            hybrid.piece(bad)
        with pytest.raises(InputError, match="vocabulary"):
            hybrid.is_eog(bad)


def test_a_model_without_a_tokenizer_still_decodes(lib: Library, tiny: Tiny) -> None:
    with Model(lib, tiny("qwen35", tokenizer=False)) as model:
        assert model.n_vocab == 512
        for call in (lambda: model.tokenize("x"), lambda: model.piece(1), lambda: model.is_eog(1)):
            with pytest.raises(ModelError, match="has no tokenizer"):
                call()
        with Context(model, **EXACT) as context:
            assert np.isfinite(run(context, [1, 2, 3])).all()


def test_text_that_is_no_unicode_is_refused(hybrid: Model) -> None:
    with pytest.raises(InputError, match="character 1"):
        hybrid.tokenize("a\ud800")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"not a model at all", "not a GGUF file"),
        ("half", "truncated"),
    ],
)
def test_bad_files_are_refused_by_name(
    lib: Library, tiny: Tiny, tmp_path: Path, content: Any, message: str
) -> None:
    path = tmp_path / "bad\x1b.gguf"
    if content == "half":
        whole = tiny("qwen35").read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as raised:
        Model(lib, path)
    assert "bad\\x1b.gguf" in str(raised.value)


def test_a_tensor_of_the_wrong_shape_comes_with_libllamas_words(
    lib: Library, tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "shape.gguf"
    whole = tiny("qwen35").read_bytes()
    path.write_bytes(whole.replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_gite.weight"))
    with pytest.raises(ModelError, match=r"shape\.gguf: cannot be loaded: .*blk\.0\.ffn_gate"):
        Model(lib, path)


def test_progress_and_stopping_the_load(lib: Library, tiny: Tiny) -> None:
    seen: list[float] = []
    Model(lib, tiny("qwen35"), progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(lib, tiny("qwen35"), progress=stop)


# -- decoding -------------------------------------------------------------------------------------


def test_the_builtin_models_logits_equal_the_recorded_row(model: Model) -> None:
    recorded = json.loads((DATA / "builtin_logits.json").read_text())
    with Context(model, n_threads=1) as context:
        row = run(context, recorded["prompt_tokens"])
    expected = np.array(recorded["logits"], dtype=np.float32)
    assert row.shape == (model.n_vocab,)
    # F16 weights: kernels of different widths differ by a few thousandths.
    np.testing.assert_allclose(row[: len(expected)], expected, atol=2e-2)
    assert int(row.argmax()) == recorded["next_token"]


def test_one_batch_or_many_give_the_same_logits(either: Model) -> None:
    ids = tokens(20)
    whole = fresh(either, ids)
    with Context(either, n_ubatch=16, **EXACT) as context:
        for start, stop in ((0, 1), (1, 8), (8, 19), (19, 20)):
            row = run(context, ids[start:stop], start)
        np.testing.assert_allclose(row, whole, atol=2e-5)
        assert (context.seq_pos_min(), context.seq_pos_max()) in ((0, 19), (19, 19))
        context.clear()
        np.testing.assert_allclose(run(context, ids), whole, atol=2e-5)


def test_rows_asked_for_are_the_rows_given(either: Model) -> None:
    ids = tokens(6)
    with Context(either, **EXACT) as context:
        batch = Batch(6)
        for i, token in enumerate(ids):
            batch.add(token, i, 0, i in (1, 4))
        context.decode(batch)
        for i in (1, 4):
            np.testing.assert_allclose(context.logits(i), fresh(either, ids[: i + 1]), atol=2e-5)
        for i in (0, 2, 5, 6, -1, 100):
            with pytest.raises(InputError, match="no logits"):
                context.logits_address(i)


def test_adding_to_a_decoded_batch_gives_no_row_before_its_decode(either: Model) -> None:
    with Context(either, **EXACT) as context:
        batch = Batch(4)
        batch.add(5, 0, 0, True)
        context.decode(batch)
        batch.add(6, 1, 0, True)
        context.logits_address(0)
        with pytest.raises(InputError, match="no logits"):
            context.logits_address(1)


def test_hidden_rows_masked_and_not(either: Model) -> None:
    ids = tokens(5)
    with Context(either, **EXACT) as context:
        batch = Batch(5)
        batch.extend(ids, 0, outputs="last")
        with pytest.raises(InputError, match="no hidden row"):
            context.nextn_address(0)
        context.set_nextn(True, masked=False)
        context.decode(batch)
        every = np.stack([context.nextn(i).copy() for i in range(5)])
        base = context.nextn_rows_address()
        assert [context.nextn_address(i) - base for i in range(5)] == [
            4 * i * either.n_embd_out for i in range(5)
        ]
        for i in (-1, 5):
            with pytest.raises(InputError, match="no hidden row"):
                context.nextn_address(i)
        context.set_nextn(True, masked=False)
        np.testing.assert_array_equal(context.nextn(2), every[2])
        # The same memory is indexed differently now: nothing readable until the next decode.
        context.set_nextn(True, masked=True)
        with pytest.raises(InputError, match="no hidden row"):
            context.nextn_address(4)
        context.clear()
        context.decode(batch)
        np.testing.assert_allclose(context.nextn(4), every[4], atol=1e-5)
        for i in (0, 3):
            with pytest.raises(InputError, match="no hidden row"):
                context.nextn_address(i)
        with pytest.raises(InputError, match="unmasked"):
            context.nextn_rows_address()


def test_the_head_drafts_from_token_and_row(either: Model) -> None:
    """The head fed in one batch or one token at a time sees the same; without its row, not."""
    ids = tokens(8)
    with (
        Context(either, **EXACT) as target,
        Context(either, mtp=True, other=target, **EXACT) as head,
    ):
        assert (head.rollback, head.shares_memory) == ("any", False)
        for context, block in ((head, 1), (head, -1), (target, 0)):
            with pytest.raises(InputError, match=f"no NextN block {block} of 1 here"):
                context.set_nextn_layer_offset(block)
        batch = Batch(8)
        batch.extend(ids, 0, outputs="last")
        target.decode(batch)
        rows = Batch(8, n_embd=head.n_embd_out)
        rows.extend(ids, 0, outputs="last")
        rows.rows()[0] = 0
        rows.set_rows(1, target.nextn_rows_address(), 7)
        head.decode(rows)
        whole = head.logits(7).copy()
        head.seq_rm(0, 3)
        assert head.seq_pos_max() == 2
        for i in range(3, 8):
            rows.clear()
            rows.add(ids[i], i, 0, True)
            rows.set_rows(0, target.nextn_address(i - 1))
            head.decode(rows)
        np.testing.assert_allclose(head.logits(0), whole, atol=2e-5)
        assert np.isfinite(head.nextn(0)).all()
        head.seq_rm(0, 7)
        rows.clear()
        rows.add(ids[7], 7, 0, True)
        rows.rows()[0] = 0
        head.decode(rows)
        assert np.abs(head.logits(0) - whole).max() > 1e-3


def test_nan_weights_give_nan_logits_and_no_exception(lib: Library, tiny: Tiny) -> None:
    path = tiny("qwen35", nan_in="output_norm.weight")
    with Model(lib, path) as broken, Context(broken, **EXACT) as context:
        assert np.isnan(run(context, [1, 2, 3])).all()


# -- what a batch holds, read back from the structure llama.cpp gets -------------------------------


def held(lib: Library, batch: Batch) -> list[tuple[int, int, list[int], int]]:
    """(token, position, sequences, output) of every token."""
    struct = batch.struct(lib.structs["llama_batch"])
    ints = ctypes.POINTER(ctypes.c_int32)
    token, pos, n_seq = (
        ctypes.cast(getattr(struct, f), ints) for f in ("token", "pos", "n_seq_id")
    )
    seqs = ctypes.cast(struct.seq_id, ctypes.POINTER(ints))
    output = ctypes.cast(struct.logits, ctypes.POINTER(ctypes.c_int8))
    return [
        (token[i], pos[i], [seqs[i][k] for k in range(n_seq[i])], output[i])
        for i in range(struct.n_tokens)
    ]


def test_a_cleared_batch_forgets_that_tokens_were_shared(lib: Library) -> None:
    batch = Batch(4, n_seq_max=2)
    batch.add(7, 0, (0, 1))
    batch.add(8, 1, (0, 1), True)
    assert held(lib, batch) == [(7, 0, [0, 1], 0), (8, 1, [0, 1], 1)]
    batch.clear()
    batch.add(9, 5, 1, True)
    assert held(lib, batch) == [(9, 5, [1], 1)]


def test_a_draft_step_is_the_same_as_its_parts(lib: Library) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    parts, single = (Batch(4, n_embd=3, n_seq_max=2) for _ in range(2))
    for batch in (parts, single):
        batch.add(1, 0, (0, 1), True)
        batch.add(2, 1, 0)
    parts.clear()
    parts.add(6, 9, 1, True)
    parts.set_rows(0, rows[1].ctypes.data)
    single.set_single(6, 9, 1, rows[1].ctypes.data)
    assert held(lib, single) == held(lib, parts) == [(6, 9, [1], 1)]
    assert single.rows()[0].tolist() == parts.rows()[0].tolist() == [3, 4, 5]
    assert (single.spans, single.outputs, single.max_token) == ({1: [9, 9]}, {0}, 6)
    for bad in ((-1, 0, 0), (1, -1, 0), (1, 0, -1), (1, 2**31 - 1, 0)):
        with pytest.raises(InputError):
            single.set_single(*bad, rows[0].ctypes.data)
    with pytest.raises(InputError):
        Batch(2).set_single(1, 0, 0, rows[0].ctypes.data)
