"""Options of runs on more than one machine, each defined once."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click

from mtpstats.cli import values
from mtpstats.cli.groups import option


def shard(value: str) -> tuple[int, int]:
    """Read ``--shard``: I/N."""
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter(f"{value!r} is not of the form I/N, with I from 1 to N.")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class SpreadOptions:
    """Who runs which prompts."""

    HEADING = "Several machines (docs/scaling.md)"

    shard: tuple[int, int] | None = option(
        "--shard",
        type=shard,
        default=None,
        metavar="I/N",
        help="Run part I of N, every Nth of the prompts that all other options leave; mtpstats "
        "merge makes one of all parts.  [default: all prompts]",
    )
    ray: str | None = option(
        "--ray",
        is_flag=False,
        flag_value="auto",
        default=None,
        metavar="[ADDRESS]",
        help="Spread the prompts over a Ray cluster: HOST:PORT, auto (or nothing) for the one this "
        "machine belongs to or $RAY_ADDRESS names, local for workers on this machine alone. "
        "Workers find the model under the same path. Needs mtpstats[ray].  [default: no Ray]",
    )
    n_workers: int | None = option(
        "--workers",
        type=values.whole(1, 100_000),
        default=None,
        metavar="N",
        help="Workers, each with the model loaded once.  [default: as many as the cluster holds]",
    )
    gpus_per_worker: float | None = option(
        "--gpus-per-worker",
        type=values.real(0, 1024),
        default=None,
        metavar="N",
        help="GPUs of each worker; a fraction is a share of one.  [default: 1, or 0 where the "
        "cluster has none]",
    )
    cpus_per_worker: int | None = option(
        "--cpus-per-worker",
        type=values.whole(1, 4096),
        default=None,
        metavar="N",
        help="CPUs of each worker, and its threads unless -t says otherwise.  [default: an equal "
        "share of a machine's]",
    )
