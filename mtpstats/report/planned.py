"""The figure of a plan: predicted tokens/s over depth and over nodes, with what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.intervals import Interval
from mtpstats.report.figures import Chart, speed
from mtpstats.summary import Estimate
from mtpstats.text import printable

PLAN_SCHEMA: Final = "mtpstats.plan/1"
VALIDATION_SCHEMA: Final = "mtpstats.validate/1"

_TREES: Final = ("tree", "opttree", "eagle2")
_FAMILIES: Final = ("chain", *_TREES)
_FIGURE: Final = {"value": float, "lo": (float, None), "hi": (float, None)}
_PLAN: Final = {
    "policies": [
        {
            "policy": str,
            "kind": str,
            "n_max": (int, None),
            "p_min": (float, None),
            "n_nodes": (int, None),
            "tokens_per_second": (_FIGURE, None),
        }
    ]
}
_VALIDATION: Final = {"policies": [{"policy": str, "measured_tokens_per_second": _FIGURE}]}


def chart(plan_path: Path, validation_path: Path | None = None) -> Chart:
    """Return the figure of a plan's file, with the points of a validation's.

    Chains without ``p_min`` stand at their depth, trees at their nodes, no drafting at 0; of grown
    trees of a kind and as many nodes the fastest is shown. Raises InputError, naming the key, for
    files that are something else.
    """
    plan = _read(plan_path, "plan", PLAN_SCHEMA, _PLAN)
    places = {entry["policy"]: _place(entry) for entry in plan["policies"]}
    families: dict[str, dict[float, Interval]] = {name: {} for name in _FAMILIES}
    for entry in plan["policies"]:
        x, figure = places[entry["policy"]], entry["tokens_per_second"]
        if x is None or figure is None:
            continue
        for name in ("chain", "tree") if entry["kind"] == "none" else (entry["kind"],):
            one = _estimate(figure)
            families[name][x] = max(families[name].get(x, one), one, key=lambda e: e.value)
    measured = []
    if validation_path is not None:
        found = _read(validation_path, "validation", VALIDATION_SCHEMA, _VALIDATION)
        for entry in found["policies"]:
            x = places.get(entry["policy"])
            if x is not None:
                measured.append((x, float(entry["measured_tokens_per_second"]["value"])))
    predicted: list[tuple[str, list[tuple[float, Estimate]]]] = [
        (f"{name}, predicted", [(x, points[x]) for x in sorted(points)])
        for name, points in families.items()
        if len(points) > 1
    ]
    if not predicted and not measured:
        raise InputError(f"{printable(str(plan_path))}: no chains and no trees in it to draw")
    return speed(predicted, measured, x_label="depth of a chain, nodes of a tree; 0: no drafting")


def _read(path: Path, what: str, schema: str, spec: dict[str, Any]) -> dict[str, Any]:
    record = results.read_json(path, what)
    results.check_record(record, printable(str(path)), what, schema, spec)
    return record  # type: ignore[no-any-return]


def _place(entry: dict[str, Any]) -> float | None:
    """Where a policy stands; None for one that is in no family."""
    if entry["kind"] == "none":
        return 0.0
    if entry["kind"] in _TREES:
        nodes = entry["n_nodes"]
        return None if nodes is None else float(nodes)
    plain = entry["kind"] == "chain" and not entry["p_min"] and entry["n_max"] is not None
    return float(entry["n_max"]) if plain else None


def _estimate(figure: dict[str, Any]) -> Interval:
    value = float(figure["value"])
    lo, hi = (value if figure[key] is None else float(figure[key]) for key in ("lo", "hi"))
    return Interval(value, lo, hi)
