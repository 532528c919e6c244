"""Deeper or wider? One sentence from a run's figures."""

from __future__ import annotations

from typing import Final

from mtpstats.intervals import Interval
from mtpstats.summary import Summary

ENOUGH: Final = 100  # verifications before the run may answer "deeper or wider?"


def deeper_or_wider(summary: Summary, speedup: float | None = None) -> str:
    """One true sentence on the question, from the run's numbers.

    It compares what one more node would earn, in tokens a verification: a rank-2 leaf at the best
    position against the deepest position drafted, which bounds what a deeper one can earn. It
    counts tokens, not the time a node costs.

    Args:
        speedup: measured tokens/s over those of plain decoding, when known.
    """
    drafted = [p for p in summary.positions if p.drafted != 0]
    if summary.drafted == 0 or (summary.drafted is None and not drafted):
        return "Nothing was drafted, so this run does not say whether deeper or wider would pay."
    if speedup is not None and speedup < 1:
        return (
            f"Leave it: with drafting this ran at {speedup:.2f} times the speed of plain decoding,"
            " so drafting does not pay here as it is, let alone deeper or wider."
        )
    ranked = [p for p in drafted if p.rank_counts is not None]
    passes = summary.verifications
    if passes is None or not ranked:
        return (
            "Cannot tell deeper from wider: the source holds no ranks of the target's choices; "
            "mtpstats bench measures them."
        )
    last, leaf = ranked[-1], max(ranked, key=lambda p: p.rank_counts[1] if p.rank_counts else 0)
    wide, deep = leaf.widening, last.unconditional
    if passes < ENOUGH or wide is None or deep is None:
        return (
            f"Cannot tell deeper from wider: {passes} verifications are too few"
            f" (at least {ENOUGH})."
        )
    leaf_text = f"a rank-2 leaf at position {leaf.number} would add {_range(wide)}"
    last_text = f"position {last.number}, the deepest drafted, adds {_range(deep)}"
    if wide.lo > deep.hi:
        return (
            f"Wider rather than deeper: {leaf_text} tokens a verification, while {last_text},"
            " and deeper ones can only add less."
        )
    if deep.lo > wide.hi:
        return (
            f"Deeper rather than wider: {last_text} tokens a verification, more than the best"
            f" sibling, as {leaf_text}."
        )
    return f"Too close to tell: {leaf_text} tokens a verification and {last_text}."


def _range(x: Interval) -> str:
    return f"{x.value:.3f} ({x.lo:.3f} to {x.hi:.3f})"
