"""The row kernel beside numpy, in one process, call by call in turn.

    python benchmarks/kernel.py [--rounds N] [--isa NAME]

Each round calls every function once on the same row; a figure is the median over the rounds of
its time by numpy.max's in that round, so that a change of clock or a busy neighbour touches both.
Limits: selection within 1.3 times numpy.max and at least 20 times faster than
numpy.argpartition; with both log-sum-exps within 5 times numpy.max; an ascending row, where every
entry beats all before it, within 10 times. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from mtpstats import _core

SIZES = (151_936, 248_320)


def measure(n: int, rounds: int) -> dict[str, list[int]]:
    """Nanoseconds by function and round."""
    row = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    ascending = np.sort(row)
    address, rising = row.ctypes.data, ascending.ctypes.data
    read = _core.Row()
    calls: dict[str, Callable[[], object]] = {
        "numpy.max": lambda: row.max(),
        "selection": lambda: read.best_at(address, n),
        "with log-sum-exps": lambda: read.read_at(address, n),
        "numpy.max, ascending": lambda: ascending.max(),
        "ascending": lambda: read.read_at(rising, n),
        "numpy.argpartition": lambda: np.argpartition(row, n - _core.K),
    }
    times: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # the row may have left the cache meanwhile
            start = perf_counter_ns()
            call()
            times[name].append(perf_counter_ns() - start)
    return times


def ratio(times: dict[str, list[int]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--isa", help="avx512, avx2 or baseline instead of the best")
    arguments = parser.parse_args()
    _core.force_isa(arguments.isa)
    print(f"instructions: {_core.isa()}; numpy {np.__version__}; {arguments.rounds} rounds")
    missed = 0
    for n in SIZES:
        times = measure(n, arguments.rounds)
        print(f"\nrow of {n:,} float32, microseconds (median)")
        for name, found in times.items():
            print(f"  {name:<22}{statistics.median(found) / 1000:>9.1f}")
        for what, value, limit, at_least in (
            ("selection / max", ratio(times, "selection", "numpy.max"), 1.3, False),
            (
                "argpartition / selection",
                ratio(times, "numpy.argpartition", "selection"),
                20.0,
                True,
            ),
            ("with sums / max", ratio(times, "with log-sum-exps", "numpy.max"), 5.0, False),
            ("ascending / max", ratio(times, "ascending", "numpy.max, ascending"), 10.0, False),
        ):
            good = value >= limit if at_least else value <= limit
            missed += not good
            word = "at least" if at_least else "at most"
            print(f"  {what:<26}{value:>6.2f}  {word} {limit:g}{'' if good else '  MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
