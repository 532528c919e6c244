"""The README's example is run as it stands, and its blocks are where CI looks for them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(marker: str) -> str:
    found = re.search(rf"^<!-- {marker} -->\n```\w*\n(.*?)^```", README, re.M | re.S)
    assert found, f"README.md has no block after <!-- {marker} -->"
    return found[1]


def expected() -> list[tuple[int, int]]:
    """(accepted, reached) per position of the example's loop, without any collector."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 3000)
    accepted, reached, n_past = [0] * 4, [0] * 4, 0
    while n_past < 2000:
        logits = rng.standard_normal((4, 1000), np.float32)
        n = 0
        for i in range(4):
            row = logits[i].copy()
            row[text[n_past + 1 + i]] += 4
            if n == i:
                reached[i] += 1
                n += int(max(range(1000), key=row.__getitem__) == text[n_past + 1 + i])
                accepted[i] += n > i
        n_past += 1 + n
    return list(zip(accepted, reached, strict=True))


def test_the_example_runs_and_prints_what_its_loop_did() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block("example"), "README.md", "exec"), {})
    lines = printed.getvalue().splitlines()
    assert lines == [
        f"position {i + 1}: {hits} of {n} accepted, {hits / n:.3f}"
        for i, (hits, n) in enumerate(expected())
    ]


def test_the_commands_ci_and_newcomers_run() -> None:
    for marker in ("run", "test"):
        assert "./build_llama.sh" in block(marker)
    assert "mtpstats bench" in block("run")
    assert "pytest" in block("test")
