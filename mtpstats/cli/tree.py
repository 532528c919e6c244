"""Drafts that branch: the options, and the tree they stand for."""

# ruff: noqa: RUF009  (option only wraps dataclasses.field)

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpstats.cli import options, values
from mtpstats.cli.groups import option
from mtpstats.errors import InputError
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.head import DraftSettings
    from mtpstats.policy import Branching, Tree

_BEST = re.compile("best:([1-9][0-9]{0,3})")
_N_MAX = 8  # of DraftOptions


@dataclass(frozen=True)
class TreeOptions:
    """How drafts branch."""

    HEADING = "Drafting trees (in place of --spec-draft-...; one prompt at a time)"

    tree: str | None = option(
        "--tree",
        metavar="SPEC",
        help="Draft and verify this tree: '[[0],[1],[0,0]]', the head's choices counted from 0, as "
        "replay --policy tree:... takes them and plan --json prints them; FILE.json, which holds "
        "them; or best:N, the best tree of N nodes for the texts of --trace.  [default: a chain]",
    )
    gate: str | None = option(
        "--tree-gate",
        metavar="SPEC",
        help="Draft a chain, and second and third choices beside it where the head is in doubt: "
        "n_max=4,p1_max=0.7,p2_min=0.2 (and p_min, n_min, p3_min), as replay --policy gated:... "
        "takes them.  [default: a chain]",
    )
    trace: Path | None = option(
        "--trace",
        type=values.file(),
        metavar="FILE",
        help="The trace that --tree best:N is found in.  [default: none]",
    )


def draft_settings(drafting: options.DraftOptions, asked: TreeOptions) -> DraftSettings:
    """Return what to draft; raises InputError for options that contradict each other."""
    from mtpstats.head import DraftSettings

    if asked.tree is None and asked.gate is None:
        if asked.trace is not None:
            raise InputError("--trace is for --tree best:N")
        return DraftSettings(drafting.n_max, drafting.n_min, drafting.p_min)
    if asked.tree is not None and asked.gate is not None:
        raise InputError("--tree and --tree-gate: a draft is one of them")
    if (drafting.n_max, drafting.n_min, drafting.p_min) != (_N_MAX, 0, 0.0):
        raise InputError("a tree says how deep it is: leave out --spec-draft-...")
    return DraftSettings.branching(_policy(asked))


def _policy(asked: TreeOptions) -> Branching:
    from mtpstats.policy import GatedSiblings, Tree, parse_policy

    best = _BEST.fullmatch(asked.tree or "")
    if best is None and (asked.tree or "").startswith("best:"):
        raise InputError(f"--tree {printable(asked.tree or '')}: N is a number from 1 to 9999")
    if asked.trace is not None and best is None:
        raise InputError("--trace is for --tree best:N")
    if best is not None:
        if asked.trace is None:
            raise InputError("--tree best:N needs a recording to find it in: --trace FILE")
        return _best(asked.trace, int(best[1]))
    if asked.gate is not None:
        policy = parse_policy(f"gated:{asked.gate.removeprefix('gated:')}")
        assert isinstance(policy, GatedSiblings)
        return policy
    assert asked.tree is not None
    tree = parse_policy(f"tree:{asked.tree.removeprefix('tree:')}")
    assert isinstance(tree, Tree)
    return tree


def _best(path: Path, n: int) -> Tree:
    """Return the best tree of ``n`` nodes, for the starts of a run if the trace has them."""
    from mtpstats.trace import Trace
    from mtpstats.trees import best_trees, improve

    trace = Trace.load(path)
    if trace.every == 1:
        return improve(trace, n)
    return best_trees(trace, n)[-1]
