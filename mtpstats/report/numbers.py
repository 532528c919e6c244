"""Numbers and words as every report writes them. A missing number is a dash."""

from __future__ import annotations

import math
import textwrap
from typing import TypeAlias

from mtpstats.summary import Estimate

WIDTH = 80

Number: TypeAlias = int | float | None


def wrapped(text: str, indent: str = "") -> str:
    """Return one paragraph of at most 80 columns."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) + "\n"


def legend(text: str) -> str:
    """Return an indented paragraph."""
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ") + "\n"


def plural(count: int | None, noun: str) -> str:
    """Return a count with its noun; nothing for an unknown one."""
    if count is None:
        return ""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def scaled(count: int) -> str:
    """Return a large count as people say it: 3.4 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def counted(count: int | None, width: int) -> str:
    """Return a count in at most ``width`` characters: 1,234, or 1235k where that is too long."""
    if count is None:
        return "-"
    text = f"{count:,}"
    for unit in "kMGTPE":
        if len(text) <= width:
            break
        count, width = (count + 500) // 1000, 6
        text = f"{count}{unit}"
    return text


def decimal(value: float | None, digits: int = 2) -> str:
    """Return a number, a dash for an unknown one."""
    return "-" if value is None else f"{value:,.{digits}f}"


def probability(estimate: Estimate) -> str:
    """Return a probability in four characters: .553, 1.00."""
    if estimate is None:
        return "-"
    text = f"{estimate.value:.3f}"
    return text[1:] if text.startswith("0") else text[:4]


def share_percent(value: float) -> str:
    """Return a share as 12.5 %."""
    return f"{100 * value:.1f} %"


def percent(estimate: Estimate) -> str:
    """Return an estimate in percent, without its interval."""
    return "-" if estimate is None else f"{100 * estimate.value:.1f}"


def percent_interval(estimate: Estimate) -> str:
    """Return an estimate in percent: 50.0 (40.1-59.9)."""
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} ({100 * estimate.lo:.1f}-{100 * estimate.hi:.1f})"


def with_interval(estimate: Estimate) -> str:
    """Return an estimate: 2.51 (2.11 to 2.92)."""
    if estimate is None:
        return "-"
    if math.isnan(estimate.lo):  # nothing tells how sure it is
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.lo:.2f} to {estimate.hi:.2f})"


def gain(estimate: Estimate) -> str:
    """Return tokens per verification: +0.150."""
    return "-" if estimate is None else f"+{estimate.value:.3f}"


def within(estimate: Estimate, width: int) -> str:
    """Return an estimate and its interval with as many digits as fit."""
    if estimate is None:
        return "-"
    if math.isnan(estimate.lo):
        return f"{estimate.value:.2f}"
    for digits in (2, 1, 0):
        text = "{0:.{3}f} ({1:.{3}f}-{2:.{3}f})".format(*estimate, digits)
        if len(text) <= width:
            break
    return text


def per_token(estimate: Estimate) -> str:
    """Return tokens per token in at most five characters: 0.87."""
    return "-" if estimate is None else f"{estimate.value:.2f}"[:5].rstrip(".")
