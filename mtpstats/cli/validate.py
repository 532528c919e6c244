"""``mtpstats validate``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mtpstats.cli import costing, options
from mtpstats.cli.live import ProgressLine
from mtpstats.cli.streams import to_stdout
from mtpstats.cli.trace_options import CostOptions, TraceModel, ValidateOptions

EXAMPLES = """\
Examples:
  mtpstats validate run.trace
      the three fastest chains, the best tree, llama.cpp's defaults and no drafting, for real
  mtpstats validate run.trace -m model.gguf --top 1 --n-prompts 10
      fewer of them, on fewer prompts
  mtpstats validate run.trace -m model.gguf --server ./llama-server -o check.json
      through llama.cpp's own server, too; everything in the file
"""


@click.command("validate", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("trace")
@options.takes(
    run=ValidateOptions,
    costs=CostOptions,
    model=TraceModel,
    output=options.OutputOptions,
    log=options.LogOption,
)
def command(
    trace: Path,
    run: ValidateOptions,
    costs: CostOptions,
    model: TraceModel,
    output: options.OutputOptions,
    log: options.LogOption,
) -> None:
    """Run the fastest policies for real, predicted beside measured.

    The prompts, the model and its settings are those of the trace. All policies continue a prompt
    in turns, and the costs they are predicted from are measured in between, unless --cost gives
    them, so that a machine that slows down does not spoil the comparison. A last sentence says
    whether branching paid, and at which cost of a row it would.
    """
    costing.check_outputs(output, costs)

    from mtpstats import validate
    from mtpstats.trace import Trace

    loaded = Trace.load(trace)
    line = ProgressLine(None if log.verbose else sys.stderr)
    progress = line if line.enabled else None
    try:
        with costing.engine(loaded, model, line, log) as (settings, engine):
            found = validate.session(
                loaded,
                engine,
                costs=costing.known_costs(loaded, trace, costs) if costs.cost else None,
                top=run.top,
                repeats=run.repeat,
                n_prompts=run.n_prompts,
                on_progress=progress,
            )
        if run.server is not None:
            from mtpstats.served import run_server

            chosen = validate.chosen(loaded, run.n_prompts)
            found = run_server(chosen, found, settings, run.server, on_progress=progress)
    finally:
        line.clear()
    if costs.save_cost is not None:
        found.costs.save(costs.save_cost)
    record = validate.to_dict(found, loaded) if output.json or output.output is not None else {}

    def shown() -> str:
        from mtpstats.report.validate import render

        return render(found)

    costing.deliver(record, shown, output, to_stdout)
