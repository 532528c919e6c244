"""Replay: what a drafting policy would have done on the texts of a trace.

For a chain these are the very verifications of a live run: the limits of tokens and context, n_min
and the end of generation work as in ``speculate``, and the counters are those a live collector
would hold. A tree's counters follow the path from the root to what was accepted:

- ``drafted[i]``: verifications that sent a node at depth i, however many (``Totals.drafted`` has
  the nodes); ``reached[i]``: of those, where all before was accepted and the path had children;
  ``accepted[i]``: where one of them was the target's choice;
- ``rank``, ``miss`` and the probabilities are those of the candidates on that path;
- ``censored``: paths accepted down to a leaf, by their length.

A tree that is grown while it is drafted (``policy.Grown``) asks the head below nodes off its own
path; a trace recorded with a width answers as far as its beams go (``_beams``).

An end-of-generation token that is accepted before the last position of a chain counts as in
llama.cpp as the target's own token in the list of verifications, and so does one that has children
in a tree; the counters count it as accepted. What a trace does not hold stays 0: ``padded_rows``
and ``nan_rows``.

The module can be called: ``mtpstats.replay(trace, policy)`` is ``mtpstats.replay.replay(trace,
policy).snapshot``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mtpstats._replay import STOPS, Run, Shape, Store
from mtpstats.errors import InputError
from mtpstats.policy import (
    MAX_NODES,
    AdaptiveDepth,
    Chain,
    Eagle2,
    GatedSiblings,
    Grown,
    OptTree,
    Policy,
    Tree,
)
from mtpstats.stats import Snapshot
from mtpstats.text import printable
from mtpstats.trace import MAX_DEPTH, Trace

__all__ = [
    "AnyPolicy",
    "PromptReplay",
    "Replay",
    "Totals",
    "limits",
    "reach",
    "replay",
    "store",
    "totals",
]

AnyPolicy: TypeAlias = "Chain | Tree | GatedSiblings | AdaptiveDepth | Grown | Policy"
Counts: TypeAlias = npt.NDArray[np.int64]

STARTS: Final = ("policy", "uniform")


@dataclass(frozen=True)
class Totals:
    """What a policy did in each of P prompts, int64 arrays: enough to price it."""

    tokens: Counts
    """[P] generated tokens; for uniform starts accepted ones and one more a root."""
    verifications: Counts
    """[P]"""
    drafted: Counts
    """[P] nodes sent to the target."""
    accepted: Counts
    """[P] of those, accepted, as a live run lists them."""
    rows: Counts
    """[P, n] verifications by the rows of their target pass: 1 + nodes."""
    widths: Counts
    """[P, w] steps of the head by their rows. A chain's have 1. A tree's first has 1, a later one
    as many as there are nodes of the depth before that have children; where a tree is grown, as
    many as it expands."""
    lengths: Counts
    """[P, 17] verifications by the length of what was accepted."""

    @property
    def length(self) -> float | None:
        """Mean acceptance length: generated tokens per verification."""
        passes = int(self.verifications.sum())
        return int(self.tokens.sum()) / passes if passes else None


@dataclass(frozen=True)
class PromptReplay:
    """One text."""

    id: str
    snapshot: Snapshot
    verifications: npt.NDArray[np.int32]
    """[V, 2] drafted and accepted of each, as ``Generation.verifications``."""
    tokens: int
    """Generated tokens."""
    near_tie: int | None
    """The first verification that a near tie could have changed: the target's margin below
    ``trace.NEAR_TIE``, two of the head's candidates within 1 % of each other that matter, or a
    probability within 5e-4 of ``p_min`` or of a gate, a node's value within 1 % a depth of what
    keeps it in a grown tree or out of it. A live run's list must agree up to there."""
    stop: str
    """Why it ended: ``n_predict``, ``eog``, ``context``, ``nan``, or ``trace``: nothing more was
    recorded."""


@dataclass(frozen=True)
class Replay:
    """A policy over a trace."""

    policy: AnyPolicy
    starts: str
    snapshot: Snapshot
    """The counters of all prompts."""
    prompts: list[PromptReplay]
    totals: Totals

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return int(self.totals.tokens.sum())

    @property
    def n_verifications(self) -> int:
        """Target passes."""
        return int(self.totals.verifications.sum())

    @property
    def drafted(self) -> int:
        """Nodes sent to the target."""
        return int(self.totals.drafted.sum())

    @property
    def accepted(self) -> int:
        """Of those, accepted."""
        return int(self.totals.accepted.sum())


