"""Stopping in the middle of a decode: at once, and with everything usable afterwards."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sessions import EXACT, Tiny, fresh, run, tokens

from mtpstats import _core
from mtpstats.errors import InputError, Interrupted
from mtpstats.llama import Batch, Context, Model
from mtpstats.speculate import DraftSettings, Generation, Speculator

CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


@contextmanager
def stops_after(context: Context, nodes: int) -> Iterator[None]:
    """Let llama.cpp stop the context's graphs after so many nodes."""
    left = [nodes]

    def stop(_unused: object) -> bool:
        left[0] -= 1
        return left[0] < 0

    callback = CALLBACK(stop)
    set_callback = context.model.lib.fn.llama_set_abort_callback
    set_callback(context.ptr, ctypes.cast(callback, ctypes.c_void_p), None)
    try:
        yield
    finally:
        set_callback(context.ptr, _core.stop_address(), None)


@pytest.mark.parametrize("nodes", [0, 7, 60])
def test_a_stopped_decode_leaves_a_memory_that_can_go_on(either: Model, nodes: int) -> None:
    ids = tokens(40)
    with Context(either, **EXACT, n_ubatch=16) as context:
        batch = Batch(10)
        batch.extend(ids[:10], 0, outputs="all")
        context.decode(batch)
        context.logits(9)
        batch = Batch(30)
        batch.extend(ids[10:], 10, outputs="last")
        with stops_after(context, nodes), pytest.raises(Interrupted) as raised:
            context.decode(batch)
        assert raised.value.code == 2
        # What stands there is of no use, nor what stood there before.
        for token in (9, 29):
            with pytest.raises(InputError, match=f"no logits for token {token} of the last batch"):
                context.logits(token)
        kept = context.seq_pos_max(0) + 1
        # Recurrent state may be that of any token: nothing of it can be used.
        assert kept == (0 if either.is_hybrid else 10)
        with pytest.raises(Exception, match="goes on at position"):
            run(context, ids[kept + 1 :], kept + 1)
        np.testing.assert_allclose(run(context, ids[kept:], kept), fresh(either, ids), atol=1e-4)


def test_later_ubatches_are_lost_and_earlier_ones_kept(attention: Model) -> None:
    ids = tokens(48)
    with Context(attention, **EXACT, n_ubatch=16) as context:
        counted = []
        callback = CALLBACK(lambda _unused: bool(counted.append(1)))
        set_callback = attention.lib.fn.llama_set_abort_callback
        set_callback(context.ptr, ctypes.cast(callback, ctypes.c_void_p), None)
        run(context, ids[:16])
        nodes = len(counted)
        context.seq_rm(0)
        batch = Batch(48)
        batch.extend(ids, 0, outputs="last")
        with stops_after(context, nodes + nodes // 2), pytest.raises(Interrupted):
            context.decode(batch)
        assert context.seq_pos_max(0) + 1 == 16
        np.testing.assert_allclose(run(context, ids[16:], 16), fresh(attention, ids), atol=1e-4)


def test_when_a_stop_is_asked_for_nothing_is_decoded(either: Model) -> None:
    with Context(either, **EXACT) as context:
        run(context, tokens(4))
        _core.stop(True)
        try:
            with pytest.raises(Interrupted):
                run(context, tokens(4), 4)
        finally:
            _core.stop(False)
        assert context.seq_pos_max(0) == 3
        run(context, tokens(4), 4)


@pytest.mark.parametrize("at", ["target", "head"])
def test_a_stopped_driver_keeps_finished_texts_and_can_begin_again(either: Model, at: str) -> None:
    prompts = [tokens(n, seed=n) for n in (9, 17, 5)]
    options = {**EXACT, "n_ctx": 256, "n_parallel": 2}
    with Speculator(either, draft=DraftSettings(3), **options) as speculator:
        whole = speculator.generate_all(prompts, 12)
    done: dict[int, Generation] = {}
    with Speculator(either, draft=DraftSettings(3), **options) as speculator:
        assert speculator._head is not None
        context = speculator._target if at == "target" else speculator._head.context
        rounds = speculator.rounds(prompts, 12, on_done=done.__setitem__)
        for _ in rounds:
            if done:
                break
        with stops_after(context, 30), pytest.raises(Interrupted):
            list(rounds)
        finished = list(done)
        assert finished
        assert len(finished) < len(prompts)
        assert [done[n].tokens for n in finished] == [whole[n].tokens for n in finished]
        again = speculator.generate_all(prompts, 12)
    assert [run.tokens for run in again] == [run.tokens for run in whole]
    assert [run.verifications for run in again] == [run.verifications for run in whole]


SCRIPT = """
import os, signal, sys, threading, time
from mtpstats import cli
from mtpstats.llama import Context

path, kills, deaf, wait = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "deaf", float(sys.argv[4])
decode = Context.decode

def later():
    for _ in range(kills):
        time.sleep(wait)
        sys.stderr.write(f"sent {time.monotonic()}\\\\n")
        os.kill(os.getpid(), signal.SIGINT)

def watched(self, batch):
    if batch.n_tokens < 1000 or self.mtp:
        return decode(self, batch)
    if deaf:
        self._fn.llama_set_abort_callback(self.ptr, None, None)
    threading.Thread(target=later, daemon=True).start()
    began = time.monotonic()
    try:
        decode(self, batch)
    finally:
        sys.stderr.write(f"ended {time.monotonic()} {time.monotonic() - began}\\\\n")

Context.decode = watched
arguments = "-n 2 -t 1 -fa off --spec-draft-n-max 1 -c 2048"
sys.exit(cli.main(["bench", "-m", path, "-p", "on and on " * 200, *arguments.split()]))
"""


@pytest.fixture(scope="module")
def slow(tiny: Tiny) -> Path:
    """A model that takes seconds for a prompt of some 2,000 tokens."""
    return tiny("glm4moe", n_ctx=4096, n_embd=512, n_ff=2048, n_head=8, n_layer=3)


def interrupted(
    slow: Path, kills: int, hears: str = "hears", wait: float = 0.0
) -> tuple[int, dict[str, list[float]], str]:
    """Exit code, times of what happened, and the rest of standard error."""
    code = SCRIPT.replace("\\\\n", "\\n")
    done = subprocess.run(
        [sys.executable, "-c", code, str(slow), str(kills), hears, str(wait)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.count("tokens/s") == (kills == 0)
    times: dict[str, list[float]] = {"sent": [], "ended": []}
    for what, words in re.findall(r"^(sent|ended) (.*)$", done.stderr, re.MULTILINE):
        times[what] += [float(word) for word in words.split()]
    rest = re.sub(r"^(sent|ended) .*\n", "", done.stderr, flags=re.MULTILINE)
    return done.returncode, times, rest


def test_ctrl_c_ends_a_slow_decode_and_the_second_one_everything(slow: Path) -> None:
    returncode, times, rest = interrupted(slow, 0)
    assert (returncode, rest) == (0, "")
    whole = times["ended"][1]
    wait = whole / 5

    returncode, times, rest = interrupted(slow, 1, wait=wait)
    print(f"a decode of {whole:.2f} s ended after {times['ended'][0] - times['sent'][0]:.3f} s")
    assert returncode == 130
    assert rest == "mtpstats: error: interrupted: 0 of 1 prompts were finished\n"
    assert times["ended"][0] - times["sent"][0] < whole / 2

    # A decode that hears nothing: the first one waits, the second one does not.
    returncode, times, rest = interrupted(slow, 2, "deaf", wait)
    assert (returncode, rest) == (130, "")
    assert len(times["sent"]) == 2
    assert times["ended"] == []
