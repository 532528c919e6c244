"""A validation as plain text of at most 80 columns."""

from __future__ import annotations

from mtpstats.breakeven import tree_verdict
from mtpstats.price import Figure, label, restless
from mtpstats.report.numbers import legend, plural, wrapped
from mtpstats.text import printable
from mtpstats.validate import Checked, Validation, verdict

NAMES = 22


def render(validation: Validation) -> str:
    """Return the whole report."""
    parts = [_header(validation), _policies(validation)]
    if any(checked.server for checked in validation.policies):
        parts.append(_server(validation))
    notes = _notes(validation)
    if notes:
        parts.append("".join(wrapped(f"! {note}", "  ") for note in notes))
    said = wrapped(verdict(validation))
    tree = tree_verdict(validation)
    return "\n".join([*parts, said + (wrapped(tree) if tree is not None else "")])


def _header(validation: Validation) -> str:
    repeats = f", each {validation.repeats} times" if validation.repeats > 1 else ""
    return wrapped(
        f"{plural(len(validation.policies), 'policy').replace('policys', 'policies')} on "
        f"{plural(validation.n_prompts, 'prompt')}{repeats}, in turns"
    )


def _policies(validation: Validation) -> str:
    lines = [
        f"{'':<{NAMES}} {'predicted':>23} {'measured':>23}",
        f"{'policy':<{NAMES}} {'tokens/s (95 %)':>23} {'tokens/s (95 %)':>23}  off %",
    ]
    for checked in validation.policies:
        lines.append(
            f"{label(checked.policy):<{NAMES}} {_rate(checked.predicted):>23} "
            f"{_rate(checked.measured):>23} {100 * checked.error:>+6.1f}"
        )
    lines.append(
        legend(
            "off: predicted over measured. Intervals are over prompts, which prediction and "
            "measurement share: compare the figures."
        )
    )
    return "\n".join(lines)


def _server(validation: Validation) -> str:
    lines = [
        "through llama-server, by its own timings",
        f"{'policy':<{NAMES}} {'tokens/s (95 %)':>23} {'drafted':>9} {'accepted':>9}",
    ]
    for checked in validation.policies:
        if checked.server is not None:
            lines.append(_server_row(checked))
    return "\n".join(lines) + "\n"


def _server_row(checked: Checked) -> str:
    rate = _rate(checked.server) if checked.server else "-"
    return (
        f"{label(checked.policy):<{NAMES}} {rate:>23} {checked.server_drafted or 0:>9,} "
        f"{checked.server_accepted or 0:>9,}"
    )


def _notes(validation: Validation) -> list[str]:
    busy = restless(validation.costs)
    notes = [] if busy is None else [busy]
    texts = len(validation.policies) * validation.n_prompts
    different = sum(len(checked.different) for checked in validation.policies)
    if different:
        unexplained = sorted({one for c in validation.policies for one in c.unexplained})
        names = ", ".join(map(printable, unexplained[:3])) + (", ..." * (len(unexplained) > 3))
        notes.append(
            f"{different} of {texts} texts drafted or accepted otherwise than replayed, "
            + (f"some without a near tie: {names}" if unexplained else "all after near ties")
        )
    return notes


def _rate(figure: Figure) -> str:
    value = _number(figure.value)
    if figure.lo is None or figure.hi is None:
        return value
    return f"{value} ({_number(figure.lo)}-{_number(figure.hi)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
