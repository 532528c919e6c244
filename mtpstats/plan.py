"""Plan: what every drafting policy would give on a machine, and which one to use.

Pure: a trace and costs in, figures and words out. A tree is scored on prompts it was not chosen
on: the half of the prompts that chose it is not the half it is priced for, both ways round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mtpstats import candidates
from mtpstats.candidates import BUDGET, Bench
from mtpstats.cost import Costs
from mtpstats.errors import InputError
from mtpstats.policy import MAX_DEPTH, Chain, GatedSiblings, Tree
from mtpstats.price import (
    NO_DRAFTING,
    PARTS,
    RESAMPLES,
    Figure,
    Priced,
    Pricer,
    fastest,
    flags_of,
    label,
    restless,
)
from mtpstats.replay import heads, reach
from mtpstats.trace import Trace

__all__ = ["Limits", "Plan", "Step", "make", "recommend", "to_dict", "verdict", "wider"]

SCHEMA: Final = "mtpstats.plan/1"
FEW_PROMPTS: Final = 10
SAME: Final = 0.005
"""Speeds that differ less, as a part of them, are alike."""


@dataclass(frozen=True)
class Step:
    """The marginal test: what one node more brings and costs, as parts of 1."""

    name: str
    tokens: float
    """Of tokens per verification."""
    seconds: float
    """Of seconds per verification."""

    @property
    def pays(self) -> bool | None:
        """Whether tokens grow faster than time; None: it makes no difference to speak of."""
        gain = (1 + self.tokens) / (1 + self.seconds) - 1
        return gain > 0 if abs(gain) >= SAME else None


@dataclass(frozen=True)
class Limits:
    """What holds the best chain back."""

    shares: dict[str, float]
    """Parts of its time: ``target`` (passes, as if of one row), ``rows`` (what the drafted rows
    add to them), ``follow``, ``draft``, ``other``."""
    free: dict[str, float]
    """How many times as fast it would be if the ``head`` took no time, if the drafted ``rows``
    added none to a pass, if all that is drafted were accepted (``acceptance``)."""
    steps: tuple[Step, ...]

    @property
    def most(self) -> str:
        """The key of ``free`` that would help most."""
        return max(self.free, key=lambda key: self.free[key])


@dataclass(frozen=True, eq=False)
class Plan:
    """All policies of a trace, priced."""

    trace: Trace
    costs: Costs
    seed: int
    policies: list[Priced]
    """In the order they were tried; no drafting first."""
    none: Priced
    default: Priced | None
    """llama.cpp's defaults; None if the trace is not that deep."""
    chain: Priced
    """The best chain."""
    wide: Priced | None
    """The best of those llama.cpp cannot run: trees, fixed or grown, gates, adaptive depth."""
    recommended: Priced
    starts: str
    limits: Limits
    pareto: list[Priced]
    """Policies that no other beats in tokens per verification and seconds per verification at
    once, quicker ones first."""
    deepest: int
    """The longest chain the trace can answer for."""
    notes: tuple[str, ...]

    def best(self, kind: str) -> Priced | None:
        """Return the fastest policy of a kind; the first of equals."""
        return fastest(p for p in self.policies if p.kind == kind)

    def chains(self) -> dict[tuple[int, float], Priced]:
        """Return the chains by n_max and p_min."""
        return {(p.policy.n_max, p.policy.p_min): p for p in self.policies
                if isinstance(p.policy, Chain)}  # fmt: skip

    def trees(self) -> dict[int, Priced]:
        """Return the best trees by their number of nodes."""
        return {len(p.policy): p for p in self.policies
                if isinstance(p.policy, Tree) and p.kind == "tree"}  # fmt: skip

    def flags(self) -> list[str]:
        """Return the recommendation as flags of llama-server."""
        return flags_of(self.recommended.policy)


