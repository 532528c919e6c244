"""``mtpstats compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mtpstats.cli import options
from mtpstats.cli.form_options import CompareOptions, ComparisonForm
from mtpstats.cli.streams import to_stdout
from mtpstats.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from mtpstats.compare import Comparison

EXAMPLES = """\
Examples:
  mtpstats compare f16.json q4_0.json
      what quantisation costs, prompt by prompt
  mtpstats compare main.json branch.json --fail-if-worse 2%
      in CI: exit code 3 if the mean acceptance length fell by more than 2 %
  mtpstats compare f16.json q8_0.json q4_0.json --markdown
      each against the first, for a pull request's comment
"""


@click.command("compare", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("results", nargs=-1, required=True)
@options.takes(check=CompareOptions, form=ComparisonForm)
def command(results: tuple[Path, ...], check: CompareOptions, form: ComparisonForm) -> None:
    """Compare results of the same prompts with the first one.

    Two quantisations, cache types, builds, with and without a chat template: differences with
    95 % intervals, paired by prompt, and better, worse or cannot tell. Refused, by the field's
    name, where prompts, tokenizer, lengths of drafts and texts, or sampling differ.
    """
    if len(results) < 2:
        raise InputError("comparing needs two results or more")

    from mtpstats.cli.result_files import read_results
    from mtpstats.compare import compare
    from mtpstats.report import comparison

    with read_results(results) as read:
        first, *others = zip(map(str, results), read, strict=True)
        found = [compare(first, other) for other in others]
    if form.json:
        to_stdout(json.dumps(comparison.as_json(found), indent=1) + "\n")
    elif form.markdown:
        to_stdout(comparison.markdown(found))
    else:
        to_stdout(comparison.render(found))
    if check.fail_if_worse is not None:
        _check(found, check.fail_on, check.fail_if_worse)


def _check(comparisons: Sequence[Comparison], figures: Sequence[str], limit: float) -> None:
    from mtpstats.compare import failure

    failures = [failure(c, figure, limit) for c in comparisons for figure in figures]
    found = [text for text in failures if text is not None]
    if found:
        raise CheckFailed("; ".join(found))
