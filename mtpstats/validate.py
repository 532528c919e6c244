"""Validate: policies run for real, predicted beside measured.

All policies continue a prompt in turns of a few verifications, and all of that is repeated; costs
that are measured anew are measured in between. So a machine that slows down slows all of it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from mtpstats import plan as plans
from mtpstats.breakeven import branched, tree_verdict
from mtpstats.candidates import can_branch, default_chain, memory_of
from mtpstats.cost import Costs, merged
from mtpstats.errors import InputError, Interrupted
from mtpstats.generation import Generation
from mtpstats.head import DraftSettings
from mtpstats.intervals import cluster_bootstrap
from mtpstats.loop import TURN, WARM_UP_TOKENS, Driver, Progress
from mtpstats.origin import measured
from mtpstats.policy import Branching, Chain, GatedSiblings, Tree
from mtpstats.price import NO_DRAFTING, Figure, Priced, Pricer, flags_of, kind_of, label
from mtpstats.replay import Totals, replay, totals
from mtpstats.run import LlamaEngine
from mtpstats.trace import Trace, TracedPrompt

__all__ = [
    "Checked",
    "Validation",
    "chosen",
    "policies_to_run",
    "run",
    "to_dict",
    "verdict",
]

SCHEMA: Final = "mtpstats.validate/1"
SPACING: Final = 4.0
ALIKE: Final = 0.05
"""Chains whose drafts differ less, as a part of them, are not both run."""
CLOSE: Final = 0.03
"""The best predicted policy has held if it measures this close to the best measured one."""

Runnable = Chain | Tree | GatedSiblings
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Engine(Protocol):
    """What makes drivers: :class:`mtpstats.run.LlamaEngine`, or a stand-in."""

    def driver(self, draft: DraftSettings | None, n_ctx: int, collector: None) -> Driver:
        """Return a driver with contexts of its own; no ``draft``: plain decoding."""


@dataclass(eq=False)
class Taken:
    """What runs of one policy gave, [repeats][prompts]."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    def begin(self) -> None:
        """A new repeat starts."""
        for kept in (self.tokens, self.seconds, self.drafted, self.accepted):
            kept.append([])

    def add(self, tokens: int, seconds: float, drafted: int, accepted: int) -> None:
        """Keep the next prompt."""
        self.tokens[-1].append(tokens)
        self.seconds[-1].append(seconds)
        self.drafted[-1].append(drafted)
        self.accepted[-1].append(accepted)

    def speed(self) -> Figure:
        """Tokens/s: of each prompt the median of its repeats, the interval over prompts."""
        paces = np.array(self.seconds) / np.maximum(np.array(self.tokens), 1)
        tokens = np.array(self.tokens[0], np.float64)
        seconds = tokens * np.median(paces, axis=0)
        spent = float(seconds.sum())
        value = float(tokens.sum()) / spent if spent > 0 else 0.0
        (interval,) = cluster_bootstrap(tokens[:, None], seconds[:, None])
        return Figure(value, *(interval[1:] if interval else (None, None)))


