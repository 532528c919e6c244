"""When a tree begins to pay: at which cost of another row in a target pass.

With ``r``, what a row more costs as a part of a pass of a single row, a run takes::

    seconds(r) = passes * T_verify(1) * (1 + r * (rows - 1)) + everything else

so the ``r`` at which two policies are equally fast solves a linear equation.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtpstats.price import Priced

__all__ = ["break_even", "row_cost"]


def row_cost(priced: Priced) -> float | None:
    """Return what a row more in a pass costs, as a part of a single row; None: it has no more."""
    extra = priced.rows - 1
    bare = float(priced.bare[0])
    if extra <= 0 or bare <= 0:
        return None
    return (float(priced.parts["verify"][0]) - bare) / (bare * extra)


def break_even(tree: Priced, others: Iterable[Priced]) -> float | None:
    """Return the row cost below which a tree is faster than all others.

    None where nothing is low enough: the tree would be slower even if rows cost nothing. Infinity
    where any is.
    """
    most = float("inf")
    fixed, by_row = _line(tree)
    for other in others:
        theirs, their_row = _line(other)
        steeper = by_row - their_row
        if steeper <= 0:
            # It sends no more rows than the other: cheap rows are the other's gain.
            if theirs < fixed:
                return None
            continue
        most = min(most, (theirs - fixed) / steeper)
    return most if most > 0 else None


def _line(priced: Priced) -> tuple[float, float]:
    """Return the seconds a token with rows that cost nothing, and those that r = 1 adds."""
    tokens, bare = float(priced.tokens[0]), float(priced.bare[0])
    if priced.kind == "none":
        return float(priced.seconds[0]) / tokens, 0.0
    rest = float(priced.seconds[0] - priced.parts["verify"][0])
    return (bare + rest) / tokens, bare * (priced.rows - 1) / tokens
