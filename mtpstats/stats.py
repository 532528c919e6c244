"""Live statistics: the passive collector and the snapshots of its counters.

The collector sees what any draft loop has in hand and never asks which tokens were accepted: that
follows from two consecutive ``draft()`` calls on a sequence. ``docs/methodology.md`` has the rules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from mtpstats import _core
from mtpstats._core import CENSOR_REASONS, LAYOUT, MAX_POSITIONS, SHOWN, UNIT
from mtpstats.errors import InputError

__all__ = [
    "CENSOR_REASONS",
    "MAX_POSITIONS",
    "SHOWN",
    "Collector",
    "Snapshot",
    "compact",
    "repeated_4grams",
]

Counts: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

_LIMIT: Final = 2**64
_SUMS: Final = ("sum_p", "sum_p_top10")
_EXACT: Final = 2.0**53 * UNIT  # sums below are exact in units as float64, too


def _places() -> tuple[dict[str, tuple[slice, tuple[int, ...]]], int]:
    places, at = {}, 0
    for name, shape in LAYOUT:
        size = int(np.prod(shape, dtype=int))
        places[name] = (slice(at, at + size), shape)
        at += size
    return places, at


_PLACES, _SIZE = _places()


class _Array:
    """A counter array of a Snapshot: a view of its memory, which may be written."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.place, self.shape = _PLACES[name.removesuffix("_units")]

    @overload
    def __get__(self, owner: None, kind: type) -> _Array: ...
    @overload
    def __get__(self, owner: Snapshot, kind: type) -> Counts: ...
    def __get__(self, owner: Snapshot | None, kind: type) -> Counts | _Array:
        return self if owner is None else owner._flat[self.place].reshape(self.shape)


class _Sum:
    """A sum of probabilities, derived from its exact units: read-only float64."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.place, self.shape = _PLACES[name]

    @overload
    def __get__(self, owner: None, kind: type) -> _Sum: ...
    @overload
    def __get__(self, owner: Snapshot, kind: type) -> Floats: ...
    def __get__(self, owner: Snapshot | None, kind: type) -> Floats | _Sum:
        if owner is None:
            return self
        values: Floats = owner._flat[self.place].reshape(self.shape) * np.float64(UNIT)
        values.flags.writeable = False
        return values


class _Count:
    """A single counter of a Snapshot, as an int."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = _PLACES[name][0].start

    @overload
    def __get__(self, owner: None, kind: type) -> _Count: ...
    @overload
    def __get__(self, owner: Snapshot, kind: type) -> int: ...
    def __get__(self, owner: Snapshot | None, kind: type) -> int | _Count:
        return self if owner is None else int(owner._flat[self.place])

    def __set__(self, owner: Snapshot, value: int) -> None:
        owner._flat[self.place] = value


