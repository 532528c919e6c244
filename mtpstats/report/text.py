"""A result as plain text of at most 80 columns."""

from __future__ import annotations

import json
from typing import Any

from mtpstats import result as results
from mtpstats.categories import of_categories
from mtpstats.report.numbers import (
    counted,
    decimal,
    gain,
    legend,
    per_token,
    percent,
    percent_interval,
    plural,
    probability,
    scaled,
    share_percent,
    with_interval,
    within,
    wrapped,
)
from mtpstats.stats import MAX_POSITIONS, SHOWN
from mtpstats.summary import Summary, of_result
from mtpstats.text import printable
from mtpstats.verdict import deeper_or_wider

LABEL = 26
LEGEND = (
    "accepted % of those reached. p1, p2: the head's mean probability of its first and second "
    "choice; rank 2 %: how often the second was right. Tokens per verification: adds, what this "
    "position gave; wider, what its second choice as one more leaf would give."
)
MOST_CATEGORIES = 20
CATEGORIES = "by category; accepted and rank 2 are of position 1"
CATEGORY_HEADS = (
    *("category", "prompts", "tokens", "accepted % (95 %)", "rank 2", "length (95 %)", "cov."),
)
CATEGORY_LEGEND = "length: mean acceptance length; cov.: drafted per generated token."

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
    summary = of_result(result)
    if summary is not None and summary.positions:
        parts.append(_acceptance(summary))
    if summary is not None and any(position.rank_counts for position in summary.positions):
        parts.append(_ranks(summary))
    parts += _categories(result)
    parts.append(_totals(timing, summary, results.wood(result)))
    notes = [*(summary.warnings if summary else ()), *remarks(result)]
    parts += ["".join(wrapped(f"! {note}", "  ") for note in notes)] if notes else []
    if summary is not None:
        parts.append(wrapped(f"Deeper or wider? {deeper_or_wider(summary, timing.speedup)}"))
    return "\n".join(parts)


# ---- what was run


def _header(result: dict[str, Any]) -> str:
    return "".join(wrapped(f"{name:<9}{text}", " " * 9) for name, text in header_rows(result))


