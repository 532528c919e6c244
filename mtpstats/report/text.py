"""A result as plain text of at most 80 columns."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from mtpstats import result as results
from mtpstats.stats import MAX_POSITIONS, SHOWN, Snapshot
from mtpstats.summary import Estimate, Summary, by_category, deeper_or_wider, summarise
from mtpstats.text import printable

WIDTH = 80
LABEL = 26
MOST_CATEGORIES = 20

_TEMP = {
    "default": " (the default)",
    "built-in model": " (the built-in model's default: it loops when greedy)",
}

_APART = {
    "discarded": "drafts whose outcome could not be told",
    "unresolved": "drafts cut off by the end",
    "dropped_tokens": "drafted tokens thrown away by n_min",
    "nan_rows": "head rows with a NaN",
    "beyond_drafted": f"drafted tokens at positions above {MAX_POSITIONS}",
}


def render(result: dict[str, Any]) -> str:
    """Return the whole report; ``result`` is what ``bench`` returns or ``result.read`` reads."""
    timing = results.timing(result)
    parts = [_header(result)]
    by_prompt = _by_prompt(result)
    summary = _summary(result, by_prompt)
    if summary is not None:
        parts += [_acceptance(summary), _ranks(summary), *_categories(result, by_prompt)]
    parts.append(_totals(timing, summary))
    notes = [*(summary.warnings if summary else ()), *_remarks(result)]
    parts += ["".join(_wrapped(f"! {note}", "  ") for note in notes)] if notes else []
    if summary is not None:
        parts.append(_wrapped(f"Deeper or wider? {deeper_or_wider(summary, timing.speedup)}"))
    return "\n".join(parts)


def _by_prompt(result: dict[str, Any]) -> list[Snapshot]:
    """Return the counters of each prompt, none for a run without statistics."""
    if result["total"]["positions"] is None:
        return []
    return [Snapshot.from_dict(prompt["positions"]) for prompt in result["prompts"]]


def _summary(result: dict[str, Any], by_prompt: list[Snapshot]) -> Summary | None:
    """Return the derived figures, None for a run without statistics."""
    total = result["total"]
    if total["positions"] is None:
        return None
    prompts = result["prompts"]
    return summarise(
        Snapshot.from_dict(total["positions"]),
        by_prompt=by_prompt,
        tokens=[prompt["tokens"] for prompt in prompts],
        loops=[prompt["repeated_4grams"] for prompt in prompts],
    )


# ---- what was run


def _header(result: dict[str, Any]) -> str:
    model, settings, environment = result["model"], result["settings"], result["environment"]
    library, n_parallel = environment["library"] or {}, settings.get("n_parallel", 1)
    rows = [
        ("model", _model(model)),
        *([("head", _model(model["draft_model"]))] if "draft_model" in model else []),
        ("machine", [
            printable(str(environment.get("cpu", ""))),
            _plural(settings["n_threads"], "thread"),
            *_devices(environment),
            f"llama.cpp {printable(str(library.get('version', 'unknown')))}",
            printable(str(library.get("backend", ""))),
        ]),
        ("run", [
            _prompts(result),
            f"{n_parallel} at a time" if n_parallel > 1 else "",
            _plural(result["total"]["tokens"], "token"),
            *_limits(settings),
        ]),
        ("chat", _chat(settings)),
        ("target", _target(settings)),
    ]  # fmt: skip
    return "".join(
        _wrapped(f"{name:<9}{', '.join(filter(None, cells))}", " " * 9)
        for name, cells in rows
        if cells
    )


def _model(model: dict[str, Any]) -> list[str]:
    return [
        printable(model["file"]),
        printable(model["architecture"]),
        f"{_scaled(model['parameters'])} parameters" if model["parameters"] else "",
        printable(model["quantisation"] or ""),
        _plural(model["nextn_blocks"], "NextN block"),
    ]


def _devices(environment: dict[str, Any]) -> list[str]:
    devices = [d for d in environment["devices"] if isinstance(d, dict) and d.get("type") != "cpu"]
    return [printable(str(device.get("description", ""))) for device in devices]


def _prompts(result: dict[str, Any]) -> str:
    done, planned = len(result["prompts"]), result["settings"]["n_prompts"]
    if planned is not None and done < planned:
        return f"{done} of {planned} prompts"
    return _plural(done, "prompt")


def _limits(settings: dict[str, Any]) -> list[str]:
    n_max, asked = settings["n_max"], settings["n_max_asked"]
    cells = [] if n_max is None else [f"n_max {n_max}"]
    if cells and asked not in (None, n_max):
        cells = [f"n_max {n_max} (all this model has heads for; {asked} were asked for)"]
    if settings["n_min"]:
        cells.append(f"n_min {settings['n_min']}")
    if settings["p_min"]:
        cells.append(f"p_min {settings['p_min']:g}")
    if settings["n_ctx"]:
        cells.append(f"context {settings['n_ctx']:,}")
    return cells


def _chat(settings: dict[str, Any]) -> list[str]:
    """Return what made text of conversations; nothing for a run without."""
    template = settings.get("chat_template")
    if template is None:
        return []
    whose = "the model's template" if template == "model" else f"template {printable(template)}"
    kwargs = settings["chat_template_kwargs"]
    cells = [f"{printable(key)} {printable(json.dumps(value))}" for key, value in kwargs.items()]
    return [f"{_plural(settings['chat_prompts'], 'conversation')} by {whose}", *cells]


def _target(settings: dict[str, Any]) -> list[str]:
    temp, why = settings["temp"], _TEMP.get(settings["temp_source"], "")
    if temp is None:
        return ["unknown"]
    if temp == 0:
        return [f"temperature 0, greedy{why}"]
    cells = [
        f"{key.replace('_', '-')} {settings[key]}"
        for key in ("top_k", "top_p", "min_p", "seed")
        if settings[key] is not None
    ]
    return [f"temperature {temp:g}{why}", *cells]


# ---- statistics


def _acceptance(summary: Summary) -> str:
    lines = ["pos  drafted  reached   accepted % (95 %)     p1    p2 rank 2 %    adds   wider"]
    for position in summary.positions:
        lines.append(
            f"{position.number:>3} {_count(position.drafted, 8):>8}"
            f" {_count(position.reached, 8):>8}  {_percent_interval(position.acceptance):>18}"
            f"  {_share(position.p1):>5} {_share(position.p2):>5} {_percent(position.rank2):>8}"
            f" {_gain(position.unconditional):>7} {_gain(position.widening):>7}"
        )
    lines.append(
        _legend(
            "accepted % of those reached. p1, p2: the head's mean probability of its first and "
            "second choice; rank 2 %: how often the second was right. Tokens per verification: "
            "adds, what this position gave; wider, what its second choice as one more leaf would "
            "give."
        )
    )
    return "\n".join(lines)


def _ranks(summary: Summary) -> str:
    lines = [
        "rank of the target's choice among the head's candidates, counts",
        "pos" + "".join(f"{rank:>7}" for rank in range(1, SHOWN + 1)) + "   miss  1 or 2 %",
    ]
    for position in summary.positions:
        counts = "".join(
            f"{_count(count, 6):>7}" for count in (*position.rank_counts, position.miss_count)
        )
        lines.append(f"{position.number:>3}{counts}  {_percent(position.recall[1]):>8}")
    return "\n".join(lines) + "\n"


def _categories(result: dict[str, Any], by_prompt: list[Snapshot]) -> list[str]:
    """Return the figures of each category, if there are two or more."""
    prompts = result["prompts"]
    names = [prompt["category"] for prompt in prompts]
    if len(set(names)) < 2:
        return []
    found = by_category(names, by_prompt, [prompt["tokens"] for prompt in prompts])
    lines = [
        "by category; accepted and rank 2 are of position 1",
        f"{'category':<15}{'prompts':>7}{'tokens':>8}{'accepted % (95 %)':>19}{'rank 2':>7}"
        f"{'length (95 %)':>18}{'cov.':>6}",
    ]
    for category in found[:MOST_CATEGORIES]:
        name = "-" if category.name is None else printable(category.name)
        lines.append(
            f"{name if len(name) < 15 else name[:11] + '...':<15}"
            f"{_count(category.prompts, 6):>7}{_count(category.tokens, 7):>8}"
            f"{_percent_interval(category.acceptance):>19}{_percent(category.rank2):>7}"
            f"{_within(category.acceptance_length, 17):>18}{_share_of_tokens(category.coverage):>6}"
        )
    more = len(found) - MOST_CATEGORIES
    if more > 0:
        lines.append(f"  and {more:,} more, each with no more prompts than these")
    lines.append(_legend("length: mean acceptance length; cov.: drafted per generated token."))
    return ["\n".join(lines)]


# ---- totals


def _totals(timing: results.Timing, summary: Summary | None) -> str:
    rows: list[tuple[str, str]] = []
    if summary is not None:
        rows += [
            ("mean acceptance length", f"{_with_interval(summary.acceptance_length)} tokens"),
            ("accepted of drafted", _accepted(summary)),
            ("coverage", f"{_with_interval(summary.coverage)} drafted tokens per generated one"),
        ]
    rows.append(("tokens/s", _speed(timing)))
    rows += [
        (name, _time(timing.seconds[part], timing.shares[part]))
        for part, name in (
            ("target", "time in the target"),
            ("head", "time in the head"),
            ("other", "time in everything else"),
        )
    ]
    rows.append(("reading the prompts", f"{timing.prompt_seconds:.2f} s"))
    if summary is not None:
        rows.append(("repeated 4-grams", _loops(summary)))
    return "".join(_wrapped(f"{name:<{LABEL}}{value}", " " * LABEL) for name, value in rows)


def _accepted(summary: Summary) -> str:
    text = f"{summary.accepted:,} of {summary.drafted:,} tokens"
    return text if summary.acceptance is None else f"{text}, {_percent(summary.acceptance)} %"


def _loops(summary: Summary) -> str:
    if summary.loops is None:
        return "-"
    text = _share_percent(summary.loops)
    return text if summary.prompts == 1 else f"at most {text} of a text"


def _speed(timing: results.Timing) -> str:
    text = _number(timing.tokens_per_second, 1)
    if timing.baseline_tokens_per_second is not None:
        text += f"; plain decoding {_number(timing.baseline_tokens_per_second, 1)}"
        text += f": speed-up {_number(timing.speedup)}"
    return text


def _time(seconds: float, share: float | None) -> str:
    return f"{seconds:.2f} s" if share is None else f"{seconds:.2f} s, {_share_percent(share)}"


def _remarks(result: dict[str, Any]) -> list[str]:
    """Return what a reader has to know about the run beside its statistics."""
    prompts, planned = result["prompts"], result["settings"]["n_prompts"]
    remarks = []
    if planned is not None and len(prompts) < planned:
        remarks.append(f"interrupted: {len(prompts)} of {planned} prompts were finished")
    broken = [prompt["id"] for prompt in prompts if prompt["stop"] == "nan"]
    if broken:
        remarks.append(f"the target gave no finite logit: {_names(broken)}")
    full = [prompt["id"] for prompt in prompts if prompt["stop"] == "context"]
    if full:
        remarks.append(f"the context was full before the end: {_names(full)}")
    plain = [p for p in prompts if p["baseline"] is not None]
    different = [p["id"] for p in plain if not p["baseline"]["same_text"]]
    if different:
        remarks.append(
            f"drafted and plain text differ in {len(different)} of {len(plain)} prompts "
            f"({_names(different)}); near ties, of which there are "
            f"{result['total']['near_ties']:,}, may fall either way"
        )
    if result["model"].get("chat_template") and not result["settings"].get("chat_prompts"):
        remarks.append(
            "the prompts were continued as plain text; this model has a chat template, and --chat "
            "makes each a user's message"
        )
    counters = result["total"]["positions"] or {}
    apart = [f"{counters[key]:,} {words}" for key, words in _APART.items() if counters.get(key)]
    if apart:
        remarks.append(f"counted apart from the statistics: {', '.join(apart)}")
    return remarks


def _names(ids: list[str]) -> str:
    shown = ", ".join(printable(name) for name in ids[:3])
    return f"{shown}, ..." if len(ids) > 3 else shown


# ---- words and numbers


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) + "\n"


def _legend(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ") + "\n"


def _plural(count: int | None, noun: str) -> str:
    if count is None:
        return ""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _scaled(count: int) -> str:
    """Return a large count as people say it: 3.4 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _count(count: int, width: int) -> str:
    """Return a count in at most ``width`` characters: 1,234, or 1235k where that is too long."""
    text = f"{count:,}"
    for unit in "kMGTPE":
        if len(text) <= width:
            break
        count, width = (count + 500) // 1000, 6
        text = f"{count}{unit}"
    return text


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(estimate: Estimate) -> str:
    """Return a probability in four characters: .553, 1.00."""
    if estimate is None:
        return "-"
    text = f"{estimate.value:.3f}"
    return text[1:] if text.startswith("0") else text[:4]


def _share_percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _percent(estimate: Estimate) -> str:
    return "-" if estimate is None else f"{100 * estimate.value:.1f}"


def _percent_interval(estimate: Estimate) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} ({100 * estimate.lo:.1f}-{100 * estimate.hi:.1f})"


def _with_interval(estimate: Estimate) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.2f} ({estimate.lo:.2f} to {estimate.hi:.2f})"


def _within(estimate: Estimate, width: int) -> str:
    """Return an estimate and its interval with as many digits as fit."""
    if estimate is None:
        return "-"
    for digits in (2, 1, 0):
        text = "{0:.{3}f} ({1:.{3}f}-{2:.{3}f})".format(*estimate, digits)
        if len(text) <= width:
            break
    return text


def _share_of_tokens(estimate: Estimate) -> str:
    return "-" if estimate is None else f"{estimate.value:.2f}"[:5].rstrip(".")


def _gain(estimate: Estimate) -> str:
    return "-" if estimate is None else f"+{estimate.value:.3f}"
