"""``mtpstats merge``."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import click

from mtpstats.cli import options
from mtpstats.cli.output import check, deliver
from mtpstats.cli.streams import to_stderr, to_stdout
from mtpstats.errors import InputError

_NAMED = 9  # shards, of those that are missing

EXAMPLES = """\
Examples:
  mtpstats merge shard1.json shard2.json -o all.json
      one result of two, and its table
  mtpstats merge shard*.json --json | jq .total.tokens_per_second
      the result on standard output
  mtpstats merge shard*.trace -o all.trace
      one trace of several
"""


@click.command("merge", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("results", nargs=-1, required=True)
@options.takes(output=options.OutputOptions)
def command(results: tuple[Path, ...], output: options.OutputOptions) -> None:
    """Add up the results of a run that was split by prompts.

    Exact, and in any order; traces likewise. Refused, by the field's name, where the runs differ in
    something that can change a number: model, build, machine, settings. No prompt id may occur
    twice. What bench or record --shard wrote is put into the order of the whole run; shards that
    are missing are named on standard error.
    """
    from mtpstats.tracemerge import kind_of

    if kind_of(results) == "trace":
        _merge_traces(results, output)
        return
    check(output)

    from mtpstats.cli.result_files import read_results
    from mtpstats.merge import merge

    with read_results(results) as read:
        merged = merge(list(zip(map(str, results), read, strict=True)))
    deliver(merged, output)
    _say_what_is_missing(merged["settings"].get("shard"), len(merged["prompts"]))


def _merge_traces(traces: tuple[Path, ...], output: options.OutputOptions) -> None:
    from mtpstats.text import printable
    from mtpstats.tracemerge import merge_traces

    if output.output is None or str(output.output) == "-":
        raise InputError("traces are merged into a file: name it with -o")
    check(output)
    done = merge_traces(traces, output.output)
    if output.json:
        told = {"schema": "mtpstats.merged/1", "trace": str(done.path), "prompts": done.n_prompts}
        to_stdout(json.dumps({**told, "bytes": done.size, "header": done.header}) + "\n")
    else:
        where = printable(str(done.path))
        to_stdout(f"trace    {where}, {done.size / 1e6:.1f} MB\nprompts  {done.n_prompts}\n")
    _say_what_is_missing(done.header.get("prompts", {}).get("shard"), done.n_prompts)


def _say_what_is_missing(shard: dict[str, Any] | None, n_prompts: int) -> None:
    """Name the shards that a merged run lacks; one that is whole is of no shard any more."""
    if shard is None:
        return
    here, of = {*shard["numbers"]}, shard["of"]
    missing = of - len(here)
    first = islice((number for number in range(1, of + 1) if number not in here), _NAMED)
    named = ", ".join(map(str, first)) + (", ..." if missing > _NAMED else "")
    why = f"not here of {of} shards: {named}" if missing > 0 else "not every shard is finished"
    to_stderr(f"mtpstats: {n_prompts} of the run's {shard['prompts']} prompts are here; {why}\n")
