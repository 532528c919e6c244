"""Batches, and what happens when things are closed, dropped or interrupted."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import EXACT, Tiny, fresh

from mtpstats.errors import InputError, LlamaError
from mtpstats.llama import Batch, Context, Library, Model, default_threads, limits

# -- batches --------------------------------------------------------------------------------------


def test_batch_limits() -> None:
    batch = Batch(2)
    assert (batch.add(1, 0), batch.add(2, 1)) == (0, 1)
    with pytest.raises(InputError, match="full"):
        batch.add(3, 2)
    batch.clear()
    assert batch.n_tokens == 0
    for bad in ((1, -1, 0), (1, 2**31 - 1, 0), (1, 0, -1)):
        with pytest.raises(InputError):
            batch.add(*bad)
    for bad_sizes in (
        {"capacity": 0},
        {"capacity": 1, "n_embd": -1},
        {"capacity": 1, "n_seq_max": 0},
    ):
        with pytest.raises(InputError):
            Batch(**bad_sizes)
    with pytest.raises(InputError, match="outputs"):
        batch.extend([1], 0, outputs="first")
    assert batch.n_tokens == 0


def test_batch_rows_stay_inside(attention: Model) -> None:
    batch = Batch(3, n_embd=2)
    base = batch.embd_address(0)
    assert [batch.embd_address(i) - base for i in range(3)] == [0, 8, 16]
    batch.rows()[:] = [[1, 2], [3, 4], [5, 6]]
    batch.set_rows(1, base, 2)
    assert batch.rows().tolist() in ([[1, 2], [1, 2], [3, 4]], [[1, 2], [1, 2], [1, 2]])
    for i in (-1, 3):
        with pytest.raises(InputError):
            batch.embd_address(i)
    for i, count in ((2, 2), (-1, 1), (0, 4), (0, -1)):
        with pytest.raises(InputError):
            batch.set_rows(i, base, count)
    with pytest.raises(InputError):
        Batch(1).embd_address(0)
    with pytest.raises(InputError):
        Batch(1).rows()


def test_batch_tokens_in_several_sequences() -> None:
    batch = Batch(4, n_seq_max=2)
    assert batch.add(1, 0, np.int64(0)) == 0
    assert not batch.coupled
    batch.clear()
    batch.add(1, 0, (0, 1))
    assert batch.coupled
    for bad in ((), (0, 1, 2), (0, 0), (0, -1)):
        with pytest.raises(InputError):
            batch.add(1, 1, bad)
    batch.add(1, 1, 0)
    with pytest.raises(InputError):
        batch.add(1, 1, (1, 0))
    assert batch.n_tokens == 2
    assert batch.spans == {0: [0, 1], 1: [0, 0]}


def test_numpy_integers_are_integers(attention: Model) -> None:
    with Context(attention, **EXACT) as context:
        batch = Batch(2)
        batch.add(np.int32(5), np.int64(0), np.int32(0), np.bool_(True))
        context.decode(batch)
        np.testing.assert_allclose(context.logits(np.int64(0)), fresh(attention, [5]), atol=2e-5)


# -- lifetime -------------------------------------------------------------------------------------


def open_pair(lib: Library, path: Path) -> tuple[Model, Context, Context]:
    model = Model(lib, path)
    target = Context(model, n_threads=1)
    return model, target, Context(model, n_threads=1, mtp=True, other=target)


def test_closing_the_model_closes_its_contexts_first(lib: Library, tiny: Tiny) -> None:
    model, target, head = open_pair(lib, tiny("qwen35"))
    model.close()
    assert model.closed
    assert target.closed
    assert head.closed
    for one in (head, target, model):
        one.close()


def test_closing_the_target_closes_the_head(lib: Library, tiny: Tiny) -> None:
    model, target, head = open_pair(lib, tiny("qwen35"))
    target.close()
    assert head.closed
    assert not model.closed
    Context(model, n_threads=1).close()
    model.close()


def test_use_after_close_is_an_exception(lib: Library, tiny: Tiny) -> None:
    model, target, head = open_pair(lib, tiny("qwen35"))
    batch, rows = Batch(2), Batch(2, n_embd=64)
    for one in (batch, rows):
        one.add(1, 0, 0, True)
    target.decode(batch)
    head.decode(rows)
    model.close()
    calls: list[Callable[[], object]] = [
        lambda: target.decode(batch),
        lambda: head.decode(rows),
        lambda: target.logits(0),
        lambda: target.logits_address(0),
        lambda: target.nextn(0),
        lambda: target.nextn_rows_address(),
        lambda: target.set_nextn(True, False),
        lambda: head.set_nextn_layer_offset(0),
        lambda: target.synchronize(),
        lambda: target.seq_rm(0),
        lambda: target.seq_cp(0, 0),
        lambda: target.seq_keep(0),
        lambda: target.seq_pos_max(0),
        lambda: target.seq_pos_min(0),
        lambda: target.rollback_room(0),
        lambda: target.clear(),
        lambda: target.ptr,
        lambda: model.ptr,
        lambda: model.tokenize("x"),
        lambda: model.piece(400),
        lambda: model.is_eog(400),
        lambda: model.meta("general.name"),
        lambda: model.metadata(),
        lambda: model.chat_template(),
        lambda: model.desc,
        lambda: model.ftype,
        lambda: model.bos,
        lambda: Context(model, n_threads=1),
    ]
    for call in calls:
        with pytest.raises(InputError, match="closed"):
            call()


def test_nothing_leaks_however_the_collector_comes_by(lib: Library, tiny: Tiny) -> None:
    path = tiny("qwen35")
    for keep in range(3):
        kept = open_pair(lib, path)[keep]
        gc.collect()
        # A context keeps its model and target alive; a model keeps no context.
        assert not kept.closed
        del kept
        gc.collect()
    model, target, head = open_pair(lib, path)
    pointers = [one._handle for one in (target, head)]
    del target, head
    gc.collect()
    # The model lives on without them.
    assert [handle.ptr for handle in pointers] == [None, None]
    assert not model.closed
    model, target, head = open_pair(lib, path)
    cycle: list[Any] = [model, target, head]
    cycle.append(cycle)
    pointers = [one._handle for one in (model, target, head)]
    del model, target, head, cycle
    gc.collect()
    assert [handle.ptr for handle in pointers] == [None, None, None]


def test_an_exception_closes_in_order(lib: Library, tiny: Tiny) -> None:
    path = tiny("qwen35")
    with (
        pytest.raises(ZeroDivisionError),
        Model(lib, path) as model,
        Context(model, n_threads=1) as context,
    ):
        raise ZeroDivisionError
    assert model.closed
    assert context.closed


def test_a_failed_call_keeps_llama_cpps_words(
    attention: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the check that would refuse this before the call.
    monkeypatch.setattr(limits, "_FLOATS", set(limits.CACHE_TYPES.values()))
    with pytest.raises(LlamaError, match=r"no context on .*glm4moe\.gguf: .*quantized V cache"):
        Context(attention, n_threads=1, flash_attn="off", type_v="q8_0")


def test_default_threads_are_physical_cores() -> None:
    assert 1 <= default_threads() <= 512


@pytest.mark.parametrize("begun", ["Model(lib, path)", "Context(model, n_threads=1)"])
def test_ctrl_c_during_a_logged_load_is_not_lost(lib: Library, tiny: Tiny, begun: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from mtpstats.llama import *\n"
        f"lib, path = load({str(lib.prefix)!r}), {str(tiny('qwen35'))!r}\n"
        "model = Model(lib, path)\n"
        "lib.verbose(lambda level, line: os.kill(os.getpid(), signal.SIGINT))\n"
        "try:\n"
        f"    {begun}\n"
        "    import time; time.sleep(1)\n"
        "except KeyboardInterrupt:\n"
        "    lib.verbose(None)\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
