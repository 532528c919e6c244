"""``mtpstats plan``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mtpstats.cli import costing, options
from mtpstats.cli.live import ProgressLine
from mtpstats.cli.streams import to_stdout
from mtpstats.cli.trace_options import CostOptions, TraceModel

EXAMPLES = """\
Examples:
  mtpstats plan run.trace
      how fast every draft would be on this machine, and the flags to use
  mtpstats plan run.trace --cost gpu.json
      the same on another machine, by a cost file measured there or written by hand
  mtpstats plan run.trace --measure -m model.gguf --save-cost here.json
      measure the costs anew, and keep them
  mtpstats plan run.trace -o plan.json
      every policy with its figures as JSON, too
"""


@click.command("plan", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("trace")
@options.takes(
    costs=CostOptions,
    model=TraceModel,
    output=options.OutputOptions,
    log=options.LogOption,
)
def command(
    trace: Path,
    costs: CostOptions,
    model: TraceModel,
    output: options.OutputOptions,
    log: options.LogOption,
) -> None:
    """Predict the speed of every drafting policy, and recommend one.

    The trace says what each policy would draft, verify and accept; the costs say what that takes.
    Chains come with flags for llama-server; trees and gates, which llama.cpp cannot run, show what
    drafting wider would add.
    """
    costing.check_outputs(output, costs)

    from mtpstats import plan as plans
    from mtpstats.trace import Trace

    loaded = Trace.load(trace)
    line = ProgressLine(None if log.verbose else sys.stderr)
    try:
        found = costing.costs_of(loaded, trace, costs, model, line, log)
    finally:
        line.clear()
    made = plans.make(loaded, found)
    record = plans.to_dict(made) if output.json or output.output is not None else {}

    def shown() -> str:
        from mtpstats.report.plan import render

        return render(made)

    costing.deliver(record, shown, output, to_stdout)
