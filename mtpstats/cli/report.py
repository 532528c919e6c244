"""``mtpstats report``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtpstats.cli import options
from mtpstats.cli.form_options import ReportForm
from mtpstats.cli.streams import to_stdout

if TYPE_CHECKING:
    from mtpstats.report.figures import Chart

EXAMPLES = """\
Examples:
  mtpstats report result.json
      what bench printed
  mtpstats report result.json --markdown
      for an issue or a pull request
  mtpstats report result.json --csv > figures.csv
      every figure with its interval, one a line
  mtpstats report result.json --html report.html --plot figures.svg
      a page to send to a colleague, and a picture
  mtpstats report result.json --html report.html --plan plan.json --validation check.json
      with the predicted speeds of a plan, and what was measured
"""


@click.command("report", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("result")
@options.takes(form=ReportForm)
def command(result: Path, form: ReportForm) -> None:
    """Show a result again: as text, Markdown, CSV, JSON, HTML or a picture."""
    if form.markdown + form.csv + form.json > 1:
        raise click.UsageError("--markdown, --csv and --json are one form each; ask for one")
    files = [path for path in (form.html, form.plot) if path is not None]
    if form.plan is not None and not files:
        raise click.UsageError("--plan is a figure: it wants --html or --plot")
    if form.validation is not None and form.plan is None:
        raise click.UsageError("--validation belongs to a --plan")

    from mtpstats import result as results
    from mtpstats.cli.result_files import read_results

    more = []
    if form.plan is not None:
        from mtpstats.report import planned

        more.append(planned.chart(form.plan, form.validation))
    with read_results([result]) as (read,):
        for path in files:
            results.check_writable(path)
        if form.html is not None:
            from mtpstats.report import page

            results.write_file(form.html, page.render(read, more).encode())
        if form.plot is not None:
            results.write_file(form.plot, _picture(form.plot, read, more))
        if form.markdown or form.csv or form.json or not files:
            to_stdout(_rendered(read, form))


def _picture(path: Path, read: dict[str, Any], more: Sequence[Chart]) -> bytes:
    from mtpstats.report import figures, plot
    from mtpstats.summary import of_result

    summary = of_result(read)
    charts = figures.charts(summary) if summary is not None else []
    return plot.picture(path, [*charts, *more], read["model"]["file"] or "unknown model")


def _rendered(read: dict[str, Any], form: ReportForm) -> str:
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
