"""When a tree begins to pay: at which cost of another row in a target pass.

With ``r``, what a row more costs as a part of a pass of a single row, a run takes::

    seconds(r) = passes * T_verify(1) * (1 + r * (rows - 1)) + everything else

so the ``r`` at which two policies are equally fast solves a linear equation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpstats.price import Priced, kind_of, label

if TYPE_CHECKING:
    from mtpstats.validate import Checked, Validation

__all__ = ["Branched", "branched", "break_even", "row_cost", "tree_verdict"]


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


@dataclass(frozen=True)
class Branched:
    """The tree of a validation beside the fastest of all that does not branch."""

    tree: Checked
    other: Checked
    gain: float
    """Measured: how many times as fast."""
    row_cost: float | None
    """What a row more in a target pass costs here, as a part of a single row."""
    break_even: float | None
    """Below which it would pay; None: even rows that cost nothing would not help."""


def branched(validation: Validation) -> Branched | None:
    """Return how the tree did; None if none was run."""
    trees = [one for one in validation.policies if kind_of(one.policy) in ("tree", "gated")]
    others = [one for one in validation.policies if one not in trees]
    if not trees or not others:
        return None
    tree = max(trees, key=lambda one: one.measured.value)
    other = max(others, key=lambda one: one.measured.value)
    assert tree.price is not None
    return Branched(
        tree,
        other,
        tree.measured.value / other.measured.value,
        row_cost(tree.price),
        break_even(tree.price, [one.price for one in others if one.price is not None]),
    )


def tree_verdict(validation: Validation) -> str | None:
    """Return in one sentence whether the tree paid, and what a row may cost for it to."""
    found = branched(validation)
    if found is None:
        return None
    paid = found.gain > 1
    said = (
        f"Branching {'paid' if paid else 'did not pay'} here: the best tree, "
        f"{label(found.tree.policy)}, measures {found.gain:.2f} times the speed of "
        f"{label(found.other.policy)}, the fastest of the others"
    )
    if found.row_cost is None:
        return said + "."
    said += f"; a row more in a pass costs {100 * found.row_cost:.1f} % of a single row"
    if found.break_even is None:
        return (
            f"{said}, and by prediction the tree would not pay even if rows cost nothing, for "
            "drafting itself takes too long."
        )
    if found.break_even == float("inf"):
        return f"{said}, and the tree sends no more of them than the others."
    would = "pays up to" if paid else "would begin to pay at"
    return f"{said}, and by prediction the tree {would} {100 * found.break_even:.1f} %."
