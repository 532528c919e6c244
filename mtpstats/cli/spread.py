"""``bench`` and ``record`` on a Ray cluster, from their options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpstats.cli import options
from mtpstats.cli.spread_options import SpreadOptions
from mtpstats.errors import InputError

if TYPE_CHECKING:
    from mtpstats.loop import Keeper, Progress
    from mtpstats.prompts import Prompt
    from mtpstats.raypool import RayPool
    from mtpstats.record import Recorded, RecordSettings
    from mtpstats.run import BenchSettings


def check(
    spread: SpreadOptions, log: options.LogOption, run: options.RunOptions | None = None
) -> None:
    """Refuse what does not go together."""
    if spread.ray is None:
        for name in ("workers", "gpus_per_worker", "cpus_per_worker"):
            if getattr(spread, "n_workers" if name == "workers" else name) is not None:
                raise InputError(f"--{name.replace('_', '-')} says what --ray uses: give both")
        return
    local = {"-v": log.verbose}
    if run is not None:
        local |= {"--stream": run.stream, "--stats-every": bool(run.stats_every)}
    for name, given in local.items():
        if given:
            raise InputError(f"{name} shows what happens in this process; with --ray nothing does")


def bench(
    spread: SpreadOptions,
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    *,
    keeper: Keeper | None,
    time_limit: float | None,
    on_progress: Callable[[Progress], None] | None,
    on_note: Callable[[str], None],
) -> dict[str, Any]:
    """Run ``mtpstats.spread.bench`` on the cluster of ``--ray``."""
    from mtpstats import run as runs
    from mtpstats import spread as spreads
    from mtpstats.worker import BenchWorker

    settings = runs.drawn(settings, len(prompts))

    def make(cpus: int) -> Callable[[], BenchWorker]:
        return partial(BenchWorker, _placed(settings, cpus))

    with _pool(spread, make) as pool:
        return spreads.bench(
            settings, prompts, pool, pool.n_workers,
            keeper=keeper, time_limit=time_limit, on_progress=on_progress, on_note=on_note,
            command=["mtpstats", *sys.argv[1:]],
        )  # fmt: skip


def record(
    spread: SpreadOptions,
    settings: RecordSettings,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    time_limit: float | None,
    on_progress: Callable[[Progress], None] | None,
    on_note: Callable[[str], None],
) -> Recorded:
    """Run ``mtpstats.spread.record`` on the cluster of ``--ray``."""
    from mtpstats import record as records
    from mtpstats import spread as spreads
    from mtpstats.worker import RecordWorker

    settings = replace(settings, run=records.run_of(settings))

    def make(cpus: int) -> Callable[[], RecordWorker]:
        return partial(RecordWorker, replace(settings, run=_placed(settings.run, cpus)))

    with _pool(spread, make) as pool:
        return spreads.record(
            settings, prompts, path, pool, pool.n_workers,
            time_limit=time_limit, on_progress=on_progress, on_note=on_note,
            command=["mtpstats", *sys.argv[1:]],
        )  # fmt: skip


@contextmanager
def _pool(spread: SpreadOptions, make: Callable[[int], Callable[[], Any]]) -> Iterator[RayPool]:
    from mtpstats.raypool import RayPool, Share

    assert spread.ray is not None
    share = Share(spread.gpus_per_worker, spread.cpus_per_worker)
    with RayPool(spread.ray, make, share, spread.n_workers) as pool:
        yield pool


def _placed(settings: BenchSettings, cpus: int) -> BenchSettings:
    """Return a worker's settings: the same file wherever it starts, threads for its CPUs."""
    draft = settings.draft_model
    return replace(
        settings,
        model=settings.model.absolute(),
        draft_model=draft.absolute() if draft is not None else None,
        n_threads=settings.n_threads or cpus,
    )
