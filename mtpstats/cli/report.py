"""``mtpstats report``."""

from __future__ import annotations

from pathlib import Path

import click

from mtpstats.cli import options
from mtpstats.cli.streams import to_stdout

EXAMPLES = """\
Examples:
  mtpstats report result.json
      what bench printed
"""


@click.command("report", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("result")
def command(result: Path) -> None:
    """Show a result again: as text."""
    from mtpstats.cli.inputs import read_results
    from mtpstats.report import text

    (read,) = read_results([result])
    to_stdout(text.render(read))