class Snapshot:
    """The counters at one moment. It owns its memory; the collector counts on without it.

    Arrays are uint64, indexed by draft position (0-based) first; the sums of probabilities are
    float64. ``a + b`` is exactly what one collector would hold that had seen both.
    """

    __slots__ = ("_flat",)
    __hash__ = None  # type: ignore[assignment]  # mutable

    drafted = _Array("[16] drafts with L > i")
    reached = _Array("[16] of those, how often the target's choice at i was put to the question")
    accepted = _Array("[16] reached and equal to the draft's token")
    rank = _Array("[16, 8] reached, by the rank of the target's choice among the candidates")
    miss = _Array("[16] reached, the choice not among the candidates")
    stopped = _Array("[16] drafts p_min ended at i: candidates seen, nothing drafted")
    stopped_hit = _Array("[16] of stopped_reached, the head's best was the target's choice")
    stopped_reached = _Array("[16] of stopped, the draft before i was wholly accepted")
    calib_p1 = _Array("[16, 10, 2] decile of rank 1's probability: reached, hits")
    calib_p2 = _Array("[16, 10, 2] decile of rank 2's probability: reached, hits")
    censored = _Array("[4, 16] wholly accepted drafts of length i, by CENSOR_REASONS")
    sum_p = _Sum("[16, 8] over reached, the probability of rank r (full softmax)")
    sum_p_top10 = _Sum("[16, 8] the same under a softmax over the 10 best")
    sum_p_units = _Array("[16, 8] sum_p in units of 2**-24, exact")
    sum_p_top10_units = _Array("[16, 8] sum_p_top10 in units of 2**-24, exact")
    verifications = _Count("target passes whose draft was resolved")
    discarded = _Count("drafts dropped because the next position did not fit (rewind, shift, ...)")
    unresolved = _Count("drafts whose outcome was never known")
    invalid = _Count("rounds without a usable logit in head or target")
    dropped_drafts = _Count("drafts thrown away before the target saw them (n_min)")
    dropped_tokens = _Count("tokens of those")
    cut_tokens = _Count("tokens cut from drafts that were sent")
    padded_rows = _Count("head rows whose best logit lay in the vocabulary's padding")
    nan_rows = _Count("head rows with a NaN or +inf")
    beyond_drafted = _Count("drafted tokens at positions from 16 on")
    beyond_reached = _Count("of those, reached")
    beyond_accepted = _Count("of those, accepted")

    def __init__(self) -> None:
        """All zeros."""
        self._flat: Counts = np.zeros(_SIZE, np.uint64)

    @classmethod
    def _from_bytes(cls, raw: bytes) -> Snapshot:
        self = cls()
        self._flat[:] = np.frombuffer(raw, np.uint64)
        return self

    def copy(self) -> Snapshot:
        """A snapshot with memory of its own."""
        return Snapshot.merge(self)

    @staticmethod
    def merge(*snapshots: Snapshot) -> Snapshot:
        """Everything the given snapshots counted; none given: zeros.

        Exact, associative and order-free. Raises InputError when a counter passes 2**64 - 1.
        """
        total = Snapshot()
        for other in snapshots:
            if not isinstance(other, Snapshot):
                raise InputError(f"only snapshots merge, not {type(other).__name__}")
            total._flat += other._flat
            if (total._flat < other._flat).any():
                raise InputError("merging passes 2**64 - 1 in a counter")
        return total

    def __add__(self, other: Snapshot) -> Snapshot:
        return Snapshot.merge(self, other) if isinstance(other, Snapshot) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return bool((self._flat == other._flat).all())

    def __repr__(self) -> str:
        return (
            f"<Snapshot: {self.verifications} verifications, {int(self.drafted.sum())} drafted,"
            f" {int(self.accepted.sum())} accepted>"
        )

    @property
    def tokens_drafted(self) -> int:
        """Drafted tokens at all positions, those from 16 on included."""
        return int(self.drafted.sum()) + self.beyond_drafted

    @property
    def tokens_accepted(self) -> int:
        """Accepted tokens at all positions, those from 16 on included."""
        return int(self.accepted.sum()) + self.beyond_accepted

    def to_dict(self, unknown: Collection[str] = ()) -> dict[str, Any]:
        """Every counter by name: nested lists and ints, the sums as floats (multiples of 2**-24).

        This is ``positions`` of the result file. Those named in ``unknown`` become None.
        """
        out: dict[str, Any] = {}
        for name, shape in LAYOUT:
            value = None if name in unknown else getattr(self, name)
            out[name] = value.tolist() if shape and value is not None else value
        return out

    @classmethod
    def from_dict(cls, data: object) -> Snapshot:
        """The inverse of :meth:`to_dict`, for untrusted data.

        Raises InputError, naming the key, for a missing or unknown key, a wrong shape, a value
        that is no count, or counts that contradict each other.
        """
        return cls.from_dicts([data])[0]

    @classmethod
    def from_dicts(cls, data: Sequence[object]) -> list[Snapshot]:
        """:meth:`from_dict` of each, at once: a result may hold thousands."""
        return cls._read(data, frozenset())

    @classmethod
    def from_partial(cls, data: Sequence[object]) -> tuple[list[Snapshot], frozenset[str]]:
        """:meth:`from_dicts` where counters may be null, which is: not known.

        Returns the snapshots and the names that are null in at least one; those are zeros in all.
        """
        unknown = frozenset(
            name
            for item in data
            if isinstance(item, Mapping)
            for name in _PLACES
            if item.get(name, 0) is None
        )
        return cls._read(data, unknown), unknown

    @classmethod
    def _read(cls, data: Sequence[object], unknown: frozenset[str]) -> list[Snapshot]:
        if not data:
            return []
        records = [_checked_keys(item) for item in data]
        matrix = np.zeros((len(records), _SIZE), np.uint64)
        for name, (place, shape) in _PLACES.items():
            if name not in unknown:
                matrix[:, place] = _numbers([record[name] for record in records], shape, name)
        _check(matrix, unknown)
        snapshots = []
        for row in matrix:
            snapshot = cls.__new__(cls)
            snapshot._flat = row
            snapshots.append(snapshot)
        return snapshots