def make(trace: Trace, costs: Costs, *, seed: int = 0, budget: int = BUDGET) -> Plan:
    """Price every policy and choose.

    A trace of every s-th root has no policy starts: then all policies are judged by uniform ones,
    which a note says, and adaptive depth, which has none, is left out.

    Args:
        seed: of the resamples and of the halves.
        budget: most nodes of a tree.

    Raises:
        InputError: a trace without prompts or without verifications.
    """
    pricer = Pricer(costs, len(trace.prompts), seed=seed, memory=candidates.memory_of(trace))
    bench = Bench(trace, pricer, seed)
    (none,) = bench.priced([NO_DRAFTING])
    if not none.verifications[0]:
        raise InputError("the trace holds no verification: there is nothing to plan from")
    chains = bench.priced(candidates.chains(trace))
    by_speed = sorted(chains, key=lambda p: -p.speeds[0])
    found = [none, *chains, *bench.priced(candidates.gates(by_speed[:3]))]
    if bench.starts == "policy":
        found += bench.priced(candidates.adaptive(by_speed[0], trace))
    found += bench.grown()
    found += bench.trees(budget)
    found = [replace(p, speedup=p.over(none)) for p in found]

    none = found[0]
    runnable = [p for p in found if p.kind == "chain"]
    same = candidates.default_chain(trace)
    default = next((p for p in runnable if p.policy == same), None)
    chain = fastest(runnable)
    assert chain is not None
    deepest = reach(trace)
    return Plan(
        trace=trace,
        costs=costs,
        seed=seed,
        policies=found,
        none=none,
        default=default,
        chain=chain,
        wide=fastest(p for p in found if p.kind not in ("none", "chain")),
        recommended=recommend(none, default, chain),
        starts=bench.starts,
        limits=_limits(chain, none, found),
        pareto=_pareto(found),
        deepest=deepest,
        notes=_notes(trace, costs, chain, deepest, found),
    )


def recommend(none: Priced, default: Priced | None, chain: Priced) -> Priced:
    """Return what to run: no drafting, llama.cpp's defaults or the best chain.

    The defaults stand unless the best chain is surely faster. Where it is too close to tell
    whether to draft at all, the better figure counts.
    """
    gain = chain.over(none)
    if not gain.above_1 and gain.value <= 1:
        return none
    if default is not None and default.over(none).above_1 and not chain.over(default).above_1:
        return default
    return chain


# ---- what it means


def _limits(chain: Priced, none: Priced, found: Sequence[Priced]) -> Limits:
    seconds = float(chain.seconds[0])
    verify, follow, draft, other = (float(chain.parts[part][0]) for part in PARTS)
    bare = float(chain.bare[0])
    drafted = chain.nodes * chain.verifications[0]
    full = chain.verifications[0] + drafted
    return Limits(
        shares={
            "target": bare / seconds,
            "rows": (verify - bare) / seconds,
            "follow": follow / seconds,
            "draft": draft / seconds,
            "other": other / seconds,
        },
        free={
            "head": seconds / (verify + other),
            "rows": seconds / (bare + follow + draft + other),
            "acceptance": float(max(1.0, full / chain.tokens[0])),
        },
        steps=tuple(_steps(chain, none, found)),
    )


def _steps(chain: Priced, none: Priced, found: Sequence[Priced]) -> Iterable[Step]:
    policy = chain.policy
    assert isinstance(policy, Chain)
    by_policy = {p.policy: p for p in found if isinstance(p.policy, Chain)}
    before = by_policy.get(replace(policy, n_max=policy.n_max - 1)) if policy.n_max > 1 else none
    if before is not None:
        yield _step(f"n_max {policy.n_max} rather than {policy.n_max - 1}", before, chain)
    after = by_policy.get(replace(policy, n_max=min(policy.n_max + 1, MAX_DEPTH)))
    if after is not None and after is not chain:
        yield _step(f"n_max {policy.n_max + 1} rather than {policy.n_max}", chain, after)
    gated = [
        p for p in found
        if isinstance(p.policy, GatedSiblings)
        and (p.policy.n_max, p.policy.p_min) == (policy.n_max, policy.p_min)
    ]  # fmt: skip
    wider = fastest(gated)
    if wider is not None:
        yield _step("second choices too, where the head is in doubt", chain, wider)


