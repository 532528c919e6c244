"""Replay in plain Python, written from the definitions, to test against.

Nothing here shares code with the package. A draft is a set of rank paths; a text is walked with
the rules of a live run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reference import REASONS, units, zeros

UNKNOWN = 255


@dataclass
class Text:
    """One recorded text as lists."""

    rank: list[list[int]]
    p: list[list[list[float]]]
    top10: list[list[float]]
    p_min_p: list[list[float]]
    off: dict[tuple[int, int], tuple[list[float], float]]
    first: int  # position of the first root
    every: int
    n: int  # tokens known
    eog: int | None  # position of the end-of-generation token
    beams: list[dict[tuple[int, ...], list[float]]] = field(default_factory=list)  # of each root

    @classmethod
    def of(cls, prompt: Any, every: int = 1) -> Text:
        depth = prompt.rank.shape[1]
        n = len(prompt.tokens)
        off = {
            divmod(int(at), depth): (list(map(float, p)), float(mass))
            for at, p, mass in zip(prompt.off_index, prompt.off_p, prompt.off_top10, strict=True)
        }
        return cls(
            rank=prompt.rank.tolist(), p=prompt.p.tolist(), top10=prompt.top10.tolist(),
            p_min_p=prompt.p_min_p.tolist(), off=off, first=prompt.n_prompt - 1, every=every, n=n,
            eog=n - 1 if prompt.stop == "eog" else None, beams=beams(prompt),
        )  # fmt: skip


def beams(prompt: Any) -> list[dict[tuple[int, ...], list[float]]]:
    """What the head said after each rank path that was recorded, by root."""
    found: list[dict[tuple[int, ...], list[float]]] = []
    layers: list[list[tuple[int, ...]]] = []
    for (depth, parent, rank), p in zip(prompt.beam_node.tolist(), prompt.beam_p, strict=True):
        if depth == 0:
            found.append({})
            layers = []
        if depth == len(layers):
            layers.append([])
        path = (*layers[depth - 1][parent], rank) if depth else ()
        layers[depth].append(path)
        found[-1][path] = [float(q) for q in p if not math.isnan(q)]
    return found


def beam(offered: Callable[[tuple[int, ...]], list[float]], width: int, depth: int) -> set[Any]:
    """The paths that a beam of this width expands, ``depth`` steps deep."""
    layer, found = [()], {()}
    for _ in range(depth - 1):
        below = [(*path, r + 1) for path in layer for r in range(len(offered(path)))]
        below.sort(key=lambda path: (-value(offered, path), path))
        layer = below[:width]
        found |= set(layer)
    return found


def value(offered: Callable[[tuple[int, ...]], list[float]], path: tuple[int, ...]) -> float:
    """Cumulative probability of a path."""
    product = 1.0
    for i, rank in enumerate(path):
        product *= offered(path[:i])[rank - 1]
    return product


@dataclass
class Draft:
    """What goes to the target, and what the head ran."""

    paths: set[tuple[int, ...]]
    widths: list[int]  # rows of each step
    uncut: set[tuple[int, ...]]  # what it would be without a limit
    stop: int | None = None  # where p_min ended it
    dropped: int = 0
    cut: int = 0
    invalid: bool = False  # the head had no finite logit


@dataclass
class Result:
    verifications: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    stop: str = "trace"
    counts: dict[str, Any] = field(default_factory=zeros)
    rows: Counter[int] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)


Limit = Callable[..., tuple[int, str]]  # of a depth: (how much of it is left, why)
Propose = Callable[[Text, int, Limit], Draft]


def simulate(
    text: Text,
    propose: Propose,
    *,
    n_predict: int = -1,
    n_ctx: int | None = None,
    uniform: bool = False,
    heard: Callable[[int, int], None] = lambda drafted, accepted: None,
) -> Result:
    """Walk the text; ``propose`` gets the root and what limits a depth, and returns a draft."""
    result = Result()
    if uniform:
        for r in range(len(text.rank)):
            root = text.first + r * text.every
            known = root < text.eog if text.eog is not None else root + len(text.rank[0]) < text.n
            if known and (n_predict < 0 or root - text.first <= n_predict):
                draft = propose(text, r, lambda depth, budget=True: (depth, "n_max"))
                result.tokens += verify(text, r, draft, result, "n_max", uniform)[0]
        return result
    r = 0
    while True:
        if 0 <= n_predict < r:
            result.stop = "n_predict"
            break
        if n_ctx is not None and text.first + r >= n_ctx:
            result.stop = "context"
            break
        if r >= len(text.rank):
            break

        def limit(depth: int, r: int = r, budget: bool = True) -> tuple[int, str]:
            reason = "n_max"
            left = n_predict - r - 1
            if budget and n_predict >= 0 and 0 < left < depth:
                depth, reason = left, "budget"
            if n_ctx is not None and n_ctx - 2 - text.first - r < depth:
                depth, reason = max(0, n_ctx - 2 - text.first - r), "context"
            return depth, reason

        draft = propose(text, r, limit)
        why = limit(max((len(p) for p in draft.uncut), default=0))[1]
        grown, going = verify(text, r, draft, result, why)
        r += grown
        if grown:
            heard(*result.verifications[-1])
        if not going:
            result.stop = "eog" if grown else "trace"
            break
    result.tokens = r
    return result


def verify(
    text: Text, r: int, draft: Draft, result: Result, why: str, uniform: bool = False
) -> tuple[int, bool]:
    """Return (tokens gained, whether the text goes on); a run needs the token after, too."""
    ranks = text.rank[r]
    root = text.first + r * text.every
    path: tuple[int, ...] = ()
    while len(path) < len(ranks) and (*path, ranks[len(path)]) in draft.paths:
        path = (*path, ranks[len(path)])
    a = len(path)
    deeper = any(p[:a] == path and len(p) > a for p in draft.paths)
    ends_inside = text.eog is not None and a > 0 and root + a == text.eog
    missing = root + a + 1 >= text.n and not uniform
    if not ends_inside and (missing or (deeper and ranks[a] == UNKNOWN)):
        result.counts["unresolved"] += 1
        return 0, False
    result.verifications.append((len(draft.paths), a - 1 if ends_inside and deeper else a))
    result.rows[1 + len(draft.paths)] += 1
    result.widths.update(draft.widths)
    result.lengths[a] += 1
    c = result.counts
    if draft.invalid:
        c["invalid"] += 1
        ended = text.eog is not None and root + 1 == text.eog
        return 1, not ended
    c["verifications"] += 1
    reached = a if ends_inside or not deeper else a + 1
    for i in range(max((len(p) for p in draft.paths), default=0)):
        if ends_inside and i >= a:
            break
        c["drafted"][i] += 1
        c["reached"][i] += i < reached
        c["accepted"][i] += i < a
        if i < reached:
            choice(text, r, i, c)
    c["cut_tokens"] += draft.cut
    on_trunk = a == 0 or set(path) == {1}
    trunk = max((len(p) for p in draft.paths if set(p) == {1}), default=0)
    if draft.dropped:
        c["dropped_drafts"] += 1
        c["dropped_tokens"] += draft.dropped
    elif draft.stop is not None and draft.stop == trunk and not ends_inside:
        c["stopped"][trunk] += 1
        if on_trunk and a == trunk:
            c["stopped_reached"][trunk] += 1
            c["stopped_hit"][trunk] += ranks[trunk] == 1
    elif reached == a:
        was_cut = any(p[:a] == path and len(p) > a for p in draft.uncut)
        reason = "end" if ends_inside else why if was_cut else "n_max"
        c["censored"][REASONS.index(reason)][a] += 1
    ended = ends_inside or (text.eog is not None and root + a + 1 == text.eog)
    return (a if ends_inside else a + 1), not ended


def choice(text: Text, r: int, i: int, c: dict[str, Any]) -> None:
    """Count the target's choice at a reached position."""
    rank = text.rank[r][i]
    if set(text.rank[r][:i]) <= {1}:
        p, mass = text.p[r][i], text.top10[r][i]
        shares = [text.p_min_p[r][i]] + [q / mass for q in p[1:]]
    else:
        p, mass = text.off[r, i]
        shares = [q / mass for q in p]
    if rank == 0:
        c["miss"][i] += 1
    else:
        c["rank"][i][rank - 1] += 1
    for k, q in enumerate(p):
        if math.isnan(q):
            break
        c["sum_p"][i][k] += units(q)
        c["sum_p_top10"][i][k] += units(min(1.0, shares[k]))
        if k < 2:
            decile = c[("calib_p1", "calib_p2")[k]][i][min(9, units(q) * 10 // 2**24)]
            decile[0] += 1
            decile[1] += rank == k + 1


def chain(
    n_max: int, p_min: float = 0.0, n_min: int = 0, gate: tuple[float, float, float] | None = None
) -> Propose:
    """A chain, with second and third choices beside it where the gate (p1, p2, p3) lets them."""

    uncut = {(1,) * (i + 1) for i in range(n_max)}

    def propose(text: Text, r: int, limit: Limit) -> Draft:
        most, _ = limit(n_max)
        # a draft is judged by n_min before it is cut; the context leaves one token more
        steps = 0 if most == 0 else max(most, n_min)
        steps = min(steps, limit(10**6, budget=False)[0] + 1)
        stop = next((d for d in range(steps) if p_min and text.p_min_p[r][d] < p_min), None)
        drafted = steps if stop is None else stop
        widths = [1] * (drafted + (stop is not None))
        if steps and drafted < n_min:
            return Draft(set(), widths, uncut, stop if drafted == 0 else None, dropped=drafted)
        n = min(drafted, most)
        paths = {(1,) * (i + 1) for i in range(n)}
        for i in range(n if gate else 0):
            p1, p2, p3 = text.p[r][i][:3]
            if p1 <= gate[0]:
                paths |= {(1,) * i + (2,)} if p2 >= gate[1] else set()
                paths |= {(1,) * i + (3,)} if p3 >= gate[2] else set()
        return Draft(paths, widths, uncut, stop, cut=drafted - n)

    return propose


def tree(paths: set[tuple[int, ...]]) -> Propose:
    """The same tree everywhere, its depth cut by the limits."""
    whole = max((len(p) for p in paths), default=0)

    def propose(text: Text, r: int, limit: Limit) -> Draft:
        depth, _ = limit(whole)
        kept = {p for p in paths if len(p) <= depth}
        widths = [len({p[:-1] for p in kept if len(p) == step + 1}) for step in range(depth)]
        return Draft(kept, widths, paths)

    return propose


def grown(n_nodes: int, depth: int, width: int, delta: float | None = None) -> Propose:
    """OPT-Tree with a delta, EAGLE-2 without one: everything sorted anew after every step."""

    def propose(text: Text, r: int, limit: Limit) -> Draft:
        most, _ = limit(depth)
        said = text.beams[r]
        ranks = 8 if delta is not None else width
        layer: list[tuple[int, ...]] = [()]
        offered: list[tuple[int, ...]] = []
        widths: list[int] = []
        tree: list[tuple[int, ...]] = []
        total = 0.0

        def order(path: tuple[int, ...]) -> Any:
            return -value(said.__getitem__, path), len(path), path

        while layer and len(widths) < most:
            widths.append(len(layer))
            if not all(said[path] for path in layer):
                return Draft(set(), widths, set(), invalid=True)
            offered += [(*path, q + 1) for path in layer for q in range(len(said[path][:ranks]))]
            tree = sorted(offered, key=order)[:n_nodes]
            now = 0.0
            for path in tree:
                now += value(said.__getitem__, path)
            if delta is not None and now - total <= delta:
                break
            total = now
            among = tree if delta is not None else offered
            layer = sorted((path for path in among if len(path) == len(widths)), key=order)[:width]
        # a grown tree that the limits leave no room for would have gone on
        uncut = set(tree) | {(*path, 1) for path in tree if len(path) == most < depth}
        return Draft(set(tree), widths, uncut or {(1,)})

    return propose
