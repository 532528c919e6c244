"""The files that commands read."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtpstats.errors import InputError


@contextmanager
def read_results(paths: Sequence[Path]) -> Iterator[list[dict[str, Any]]]:
    """Read the results in these files, for the work done on them in the body.

    Counters are checked where they are used, once. If that fails, the error names the file.
    """
    from mtpstats import result

    # Reading makes a million objects and no garbage; the process ends soon after.
    gc.disable()
    found = [result.read(path) for path in paths]
    try:
        yield found
    except InputError:
        for path, one in zip(paths, found, strict=True):
            _check_counters(one, path)
        raise


def _check_counters(result: dict[str, Any], path: Path) -> None:
    from mtpstats.reading import shown
    from mtpstats.stats import Snapshot

    positions = [one["positions"] for one in (*result["prompts"], result["total"])]
    try:
        Snapshot.from_partial([counters for counters in positions if counters is not None])
    except InputError as error:
        raise InputError(f"{shown(path)}: {error}") from None
