"""Drafting policies: rules that say which nodes to draft and verify at a root.

A node is a rank path, a tuple of ranks counted from 1: ``(1, 2)`` is the head's second choice after
its first. ``str(policy)`` is the form that :func:`parse_policy` reads.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats import reading
from mtpstats.errors import InputError
from mtpstats.text import printable

__all__ = [
    "AdaptiveDepth",
    "Branching",
    "Chain",
    "Eagle2",
    "GatedSiblings",
    "Grown",
    "OptTree",
    "Path",
    "Policy",
    "Root",
    "Tree",
    "parse_policy",
]

Path: TypeAlias = tuple[int, ...]

MAX_DEPTH: Final = 16
MAX_NODES: Final = 1023
MAX_WIDTH: Final = 16
RANKS: Final = 8
MAX_BYTES: Final = 1 << 20  # of a file of choices


def _check_chain(n_max: int, p_min: float, n_min: int) -> None:
    if not 1 <= n_max <= MAX_DEPTH:
        raise InputError(f"n_max is {n_max}: a policy drafts 1 to {MAX_DEPTH} tokens deep")
    if not 0 <= n_min <= n_max:
        raise InputError(f"n_min is {n_min}: it must lie between 0 and n_max {n_max}")
    if not 0.0 <= p_min <= 1.0:
        raise InputError(f"p_min is {p_min}: it must lie between 0 and 1")


class _Named:
    """Policies that are dataclasses of numbers: ``kind:field=value,...``."""

    kind: str

    def __str__(self) -> str:
        cells = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)  # type: ignore[arg-type]
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        return f"{self.kind}:{','.join(cells)}"


@dataclass(frozen=True)
class Chain(_Named):
    """What llama.cpp's draft-mtp does with these flags: the head's best token at every step."""

    n_max: int
    """Tokens to draft; ``--spec-draft-n-max``."""
    p_min: float = 0.0
    """End the draft where the head's best has less probability under a softmax over its 10 best;
    ``--spec-draft-p-min``."""
    n_min: int = 0
    """Throw shorter drafts away; ``--spec-draft-n-min``."""

    kind = "chain"

    def __post_init__(self) -> None:
        _check_chain(self.n_max, self.p_min, self.n_min)


@dataclass(frozen=True)
class GatedSiblings(_Named):
    """A chain, with its tokens' second and third choices beside them where the head is in doubt.

    At each position of the chain ``Chain(n_max, p_min, n_min)`` let p1, p2, p3 be the head's
    full-vocabulary probabilities of its three best. Where ``p1 <= p1_max`` the second choice is
    verified too if ``p2 >= p2_min``, and the third if ``p3 >= p3_min``; both are leaves. The
    default of ``p3_min`` means that there are no third ones. Siblings cost no head step: their
    logits are those of the chain's token. ``n_max`` and ``n_min`` are about the chain alone.
    """

    n_max: int
    p_min: float = 0.0
    n_min: int = 0
    p1_max: float = 1.0
    p2_min: float = 0.0
    p3_min: float = math.inf

    kind = "gated"

    def __post_init__(self) -> None:
        _check_chain(self.n_max, self.p_min, self.n_min)
        for name in ("p1_max", "p2_min", "p3_min"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0 and not (name == "p3_min" and value == math.inf):
                raise InputError(f"{name} is {value}: it must lie between 0 and 1")

    @property
    def beside(self) -> int:
        """Most siblings of a token: 1 without third choices."""
        return 1 if self.p3_min > 1 else 2

    @property
    def leaves(self) -> int:
        """Most leaves: the chain's own end and all siblings."""
        return 1 + self.beside * self.n_max

    changes = 0
    """As ``Tree.changes``: siblings take no step of the head."""