def replay(
    trace: Trace,
    policy: AnyPolicy,
    *,
    n_predict: int | None = None,
    n_ctx: int | None = None,
    starts: str = "policy",
) -> Replay:
    """Replay a policy over every text.

    Args:
        n_predict: as of a live run, at most the trace's. None: the trace's.
        n_ctx: context of that run, in tokens. None: large enough; for a text that the recording's
            context cut off, that one.
        starts: ``policy``: the roots at which the policy starts, as a run would; ``uniform``:
            every root once, without limits of tokens or context, as far as all that lies below it
            is known: a property of the head. The two are never mixed.

    Raises:
        InputError: a policy deeper than the trace, limits beyond what was recorded, or policy
            starts from a trace of every s-th root.
    """
    run = _run(trace, policy, n_predict, n_ctx, starts, full=True)
    ends = np.cumsum(run.verifications)
    prompts = [
        PromptReplay(
            id=prompt.id,
            snapshot=Snapshot._from_bytes(run.counters[i].tobytes()),
            verifications=run.pairs[ends[i] - run.verifications[i] : ends[i]],
            tokens=int(run.tokens[i]),
            near_tie=int(run.near_tie[i]) if run.near_tie[i] >= 0 else None,
            stop=STOPS[run.stop[i]] if starts == "policy" else "trace",
        )
        for i, prompt in enumerate(trace.prompts)
    ]
    total = run.counters.sum(axis=0, dtype=np.uint64)
    return Replay(policy, starts, Snapshot._from_bytes(total.tobytes()), prompts, _totals(run))


def totals(
    trace: Trace,
    policy: AnyPolicy,
    *,
    n_predict: int | None = None,
    n_ctx: int | None = None,
    starts: str = "policy",
) -> Totals:
    """Return what :func:`replay` returns as ``totals``, without counters: several times faster."""
    return _totals(_run(trace, policy, n_predict, n_ctx, starts, full=False))


def _totals(run: Run) -> Totals:
    def used(counts: Counts) -> Counts:
        columns = np.flatnonzero(counts.any(axis=0))
        return counts[:, : int(columns[-1]) + 1 if columns.size else 1]

    return Totals(
        tokens=run.tokens,
        verifications=run.verifications,
        drafted=run.drafted,
        accepted=run.accepted,
        rows=used(run.rows),
        widths=used(run.widths),
        lengths=run.lengths,
    )


_stores: WeakKeyDictionary[Trace, Store] = WeakKeyDictionary()


def store(trace: Trace) -> Store:
    """Return the trace as compiled code reads it; made once."""
    found = _stores.get(trace)
    if found is None:
        shared = trace.header["head"]["kind"] == "shared"
        found = _stores[trace] = Store(trace.prompts, trace.every, shared)
    return found


def limits(
    trace: Trace, n_predict: int | None, n_ctx: int | None, starts: str = "policy"
) -> tuple[int, int]:
    """Return (n_predict, n_ctx) of a replay, -1 for none; see :func:`replay` for the errors."""
    if starts not in STARTS:
        raise InputError(f"starts is {starts!r}: it must be {' or '.join(STARTS)}")
    if starts == "policy" and trace.every > 1:
        raise InputError(
            f"the trace holds every {trace.every}th root only, and a run may start at any: use "
            "uniform starts (--starts uniform), or record without --every"
        )
    most = trace.n_predict
    if n_predict is None:
        n_predict = most
    elif n_predict < -1 or (most >= 0 and not 0 <= n_predict <= most):
        raise InputError(f"n_predict is {n_predict}: the trace holds {most} tokens a prompt")
    if n_ctx is None:
        return n_predict, -1
    if n_ctx < 1:
        raise InputError(f"n_ctx is {n_ctx}: it must be at least 1")
    for prompt in trace.prompts:
        if prompt.stop == "context" and n_ctx > prompt.n_ctx:
            raise InputError(
                f"n_ctx is {n_ctx}: prompt {printable(prompt.id)} was recorded up to the end of a "
                f"context of {prompt.n_ctx}"
            )
    return n_predict, n_ctx