@dataclass(frozen=True, eq=False)
class Checked:
    """One policy, predicted and measured."""

    policy: Runnable
    predicted: Figure
    """Tokens/s."""
    measured: Figure
    same: int
    """Prompts of which the first run drafted and accepted exactly what the replay says."""
    different: tuple[str, ...]
    """The others."""
    unexplained: tuple[str, ...] = ()
    """Of them, those without a near tie, which may fall either way."""
    price: Priced | None = None
    """All of the prediction."""
    server: Figure | None = None
    """Tokens/s by llama-server's own timings."""
    server_drafted: int | None = None
    server_accepted: int | None = None

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was measured."""
        return self.predicted.value / self.measured.value - 1


@dataclass(frozen=True, eq=False)
class Validation:
    """All policies that were run; no drafting first."""

    policies: tuple[Checked, ...]
    costs: Costs
    repeats: int
    n_prompts: int

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return float(np.median([abs(checked.error) for checked in self.policies]))

    @property
    def best_predicted(self) -> Checked:
        """The fastest by prediction."""
        return max(self.policies, key=lambda checked: checked.predicted.value)

    @property
    def best_measured(self) -> Checked:
        """The fastest in fact."""
        return max(self.policies, key=lambda checked: checked.measured.value)

    @property
    def shortfall(self) -> float:
        """What following the prediction loses: 1 - its pick's speed over the fastest's."""
        return 1 - self.best_predicted.measured.value / self.best_measured.measured.value


def chosen(trace: Trace, n_prompts: int | None) -> Trace:
    """Return a trace of so many of the prompts, evenly spread; None: of all."""
    n = len(trace.prompts)
    if n_prompts is None or n_prompts >= n:
        return trace
    return trace.select(int(i) for i in np.arange(n_prompts) * n // n_prompts)


def session(
    trace: Trace,
    engine: LlamaEngine,
    *,
    costs: Costs | None = None,
    top: int = 3,
    repeats: int = 3,
    n_prompts: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Validation:
    """Plan, and run the ``top`` chains, llama.cpp's defaults, no drafting and the best tree.

    Args:
        engine: the trace's model with the settings of its recording.
        costs: to predict from; None: measured now, and between the runs.
        n_prompts: how many of the prompts to run; the plan is made from all.
    """
    _check_every(trace)
    measure = partial(measured, engine, trace, on_progress or (lambda _progress: None))
    plan = plans.make(trace, costs if costs is not None else measure())
    default = default_chain(trace)
    policies = policies_to_run(picks(plan, top), default if default.n_max <= plan.deepest else None)
    tree = best_tree(plan, engine.n_ubatch)
    policies += [tree] if tree is not None else []
    return run(
        chosen(trace, n_prompts), policies, engine,
        costs=costs, measure=measure, repeats=repeats, on_progress=on_progress,
    )  # fmt: skip


def best_tree(plan: plans.Plan, n_ubatch: int) -> Branching | None:
    """Return the fastest policy of the plan that branches and that the driver can run here."""
    if not can_branch(plan.trace):
        return None
    chains = memory_of(plan.trace) == "chains"
    found: list[tuple[float, Branching]] = []
    for one in plan.policies:
        policy = one.policy
        if not isinstance(policy, Tree | GatedSiblings) or policy.leaves < 2:
            continue
        depth = policy.depth if isinstance(policy, Tree) else policy.n_max
        if not chains or policy.leaves * (1 + depth) <= n_ubatch:
            found.append((float(one.speeds[0]), policy))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def picks(plan: plans.Plan, top: int) -> list[Chain]:
    """Return the fastest chains, without those that do the same as a faster one."""
    picked: list[Priced] = []
    for one in sorted(plan.chains().values(), key=lambda p: -p.speeds[0]):
        if len(picked) < top and not any(_alike(one, other) for other in picked):
            picked.append(one)
    return [one.policy for one in picked if isinstance(one.policy, Chain)]


def _alike(a: Priced, b: Priced) -> bool:
    pairs = ((a.length, b.length), (a.nodes, b.nodes), (a.steps, b.steps))
    return all(abs(x - y) <= ALIKE * y for x, y in pairs)


def _check_every(trace: Trace) -> None:
    if trace.every > 1:
        raise InputError(
            f"the trace holds every {trace.every}th root only, so no run can be predicted from it: "
            "record without --every"
        )


def run(
    trace: Trace,
    policies: Sequence[Runnable],
    engine: Engine,
    *,
    costs: Costs | None = None,
    measure: Callable[[], Costs] | None = None,
    repeats: int = 3,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Validation:
    """Run policies on the trace's prompts and set them beside their prediction.

    Args:
        policies: chains, and the empty tree for no drafting.
        engine: of the trace's model and settings.
        costs: to predict from; None: those that ``measure`` finds, which is called before the first
            prompt and then whenever four times as long was run as it took.
        repeats: runs of each policy on each prompt.

    Raises:
        InputError: neither costs nor a way to measure them, or nothing to run.
        Interrupted: the user stopped it.
    """
    if costs is None and measure is None:
        raise InputError("no costs to predict from")
    _check_every(trace)
    if repeats < 1 or not policies or not trace.prompts:
        raise InputError("nothing to run: it takes a policy, a prompt and a repeat")
    replayed = [totals(trace, policy) for policy in policies]
    taken = [Taken() for _ in policies]
    found: list[Costs] = []
    n_ctx = max(prompt.n_ctx for prompt in trace.prompts)
    done, planned = 0, repeats * sum(int(t.tokens.sum()) for t in replayed)
    tell = on_progress or (lambda _progress: None)
    with ExitStack() as stack:
        drivers = []
        for policy in policies:
            driver = engine.driver(_draft(policy), n_ctx, None)
            stack.callback(driver.close)
            drivers.append(driver)
        try:
            first = prompt_of(trace.prompts[0])[:WARM_UP_TOKENS]
            _together(drivers, range(len(drivers)), first, WARM_UP_TOKENS)
            turns = _Turns(perf_counter)
            for repeat in range(repeats):
                for one in taken:
                    one.begin()
                for i, prompt in enumerate(trace.prompts):
                    if costs is None and measure is not None and turns.to_measure():
                        found.append(turns.timed(measure))
                    tell(Progress(f"repeat {repeat + 1}/{repeats}", done, planned, "tokens"))
                    order = turned(len(policies), repeat + i)
                    got = _together(drivers, order, prompt_of(prompt), trace.n_predict)
                    for one, generation in zip(taken, got, strict=True):
                        _keep(one, generation)
                        done += len(generation.tokens)
        except KeyboardInterrupt:
            raise Interrupted("interrupted: nothing was compared") from None
    costs = costs if costs is not None else merged(found)
    pricer = Pricer(costs, len(trace.prompts), seed=seed, memory=memory_of(trace))
    priced = pricer.price(zip(policies, replayed, strict=True))
    checked = [
        _checked(trace, policy, price, did, one)
        for policy, price, did, one in zip(policies, priced, replayed, taken, strict=True)
    ]
    return Validation(tuple(checked), costs, repeats, len(trace.prompts))


class _Turns:
    """Whose turn it is, the runs' or the measuring's, which shall take a fifth of the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next: float | None = None

    def to_measure(self) -> bool:
        return self._next is None or self._clock() >= self._next

    def timed(self, measure: Callable[[], Costs]) -> Costs:
        began = self._clock()
        costs = measure()
        ended = self._clock()
        self._next = ended + SPACING * (ended - began)
        return costs


