"""``mtpstats report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mtpstats.cli import options
from mtpstats.cli.streams import to_stdout

EXAMPLES = """\
Examples:
  mtpstats report result.json
      what bench printed
  mtpstats report result.json --markdown
      for an issue or a pull request
  mtpstats report result.json --csv > figures.csv
      every figure with its interval, one a line
"""


@click.command("report", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("result")
@options.takes(form=options.ReportForm)
def command(result: Path, form: options.ReportForm) -> None:
    """Show a result again: as text, Markdown, CSV or JSON."""
    if form.markdown + form.csv + form.json > 1:
        raise click.UsageError("--markdown, --csv and --json are one form each; ask for one")

    from mtpstats.cli.inputs import read_results

    (read,) = read_results([result])
    to_stdout(_rendered(read, form))


def _rendered(read: dict[str, Any], form: options.ReportForm) -> str:
    """Return the form that was asked for."""
    if form.json:
        from mtpstats.report import derived

        return json.dumps(derived.as_json(read), indent=1, allow_nan=False) + "\n"
    if form.csv:
        from mtpstats.report import tidy

        return tidy.render(read)
    if form.markdown:
        from mtpstats.report import markdown

        return markdown.render(read)
    from mtpstats.report import text

    return text.render(read)
