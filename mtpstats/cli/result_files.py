"""The files that commands read."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results in these files."""
    from mtpstats import result

    # Reading makes a million objects and no garbage; the process ends soon after.
    gc.disable()
    return [result.read(path) for path in paths]
