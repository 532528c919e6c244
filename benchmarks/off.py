"""What an off collector costs: its calls beside an empty Cython method with the same arguments.

    python benchmarks/off.py [--rounds N]

The yardstick is ``_core.Empty``, compiled into the same module. Each round times a loop of calls
of both, in turn; the figure is the median over rounds of the ratio, after the time of the bare
loop is taken from both. Limit: 2. Exit code 1 if it is missed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import repeat
from time import perf_counter_ns

import numpy as np

from mtpstats import _core
from mtpstats.stats import Collector

CALLS = 20_000
LIMIT = 2.0

LOGITS = np.zeros(1000, np.float32)
ADDRESS = LOGITS.ctypes.data
N_PAST, TOKEN = 100_000, 90_000


def bare(_: object) -> int:
    start = perf_counter_ns()
    for _ in repeat(None, CALLS):
        pass
    return perf_counter_ns() - start


def draft(target: Collector | _core.Empty) -> int:
    call = target.draft
    start = perf_counter_ns()
    for _ in repeat(None, CALLS):
        call(0, N_PAST, TOKEN)
    return perf_counter_ns() - start


def candidates(target: Collector | _core.Empty) -> int:
    call = target.candidates
    start = perf_counter_ns()
    for _ in repeat(None, CALLS):
        call(0, 3, LOGITS)
    return perf_counter_ns() - start


def candidates_at(target: Collector | _core.Empty) -> int:
    call = target.candidates_at
    start = perf_counter_ns()
    for _ in repeat(None, CALLS):
        call(0, 3, ADDRESS, 1000)
    return perf_counter_ns() - start


def attribute(target: Collector | _core.Empty) -> int:
    """As loops write it: the method is looked up at each call."""
    start = perf_counter_ns()
    for _ in repeat(None, CALLS):
        target.draft(0, N_PAST, TOKEN)
    return perf_counter_ns() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    off, empty = Collector(enabled=False), _core.Empty()
    missed = 0
    print("nanoseconds a call (median)     off   empty   ratio")
    loops: dict[str, Callable[[Collector | _core.Empty], int]] = {
        "draft": draft,
        "candidates": candidates,
        "candidates_at": candidates_at,
        "collector.draft": attribute,
    }
    for name, loop in loops.items():
        ours, theirs = [], []
        for _ in range(rounds):
            idle = bare(None)
            ours.append((loop(off) - idle) / CALLS)
            theirs.append((loop(empty) - idle) / CALLS)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        missed += ratio > LIMIT
        print(
            f"  {name:<24}{statistics.median(ours):>9.1f}{statistics.median(theirs):>8.1f}"
            f"{ratio:>8.2f}{'' if ratio <= LIMIT else '  MISSED'}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