def reach(trace: Trace) -> int:
    """Return how deep a draft can be that the trace answers for."""
    return min(trace.depth, heads(trace))


def heads(trace: Trace) -> int:
    """Return how deep this model can draft."""
    head = trace.header["head"]
    return int(head["blocks"]) if head["kind"] == "chain" else MAX_DEPTH


def _depth(trace: Trace, policy: AnyPolicy, n_max: int) -> int:
    """Return a chain's length on this model, checked against the trace."""
    n_max = min(n_max, heads(trace))
    if n_max > trace.depth:
        raise InputError(
            f"{policy} drafts {n_max} deep, the trace holds {trace.depth}: record with --depth "
            f"{n_max}"
        )
    return n_max


def _run(
    trace: Trace,
    policy: AnyPolicy,
    n_predict: int | None,
    n_ctx: int | None,
    starts: str,
    full: bool,
) -> Run:
    predict, ctx = limits(trace, n_predict, n_ctx, starts)

    def run(nodes: int, width: int = 1) -> Run:
        return Run(store(trace), predict, ctx, starts == "uniform", nodes, width, full)

    if isinstance(policy, Tree):
        shape = _shape(trace, policy)
        made = run(len(policy), len(policy))
        made.tree(shape)
    elif isinstance(policy, Chain | GatedSiblings):
        n_max = _depth(trace, policy, policy.n_max)
        if policy.n_min > n_max:
            raise InputError(f"{policy}: n_min is above {n_max}, all this model has heads for")
        gate = None
        if isinstance(policy, GatedSiblings):
            gate = (policy.p1_max, policy.p2_min, policy.p3_min)
        made = run(n_max if gate is None else 3 * n_max)
        made.chain(n_max, policy.p_min, policy.n_min, gate)
    elif isinstance(policy, AdaptiveDepth):
        if starts == "uniform":
            raise InputError(f"{policy} depends on what came before: it has no uniform starts")
        n_max = _depth(trace, policy, policy.n_max)
        made = run(n_max)
        low, first = min(policy.low, n_max), min(policy.first, n_max)
        made.adaptive(low, first, n_max, policy.up, policy.down, policy.p_min)
    elif isinstance(policy, OptTree | Eagle2):
        n_max = _depth(trace, policy, policy.depth)
        if policy.width > trace.width:
            raise InputError(
                f"{policy} expands {policy.width} nodes a step, the trace holds beams of "
                f"{trace.width}: record with --width {policy.width}"
            )
        made = run(policy.n_nodes, policy.width)
        delta = policy.delta if isinstance(policy, OptTree) else None
        made.grown(policy.n_nodes, n_max, policy.width, policy.ranks, delta)
    elif isinstance(policy, Policy):
        made = run(MAX_NODES, MAX_NODES)
        made.python(policy.begin, policy.draft, policy.verified, _shapes(trace))
    else:
        raise InputError(f"{type(policy).__name__} is no policy; derive it from mtpstats.Policy")
    return made


def _shape(trace: Trace, tree: Tree) -> Shape:
    n_max = _depth(trace, tree, tree.depth)
    if tree.depth > n_max:
        raise InputError(f"{tree} is {tree.depth} deep, this model has heads for {n_max}")
    return Shape(tree.paths)


def _shapes(trace: Trace) -> Callable[[Any], Shape]:
    """Return what makes the shape of a tree, once for each tree."""
    made: dict[int, tuple[Tree, Shape]] = {}

    def shape_of(tree: Any) -> Shape:
        if not isinstance(tree, Tree):
            raise InputError(
                f"the policy drafted {printable(repr(tree))[:60]}: neither a length nor a tree"
            )
        if id(tree) not in made:
            if len(made) >= 4096:
                made.clear()
            made[id(tree)] = (tree, _shape(trace, tree))
        return made[id(tree)][1]

    return shape_of


class _Callable(ModuleType):
    def __call__(self, trace: Trace, policy: AnyPolicy, **options: Any) -> Snapshot:
        """Return ``replay(...).snapshot``."""
        return replay(trace, policy, **options).snapshot


# The package has a function replay() and a module of that name: one object is both.
sys.modules[__name__].__class__ = _Callable