def _together(
    drivers: Sequence[Driver], order: Sequence[int], prompt: Sequence[int], n_predict: int
) -> list[Generation]:
    """Continue a prompt with all drivers in turns; whoever is behind in tokens goes on."""
    got: dict[int, Generation] = {}
    made = [0] * len(drivers)

    def keep(which: int, _number: int, generation: Generation) -> None:
        got[which] = generation

    with ExitStack() as stack:
        going = {
            which: stack.enter_context(
                closing(drivers[which].rounds([prompt], n_predict, on_done=partial(keep, which)))
            )
            for which in order
        }
        while going:
            which = min(going, key=made.__getitem__)
            goal = made[which] + TURN
            for tokens in going[which]:
                made[which] += tokens
                if made[which] >= goal:
                    break
            else:
                del going[which]
    return [got[which] for which in range(len(drivers))]


def turned(n: int, by: int) -> list[int]:
    """Return 0..n-1, from another start each time."""
    return [(i + by) % n for i in range(n)]


def _draft(policy: Runnable) -> DraftSettings | None:
    if isinstance(policy, Chain):
        return DraftSettings(policy.n_max, policy.n_min, policy.p_min)
    if isinstance(policy, Tree | GatedSiblings) and policy != NO_DRAFTING:
        return DraftSettings.branching(policy)
    flags_of(policy)  # an error for what nobody can run
    return None


def prompt_of(prompt: TracedPrompt) -> list[int]:
    """Return the prompt's tokens without the text that follows."""
    tokens: list[int] = prompt.tokens[: prompt.n_prompt].tolist()
    return tokens