@dataclass(frozen=True)
class AdaptiveDepth(_Named):
    """A chain whose length follows the outcomes of the text so far.

    It starts at ``start`` tokens. After a verification that accepted the whole draft it is ``up``
    longer, up to ``n_max``; after one that rejected some of it ``down`` shorter, down to ``low``.
    A verification without a draft changes nothing. The defaults 2 and 1 are those of the heuristic
    schedule for assistant tokens in Hugging Face transformers. ``start`` 0 means ``n_max``.
    """

    n_max: int
    low: int = 1
    start: int = 0
    up: int = 2
    down: int = 1
    p_min: float = 0.0

    kind = "adaptive"

    def __post_init__(self) -> None:
        _check_chain(self.n_max, self.p_min, 0)
        if not 1 <= self.low <= self.n_max:
            raise InputError(f"low is {self.low}: it must lie between 1 and n_max {self.n_max}")
        if self.start != 0 and not self.low <= self.start <= self.n_max:
            raise InputError(f"start is {self.start}: it must lie between low and n_max")
        for name in ("up", "down"):
            if not 0 <= getattr(self, name) <= MAX_DEPTH:
                raise InputError(f"{name} is {getattr(self, name)}: it must be 0 to {MAX_DEPTH}")

    @property
    def first(self) -> int:
        """Length of a text's first draft."""
        return self.start or self.n_max


@dataclass(frozen=True)
class Grown(_Named):
    """A tree that the head's probabilities choose while it is drafted.

    A node's value is the product of the head's full-vocabulary probabilities down to it. Each step
    of the head expands at most ``width`` nodes of a depth, those of the greatest value; of all that
    was offered the ``n_nodes`` of the greatest value are verified. Of equal values the shallower
    node goes first, then the lower rank path. Where tokens or context are short the tree is grown
    as deep as they allow. It needs a trace of at least this width (``record --width``).
    """

    n_nodes: int
    """Nodes to verify, at most."""
    depth: int
    """Steps of the head, at most."""
    width: int
    """Rows of a step, at most."""

    def __post_init__(self) -> None:
        if not 1 <= self.n_nodes <= MAX_NODES:
            raise InputError(f"n_nodes is {self.n_nodes}: a tree has 1 to {MAX_NODES}")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise InputError(f"depth is {self.depth}: a policy drafts 1 to {MAX_DEPTH} tokens deep")
        if not 1 <= self.width <= MAX_WIDTH:
            raise InputError(f"width is {self.width}: a step expands 1 to {MAX_WIDTH} nodes")


@dataclass(frozen=True)
class Eagle2(Grown):
    """The dynamic draft tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858).

    Every step expands the ``width`` best nodes of the last depth, and each of them offers its
    ``width`` best candidates (both are "top k" there, ``n_nodes`` the total of draft tokens); then
    all nodes are ranked anew. The head always runs ``depth`` steps. Beyond 8 candidates a trace
    holds none.
    """

    kind = "eagle2"

    @property
    def ranks(self) -> int:
        """Candidates of a node that count."""
        return min(self.width, RANKS)


@dataclass(frozen=True)
class OptTree(Grown):
    """The adaptive draft tree of OPT-Tree (Wang et al. 2024, arXiv:2406.17276).

    After every step the tree is the ``n_nodes`` best nodes so far, which have the greatest sum of
    values, the expected number of accepted tokens. Drafting ends when a step added no more than
    ``delta`` to that sum. Only nodes that are in the tree are expanded: below others nothing could
    come in. The paper has no ``width``: it takes the ``n_nodes`` best of each depth.
    """

    delta: float = 0.0

    kind = "opttree"
    ranks = RANKS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.delta <= MAX_DEPTH:
            raise InputError(f"delta is {self.delta}: it must lie between 0 and {MAX_DEPTH}")