def _step(name: str, before: Priced, after: Priced) -> Step:
    return Step(name, after.length / before.length - 1, after.period / before.period - 1)


def _pareto(found: Sequence[Priced]) -> list[Priced]:
    front: list[Priced] = []
    for priced in sorted(found, key=lambda p: (p.period, -p.length)):
        if not front or priced.length > front[-1].length:
            front.append(priced)
    return front


def _notes(
    trace: Trace, costs: Costs, chain: Priced, deepest: int, found: Sequence[Priced]
) -> tuple[str, ...]:
    notes = []
    if trace.incomplete:
        notes.append(f"the trace is incomplete: {trace.incomplete}")
    if trace.every > 1:
        notes.append(
            f"every {trace.every}th root was recorded, so runs cannot be replayed: figures are of "
            "uniform starts, which take a draft to start anywhere alike"
        )
    n = len(trace.prompts)
    if n < 2:
        notes.append("a single prompt tells no interval")
    elif n < FEW_PROMPTS:
        notes.append(f"intervals over {n} prompts, fewer than {FEW_PROMPTS}, are too narrow")
    possible = heads(trace)
    if deepest < possible:
        at_the_end = isinstance(chain.policy, Chain) and chain.policy.n_max == deepest
        notes.append(
            f"the trace is {deepest} deep: n_max {deepest + 1} to {possible} are not in the plan"
            + (", and the fastest chain is as deep as it goes" if at_the_end else "")
            + f" (record --depth {possible})"
        )
    wide = [p for p in found if p.extrapolated]
    if wide:
        least = min(wide, key=lambda p: p.nodes)
        notes.append(
            f"costs are measured up to {costs.verify.last} rows; passes with more, in "
            f"{len(wide)} policies from {least.nodes:.0f} nodes on, are extrapolated"
        )
    busy = restless(costs)
    if busy is not None:
        notes.append(busy)
    ours = (trace.header.get("model") or {}).get("sha256")
    theirs = (costs.facts.get("model") or {}).get("sha256")
    if ours and theirs and ours != theirs:
        notes.append("the costs were measured with another model")
    return tuple(notes)


# ---- words


def verdict(plan: Plan) -> str:
    """Return what to do, in one sentence."""
    default, chain = plan.default, plan.chain
    name, gain = label(chain.policy), chain.over(plan.none)
    alone = ", going by a single prompt" if chain.on_one_prompt else ""
    if gain.below_1:
        return (
            f"Do not draft: the fastest chain, {name}, would run at {_times(gain)} times the speed "
            f"of no drafting{alone}."
        )
    if not gain.above_1:
        return (
            f"Too close to tell whether drafting pays: the fastest chain, {name}, would run at "
            f"{_times(gain)} times the speed of no drafting{alone}."
        )
    if default is None:
        return f"Draft with {name}: {_times(gain)} times the speed of no drafting{alone}."
    if chain is default:
        return (
            f"Draft with llama.cpp's defaults, {name}: no other chain is faster, at "
            f"{_times(gain)} times the speed of no drafting{alone}."
        )
    over = chain.over(default)
    if plan.recommended is default:
        return (
            f"Draft with llama.cpp's defaults, {label(default.policy)}, at "
            f"{_times(default.over(plan.none))} times the speed of no drafting: {name} is too "
            f"close to them to tell, at {_times(over)} times their speed."
        )
    if over.above_1:
        return (
            f"Draft with {name}: {_times(gain)} times the speed of no drafting and {_times(over)} "
            f"times that of llama.cpp's defaults{alone}."
        )
    return (
        f"Draft with {name}: {_times(gain)} times the speed of no drafting; llama.cpp's defaults "
        f"are too close to tell, this is {_times(over)} times their speed."
    )