def _keep(taken: Taken, got: Generation) -> None:
    taken.add(len(got.tokens), got.seconds.generation, got.drafted, got.accepted)


def _checked(trace: Trace, policy: Runnable, price: Priced, done: Totals, taken: Taken) -> Checked:
    different = [
        i
        for i in range(len(trace.prompts))
        if (done.tokens[i], done.drafted[i], done.accepted[i])
        != (taken.tokens[0][i], taken.drafted[0][i], taken.accepted[0][i])
    ]
    replays = replay(trace.select(different), policy).prompts
    return Checked(
        policy=policy,
        predicted=price.rate,
        measured=taken.speed(),
        price=price,
        same=len(trace.prompts) - len(different),
        different=tuple(one.id for one in replays),
        unexplained=tuple(one.id for one in replays if one.near_tie is None),
    )


# ---- words and JSON


def verdict(validation: Validation) -> str:
    """Return in one sentence whether the prediction held."""
    best, pick = validation.best_measured, validation.best_predicted
    name, error = label(pick.policy), 100 * validation.median_error
    lead = f"predictions are {error:.1f} % off in the median"
    if pick is best:
        return f"The prediction held: {lead}, and the pick, {name}, is the fastest."
    loss = 100 * validation.shortfall
    if validation.shortfall <= CLOSE:
        return (
            f"The prediction held: {lead}, and the pick, {name}, measures {loss:.1f} % below the "
            f"fastest, {label(best.policy)}."
        )
    return (
        f"The prediction did not hold: {lead}, and its pick, {name}, measures {loss:.1f} % below "
        f"{label(best.policy)}."
    )


def to_dict(validation: Validation, trace: Trace) -> dict[str, Any]:
    """Return the validation as JSON types, schema ``mtpstats.validate/1``."""
    order = {id(checked): i for i, checked in enumerate(validation.policies)}
    return {
        "schema": SCHEMA,
        "model": trace.header.get("model"),
        "environment": validation.costs.facts.get("environment"),
        "n_prompts": validation.n_prompts,
        "repeats": validation.repeats,
        "costs": validation.costs.to_dict(),
        "policies": [_entry(checked) for checked in validation.policies],
        "median_absolute_error": validation.median_error,
        "best_predicted": order[id(validation.best_predicted)],
        "best_measured": order[id(validation.best_measured)],
        "shortfall": validation.shortfall,
        "verdict": verdict(validation),
        "tree": _tree_entry(validation, order),
    }


def _tree_entry(validation: Validation, order: dict[int, int]) -> dict[str, Any] | None:
    found = branched(validation)
    if found is None:
        return None
    low = found.break_even
    return {
        "policy": order[id(found.tree)],
        "fastest_other": order[id(found.other)],
        "gain": found.gain,
        "row_cost": found.row_cost,
        "break_even_row_cost": None if low == float("inf") else low,
        "verdict": tree_verdict(validation),
    }


def _entry(checked: Checked) -> dict[str, Any]:
    policy = checked.policy
    server = None
    if checked.server is not None:
        server = {
            "tokens_per_second": checked.server._asdict(),
            "drafted": checked.server_drafted,
            "accepted": checked.server_accepted,
        }
    return {
        "policy": "none" if kind_of(policy) == "none" else str(policy),
        "predicted_tokens_per_second": checked.predicted._asdict(),
        "measured_tokens_per_second": checked.measured._asdict(),
        "error": checked.error,
        "prompts_as_replayed": checked.same,
        "prompts_different": list(checked.different),
        "prompts_different_without_near_tie": list(checked.unexplained),
        "llama_server": server,
        "flags": flags_of(policy) if kind_of(policy) in ("none", "chain") else None,
    }


def policies_to_run(picked: Sequence[Chain], default: Chain | None) -> list[Runnable]:
    """Return no drafting, llama.cpp's defaults and the chains picked, each once."""
    wanted: list[Runnable] = [NO_DRAFTING, *([default] if default is not None else []), *picked]
    return list(dict.fromkeys(wanted))
