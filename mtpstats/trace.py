"""Traces: what a recording holds, in memory and in its file.

A trace has, for every root of every text, the rank of the target's choices along the forced path
and the head's probabilities along its own greedy path, so that any drafting policy can be replayed
from it (DESIGN section 4). A root ``t`` is the text position of ``id_last``; the head's step ``d``
guesses ``tokens[t + 1 + d]``. With a width it also has what the head would have offered off its own
path, for trees that are grown while they are drafted. ``tracefile`` reads and writes the file,
``docs/files.md`` describes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpstats import _beams
from mtpstats.errors import InputError
from mtpstats.generation import NEAR_TIE
from mtpstats.text import printable

__all__ = [
    "MISS",
    "NEAR_TIE",
    "UNKNOWN",
    "Trace",
    "TracedPrompt",
    "check_header",
    "quantise",
    "trace_header",
]

SCHEMA: Final = "mtpstats.trace/1"
MAX_DEPTH: Final = 16
MAX_WIDTH: Final = _beams.MAX_WIDTH
MAX_ROOTS: Final = 1 << 23  # of one text
RANKS: Final = 8  # candidates kept at a position
MISS: Final = 0
UNKNOWN: Final = 255
STOPS: Final = ("eog", "n_predict", "context", "nan")

Int32: TypeAlias = npt.NDArray[np.int32]
UInt8: TypeAlias = npt.NDArray[np.uint8]
Float32: TypeAlias = npt.NDArray[np.float32]

ARRAYS: Final[dict[str, tuple[type[np.generic], int]]] = {
    "tokens": (np.int32, 1),
    "margin": (np.float32, 1),
    "roots": (np.int32, 1),
    "rank": (np.uint8, 2),
    "p_min_p": (np.float32, 2),
    "path_p": (np.float32, 2),
    "path_overlap": (np.float32, 1),
    "off_top10": (np.float32, 1),
    "greedy_p": (np.float16, 2),
}
"""Dtype and number of dimensions of each array in a file, in its order."""
BEAM_ARRAYS: Final[dict[str, tuple[type[np.generic], int]]] = {
    "beam_node": (np.uint8, 2),
    "beam_p": (np.float32, 2),
}
"""Those that follow where the recording has a width."""


def arrays_of(width: int) -> dict[str, tuple[type[np.generic], int]]:
    """Return the arrays of a file of this width."""
    return ARRAYS | BEAM_ARRAYS if width else ARRAYS


def quantise(p: npt.ArrayLike) -> Float32:
    """Probabilities as float32 multiples of 2**-24, NaN kept: the units live counters add up.

    With ``p`` in a trace rounded so (once, from float64), replay adds exactly what a live
    collector adds.
    """
    return (np.rint(np.asarray(p, np.float64) * 2.0**24) * 2.0**-24).astype(np.float32)


def off_path(rank: UInt8) -> npt.NDArray[np.bool_]:
    """Where a rank that is not 1 stands before, [R, D]."""
    off = np.zeros(rank.shape, np.bool_)
    np.logical_or.accumulate(rank[:, :-1] != 1, axis=1, out=off[:, 1:])
    return off


@dataclass(frozen=True, eq=False)
class TracedPrompt:
    """One recorded text: R roots, D depths. Arrays are taken over as they are, not copied.

    Raises ``InputError`` for arrays that do not fit each other.
    """

    id: str
    category: str | None
    n_prompt: int
    """Tokens of the prompt; the first root can be ``n_prompt - 1``."""
    stop: str
    """Why the text ends: ``eog`` (the last token is end of generation), ``n_predict`` (as much as
    was asked for), ``context`` (full) or ``nan`` (the target gave no finite logit)."""
    n_ctx: int
    """Context the text was recorded in."""
    seconds: float
    """Wall-clock time of recording it."""
    tokens: Int32
    """[n] the prompt and the generated text, as far as it is known."""
    margin: Float32
    """[n - n_prompt] of each generated token: how far the target's choice was from another one, as
    ``Generation.margins``."""
    roots: Int32
    """[R] text positions of the recorded roots, ascending."""
    rank: UInt8
    """[R, D] forced path: rank 1..8 of ``tokens[t + 1 + d]`` among the head's candidates when the
    head was fed ``tokens[t..t + d]``; ``MISS``; ``UNKNOWN`` past the first miss, past the known
    text, or not recorded."""
    p: Float32
    """[R, D, 8] greedy path (the head fed its own best): full-vocabulary probability of the
    candidates, best first, rounded by :func:`quantise`. NaN: no candidate, or not kept: the file
    keeps ranks 4 to 8 only where the forced path goes too."""
    top10: Float32
    """[R, D] greedy path: full-vocabulary probability of the head's 10 best together. The file
    leaves it out: where the forced path goes too it is rank 1's ``p`` over ``p_min_p``."""
    p_min_p: Float32
    """[R, D] greedy path: the number the drafter compares with ``p_min``, ``Row.p_top10``."""
    off_index: Int32
    """[K] where the forced path is known and has left the greedy one: ``root_index * D + d``,
    ascending. Exactly those with a rank that is not 1 before them."""
    off_p: Float32
    """[K, 8] ``p`` there."""
    off_top10: Float32
    """[K] ``top10`` there."""
    overlap: Float32
    """[R, D] forced path: sum over tokens of min(p_target, p_head), NaN where unknown. It is the
    acceptance probability of a drafter that uses rejection sampling."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Anything else worth keeping, as JSON types."""
    width: int = 0
    """W: what beams of 1 to W nodes a depth expand was recorded; 0: nothing off the paths."""
    beam_node: UInt8 = field(default_factory=lambda: np.empty((0, 3), np.uint8))
    """[B, 3] the nodes whose candidates were recorded, root by root, shallower first, then by rank
    path: depth d, the parent's index among the root's nodes at d - 1, rank. A root's first node is
    the root itself, (0, 0, 0). At each depth they are the w nodes of greatest cumulative
    probability below those of the depth before, for every w from 1 to W (``_beams``)."""
    beam_p: Float32 = field(default_factory=lambda: np.empty((0, RANKS), np.float32))
    """[B, 8] ``p`` there, in full."""

    def __post_init__(self) -> None:
        rank = np.asarray(self.rank)
        if rank.ndim != 2 or not 1 <= rank.shape[1] <= MAX_DEPTH:
            raise self._wrong(f"rank has shape {rank.shape}; it must be [roots, 1..{MAX_DEPTH}]")
        n_roots, depth = rank.shape
        n, k, b = len(self.tokens), len(self.off_index), len(self.beam_node)
        for name, dtype, shape in (
            ("tokens", np.int32, (n,)),
            ("margin", np.float32, (n - self.n_prompt,)),
            ("roots", np.int32, (n_roots,)),
            ("rank", np.uint8, (n_roots, depth)),
            ("p", np.float32, (n_roots, depth, RANKS)),
            ("top10", np.float32, (n_roots, depth)),
            ("p_min_p", np.float32, (n_roots, depth)),
            ("off_index", np.int32, (k,)),
            ("off_p", np.float32, (k, RANKS)),
            ("off_top10", np.float32, (k,)),
            ("overlap", np.float32, (n_roots, depth)),
            ("beam_node", np.uint8, (b, 3)),
            ("beam_p", np.float32, (b, RANKS)),
        ):
            array = np.ascontiguousarray(getattr(self, name), dtype)
            if array.size == 0:
                array = array.reshape(shape) if 0 in shape else array
            if array.shape != shape:
                raise self._wrong(f"{name} has shape {array.shape}, expected {shape}")
            object.__setattr__(self, name, array)
        self._check(n)

    def _check(self, n: int) -> None:
        if not 1 <= self.n_prompt <= n:
            raise self._wrong(f"n_prompt {self.n_prompt} does not fit {n} tokens")
        if self.stop not in STOPS:
            raise self._wrong(f"stop {printable(repr(self.stop))} is none of {', '.join(STOPS)}")
        if self.stop == "eog" and n == self.n_prompt:
            raise self._wrong("stop is 'eog', and no token was generated")
        if not 0 <= self.n_ctx < 2**31:
            raise self._wrong(f"n_ctx is {self.n_ctx}")
        if self.tokens.size and self.tokens.min() < 0:
            raise self._wrong("tokens holds a negative id")
        roots, rank = self.roots, self.rank
        if roots.size > MAX_ROOTS:
            raise self._wrong(f"{roots.size} roots are more than a text can have")
        if roots.size and not (
            self.n_prompt - 1 <= roots[0] and roots[-1] < n and (np.diff(roots) > 0).all()
        ):
            raise self._wrong("roots are not ascending positions of the generated text")
        known = rank != UNKNOWN
        hit = known & (rank != MISS)
        if (rank[known] > RANKS).any():
            raise self._wrong(f"rank holds a number above {RANKS}")
        if (known[:, 1:] & ~hit[:, :-1]).any():
            raise self._wrong("rank goes on after a miss or a gap")
        guessed = roots[:, None] + 1 + np.arange(self.depth)
        if (known & (guessed >= n)).any():
            raise self._wrong("rank goes on past the end of the text")
        for name in ("p", "top10", "p_min_p", "off_p", "off_top10", "overlap"):
            array = getattr(self, name)
            if ((array < 0) | (array > 1.01)).any():  # a little more than 1 by rounding
                raise self._wrong(f"{name} holds a number that is no probability")
        if not np.array_equal(self.off_index, np.flatnonzero(known & off_path(rank))):
            raise self._wrong("off_index is not where rank leaves the greedy path")
        if not 0 <= self.width <= MAX_WIDTH:
            raise self._wrong(f"width is {self.width}; it must be 0 to {MAX_WIDTH}")
        wrong = -1 if len(self.beam_node) == 0 else 0
        if self.width:
            wrong = _beams.first_wrong(
                self.beam_node, self.beam_p, roots.size, self.depth, self.width
            )
        if wrong >= 0:
            raise self._wrong(
                f"row {wrong} of {len(self.beam_node)} of beam_node and beam_p is not what a "
                f"recording of width {self.width} holds"
            )

    def _wrong(self, what: str) -> InputError:
        return InputError(f"prompt {printable(str(self.id))}: {what}")

    @property
    def depth(self) -> int:
        """D."""
        return int(self.rank.shape[1])

    @property
    def n_generated(self) -> int:
        """Known tokens after the prompt."""
        return len(self.tokens) - self.n_prompt