def wider(plan: Plan) -> str:
    """Return in one sentence what the best policy adds that llama.cpp cannot run."""
    best = plan.wide
    if best is None:
        return "Nothing wider: no candidate was ever right."
    gain = best.over(plan.chain)
    name = f"the best of trees, gates and adaptive depth ({label(best.policy)}"
    if best.in_sample is not None:
        name += ", scored on prompts it was not chosen on"
    name += f") would run at {_times(gain)} times the speed of the fastest chain"
    if gain.above_1:
        return f"Wider would pay, in an engine that can: {name}."
    if (gain.value if gain.hi is None else gain.hi) < 1 + SAME:
        return f"Wider does not pay: {name}."
    return f"Whether wider pays is too close to tell: {name}."


def _times(figure: Figure) -> str:
    if figure.lo is None or figure.hi is None:
        return f"{figure.value:.2f}"
    return f"{figure.value:.2f} ({figure.lo:.2f} to {figure.hi:.2f})"


# ---- JSON


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON types, schema ``mtpstats.plan/1``; times in seconds.

    ``policies`` holds the series of every figure: chains by ``n_max`` and ``p_min``, trees and
    grown ones by ``n_nodes``.
    """
    trace = plan.trace
    number = {id(priced): i for i, priced in enumerate(plan.policies)}

    def index(priced: Priced | None) -> int | None:
        return None if priced is None else number[id(priced)]

    return {
        "schema": SCHEMA,
        "model": trace.header.get("model"),
        "trace": {
            "prompts": len(trace.prompts),
            "roots": trace.n_roots,
            "tokens": int(plan.none.tokens[0]),
            "depth": trace.depth,
            "width": trace.width,
            "every": trace.every,
            "n_predict": trace.n_predict,
            "incomplete": trace.incomplete,
            "starts": plan.starts,
        },
        "costs": plan.costs.to_dict(),
        "seed": plan.seed,
        "resamples": RESAMPLES,
        "policies": [_entry(priced) for priced in plan.policies],
        "none": index(plan.none),
        "default": index(plan.default),
        "chain": index(plan.chain),
        "wide": index(plan.wide),
        "recommended": index(plan.recommended),
        "pareto": [index(priced) for priced in plan.pareto],
        "limits": {
            "shares": plan.limits.shares,
            "free": plan.limits.free,
            "steps": [
                {"name": s.name, "tokens": s.tokens, "seconds": s.seconds, "pays": s.pays}
                for s in plan.limits.steps
            ],
        },
        "deepest": plan.deepest,
        "flags": plan.flags(),
        "verdict": verdict(plan),
        "wider": wider(plan),
        "notes": list(plan.notes),
    }  # fmt: skip


def _entry(priced: Priced) -> dict[str, Any]:
    policy = priced.policy
    return {
        "policy": priced.spec,
        "kind": priced.kind,
        "n_max": getattr(policy, "n_max", None),
        "p_min": getattr(policy, "p_min", None),
        "n_nodes": len(policy) if isinstance(policy, Tree) else getattr(policy, "n_nodes", None),
        "tokens_per_second": _figure(priced.rate),
        "speedup": _figure(priced.speedup),
        "in_sample_tokens_per_second": _figure(priced.in_sample),
        "tokens_per_verification": priced.length,
        "nodes_per_verification": priced.nodes,
        "steps_per_verification": priced.steps,
        "seconds_per_verification": priced.period,
        "shares": {part: float(priced.parts[part][0] / priced.seconds[0]) for part in PARTS},
        "extrapolated": priced.extrapolated,
    }


def _figure(figure: Figure | None) -> dict[str, float | None] | None:
    return None if figure is None else figure._asdict()
