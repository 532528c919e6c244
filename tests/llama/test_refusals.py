"""What a context refuses before libllama sees it: batches, settings, heads that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sessions import EXACT, Tiny, fresh, run, tokens

from mtpstats.errors import ContextFull, InputError, ModelError, MtpStatsError
from mtpstats.llama import Batch, Context, Library, Model, limits


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


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("gemma4", {"type_k": "q8_0", "flash_attn": "off"}, "keys of 16: q8_0 takes multiples"),
        ("gemma4", {"type_v": "iq4_nl"}, "values of 16: iq4_nl takes multiples of 32"),
        ("deepseek2", {"type_k": "q8_0", "type_v": "q8_0"}, "keys of 48: q8_0 takes multiples"),
        ("deepseek2", {"type_k": "bf16"}, "one cache: give both one type, not bf16 and f16"),
        ("deepseek4", {"type_v": "f32"}, "one cache: give both one type, not f16 and f32"),
    ],
)
def test_caches_that_attention_cannot_read(
    lib: Library, tiny: Tiny, arch: str, options: dict[str, Any], message: str
) -> None:
    with (
        Model(lib, tiny(arch, f32=True)) as model,
        pytest.raises(InputError, match=rf"\({arch}\) .*{message}"),
    ):
        Context(model, n_threads=1, **options)


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
