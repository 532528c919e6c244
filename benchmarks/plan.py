"""How long a full plan takes over a made-up trace, and where the time goes.

Example:

    python benchmarks/plan.py --roots 100000 --depth 16
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from replay import made_up

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtpstats import plan
from mtpstats.cost import Costs, Curve, Point
from mtpstats.report import plan as report


def main() -> None:
    """Print the times, and the plan with ``--show``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roots", type=int, default=100_000)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    trace = made_up(args.roots, args.depth, args.prompts, width=args.width)
    rng = np.random.default_rng(0)
    curves = [
        Curve({n: Point.of(base * (1 + slope * n) * rng.uniform(0.97, 1.1, 30)) for n in points})
        for base, slope, points in (
            (20e-3, 0.02, range(1, 34)), (2e-3, 0.01, range(1, 9)), (1e-3, 0.01, range(1, 34)),
        )
    ]  # fmt: skip
    costs = Costs(*curves, other_verification=1e-4, other_token=1e-5)
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    wall, cpu = perf_counter(), process_time()
    made = plan.make(trace, costs)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    profile.disable()
    if args.show:
        print(report.render(made))
    if args.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(25)
    print(
        f"{trace.n_roots:,} roots, {len(trace.prompts)} prompts, {len(made.policies)} policies: "
        f"{wall:.2f} s ({cpu:.2f} s of CPU)"
    )


if __name__ == "__main__":
    main()