@dataclass(frozen=True, init=False, repr=False)
class Tree:
    """The same nodes at every root.

    Args:
        paths: rank paths, each with all that lead to it; in any order. None: no drafting at all.

    Raises:
        InputError: a path without its parent, twice, too deep, or of no rank from 1 to 8.

    >>> Tree([(1,), (1, 1), (2,)])
    <tree:[[0],[1],[0,0]]>
    """

    paths: tuple[Path, ...]
    """Shallower first, then by rank."""

    def __init__(self, paths: Iterable[Sequence[int]] = ()) -> None:
        object.__setattr__(self, "paths", tuple(_checked(paths, 1)))

    @classmethod
    def chain(cls, n: int) -> Tree:
        """Return the tree of the head's n best tokens one after another."""
        return cls((1,) * (i + 1) for i in range(n))

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> Tree:
        """Return the tree of Medusa-style choices: nested lists of ranks counted from 0."""
        try:
            return cls([[rank + 1 for rank in path] for path in _checked(choices, 0)])
        except (TypeError, ValueError):
            raise InputError("tree: choices must be a list of lists of ranks from 0") from None

    def choices(self) -> list[list[int]]:
        """Return the nodes as Medusa-style choices: lists of ranks counted from 0."""
        return [[rank - 1 for rank in path] for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def leaves(self) -> int:
        """Nodes that nothing follows; 1 for the root alone."""
        return len({(), *self.paths} - {path[:-1] for path in self.paths})

    @property
    def widths(self) -> list[int]:
        """Rows of each step of the head: nodes of a depth that have children."""
        inner = {path[:-1] for path in self.paths}
        return [sum(len(path) == depth for path in inner) for depth in range(self.depth)]

    @property
    def changes(self) -> int:
        """Steps of the head that have another number of rows than the one before."""
        return sum(a != b for a, b in pairwise(self.widths))

    def __str__(self) -> str:
        return f"tree:{json.dumps(self.choices(), separators=(',', ':'))}"

    def __repr__(self) -> str:
        return f"<{self}>"


Branching: TypeAlias = "Tree | GatedSiblings"
"""What the driver can draft beside chains."""


def _checked(paths: Iterable[Sequence[int]], first: int) -> list[Path]:
    """Return the nodes of a tree, shallower first; ``first`` is the head's first choice."""
    ordered = sorted((tuple(int(rank) for rank in path) for path in paths), key=_order)
    known: set[Path] = {()}
    for path in ordered:
        shown = printable(repr(list(path)))[:80]
        if not 1 <= len(path) <= MAX_DEPTH:
            raise InputError(f"tree: path {shown} is not 1 to {MAX_DEPTH} ranks long")
        if not all(first <= rank < first + RANKS for rank in path):
            raise InputError(f"tree: path {shown} has a rank outside {first}..{first + RANKS - 1}")
        if path in known:
            raise InputError(f"tree: path {shown} is given twice")
        if path[:-1] not in known:
            raise InputError(f"tree: path {shown} has no parent")
        known.add(path)
    if len(ordered) > MAX_NODES:
        raise InputError(f"tree: {len(ordered)} nodes; at most {MAX_NODES}")
    return ordered


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


class Root(Protocol):
    """What a policy of your own sees at a root. Do not keep it: the next one is the same object."""

    @property
    def position(self) -> int:
        """Text position of the last token before the draft."""

    @property
    def depth(self) -> int:
        """How deep the trace is."""

    @property
    def limit(self) -> int:
        """Draft tokens that can be verified at all; what is drafted beyond is cut."""

    @property
    def p(self) -> npt.NDArray[np.float32]:
        """[depth, 8] the head's probabilities along its own path, best first; a view."""

    @property
    def p_top10(self) -> npt.NDArray[np.float32]:
        """[depth] what llama.cpp compares with p_min; a view."""

    @property
    def width(self) -> int:
        """The widest beam of the trace, 0 if it has none."""

    def below(self, path: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Return [8] the head's probabilities after a rank path, best first, NaN where there are
        fewer; a view. ``()`` is the root. None where the trace holds none: no beam of 1 to
        ``width`` nodes a depth goes there."""


Draft: TypeAlias = "int | Tree | tuple[int | Tree, int]"


class Policy(ABC):
    """Base of your own policies, which must have a :meth:`draft`.

    ::

        class Doubtful(Policy):
            def draft(self, root):  # stop where the head is in doubt
                sure = root.p[:, 0] > 0.5
                return int(sure.argmin()) if not sure.all() else root.depth
    """

    def begin(self) -> None:  # noqa: B027  (need not be there)
        """A new text starts."""

    @abstractmethod
    def draft(self, root: Root) -> Draft:
        """Return what to verify: the length of a chain, or a tree.

        The head is taken to run as many steps as what is returned is deep. A policy that looked
        further returns ``(draft, steps)``. Make trees once and return the same ones again.
        """

    def verified(self, drafted: int, accepted: int) -> None:  # noqa: B027  (neither)
        """Hear what became of it: nodes sent to the target, tokens accepted."""

    def __str__(self) -> str:
        return type(self).__name__


_NAMED: Final[dict[str, Callable[..., Any]]] = {
    kind.kind: kind for kind in (Chain, GatedSiblings, AdaptiveDepth, OptTree, Eagle2)
}


def parse_policy(spec: str) -> Chain | Tree | GatedSiblings | AdaptiveDepth | Grown:
    """Return the policy of a command line's words.

    ``chain:n_max=4,p_min=0.6``, ``gated:n_max=4,p1_max=0.7,p2_min=0.2``,
    ``adaptive:n_max=8,up=2,down=1``, ``opttree:n_nodes=8,depth=6,width=2,delta=0.1``,
    ``eagle2:n_nodes=8,depth=4,width=2``, ``tree:[[0],[1],[0,0]]`` (ranks from 0, as Medusa's
    choices) or ``tree:FILE.json`` (a file of such a list, or of an object that has it as
    ``choices``).

    Raises ``InputError`` for anything else.
    """
    kind, colon, rest = spec.partition(":")
    shown = printable(spec)[:80]
    if kind == "tree" and colon:
        return _tree(rest)
    if kind not in _NAMED or not colon:
        known = ", ".join(f"{name}:..." for name in (*_NAMED, "tree"))
        raise InputError(f"policy {shown!r}: its kind is none of {known}")
    made = _NAMED[kind]
    types = {f.name: f.type for f in fields(made)}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for cell in filter(None, rest.split(",")):
        name, _, text = (part.strip() for part in cell.partition("="))
        if name not in types:
            raise InputError(f"policy {shown!r}: {name!r} is none of {', '.join(types)}")
        if name in values:
            raise InputError(f"policy {shown!r}: {name} is given twice")
        try:
            values[name] = int(text) if types[name] == "int" else float(text)
        except ValueError:
            raise InputError(f"policy {shown!r}: {name} is {text!r}, no number") from None
    for f in fields(made):  # type: ignore[arg-type]
        if f.default is MISSING and f.name not in values:
            raise InputError(f"policy {shown!r}: {f.name} is missing")
    try:
        policy: Chain | GatedSiblings | AdaptiveDepth | Grown = made(**values)
    except InputError as error:
        raise InputError(f"policy {shown!r}: {error}") from None
    return policy


def _tree(text: str) -> Tree:
    shown = f"policy 'tree:{printable(text)[:80]}'"
    if not text.lstrip().startswith("["):
        try:
            text = reading.read(FilePath(text), MAX_BYTES)
        except InputError as error:
            raise InputError(f"policy 'tree:FILE': {error}") from None
    try:
        found = reading.loads(text)
    except ValueError as error:
        raise InputError(f"{shown}: not JSON: {printable(str(error))}") from None
    if isinstance(found, dict):
        found = found.get("choices")
    if not isinstance(found, list) or not all(
        isinstance(path, list) and all(type(rank) is int for rank in path) for path in found
    ):
        raise InputError(f"{shown}: not a list of lists of ranks from 0")
    try:
        return Tree.from_choices(found)
    except InputError as error:
        raise InputError(f"{shown}: {error}") from None
