"""What a recording did, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpstats.cost import Costs
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.record import Recorded

ROWS = (1, 2, 3, 4, 5, 9, 17, 33)


def render(done: Recorded) -> str:
    """Return the summary, at most 80 columns wide unless the file's name is longer."""
    where = printable(str(done.path))
    lines = [f"trace    {where}, {_bytes(done.size)}"]
    depth, every = done.header["depth"], done.header["every"]
    width = f" and {done.header['width']} wide" if "width" in done.header else ""
    roots = "at every position" if every == 1 else f"at one position in {every}"
    before = f" ({done.n_before} were in it already)" if done.n_before else ""
    lines.append(f"prompts  {done.n_before + done.n_done}{before}, {depth} deep{width} {roots}")
    if done.n_done:
        prompts = "1 prompt" if done.n_done == 1 else f"{done.n_done} prompts"
        lines.append(
            f"now      {prompts}, {done.tokens:,} tokens, {done.roots:,} roots in "
            f"{done.seconds:.1f} s"
        )
    if "cost" in done.header:
        lines += ["", *_costs(Costs.from_dict(done.header["cost"]))]
    lines += ["", f"next     mtpstats replay {where}"]
    return "\n".join(lines) + "\n"


def _costs(costs: Costs) -> list[str]:
    rows = [n for n in ROWS if n <= costs.verify.last]
    lines = [
        f"milliseconds, medians after {costs.n_past or 0:,} tokens",
        "rows             " + "".join(f"{n:>8}" for n in rows),
    ]
    for title, curve in (
        ("target pass", costs.verify),
        ("head follows", costs.follow),
        ("head step", costs.draft),
    ):
        if curve is not None:
            cells = "".join(f"{1e3 * float(curve(n)):8.2f}" for n in rows)
            lines.append(f"{title:<17}{cells}")
    return lines


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