def trace_header(
    *,
    depth: int,
    width: int = 0,
    every: int = 1,
    n_predict: int = -1,
    heads: str = "single",
    n_blocks: int = 1,
    **rest: Any,
) -> dict[str, Any]:
    """Return a trace's header.

    Args:
        depth: D, 1..16. width: W, 0..16; 0 is left out. every: a root was recorded at every so
            many positions.
        n_predict: tokens that were asked for; the text holds as many more as its last
            verification may need. -1: to the end of generation or of the context.
        heads: ``single``, ``chain`` (a block per draft step: drafts are as long as there are
            blocks at most) or ``shared`` (the head reads the target's cells and cannot draft at
            position 0). n_blocks: NextN blocks.
        rest: ``sampling``, ``settings``, ``environment``, ``model``: all to reproduce it.
    """
    header = {
        "schema": SCHEMA,
        "arrays": list(arrays_of(width)),
        "depth": depth,
        **({"width": width} if width else {}),
        "every": every,
        "n_predict": n_predict,
        "head": {"kind": heads, "blocks": n_blocks},
        **rest,
    }
    check_header(header, "trace header")
    return header


def check_header(header: dict[str, Any], where: str) -> None:
    """Raise ``InputError`` for a header that no trace has."""

    def whole(value: object, low: int, high: int = 2**31 - 1) -> bool:
        return type(value) is int and low <= value <= high

    def numbers(value: object) -> bool:
        return isinstance(value, dict) and all(
            type(number) in (int, float) and abs(number) < 2**64 for number in value.values()
        )

    head, width = header.get("head"), header.get("width", 0)
    kind = head.get("kind") if isinstance(head, dict) else None
    for key, right in (
        ("width", whole(width, 0, MAX_WIDTH)),
        ("arrays", header.get("arrays") == list(arrays_of(width))),
        ("depth", whole(header.get("depth"), 1, MAX_DEPTH)),
        ("every", whole(header.get("every"), 1)),
        ("n_predict", whole(header.get("n_predict"), -1)),
        ("head", kind in ("single", "chain", "shared") and whole(head.get("blocks"), 0)),  # type: ignore[union-attr]
        ("sampling", numbers(header.get("sampling", {}))),
        *(
            (key, isinstance(header.get(key, {}), dict))
            for key in ("settings", "environment", "model")
        ),
    ):
        if not right:
            shown = printable(repr(header.get(key)))[:60]
            raise InputError(f"{where}: {key} is {shown}, which no trace has")


