"""What a collector allocates: nothing while it runs, off or on, and under 64 KB in all."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
from drafts import VOCAB, row

from mtpstats import _core
from mtpstats.stats import Collector


def test_off_allocates_nothing_that_python_sees() -> None:
    c = Collector(enabled=False)
    logits = row(2)
    address = logits.ctypes.data
    position, n_past, token, n = 3, 100_000, 90_000, VOCAB
    loop = range(1000)
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        blocks = sys.getallocatedblocks()
        peak_before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in loop:
            c.draft(0, n_past, token)
            c.candidates(0, position, logits)
            c.candidates_at(0, position, address, n)
        peak = tracemalloc.get_traced_memory()[1]
        blocks = sys.getallocatedblocks() - blocks
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    here = [d for d in after.compare_to(before, "filename") if "_core" in d.traceback[0].filename]
    assert here == []
    # a block a call would be 3,000; what is left is this test's own bookkeeping
    assert blocks < 100
    assert peak - peak_before < 20_000


SHIM = r"""
#include <stddef.h>
#include <dlfcn.h>
#include <stdatomic.h>
static atomic_long calls;
static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t);
static void *(*next_realloc)(void *, size_t);
static char early[4096]; static size_t used;
long count_allocations(void) { return atomic_load(&calls); }
void *malloc(size_t n) {
    if (!next_malloc) next_malloc = dlsym(RTLD_NEXT, "malloc");
    atomic_fetch_add(&calls, 1); return next_malloc(n);
}
void *calloc(size_t m, size_t n) { /* dlsym itself calls it */
    if (!next_calloc) {
        static int looking;
        if (looking) { void *p = early + used; used += (m * n + 15) & ~(size_t)15; return p; }
        looking = 1; next_calloc = dlsym(RTLD_NEXT, "calloc");
    }
    atomic_fetch_add(&calls, 1); return next_calloc(m, n);
}
void *realloc(void *p, size_t n) {
    if (!next_realloc) next_realloc = dlsym(RTLD_NEXT, "realloc");
    atomic_fetch_add(&calls, 1); return next_realloc(p, n);
}
"""

COUNT = """
import ctypes, numpy as np
from itertools import repeat
from mtpstats.stats import Collector
calls = ctypes.CDLL(None).count_allocations
calls.restype = ctypes.c_long
off = Collector(enabled=False)
on = Collector()
logits = np.zeros(100, np.float32)
address, n_past, token = logits.ctypes.data, 100_000, 90_000
def run(c, times):
    for _ in repeat(None, times):
        c.draft(0, n_past, token)
        c.candidates_at(0, 0, address, 100)
def run_buffer(c, times):
    for _ in repeat(None, times):
        c.draft(0, n_past, token)
        c.candidates(0, 0, logits)
run(off, 10); run(on, 10); run_buffer(off, 10)
a = calls(); run(off, 5000); run_buffer(off, 5000)
b = calls(); run(on, 5000)
c = calls(); Collector(enabled=False); Collector(enabled=False)
d = calls()
for _ in repeat(None, 20):
    Collector()
e = calls()
print(b - a, c - b, d - c, e - d)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the counting shim needs LD_PRELOAD")
def test_the_c_allocator_is_not_called(tmp_path: Any) -> None:
    """Counts malloc, calloc and realloc: with PYTHONMALLOC=malloc Python's own calls too."""
    source, shim = tmp_path / "count.c", tmp_path / "count.so"
    source.write_text(SHIM)
    cc = os.environ.get("CC", "cc")
    subprocess.run(
        [*cc.split(), "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True
    )
    env = os.environ | {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}
    found = subprocess.run(
        [sys.executable, "-c", COUNT], env=env, check=True, capture_output=True, text=True
    )
    off, on, construct_off, construct_on = map(int, found.stdout.split())
    # the test itself makes a few objects; a call that allocated would count 20,000
    assert off < 20
    assert on < 20  # collecting from an address allocates nothing either
    assert construct_off <= 4  # two objects, and what makes the calls
    assert construct_on >= 40  # two tables each: the shim does count


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        ("before", ctypes.c_size_t * 7), ("uordblks", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    ]  # fmt: skip


class Mallinfo(ctypes.Structure):
    """The same of a glibc before 2.33."""

    _fields_ = [
        ("before", ctypes.c_int * 7), ("uordblks", ctypes.c_int), ("after", ctypes.c_int * 2)
    ]  # fmt: skip


def heap_in_use() -> int:
    """Bytes that the C library has given out and not got back."""
    libc = ctypes.CDLL(None)
    for name, kind in (("mallinfo2", Mallinfo2), ("mallinfo", Mallinfo)):
        if hasattr(libc, name):
            call = libc[name]
            call.restype = kind
            return call().uordblks
    pytest.fail("this C library cannot say how much memory is in use: it has no mallinfo")


def test_memory_is_constant_in_the_length_of_the_run_and_under_64_kb() -> None:
    assert _core.STATE_BYTES < 64 * 1024
    if sys.platform != "linux":
        pytest.skip("mallinfo is in Linux's C libraries")
    c = Collector()
    logits = row(2)

    def run(n: int) -> None:
        for i in range(n):
            c.draft(0, i, 2)
            c.candidates(0, 0, logits)
            c.candidates(0, 1, logits)
            c.verify(0, (2, 2))

    run(100)
    before = heap_in_use()
    run(20_000)
    assert abs(heap_in_use() - before) < 4096
