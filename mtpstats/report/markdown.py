"""A result as Markdown, for an issue or a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtpstats.text import printable

_ALIGN = {"l": ":--", "r": "--:"}
# What Markdown or HTML inside it would act on.
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>&~$^@:-]|(?<=www)\.)", re.IGNORECASE)


def cell(text: str) -> str:
    """Return foreign text as Markdown that shows it as it is: no markup, no link, one line."""
    return _SPECIAL.sub(r"\\\1", printable(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Return a pipe table; ``align`` has an l or r for each column."""
    lines = [heads, [_ALIGN[side] for side in align], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