def header_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what was run, by subject, as printable text."""
    model, settings, environment = result["model"], result["settings"], result["environment"]
    library, n_parallel = environment["library"] or {}, settings.get("n_parallel", 1)
    rows = [
        ("model", _model(model)),
        *([("head", _model(model["draft_model"]))] if "draft_model" in model else []),
        ("machine", [
            printable(str(environment.get("cpu", ""))),
            plural(settings["n_threads"], "thread"),
            *_devices(environment),
            f"llama.cpp {printable(str(library['version']))}" if "version" in library else "",
            printable(str(library.get("backend", ""))),
        ]),
        ("source", _source(environment)),
        ("run", [
            _prompts(result),
            f"{n_parallel} at a time" if n_parallel > 1 else "",
            plural(result["total"]["tokens"], "token"),
            *_limits(settings),
        ]),
        ("tree", _tree(settings)),
        ("chat", _chat(settings)),
        ("target", _target(settings)),
    ]  # fmt: skip
    return [(name, ", ".join(filter(None, cells))) for name, cells in rows if any(cells)]


def _source(environment: dict[str, Any]) -> list[str]:
    """Return what a result was imported from."""
    source = environment.get("source")
    return [printable(text) for text in (source["kind"], *source["files"])] if source else []


def _model(model: dict[str, Any]) -> list[str]:
    return [
        printable(model["file"] or "unknown"),
        printable(model["architecture"] or ""),
        f"{scaled(model['parameters'])} parameters" if model["parameters"] else "",
        printable(model["quantisation"] or ""),
        plural(model["nextn_blocks"], "NextN block"),
    ]


def _devices(environment: dict[str, Any]) -> list[str]:
    devices = [d for d in environment["devices"] if isinstance(d, dict) and d.get("type") != "cpu"]
    return [printable(str(device.get("description", ""))) for device in devices]


def _prompts(result: dict[str, Any]) -> str:
    done, planned = len(result["prompts"]), result["settings"]["n_prompts"]
    if planned is not None and done < planned:
        return f"{done} of {planned} prompts"
    return plural(done, "prompt")


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


def _tree(settings: dict[str, Any]) -> list[str]:
    """Return how drafts branched; nothing for chains."""
    tree = settings.get("tree")
    if tree is None:
        return []
    policy = printable(tree["policy"])
    return [
        policy if policy.startswith("gated:") else plural(tree["nodes"], "node"),
        f"{tree['depth']} deep",
        "1 leaf" if tree["leaves"] == 1 else f"{tree['leaves']} leaves",
        f"a chain each: {tree['rows']} rows a pass" if tree["memory"] == "chains" else "",
    ]


def _chat(settings: dict[str, Any]) -> list[str]:
    """Return what made text of conversations; nothing for a run without."""
    template = settings.get("chat_template")
    if template is None:
        return []
    whose = "the model's template" if template == "model" else f"template {printable(template)}"
    kwargs = settings.get("chat_template_kwargs", {})
    cells = [f"{printable(key)} {printable(json.dumps(value))}" for key, value in kwargs.items()]
    return [f"{plural(settings.get('chat_prompts'), 'conversation')} by {whose}", *cells]


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
            f"{position.number:>3} {counted(position.drafted, 8):>8}"
            f" {counted(position.reached, 8):>8}  {percent_interval(position.acceptance):>18}"
            f"  {probability(position.p1):>5} {probability(position.p2):>5}"
            f" {percent(position.rank2):>8}"
            f" {gain(position.unconditional):>7} {gain(position.widening):>7}"
        )
    lines.append(legend(LEGEND))
    return "\n".join(lines)


def _ranks(summary: Summary) -> str:
    lines = [
        "rank of the target's choice among the head's candidates, counts",
        "pos" + "".join(f"{rank:>7}" for rank in range(1, SHOWN + 1)) + "   miss  1 or 2 %",
    ]
    for position in summary.positions:
        ranks = position.rank_counts or ()
        counts = "".join(f"{counted(count, 6):>7}" for count in (*ranks, position.miss_count))
        lines.append(f"{position.number:>3}{counts}  {percent(position.recall[1]):>8}")
    return "\n".join(lines) + "\n"


def _categories(result: dict[str, Any]) -> list[str]:
    """Return the figures of each category, if there are two or more."""
    rows, more = category_rows(result)
    if not rows:
        return []
    lines = [CATEGORIES]
    widths = 15, 7, 8, 19, 7, 18, 6
    for name, *cells in (CATEGORY_HEADS, *rows):
        shown = name if len(name) < widths[0] else name[:11] + "..."
        lines.append(
            f"{shown:<{widths[0]}}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        )
    if more > 0:
        lines.append(f"  and {more:,} more, each with no more prompts than these")
    lines.append(legend(CATEGORY_LEGEND))
    return ["\n".join(lines)]


def category_rows(result: dict[str, Any]) -> tuple[list[tuple[str, ...]], int]:
    """Return the figures of the largest categories as text, and how many more there are."""
    found, more = of_categories(result, MOST_CATEGORIES)
    rows: list[tuple[str, ...]] = [
        (
            "-" if category.name is None else printable(category.name),
            counted(category.prompts, 6),
            counted(category.tokens, 7),
            percent_interval(category.acceptance),
            percent(category.rank2),
            within(category.acceptance_length, 17),
            per_token(category.coverage),
        )
        for category in found
    ]
    return rows, more


# ---- totals


def _totals(timing: results.Timing, summary: Summary | None, wood: results.Wood | None) -> str:
    rows = total_rows(timing, summary, wood)
    return "".join(wrapped(f"{name:<{LABEL}}{value}", " " * LABEL) for name, value in rows)


def total_rows(
    timing: results.Timing, summary: Summary | None, wood: results.Wood | None = None
) -> list[tuple[str, str]]:
    """Return the figures of the whole run."""
    rows: list[tuple[str, str]] = []
    if summary is not None:
        length = f"{with_interval(summary.acceptance_length)} tokens"
        rows.append(("mean acceptance length", length))
    if wood is not None:
        rows += _wood(wood)
    elif summary is not None:
        rows += [
            ("accepted of drafted", _accepted(summary)),
            ("coverage", f"{with_interval(summary.coverage)} drafted tokens per generated one"),
        ]
    rows.append(("tokens/s", _speed(timing)))
    if timing.seconds["target"] is None:
        rows.append(("time generating", _time(timing.generation_seconds, None)))
    else:
        rows += [
            (name, _time(timing.seconds[part], timing.shares[part]))
            for part, name in (
                ("target", "time in the target"),
                ("head", "time in the head"),
                ("other", "time in everything else"),
            )
        ]
    rows.append(("reading the prompts", _time(timing.prompt_seconds, None)))
    if summary is not None:
        rows.append(("repeated 4-grams", _loops(summary)))
    return rows


def _wood(wood: results.Wood) -> list[tuple[str, str]]:
    accepted = f"{wood.accepted:,} of {wood.nodes:,}"
    if wood.nodes:
        accepted += f", {share_percent(wood.accepted / wood.nodes)}"
    return [
        ("accepted of nodes", f"{accepted}; {wood.wasted:,} wasted"),
        ("coverage", f"{decimal(wood.nodes_per_token)} nodes per generated token"),
        (
            "a verification",
            f"{decimal(wood.nodes_per_verification)} nodes, "
            f"{decimal(wood.levels_per_verification)} deep, "
            f"{decimal(wood.rows_per_verification)} rows",
        ),
    ]


def _accepted(summary: Summary) -> str:
    if summary.accepted is None or summary.drafted is None:
        return "-"
    text = f"{summary.accepted:,} of {summary.drafted:,} tokens"
    return text if summary.acceptance is None else f"{text}, {percent(summary.acceptance)} %"


def _loops(summary: Summary) -> str:
    if summary.loops is None:
        return "-"
    text = share_percent(summary.loops)
    return text if summary.prompts == 1 else f"at most {text} of a text"


def _speed(timing: results.Timing) -> str:
    text = decimal(timing.tokens_per_second, 1)
    if timing.baseline_tokens_per_second is not None:
        text += f"; plain decoding {decimal(timing.baseline_tokens_per_second, 1)}"
        text += f": speed-up {decimal(timing.speedup)}"
    return text


def _time(seconds: float | None, share: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if share is None else f"{seconds:.2f} s, {share_percent(share)}"


def remarks(result: dict[str, Any]) -> list[str]:
    """Return what a reader has to know about the run beside its statistics."""
    prompts, planned = result["prompts"], result["settings"]["n_prompts"]
    source = result["environment"].get("source")
    found = [printable(note) for note in source["notes"]] if source else []
    if planned is not None and len(prompts) < planned:
        found.append(f"interrupted: {len(prompts)} of {planned} prompts were finished")
    broken = [prompt["id"] for prompt in prompts if prompt["stop"] == "nan"]
    if broken:
        found.append(f"the target gave no finite logit: {_names(broken)}")
    full = [prompt["id"] for prompt in prompts if prompt["stop"] == "context"]
    if full:
        found.append(f"the context was full before the end: {_names(full)}")
    plain = [p for p in prompts if p["baseline"] is not None]
    different = [p["id"] for p in plain if not p["baseline"]["same_text"]]
    if different:
        found.append(
            f"drafted and plain text differ in {len(different)} of {len(plain)} prompts "
            f"({_names(different)}); near ties, of which there are "
            f"{counted(result['total']['near_ties'], 20)}, may fall either way"
        )
    if result["model"].get("chat_template") and not result["settings"].get("chat_prompts"):
        found.append(
            "the prompts were continued as plain text; this model has a chat template, and --chat "
            "makes each a user's message"
        )
    counters = result["total"]["positions"] or {}
    apart = [f"{counters[key]:,} {words}" for key, words in _APART.items() if counters.get(key)]
    if apart:
        found.append(f"counted apart from the statistics: {', '.join(apart)}")
    return found


def _names(ids: list[str]) -> str:
    shown = ", ".join(printable(name) for name in ids[:3])
    return f"{shown}, ..." if len(ids) > 3 else shown