def stacked(snapshots: Sequence[Snapshot]) -> dict[str, Counts | Floats]:
    """Every counter of several snapshots, [snapshots, ...], by name; the sums as float64."""
    return _columns(np.stack([snapshot._flat for snapshot in snapshots]))


def _columns(matrix: Counts) -> dict[str, Counts | Floats]:
    found: dict[str, Counts | Floats] = {
        name: matrix[:, place].reshape(len(matrix), *shape)
        for name, (place, shape) in _PLACES.items()
    }
    found |= {name: found[name] * np.float64(UNIT) for name in _SUMS}
    return found


def _checked_keys(data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise InputError(f"counters must be an object, not {type(data).__name__}")
    for key in data:
        if key not in _PLACES:
            raise InputError(f"counters: unknown key {str(key)[:40]!r}")
    for name in _PLACES:
        if name not in data:
            raise InputError(f"counters: key {name!r} is missing")
    return data


def _check(matrix: Counts, unknown: frozenset[str]) -> None:
    """Relations that hold for any counting; a file that breaks one was damaged or made up."""
    c = _columns(matrix)

    def most(key: str, limit: str, axes: int = 0) -> None:
        """``key`` is nowhere above ``limit``, which has fewer axes."""
        bound = c[limit].reshape(c[limit].shape + (1,) * axes)
        if not {key, limit} & unknown and (c[key] > bound).any():
            raise InputError(f"counters: {key!r} contradicts the others")

    most("reached", "drafted")
    most("accepted", "reached")
    if not {"rank", "miss", "reached"} & unknown:
        seen = c["rank"].sum(axis=-1, dtype=np.uint64) + c["miss"]
        if (seen != c["reached"]).any():
            raise InputError("counters: 'rank' contradicts the others")
    most("stopped_reached", "stopped")
    most("stopped_hit", "stopped_reached")
    for key in ("calib_p1", "calib_p2"):
        if (c[key][..., 1] > c[key][..., 0]).any():
            raise InputError(f"counters: {key!r} contradicts the others")
    most("sum_p", "reached", 1)
    most("sum_p_top10", "reached", 1)
    most("drafted", "verifications", 1)
    most("beyond_reached", "beyond_drafted")
    most("beyond_accepted", "beyond_reached")


def _numbers(values: list[object], shape: tuple[int, ...], name: str) -> Counts:
    """The counters of one name, [values, numbers], of nested lists of the given shape, checked."""
    flat: list[Any] = values
    for size in shape:
        if set(map(type, flat)) != {list} or set(map(len, flat)) != {size}:
            break
        flat = list(chain.from_iterable(flat))
    else:
        kinds = set(map(type, flat))
        with suppress(OverflowError):
            if kinds == {int} and name not in _SUMS:
                counts = np.array(flat, np.int64)
                if counts.min() >= 0:
                    return counts.astype(np.uint64).reshape(len(values), -1)
            if kinds <= {int, float} and name in _SUMS:
                sums = np.array(flat, np.float64)
                if sums.min() >= 0 and sums.max() < _EXACT:
                    units = sums / UNIT
                    if (units == np.floor(units)).all():
                        return units.astype(np.uint64).reshape(len(values), -1)
    # one by one: this finds the value that is wrong
    rows = []
    for value in values:
        row: list[int] = []
        _flatten(value, shape, name, row)
        rows.append(row)
    return np.array(rows, np.uint64)


def _flatten(value: object, shape: tuple[int, ...], name: str, out: list[int]) -> None:
    """Appends the numbers of a nested list of the given shape, checked."""
    if shape:
        if not isinstance(value, list) or len(value) != shape[0]:
            raise InputError(f"counters: {name!r} must be a list of {shape[0]} here")
        for item in value:
            _flatten(item, shape[1:], name, out)
        return
    number: object = value
    if name in _SUMS and isinstance(value, float):
        if not 0.0 <= value < _LIMIT * UNIT:
            raise InputError(f"counters: {name!r} holds {value}, which is no sum")
        number = int(value / UNIT) if (value / UNIT).is_integer() else None
        if number is None:
            raise InputError(f"counters: {name!r} holds {value}, not a multiple of 2**-24")
    elif name in _SUMS and isinstance(value, int) and not isinstance(value, bool):
        number = value << 24
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _LIMIT:
        # the value may be of any size and depth
        shown = repr(value)[:40] if isinstance(value, str | float | bool) else "something"
        if isinstance(value, int):
            shown = f"{value}" if abs(value) < _LIMIT else "a huge number"
        raise InputError(f"counters: {name!r} holds {shown}, which is no count")
    out.append(number)


class Collector(_core.Collector):
    """Collects what drafts would have gained, from any drafting loop in any engine.

    Per sequence, in this order::

        begin(seq)
        draft(seq, n_past, id_last)             # also resolves the draft before
        candidates(seq, position, logits)       # 0, 1, 2, ...: the head's logits
        stop(seq, position)                     # only if p_min ended the draft there
        verify(seq, tokens, reason)             # what was sent, or drop(seq)
        draft(seq, n_past, id_last)  ...
        finish(seq, n_past, id_last)

    ``n_past`` is the position at which ``id_last`` goes. From two ``draft()`` calls follow the
    number of accepted tokens, ``n_past' - n_past - 1``, and the target's choices. Without
    ``verify()`` the draft is taken to be the head's best token at each position with candidates.
    A ``verify()`` that follows another is a replay of the shortened draft, as engines do that
    must restore a checkpoint. A draft that branches ends with ``verify_tree()`` in its place, once
    the target has chosen a path.

    Args:
        n_max: the longest draft to expect, 1..1024; a position beyond it is an error. None: 1024.
        enabled: False makes every call do nothing, at the price of an empty call.
        every: call ``sink`` after this many verifications, over all sequences; 0: never.
        sink: called with a merged Snapshot. What it raises reaches the caller of ``draft()``.

    Sequence ids are any number from 0 to 2**31 - 1; each takes a fixed amount of memory
    (``_core.STATE_BYTES``), whatever the length of the run. Not locked: one collector per thread,
    or a lock of your own. A call out of order raises InputError and changes nothing.
    """

    __slots__ = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Collector:
        """On only when ``LLAMA_MTP_TOPK_STATS`` is 1, as in llama.cpp's PR 28110.

        It then writes a table to standard error every ``LLAMA_MTP_TOPK_STATS_EVERY``
        verifications (default 128). Raises InputError when that is no whole number above 0.
        """
        env = os.environ if environ is None else environ
        if env.get("LLAMA_MTP_TOPK_STATS") != "1":
            return cls(enabled=False)
        text = env.get("LLAMA_MTP_TOPK_STATS_EVERY", "128")
        try:
            every = int(text)
        except ValueError:
            every = 0
        if not 1 <= every < 2**63:
            raise InputError(
                f"LLAMA_MTP_TOPK_STATS_EVERY is {text!r}; it must be a whole number above 0"
            )
        return cls(every=every, sink=_to_stderr)

    def snapshot(self, seq: int | None = None) -> Snapshot:
        """The counters of one sequence, or of all of them added. Open drafts are not in it."""
        return Snapshot._from_bytes(self.counters(seq))

    def take(self, seq: int | None = None) -> Snapshot:
        """The same, and set those counters to 0. An open draft stays open."""
        return Snapshot._from_bytes(self.counters(seq, True))


def repeated_4grams(tokens: Sequence[int]) -> float | None:
    """Share of a text's 4-grams that occurred in it before; None below 4 tokens.

    >>> repeated_4grams([1, 2, 3, 4, 1, 2, 3, 4])  # 1 of 5
    0.2
    """
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return (len(grams) - len(set(grams))) / len(grams) if grams else None


def _to_stderr(snapshot: Snapshot) -> None:
    print(compact(snapshot), file=sys.stderr, flush=True)


def compact(snapshot: Snapshot) -> str:
    """The counters as a table of at most 80 columns, one line per drafted position."""
    lines = [
        f"mtpstats: {snapshot.verifications} verifications, {snapshot.tokens_drafted} drafted,"
        f" {snapshot.tokens_accepted} accepted",
        "pos  reached  accept"
        + "".join(f"{f'r{r}':>6}" for r in range(1, SHOWN + 1))
        + "  miss    p2",
    ]
    for i in np.flatnonzero(snapshot.drafted):
        reached = int(snapshot.reached[i])
        rate = f"{int(snapshot.accepted[i]) / reached:.3f}" if reached else "-"
        p2 = f"{snapshot.sum_p[i, 1] / reached:.3f}" if reached else "-"
        counts = "".join(f"{_short(int(n)):>6}" for n in (*snapshot.rank[i], snapshot.miss[i]))
        lines.append(f"{i + 1:>3}{_short(reached, 9):>9}{rate:>8}{counts}{p2:>6}")
    return "\n".join(lines)


def _short(n: int, width: int = 6) -> str:
    """A count in fewer than ``width`` characters: 1234567 becomes 1235k."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        text = f"{n}{unit}"
        if len(text) < width:
            return text
        n = (n + 500) // 1000
    return text
