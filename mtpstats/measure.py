"""Measuring what target passes and head steps take, on a driver's own contexts.

Every sample is a round as a run makes it: the head drafts, the target verifies n rows, the head
follows. So each finds the caches as a run leaves them. A quick round is made twice and the second
counts, since llama.cpp reuses the graph of the step before if that had the same shape, as it often
has in a run. Numbers of rows come in another random order each time through, so that a machine
that slows down slows all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mtpstats._core import copy
from mtpstats.cost import Costs, Curve, Point
from mtpstats.errors import InputError
from mtpstats.generation import Generation
from mtpstats.loop import Progress
from mtpstats.policy import Tree
from mtpstats.slot import Text
from mtpstats.speculate import Speculator

ROWS = tuple(range(1, 34))
FEWER_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_ROWS = max(ROWS)
"""``n_rows`` of the driver that is measured."""
STEPS = 4  # of the head in a round, at most
LEAST, MOST = 5, 25  # samples of each
SECONDS, MOST_SECONDS = 5.0, 15.0
"""What measuring takes, unless ``LEAST`` samples of each take longer; where they would take more
than the second, fewer rows are measured."""
SPAN = 3 * MOST_ROWS
"""Tokens that a text grows by at least until it is begun anew."""
QUICK = 0.02  # seconds; a slower round is made once only
ROUNDS = 6  # of a real run at each draft length, each time through
WARM = 2  # rounds before those of a driver that was left alone for a while


@dataclass
class _Samples:
    """Seconds of everything that was measured, by rows where there are rows."""

    verify: dict[int, list[float]] = field(default_factory=dict)
    follow: dict[int, list[float]] = field(default_factory=dict)
    draft: dict[int, list[float]] = field(default_factory=dict)
    first_step: list[float] = field(default_factory=list)
    between_steps: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    runs: dict[int, list[Generation]] = field(default_factory=dict)
    trees: list[Generation] = field(default_factory=list)


class _Rig:
    """A driver whose memories hold about ``n_past`` tokens of a text, and its rounds."""

    def __init__(
        self,
        driver: Speculator,
        text: Sequence[int],
        n_past: int,
        plain: Speculator | None,
        tree: Speculator | None = None,
    ) -> None:
        assert driver._head is not None
        self.driver, self.head, self.target = driver, driver._head, driver._target
        self.plain, self.tree = plain, tree
        self._text = list(text)
        # A pass takes longer in a longer text: stay near the length that was asked for.
        span = max(SPAN, n_past // 4)
        self._first = max(1, n_past - span // 2)
        self._end = min(self._first + span, driver.n_ctx, len(self._text))
        self._slot: Text | None = None
        self._plain_slot: Text | None = None
        self._tree_slot: Text | None = None

    def slot(self, room: int) -> Text:
        """Return the text in the making; begun anew where it would become too long."""
        self._slot = self._ready(self.driver, self._slot, room)
        return self._slot

    def _ready(self, driver: Speculator, slot: Text | None, room: int) -> Text:
        if slot is None or slot.n_past + room >= self._end:
            slot = Text(0, 0, driver._row_bytes, -1)
            driver._begin(slot, self._text[: self._first + 1])
        return slot

    def round(self, rows: int, samples: _Samples) -> float:
        """Draft, verify so many rows, follow and choose; return the seconds of the pass.

        The pass includes what becomes of the rejected tokens; memory that gives nothing back
        decodes the kept one again.
        """
        driver, head, target = self.driver, self.head, self.target
        slot = self.slot(rows + 1)
        if rows > 1:
            self._steps(min(rows - 1, STEPS, driver.n_max), slot, samples)
        at = slot.n_past
        slot.draft = self._text[at + 1 : at + rows]
        slot.n_rows = rows
        driver._target_ns = head.ns = 0
        driver._pass([slot])
        before = perf_counter()
        head.context.synchronize()
        samples.follow.setdefault(rows, []).append(head.ns * 1e-9 + perf_counter() - before)
        before = perf_counter()
        logits = target.logits_address(slot.index)
        driver._sampler.sample_at(logits, target.n_vocab, slot.n_past + 1, driver.model.n_vocab)
        samples.token.append(perf_counter() - before)
        # What cannot be taken back is kept.
        kept = rows if target.rollback == "snapshots" and rows - 1 > target.n_rs_seq else 1
        sent = slot.sent[:kept]
        slot.keep_row(target.nextn_address(slot.index + kept - 1))
        slot.n_past += kept
        slot.id_last = self._text[slot.n_past]
        before = perf_counter()
        if kept < rows:
            head.rewind(slot)
            driver._recovery.keep([(slot, sent)])
        seconds = driver._target_ns * 1e-9 + perf_counter() - before
        samples.verify.setdefault(rows, []).append(seconds)
        return seconds

    def _steps(self, n: int, slot: Text, samples: _Samples) -> None:
        """Draft, a step at a time, as the head does alone."""
        head, context, batch = self.head, self.head.context, self.head.batch
        slot.draft = []
        hidden, token = slot.row, slot.id_last
        for step in range(n):
            batch.clear()
            output = head.feed(slot, token, hidden)
            before = perf_counter()
            head.step([slot], step)
            context.logits_address(output)
            seconds = perf_counter() - before
            (samples.draft.setdefault(1, []) if step else samples.first_step).append(seconds)
            token = self._text[slot.n_past + 1 + step]
            slot.draft.append(token)
            hidden = head.hidden(output, step)
        head.rewind(slot)

    def wide_step(self, width: int, samples: _Samples) -> None:
        """Run the head over ``width`` rows at once."""
        slot, head, context, batch = self.slot(width), self.head, self.head.context, self.head.batch
        batch.clear()
        for i in range(width):
            output = batch.add(self._text[slot.n_past + i], slot.n_past + i, 0, True)
            copy(batch.embd_address(output), slot.row, slot.row_bytes)
        before = perf_counter()
        head.step([slot], 0)
        context.logits_address(width - 1)
        samples.draft.setdefault(width, []).append(perf_counter() - before)
        head.rewind(slot)

    def drafting(self, samples: _Samples) -> None:
        """Draft as a run does, for what that takes beside the decodes."""
        slot, head = self.slot(STEPS + 2), self.head
        slot.plan(min(STEPS, head.n_max), 0, STEPS, None)
        head.ns = 0
        before = perf_counter()
        head.draft([slot])
        spent = perf_counter() - before - head.ns * 1e-9
        samples.between_steps.append(max(spent, 0.0) / slot.n_steps)

    def run(self, n_max: int, samples: _Samples) -> None:
        """Let the driver itself go on for some rounds with drafts of ``n_max``."""
        driver, head = self.driver, self.head
        slot = self.slot(ROUNDS * (n_max + 1) + 2)
        slot.draft, slot.result = [], Generation()
        most, head.n_max = head.n_max, n_max
        try:
            for _ in range(ROUNDS):
                if driver._round([slot], None):
                    self._slot = None
                    break
        finally:
            head.n_max = most
        samples.runs.setdefault(n_max, []).append(slot.result)

    def run_plain(self, samples: _Samples) -> None:
        """Let the driver without a head go on for some rounds, those in which it finds its memory
        again aside."""
        driver = self.plain
        assert driver is not None
        slot = self._plain_slot = self._ready(driver, self._plain_slot, WARM + ROUNDS + 2)
        seconds: list[float] = []
        for i in range(WARM + ROUNDS):
            if i in (0, WARM):
                slot.result = Generation()
                seconds.clear()
            ended = driver._round([slot], None)
            seconds.append(driver._target_ns * 1e-9)
            if ended:
                self._plain_slot = None
                break
        samples.plain += seconds
        samples.runs.setdefault(0, []).append(slot.result)

    def run_tree(self, samples: _Samples) -> None:
        """Let the driver of a tree go on for about as long as a turn of ``validate`` is."""
        driver = self.tree
        assert driver is not None
        room = 2 * ROUNDS * (driver.n_max + 1) + 2
        slot = self._tree_slot = self._ready(driver, self._tree_slot, room)
        slot.result = Generation()
        for _ in range(2 * ROUNDS):
            if driver._round([slot], None):
                self._tree_slot = None
                break
        samples.trees.append(slot.result)


def measure(
    driver: Speculator,
    text: Sequence[int],
    n_past: int,
    *,
    plain: Speculator | None = None,
    tree: Speculator | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    seconds: float = SECONDS,
) -> Costs:
    """Measure a driver whose passes and head steps may have ``MOST_ROWS`` rows.

    Args:
        text: tokens of real text, since experts are chosen by what they read; repeated as often as
            the context holds it.
        n_past: tokens in the context while it is measured.
        plain: a driver without a head, for what a token takes without drafting.
        tree: a driver of :func:`sample_tree`, for how much longer trees take than chains say.
        seconds: time to spend, unless ``LEAST`` samples of each take longer.

    Raises:
        InputError: a context without room for it.
    """
    room = driver.n_ctx - 2 * MOST_ROWS
    if room < 1:
        raise InputError(
            f"a context of {driver.n_ctx} is too short to measure costs in: raise --ctx-size"
        )
    n_past = max(1, min(n_past, room))
    rig = _Rig(driver, [*text] * (driver.n_ctx // len(text) + 1), n_past, plain, tree)
    tell = on_progress or (lambda _: None)
    order = random.Random(0)
    # The first time through touches everything and tells about how long one takes.
    tell(Progress("measuring costs"))
    began = perf_counter()
    slowest = _sweep(rig, FEWER_ROWS, 1, order, _Samples())
    took = perf_counter() - began
    repeats = 2 if slowest < QUICK else 1
    took *= repeats * len(ROWS) / len(FEWER_ROWS)
    rows = ROWS if took * LEAST <= MOST_SECONDS else FEWER_ROWS
    samples, began, times = _Samples(), perf_counter(), 0
    while times < LEAST or (times < MOST and perf_counter() - began < seconds):
        _sweep(rig, rows, repeats, order, samples)
        times += 1
        share = min(times / LEAST, (perf_counter() - began) / seconds) if seconds else times / LEAST
        tell(Progress("measuring costs", 100 * min(share, 1.0), 100, "%"))
    return _costs(driver, samples, n_past)


def _sweep(
    rig: _Rig, rows: Sequence[int], repeats: int, order: random.Random, samples: _Samples
) -> float:
    """Go through everything once; return the seconds of the slowest pass."""
    most = min(rig.target.n_batch, rig.head.context.n_batch)
    longest = rig.target.n_rs_seq + 1 if rig.target.rollback == "snapshots" else MOST_ROWS
    drafts = {0, 1, min(4, rig.driver.n_max), min(8, rig.driver.n_max)}
    tasks = [
        *(("verify", n) for n in rows if n <= most and (n <= longest or n in FEWER_ROWS)),
        *(("step", n) for n in WIDTHS if 1 < n <= most),
        *(("run", n) for n in drafts),
        *([("tree", 0)] if rig.tree is not None else []),
    ]
    order.shuffle(tasks)
    slowest = 0.0
    unused = _Samples()
    for what, n in tasks:
        if what == "tree":
            rig.run_tree(samples)
            continue
        if what == "run":
            rig.drafting(samples)
            if n or rig.plain is None:
                rig.run(n, samples)
            else:
                rig.run_plain(samples)
            continue
        for into in [unused] * (repeats - 1) + [samples]:
            if what == "verify":
                slowest = max(slowest, rig.round(n, into))
            else:
                rig.wide_step(n, into)
    return slowest


def _costs(driver: Speculator, samples: _Samples, n_past: int) -> Costs:
    def curve(seconds: dict[int, list[float]]) -> Curve:
        return Curve({rows: Point.of(times) for rows, times in seconds.items()})

    first, later = samples.first_step, samples.draft.setdefault(1, [])
    if not later:
        later += first
    # The head's first step comes after a pass of another shape.
    change = max(median(first) - median(later), 0.0)
    token, step = median(samples.token), median(samples.between_steps)
    costs = Costs(
        curve(samples.verify),
        curve(samples.draft),
        None if driver._head is None or driver._head.kind == "shared" else curve(samples.follow),
        curve({1: samples.plain}) if samples.plain else None,
        other_draft=step,
        other_token=token,
        n_past=n_past,
    )
    return replace(costs, **_rest(costs, samples, change, driver))


def sample_tree(n_max: int) -> Tree:
    """Return the tree that real runs are made with: of middle size, at most so deep."""
    paths = ((1,), (2,), (1, 1), (1, 2), (2, 1), (1, 1, 1))
    return Tree(path for path in paths if len(path) <= n_max)


def _tree_check(found: Costs, runs: Sequence[Generation], n_max: int) -> dict[str, Any]:
    """Return what runs of the sample tree took, and what the costs make of them."""
    tree = sample_tree(n_max)
    passes = [accepted for run in runs for _, accepted in run.verifications]
    rows = sum(run.trees.rows for run in runs if run.trees) // len(passes)
    tokens = sum(len(run.tokens) for run in runs)
    by = {"by_medians": found, "by_means": found.averaged()}
    target = {name: len(passes) * float(costs.verify(rows)) for name, costs in by.items()}
    rest: dict[str, float] = {}
    for name, costs in by.items():
        steps = float(np.sum(costs.draft(tree.widths) + costs.other_draft))
        head = len(passes) * (steps + tree.changes * costs.other_shape)
        head += float(costs.follow(np.add(passes, 1)).sum()) if costs.follow else 0.0
        rest[name] = head + len(passes) * costs.other_verification + tokens * costs.other_token
    parts = [run.seconds for run in runs]
    return {
        "tree_target": {"measured": sum(part.target for part in parts), **target},
        "tree_rest": {"measured": sum(part.head + part.other for part in parts), **rest},
    }


def _rest(costs: Costs, samples: _Samples, change: float, driver: Speculator) -> dict[str, Any]:
    """Return what real rounds took beside all that is known, and how well costs explain them."""
    beside: dict[bool, list[float]] = {False: [], True: []}
    for n_max, runs in samples.runs.items():
        for run in runs:
            left = run.seconds.other - costs.other_draft * run.drafted
            left -= costs.other_token * len(run.tokens)
            beside[n_max > 0].append(max(left, 0.0) / len(run.verifications))
    found = replace(
        costs,
        other_verification=median(beside[True]) + change,
        other_shape=change,
        other_plain=median(beside[False]),
    )
    check = {}
    for n_max, runs in samples.runs.items():
        passes = [1 + drafted for run in runs for drafted, _ in run.verifications]
        rows = np.bincount(passes)
        widths = [0, sum(passes) - len(passes)]
        tokens = sum(len(run.tokens) for run in runs)
        if n_max or found.plain is not None:
            by = {"by_medians": found, "by_means": found.averaged()}
            check[str(n_max)] = {
                "measured": sum(run.seconds.generation for run in runs),
                **{
                    name: float(
                        costs.seconds(rows, widths, tokens) if n_max else costs.without(tokens)
                    )
                    for name, costs in by.items()
                },
            }
    if samples.trees:
        check |= _tree_check(found, samples.trees, driver.n_max)
    return {
        "other_verification": found.other_verification,
        "other_shape": found.other_shape,
        "other_plain": found.other_plain,
        "facts": {"check": check},
    }
