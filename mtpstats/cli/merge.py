"""``mtpstats merge``."""

from __future__ import annotations

from pathlib import Path

import click

from mtpstats.cli import options
from mtpstats.cli.output import check, deliver

EXAMPLES = """\
Examples:
  mtpstats merge shard1.json shard2.json -o all.json
      one result of two, and its table
  mtpstats merge shard*.json --json | jq .total.tokens_per_second
      the result on standard output
"""


@click.command("merge", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("results", nargs=-1, required=True)
@options.takes(output=options.OutputOptions)
def command(results: tuple[Path, ...], output: options.OutputOptions) -> None:
    """Add up the results of a run that was split by prompts.

    Exact, and in any order. Refused, by the field's name, where the runs differ in something that
    can change a number: model, build, machine, settings. No prompt id may occur twice.
    """
    check(output)

    from mtpstats.cli.result_files import read_results
    from mtpstats.merge import merge

    names = [str(path) for path in results]
    deliver(merge(list(zip(names, read_results(results), strict=True))), output)
