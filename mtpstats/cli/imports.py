"""``mtpstats import``."""

from __future__ import annotations

from pathlib import Path

import click

from mtpstats.cli import options
from mtpstats.cli.output import check, deliver

EXAMPLES = """\
Examples:
  mtpstats import server.log -o served.json
      the finished requests of a log; llama-server -lv 4 logs the positions, too
  curl -s localhost:8080/metrics > before.txt    (llama-server --metrics)
  curl -s localhost:8080/metrics > after.txt
  mtpstats import before.txt after.txt
      what was drafted and accepted in between
"""


@click.command("import", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("source", nargs=-1, required=True)
@options.takes(output=options.OutputOptions)
def command(source: tuple[Path, ...], output: options.OutputOptions) -> None:
    """Make a result of what a llama-server logged or counted.

    SOURCE is its log (of any verbosity, plain or --log-jsonl), a saved /metrics page, or two such
    pages. A server knows no ranks and no probabilities: those are missing in the result.
    """
    check(output)

    from mtpstats.imports import from_files

    deliver(from_files(source), output)
