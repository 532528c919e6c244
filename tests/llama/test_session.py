"""Model and Context on real models: values, and every refusal before the call."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sessions import EXACT, Tiny, fresh, run, tokens

from mtpstats.errors import ContextFull, InputError, ModelError, MtpStatsError
from mtpstats.llama import Batch, Context, Library, Model, limits

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


# -- what the binding refuses before libllama sees it --------------------------------------------


@pytest.fixture
def context(either: Model) -> Iterator[Context]:
    with Context(either, n_batch=8, n_ubatch=8, n_outputs_max=4, **EXACT) as context:
        yield context


def refuse(context: Context, batch: Batch, message: str, kind: type = InputError) -> None:
    before = context.seq_pos_max()
    with pytest.raises(kind, match=message):
        context.decode(batch)
    assert context.seq_pos_max() == before


def test_empty_batch(context: Context) -> None:
    refuse(context, Batch(4), "empty")


def test_more_tokens_than_n_batch(context: Context) -> None:
    batch = Batch(16)
    batch.extend(tokens(9), 0)
    refuse(context, batch, "9 tokens in the batch; n_batch is 8")


def test_token_outside_the_vocabulary(context: Context) -> None:
    batch = Batch(4)
    batch.add(512, 0)
    refuse(context, batch, "token 512 is outside")
    with pytest.raises(InputError, match="token -1"):
        batch.add(-1, 1)


@pytest.mark.parametrize("seq", [1, 255, 256, 1 << 20])
def test_sequence_outside_n_seq_max(context: Context, seq: int) -> None:
    batch = Batch(4)
    batch.add(1, 0, seq)
    refuse(context, batch, f"sequence {seq}; n_seq_max is 1")
    for call in (context.seq_rm, context.seq_keep, context.seq_pos_max, context.seq_pos_min):
        with pytest.raises(InputError, match="n_seq_max is 1"):
            call(seq)
    with pytest.raises(InputError, match="n_seq_max is 1"):
        context.seq_cp(0, seq)


def test_more_logits_than_n_outputs_max(context: Context) -> None:
    batch = Batch(8)
    batch.extend(tokens(5), 0, outputs="all")
    refuse(context, batch, "logits of 5 tokens asked for; n_outputs_max is 4")


def test_gaps_and_repeats_in_positions(context: Context) -> None:
    run(context, tokens(3))
    for pos in (0, 2, 4, 100):
        batch = Batch(4)
        batch.add(1, pos)
        refuse(context, batch, f"goes on at position 3, the batch at {pos}")
    batch = Batch(4)
    batch.add(1, 3)
    for pos in (3, 5, 0):
        with pytest.raises(InputError, match="does not follow position 3"):
            batch.add(1, pos)
    assert batch.n_tokens == 1


def test_a_full_context_is_known_before_the_call(either: Model) -> None:
    with Context(either, n_ctx=256, n_batch=64, **EXACT) as context:
        ids = tokens(256)
        for start in range(0, 256, 64):
            run(context, ids[start : start + 64], start)
        batch = Batch(1)
        batch.add(1, 256)
        refuse(context, batch, "position 256 of sequence 0 .* context of 256", ContextFull)
        with pytest.raises(ContextFull) as raised:
            context.decode(batch)
        assert raised.value.code == 1


def test_a_shared_cache_that_is_full_is_llama_cpps_own_code_one(attention: Model) -> None:
    with Context(attention, n_ctx=256, n_seq_max=2, kv_unified=True, **EXACT) as context:
        run(context, tokens(200))
        batch = Batch(100)
        batch.extend(tokens(100), 0, 1, "last")
        with pytest.raises(ContextFull) as raised:
            context.decode(batch)
        assert raised.value.code == 1
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (199, -1)
        batch.clear()
        batch.extend(tokens(40), 0, 1, "last")
        context.decode(batch)
        np.testing.assert_allclose(context.logits(39), fresh(attention, tokens(40)), atol=2e-5)


def test_the_target_takes_no_rows_and_the_head_needs_them(either: Model) -> None:
    with (
        Context(either, **EXACT) as target,
        Context(either, mtp=True, other=target, **EXACT) as head,
    ):
        rows, plain = Batch(2, n_embd=either.n_embd_out), Batch(2)
        narrow = Batch(2, n_embd=either.n_embd_out - 1)
        for batch in (rows, plain, narrow):
            batch.add(1, 0)
        refuse(target, rows, "the target takes tokens only")
        refuse(head, plain, "hidden rows of 64; the batch has rows of 0")
        refuse(head, narrow, "hidden rows of 64; the batch has rows of 63")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 2**31 - 1}, "trained for 512 positions"),
        ({"n_ctx": 513}, "trained for 512 positions"),
        ({"n_ctx": -1}, "n_ctx is -1"),
        ({"n_ctx": 2**31, "beyond_training": True}, "n_ctx is 2147483648"),
        ({"n_batch": 0}, "n_batch is 0"),
        ({"n_ubatch": -1}, "n_ubatch is -1"),
        ({"n_seq_max": 0}, "n_seq_max is 0"),
        ({"n_seq_max": 257}, "n_seq_max is 257"),
        ({"n_seq_max": 4, "n_batch": 3}, "at least n_seq_max"),
        ({"n_seq_max": 4, "n_outputs_max": 3}, "at least n_seq_max"),
        ({"n_threads": 0}, "n_threads is 0"),
        ({"n_threads": 513}, "n_threads is 513"),
        ({"n_threads_batch": -1}, "n_threads_batch is -1"),
        ({"n_rs_seq": -1}, "n_rs_seq is -1"),
        ({"n_outputs_max": -1}, "n_outputs_max is -1"),
        ({"flash_attn": "yes"}, "flash_attn is yes; use one of auto, off, on"),
        ({"type_k": "q3_k"}, "type_k is q3_k"),
        ({"mtp": True}, "needs the target's context"),
        ({"flash_attn": "off", "type_v": "q8_0"}, "quantised V cache"),
    ],
)
def test_settings_that_cannot_work(either: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MtpStatsError, match=message):
        Context(either, **{"n_threads": 1, **options})


def test_more_context_than_trained_when_asked(either: Model) -> None:
    with Context(either, n_ctx=1024, beyond_training=True, n_threads=1) as context:
        assert context.n_ctx == 1024
    with Context(either, n_ctx=1024, n_seq_max=2, n_threads=1) as context:
        assert context.n_ctx == 512
    with Context(either, n_threads=1) as context:
        assert (context.n_ctx, context.n_batch, context.n_ubatch) == (512, 512, 512)


def test_snapshots_that_do_not_fit_a_ubatch(hybrid: Model, attention: Model) -> None:
    with pytest.raises(InputError, match="drafts of up to 7 tokens need more than 8"):
        Context(hybrid, n_ubatch=8, n_rs_seq=7, n_threads=1)
    with Context(hybrid, n_ubatch=9, n_rs_seq=7, **EXACT) as context:
        run(context, tokens(30))
    with Context(attention, n_ubatch=8, n_rs_seq=7, **EXACT) as context:
        assert (context.n_rs_seq, context.rollback) == (0, "any")


def test_mtp_on_models_without_it(lib: Library, tiny: Tiny) -> None:
    def obstacle(path: Path, message: str) -> None:
        with Model(lib, path) as model, Context(model, n_threads=1) as target:
            assert not model.has_mtp
            with pytest.raises(ModelError, match=message):
                Context(model, mtp=True, other=target, n_threads=1)

    obstacle(tiny("qwen35", n_nextn=0), "2 layers and no NextN block")
    obstacle(
        tiny("glm4moe", without=r"blk\.2\."),
        r"promises 1 NextN block\(s\).*blk\.2\.nextn\.eh_proj\.weight is missing",
    )
    obstacle(tiny("glm4moe", n_nextn=2), "2 NextN blocks; llama.cpp runs one for glm4moe")


@pytest.mark.parametrize("arch", ["exaone-moe", "exaone4", "glm4", "dots3note", "bailingmoe2"])
def test_architectures_with_nextn_metadata_but_no_graph(attention: Model, arch: str) -> None:
    header = SimpleNamespace(arch=arch, has_tensor=lambda name: True)
    model = SimpleNamespace(header=header, arch=arch, vocab_only=False, n_layer_nextn=1, n_layer=2)
    assert "no MTP graph" in str(Model.mtp_obstacle(model))  # type: ignore[arg-type]


def test_a_shared_head_goes_with_its_own_target_only(attention: Model) -> None:
    assistant = SimpleNamespace(
        path=Path("a.gguf"),
        header=SimpleNamespace(arch="gemma4-assistant"),
        arch="gemma4-assistant",
        mtp_obstacle=lambda: None,
    )
    with pytest.raises(InputError, match="needs the target"):
        limits.check_mtp(assistant, 0, None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"drafts for gemma4 models only; .* is glm4moe"):
        limits.check_mtp(assistant, 0, attention)  # type: ignore[arg-type]


def test_vocab_only_models_decode_nothing(lib: Library, tiny: Tiny) -> None:
    with Model(lib, tiny("qwen35"), vocab_only=True) as model:
        assert model.tokenize("the") == [257, ord("e")]
        assert not model.has_mtp
        with pytest.raises(InputError, match="without its weights"):
            Context(model)


def test_a_head_of_another_width_or_vocabulary(lib: Library, tiny: Tiny, attention: Model) -> None:
    with Context(attention, n_threads=1) as target:
        for options, message in (
            ({"n_embd": 128}, "hidden rows of 128, the target .* of 64"),
            ({"n_vocab": 600}, "a vocabulary of 600, the target .* of 512"),
        ):
            with (
                Model(lib, tiny("glm4moe", f32=True, **options)) as other,
                pytest.raises(ModelError, match=message),
            ):
                Context(other, mtp=True, other=target, n_threads=1)
        with pytest.raises(InputError, match="`other`"):
            Context(attention, other=target, n_threads=1)


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
