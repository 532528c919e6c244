"""How fast replay is: roots/s by policy, and all that a plan replays, on a made-up trace.

What counts as a root: each recorded root of the trace, however many of them a policy starts at.
Medians of repeated runs. Example:

    python benchmarks/replay.py --roots 100000 --depth 16
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtpstats import replay as replays
from mtpstats._beams import Beams
from mtpstats.policy import AdaptiveDepth, Chain, GatedSiblings, Policy, Root, Tree
from mtpstats.trace import UNKNOWN, Trace, TracedPrompt, trace_header


def beams(p: np.ndarray, width: int) -> dict:
    """Beams of a text whose nodes off the greedy path have probabilities of other places."""
    n, depth = p.shape[:2]
    node, rows, flat = [], [], p.reshape(-1, 8)
    for r in range(n):
        grown, nodes = Beams(width), [(0, 0)]
        for d in range(depth):
            here = flat[(r * depth + d + 7919 * np.arange(len(nodes))) % len(flat)]
            node += [(d, *one) for one in nodes]
            rows.append(here)
            nodes = grown.grow(here)
    return {
        "width": width,
        "beam_node": np.array(node, np.uint8),
        "beam_p": np.concatenate(rows),
    }


def made_up(n_roots: int, depth: int, prompts: int, seed: int = 0, width: int = 0) -> Trace:
    """A trace whose ranks decay with depth as those of a single head do."""
    rng = np.random.default_rng(seed)
    texts = []
    n = n_roots // prompts
    for number in range(prompts):
        shares = np.array([0.08, 0.66, 0.12, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01])
        rank = rng.choice(9, (n, depth), p=shares).astype(np.uint8)
        rank[:, 1:][rng.random((n, depth - 1)) < 0.1] = 0
        gone = np.logical_or.accumulate(rank == 0, axis=1)
        rank[:, 1:][gone[:, :-1]] = UNKNOWN
        rank[np.arange(n)[:, None] + np.arange(depth) >= n] = UNKNOWN
        p = np.sort(rng.dirichlet(np.full(10, 0.35), (n, depth)).astype(np.float32), axis=2)
        p = np.ascontiguousarray(p[:, :, ::-1][:, :, :8])
        left = np.zeros(rank.shape, bool)
        left[:, 1:] = np.logical_or.accumulate(rank != 1, axis=1)[:, :-1]
        off = np.flatnonzero(left & (rank != UNKNOWN))
        texts.append(
            TracedPrompt(
                id=f"p{number}",
                category=None,
                n_prompt=1,
                stop="n_predict",
                n_ctx=2 * n,
                seconds=1.0,
                tokens=rng.integers(0, 1000, n + 1),
                margin=rng.random(n) + 0.1,
                roots=np.arange(n),
                rank=rank,
                p=p,
                top10=np.ones((n, depth)),
                p_min_p=p[:, :, 0],
                off_index=off,
                off_p=p.reshape(-1, 8)[off],
                off_top10=np.ones(len(off)),
                overlap=np.full((n, depth), np.nan),
                **(beams(p, width) if width else {}),
            )
        )
    return Trace(trace_header(depth=depth, width=width, n_predict=n - depth - 2), texts)


class Sure(Policy):
    """A policy in Python that looks at the head's probabilities."""

    def draft(self, root: Root) -> int:
        p = root.p_top10
        return 4 if p[0] > 0.6 else 2


def bushy(n: int, depth: int) -> Tree:
    """Some tree of n nodes: a chain, and second choices beside and below it."""
    paths = [(1,) * i for i in range(1, depth + 1)]
    paths += [(1,) * i + (2,) for i in range(depth)]
    paths += [(2,) + (1,) * i for i in range(1, depth)] + [(r,) for r in range(3, 9)]
    paths += [(1, r) for r in range(3, 9)] + [(2, r) for r in range(2, 9)]
    paths += [(1, 1, r) for r in range(3, 9)] + [(3, r) for r in range(1, 9)]
    kept = sorted(dict.fromkeys(paths), key=lambda path: (sum(path), len(path)))[:n]
    return Tree(kept)


def timed(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = process_time()
        work()
        times.append(process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Print a line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roots", type=int, default=100_000)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    trace = made_up(args.roots, args.depth, args.prompts)
    start = process_time()
    replays.store(trace)
    print(f"{'opening the trace':<42}{process_time() - start:9.4f} s")
    for policy in (
        Chain(3), Chain(8), Chain(args.depth, p_min=0.3), bushy(16, 8), bushy(64, 8),
        GatedSiblings(8, p1_max=0.7, p2_min=0.2), AdaptiveDepth(8), Sure(),
    ):  # fmt: skip
        name = str(policy) if not isinstance(policy, Tree) else f"tree of {len(policy)} nodes"
        for words, work in (("", replays.totals), (", all counters", replays.replay)):
            seconds = timed(lambda: work(trace, policy), args.repeats)  # noqa: B023
            speed = trace.n_roots / seconds / 1e6
            print(f"{name + words:<42}{seconds:9.4f} s {speed:9.2f} million roots/s")

    def plan() -> None:
        for n_max in range(1, args.depth + 1):
            for p_min in np.arange(10) / 10:
                replays.totals(trace, Chain(n_max, float(p_min)))
        for n in range(1, 65):
            replays.totals(trace, bushy(n, 8))
        for n_max in range(1, args.depth + 1):
            replays.totals(trace, GatedSiblings(n_max, p1_max=0.7))
            replays.totals(trace, AdaptiveDepth(n_max))

    print(f"{'all replays of a plan':<42}{timed(plan, 1):9.4f} s")


if __name__ == "__main__":
    main()
