"""A plan as plain text of at most 80 columns."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from mtpstats.plan import Plan, verdict, wider
from mtpstats.price import Priced, label
from mtpstats.report.numbers import legend, plural, wrapped
from mtpstats.text import printable

NAMES = 28
SHOWN_CHAINS = 5
SHOWN_BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CLOSE = 1.08  # Pareto points with less than 8 % more tokens than the one before are not printed

_SHARES = {
    "target": "target passes as of one row",
    "rows": "what drafted rows add to them",
    "draft": "the head's drafting",
    "follow": "the head's pass over verified rows",
    "other": "everything else",
}
_FREE = {
    "head": "the head took no time",
    "rows": "drafted rows cost the target nothing",
    "acceptance": "everything drafted were accepted",
}
_ANSWERS = {True: "pays", False: "does not pay", None: "makes no difference"}
_MOST = {
    "head": "what the head costs",
    "rows": "what verifying more rows costs",
    "acceptance": "acceptance",
}


def render(plan: Plan) -> str:
    """Return the whole report."""
    parts = [_header(plan), _policies(plan), _chains(plan)]
    if plan.trees():
        parts.append(_trees(plan))
    parts += [_pareto(plan), _limits(plan)]
    if plan.notes:
        parts.append("".join(wrapped(f"! {note}", "  ") for note in plan.notes))
    parts += [_flags(plan), wrapped(verdict(plan)) + wrapped(wider(plan)) + _spec(plan)]
    return "\n".join(parts)


def _header(plan: Plan) -> str:
    trace, model = plan.trace, plan.trace.header.get("model") or {}
    width = f", width {trace.width}" if trace.width else ""
    every = f", every {trace.every}th root" if trace.every > 1 else ""
    rows = [
        ("model", [printable(str(model.get(key) or "")) for key in ("file", "architecture")]),
        ("trace", [
            plural(len(trace.prompts), "prompt"),
            plural(int(plan.none.tokens[0]), "token"),
            f"depth {trace.depth}{width}{every}",
        ]),
        ("costs", _costs(plan)),
    ]  # fmt: skip
    return "".join(
        wrapped(f"{name:<9}{', '.join(filter(None, cells))}", " " * 9)
        for name, cells in rows
        if any(cells)
    )


def _costs(plan: Plan) -> list[str]:
    costs = plan.costs
    environment = costs.facts.get("environment") or {}
    threads = (costs.facts.get("settings") or {}).get("n_threads")
    verify = ", ".join(
        f"{rows}: {_short(1e3 * float(costs.verify(rows)))}"
        for rows in (1, 2, 4, 8, 16, 32)
        if rows <= costs.verify.last
    )
    return [
        printable(str(environment.get("cpu") or "")),
        plural(threads if isinstance(threads, int) else None, "thread"),
        f"after {costs.n_past:,} tokens" if costs.n_past is not None else "",
        f"ms to verify rows {verify}",
        f"to draft one {_short(1e3 * float(costs.draft(1)))}",
    ]


def _policies(plan: Plan) -> str:
    chains = sorted((p for p in plan.policies if p.kind == "chain"), key=_speed, reverse=True)
    rows: list[tuple[str, Priced]] = [("no drafting", plan.none)]
    if plan.default is not None:
        rows.append(("llama.cpp's defaults", plan.default))
    # Of chains that look alike here the fastest is enough.
    rest = {f"{p.length:.2f} {p.nodes:.2f}": p for p in reversed(chains) if p is not plan.default}
    rows += [
        (label(p.policy), p) for p in sorted(rest.values(), key=_speed)[: -SHOWN_CHAINS - 1 : -1]
    ]
    others = [plan.best(kind) for kind in ("gated", "adaptive", "opttree", "eagle2", "tree")]
    rows += [(_name(p), p) for p in others if p is not None]
    lines = [f"{'':<{NAMES + 3}}per verification", _HEAD]
    lines += [_row(name, priced) for name, priced in rows]
    lines.append(
        legend(
            "Predicted. nodes: tokens drafted and verified; times: speed over no drafting. "
            "* llama.cpp runs chains only."
        )
    )
    return "\n".join(lines)


_HEAD = f"{'policy':<{NAMES}} tokens  nodes      ms        tokens/s (95 %) times"


def _name(priced: Priced) -> str:
    return label(priced.policy) + ("" if priced.kind in ("none", "chain") else " *")


def _row(name: str, priced: Priced) -> str:
    times = priced.speedup.value if priced.speedup else 1.0
    return (
        f"{name:<{NAMES}} {priced.length:>6.2f} {priced.nodes:>6.2f} {_ms(priced):>7}"
        f" {_rate(priced):>22} {times:>5.2f}"
    )


def _ms(priced: Priced) -> str:
    return _short(1e3 * priced.period)


def _speed(priced: Priced) -> float:
    return float(priced.speeds[0])


def _short(value: float) -> str:
    """Return a figure of at most 7 characters: 0.0123, 4.56, 78.9, 789, 12,345, 1,234k."""
    if value >= 1e5:
        return f"{value / 1e3:,.0f}k"
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def _rate(priced: Priced) -> str:
    rate = priced.rate
    if rate.lo is None or rate.hi is None:
        return _short(rate.value)
    return f"{_short(rate.value)} ({_short(rate.lo)}-{_short(rate.hi)})"


def _chains(plan: Plan) -> str:
    found = plan.chains()
    p_mins = sorted({p_min for _, p_min in found})
    lines = [
        "tokens/s of chains: n_max down, p_min across",
        "     " + "".join(f"{p_min:>7g}" for p_min in p_mins),
    ]
    for n_max in range(1, plan.deepest + 1):
        cells = "".join(f"{_short(_speed(found[n_max, p_min])):>7}" for p_min in p_mins)
        lines.append(f"{n_max:>5}{cells}")
    return "\n".join(lines) + "\n"


def _trees(plan: Plan) -> str:
    found = plan.trees()
    best = plan.best("tree")
    shown = {n for n in SHOWN_BUDGETS if n in found} | {n for n, p in found.items() if p is best}
    lines = [
        "trees by nodes: the best static one, on prompts it was not chosen on",
        "nodes tokens per verification      ms        tokens/s (95 %)  on its own prompts",
    ]
    for n in sorted(shown):
        priced = found[n]
        own = _short(priced.in_sample.value) if priced.in_sample else "-"
        lines.append(
            f"{n:>5} {priced.length:>22.2f} {_ms(priced):>7} {_rate(priced):>22} {own:>19}"
        )
    return "\n".join(lines) + "\n"


def _pareto(plan: Plan) -> str:
    lines = ["the most tokens for the time of a verification", _HEAD]
    before = 0.0
    for priced in plan.pareto:
        if priced.length >= CLOSE * before or priced is plan.recommended:
            before = priced.length
            lines.append(_row(_name(priced), priced))
    return "\n".join(lines) + "\n"


def _limits(plan: Plan) -> str:
    limits = plan.limits
    lines = [f"what limits the fastest chain, {label(plan.chain.policy)}: {_MOST[limits.most]}\n"]
    lines += [
        f"  {_SHARES[key]:<38}{100 * share:>6.1f} % of its time\n"
        for key, share in limits.shares.items()
    ]
    lines += [
        f"  {'if ' + _FREE[key]:<38}{times:>6.2f} times as fast\n"
        for key, times in limits.free.items()
    ]
    for step in limits.steps:
        answer = _ANSWERS[step.pays]
        lines.append(
            wrapped(
                f"  {step.name}: {100 * step.tokens:+.1f} % tokens, {100 * step.seconds:+.1f} % "
                f"time a verification: {answer}",
                "    ",
            )
        )
    return "".join(lines)


def _flags(plan: Plan) -> str:
    model = str((plan.trace.header.get("model") or {}).get("file") or "MODEL")
    words = ["llama-server", "-m", shlex.quote(printable(model)), *plan.flags()]
    return "\n".join(["for llama-server:", *_folded(words)]) + "\n"


def _folded(words: Iterable[str]) -> list[str]:
    """Break a command so that a shell still reads it as one."""
    lines, line = [], " "
    for word in words:
        if len(line) + len(word) + 3 > 80 and word.startswith("-"):
            lines.append(line + " \\")
            line = "   "
        line += f" {word}"
    return [*lines, line]


def _spec(plan: Plan) -> str:
    """The best wide policy in full, for ``replay --policy``."""
    if plan.wide is None:
        return ""
    return wrapped(f"As a policy: {plan.wide.spec.replace(',', ', ')}", "  ")