class Trace:
    """Recorded prompts and what they have in common. Nothing in it is to be changed.

    Args:
        header: see :func:`trace_header`.
        prompts: all of the header's depth and width.
        incomplete: what is missing at the end of the file it came from, None if nothing is.

    Raises:
        InputError: a header that is none, prompts of another depth, width or spacing.
    """

    def __init__(
        self,
        header: dict[str, Any],
        prompts: Iterable[TracedPrompt],
        *,
        incomplete: str | None = None,
    ) -> None:
        check_header(header, "trace header")
        self.header = header
        self.prompts = list(prompts)
        self.incomplete = incomplete
        for prompt in self.prompts:
            if prompt.depth != self.depth:
                raise prompt._wrong(f"depth is {prompt.depth}, the header says {self.depth}")
            if prompt.width != self.width:
                raise prompt._wrong(f"width is {prompt.width}, the header says {self.width}")
            expected = np.arange(prompt.roots.size) * self.every + (prompt.n_prompt - 1)
            if not np.array_equal(prompt.roots, expected):
                raise prompt._wrong(f"roots are not every {self.every} positions from its end")

    def __repr__(self) -> str:
        return f"<Trace: {len(self.prompts)} prompts, {self.n_roots} roots, depth {self.depth}>"

    @property
    def depth(self) -> int:
        """D: draft positions recorded at each root."""
        return int(self.header["depth"])

    @property
    def width(self) -> int:
        """W: the widest beam recorded off the paths, 0 if none was."""
        return int(self.header.get("width", 0))

    @property
    def every(self) -> int:
        """Text positions from one root to the next."""
        return int(self.header["every"])

    @property
    def n_predict(self) -> int:
        """Tokens that were asked for, -1 for no limit."""
        return int(self.header["n_predict"])

    @property
    def n_roots(self) -> int:
        """Roots of all prompts."""
        return sum(len(prompt.roots) for prompt in self.prompts)

    def select(self, which: Iterable[int | str]) -> Trace:
        """Return a trace of some prompts, by index or id, in that order; repeating is allowed.

        The prompts are shared. Raises InputError for one there is not.
        """
        by_id = {prompt.id: prompt for prompt in self.prompts}
        chosen = []
        for key in which:
            try:
                chosen.append(by_id[key] if isinstance(key, str) else self.prompts[key])
            except (KeyError, IndexError):
                raise InputError(f"the trace has no prompt {printable(str(key))}") from None
        return Trace(self.header, chosen, incomplete=self.incomplete)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file; a record cut off at its end is left out and named in ``incomplete``.

        Raises ``InputError``, naming the file and the place, for anything else that is not as
        :class:`mtpstats.tracefile.TraceWriter` writes it.
        """
        from mtpstats.tracefile import load

        return load(path)
