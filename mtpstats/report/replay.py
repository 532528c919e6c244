"""What ``mtpstats replay`` prints: policies, the head itself, trees. At most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtpstats.figures import Figures
from mtpstats.policy import Path, Tree
from mtpstats.report.numbers import (
    WIDTH,
    counted,
    legend,
    percent,
    percent_interval,
    plural,
    with_interval,
    wrapped,
)
from mtpstats.summary import Estimate, Summary
from mtpstats.text import printable
from mtpstats.trees import TreeChoice
from mtpstats.uniform import Continuation


@dataclass(frozen=True)
class Report:
    """Everything shown. ``unseen`` belongs to ``choices``, tree by tree."""

    header: dict[str, Any]
    n_prompts: int
    n_tokens: int
    n_roots: int
    incomplete: str | None
    policies: Sequence[Figures]
    head: Summary
    continuations: Sequence[Continuation]
    overlaps: Sequence[Estimate]
    choices: Sequence[TreeChoice] = ()
    unseen: Sequence[Estimate] = ()
    notes: Sequence[str] = field(default=())


def render(report: Report) -> str:
    """Return the whole report."""
    parts = [_header(report), _policies(report.policies), _head(report)]
    parts += [_trees(report)] if report.choices else []
    notes = [*report.notes]
    if report.incomplete:
        notes.append(f"the file is not complete: {report.incomplete}")
    parts += ["".join(wrapped(f"! {note}", "  ") for note in notes)] if notes else []
    return "\n".join(parts)


def _header(report: Report) -> str:
    header = report.header
    model = header.get("model") or {}
    sampling = header.get("sampling") or {}
    temp = sampling.get("temp")
    every = header["every"]
    rows = [
        ("model", [printable(str(model.get(key) or "")) for key in ("file", "architecture")]),
        ("trace", [
            plural(report.n_prompts, "prompt"),
            plural(report.n_tokens, "token"),
            plural(report.n_roots, "root"),
            f"every {every} positions" if every > 1 else "",
            f"depth {header['depth']}",
            f"width {header['width']}" if "width" in header else "",
        ]),
        ("target", [] if temp is None else [f"temperature {temp:g}"]),
    ]  # fmt: skip
    return "".join(
        wrapped(f"{name:<9}{', '.join(filter(None, cells))}", " " * 9)
        for name, cells in rows
        if any(cells)
    )


def _policies(policies: Sequence[Figures]) -> str:
    lines = ["passes  tokens/pass (95 %)  acc. %  nodes  steps  policy"]
    for one in policies:
        cells = (
            f"{counted(one.verifications, 6):>6}  {with_interval(one.length):>19}"
            f"  {percent(one.acceptance):>6}  {_value(one.nodes):>5}  {_value(one.head_steps):>5}"
        )
        name = printable(one.policy)
        if len(cells) + 2 + len(name) <= WIDTH:
            lines.append(f"{cells}  {name}")
        else:
            lines += [cells, wrapped(" " * 8 + name, " " * 8).rstrip("\n")]
    lines.append(
        legend(
            f"{_STARTS[policies[0].starts]} acc. %: accepted of the nodes sent; nodes, steps of "
            "the head: per pass of the target."
        )
    )
    return "\n".join(lines)


_STARTS = {
    "policy": "Starts: the roots at which each policy starts, as in a run.",
    "uniform": "Starts: every root once, a property of the head and not of a run.",
}


def _value(estimate: Estimate) -> str:
    return "-" if estimate is None else f"{estimate.value:.2f}"


def _head(report: Report) -> str:
    lines = [
        "the head itself: every root counted once",
        "pos  reached  right % (95 %)     @2 %   @3 %   @8 %  after 1  after 2  overlap",
    ]
    after = {(one.position, one.rank): one for one in report.continuations}
    for position in report.head.positions:
        i = position.index
        shown = percent_interval(position.rank1)
        recall = "".join(f"{percent(position.recall[k - 1]):>7}" for k in (2, 3, 8))
        onward = "".join(
            f"{percent(after[i, rank].rate) if (i, rank) in after else '-':>9}" for rank in (1, 2)
        )
        overlap = report.overlaps[i] if i < len(report.overlaps) else None
        lines.append(
            f"{position.number:>3} {counted(position.reached, 8):>8} {shown:>17}{recall}{onward}"
            f"{percent(overlap):>9}"
        )
    lines.append(
        legend(
            "right %: the head's first choice, all before it right; @k: one of its k best. after "
            "r: where its r-th choice was right here, its first at the next position, in % (after "
            "2 is what a branch earns beyond its leaf). overlap: what a drafter that uses "
            "rejection sampling would have accepted, in %."
        )
    )
    return "\n".join(lines)


def _trees(report: Report) -> str:
    lines = [
        "trees: tokens per pass",
        "nodes  replayed  uniform  if independent  from rates  chosen half  other half",
    ]
    for one in report.choices:
        lines.append(
            f"{len(one.tree):>5}  {_length(one.length):>8}  {_length(one.uniform_length):>7}"
            f"  {_length(one.estimate):>14}  {_length(one.from_rates_length):>10}"
            f"  {_length(one.half_length):>11}  {_length(one.other_half_length):>10}"
        )
    lines.append(
        legend(
            "replayed: in a run. uniform: the best any tree of this size has over all roots; if "
            "independent: what per-position rates make of that tree. from rates: in a run, the "
            "tree one would build from those rates. A tree chosen on half of the prompts, on "
            "that half and on the other."
        )
    )
    for i, one in enumerate(report.choices):
        lines += [_tree_title(one, report.unseen[i] if i < len(report.unseen) else None)]
        notes = {
            path: f"{100 * share:.1f} %"
            for path, share in zip(one.tree.paths, one.shares, strict=True)
        }
        lines.append(draw(one.tree, notes) + wrapped(f"choices {one.tree.choices()}", " " * 8))
    return "\n".join(lines)


def _tree_title(one: TreeChoice, unseen: Estimate) -> str:
    how = "improved by replaying" if one.improved else "the most frequent paths"
    text = f"{plural(len(one.tree), 'node')}, {how} (%: of all roots)"
    if unseen is not None:
        text += f"; on unseen prompts {with_interval(unseen)} tokens per pass"
    return wrapped(text).rstrip("\n")


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def draw(tree: Tree, notes: dict[Path, str] | None = None) -> str:
    """Return the tree as text, a line for each node: its rank, and its note if it has one.

    ::

        *
        +- 1
        |  +- 1
        |  `- 2
        `- 2
    """
    below: dict[Path, list[Path]] = {}
    for path in tree.paths:
        below.setdefault(path[:-1], []).append(path)
    lines = ["*"]

    def add(path: Path, indent: str) -> None:
        children = below.get(path, [])
        for child in children:
            last = child == children[-1]
            note = (notes or {}).get(child, "")
            lines.append(f"{indent}{'`-' if last else '+-'} {child[-1]}  {note}".rstrip())
            add(child, indent + ("   " if last else "|  "))

    add((), "")
    return "\n".join(lines) + "\n"
