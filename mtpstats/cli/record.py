"""``mtpstats record``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mtpstats.cli import inputs, options
from mtpstats.cli import spread as spreading
from mtpstats.cli.long_options import LongRunOptions
from mtpstats.cli.spread_options import SpreadOptions
from mtpstats.cli.streams import last_words, show_log, to_stderr, to_stdout
from mtpstats.cli.trace_options import RecordOptions
from mtpstats.errors import InputError, MtpStatsError, SetAside

if TYPE_CHECKING:
    from mtpstats.record import Recorded

SCHEMA = "mtpstats.recorded/1"

EXAMPLES = """\
Examples:
  mtpstats record -o tiny.trace
      the built-in model and prompts
  mtpstats record -m model.gguf --prompts mine.jsonl -n 256 -ngl 99 -o run.trace
      your model and prompts; then: mtpstats replay run.trace
  mtpstats record -m model.gguf --prompts mine.jsonl -n 256 -ngl 99 -o run.trace --resume
      after an interruption, or --time-limit 8h: go on where it ended
  mtpstats record -m model.gguf --width 4 -o wide.trace
      for trees that the head's probabilities choose while they are drafted, too
  mtpstats record -m model.gguf --depth 16 --every 4 -o deep.trace
      what the head is like 16 deep, from a quarter of the positions
"""


@click.command("record", cls=options.Command, epilog=EXAMPLES)
@options.takes(
    recording=RecordOptions,
    model=options.ModelOptions,
    devices=options.DeviceOptions,
    texts=options.PromptOptions,
    choice=options.SelectionOptions,
    sampling=options.SamplingOptions,
    long=LongRunOptions,
    spread=SpreadOptions,
    output=options.JsonOption,
    log=options.LogOption,
)
def command(
    recording: RecordOptions,
    model: options.ModelOptions,
    devices: options.DeviceOptions,
    texts: options.PromptOptions,
    choice: options.SelectionOptions,
    sampling: options.SamplingOptions,
    long: LongRunOptions,
    spread: SpreadOptions,
    output: options.JsonOption,
    log: options.LogOption,
) -> None:
    """Record once what any drafting policy can be replayed from.

    The model continues the prompts, and at every position the head drafts as deep as is asked for:
    along its own choices, and along the text; with --width, along other choices too. From the
    trace mtpstats replay says exactly what any draft would have done. First the time of target
    passes and head steps is measured.
    """
    _check_output(recording)
    inputs.check_shard(spread.shard, sampling)
    spreading.check(spread, log)

    from mtpstats import record as records

    if long.resume:
        sampling = replace(sampling, seed=records.recorded_seed(recording.output, sampling.seed))
    sampling = inputs.with_seed(sampling)
    prompts = inputs.gather(texts, sampling.seed if choice.shuffle else None)
    from mtpstats.cli.live import ProgressLine

    line = ProgressLine(None if log.verbose else sys.stderr)

    def on_abort(text: str, said: str) -> None:
        line.clear()
        last_words(text, lambda: said)

    def on_removed(text: str) -> None:
        line.clear()
        to_stderr(f"mtpstats: {text}\n")

    settings = records.RecordSettings(
        inputs.settings(
            model, devices, sampling, inputs.selection(choice, spread.shard), recording.n_predict
        ),
        depth=recording.depth,
        width=recording.width,
        every=recording.every,
        resume=long.resume,
        costs=not recording.no_cost,
    )
    try:
        if spread.ray is not None:
            done = spreading.record(
                spread,
                settings,
                prompts,
                recording.output,
                time_limit=long.time_limit,
                on_progress=line if line.enabled else None,
                on_note=on_removed,
            )
        else:
            done = records.record(
                settings,
                prompts,
                recording.output,
                time_limit=long.time_limit,
                on_progress=line if line.enabled else None,
                on_log=show_log if log.verbose else None,
                on_abort=on_abort,
                on_removed=on_removed,
                command=["mtpstats", *sys.argv[1:]],
            )
    finally:
        line.clear()
    if recording.cost_out is not None:
        _write_costs(done, recording)
    said = _short_of(done)
    if said and not done.n_before + done.n_done:
        raise MtpStatsError(said)
    if output.json:
        to_stdout(json.dumps(_record(done), allow_nan=False) + "\n")
    else:
        from mtpstats.report.record import render

        to_stdout(render(done))
    if said:
        to_stderr(f"mtpstats: {said}\n")
    if done.set_aside:
        raise SetAside(done.set_aside, done.n_before + done.n_done + len(done.set_aside))


def _check_output(recording: RecordOptions) -> None:
    """Refuse before a long run what could not be written after it."""
    if str(recording.output) == "-":
        raise InputError("-o wants a file name; a trace cannot be written to standard output")
    if recording.cost_out is None:
        return
    if recording.no_cost:
        raise InputError("--no-cost measures nothing that --cost-out could write")

    from mtpstats import result

    result.check_writable(recording.cost_out)


def _short_of(done: Recorded) -> str:
    """Return how far the time limit let it come; nothing if that is to the end."""
    if not done.n_left:
        return ""
    held = done.n_before + done.n_done
    return (
        f"{held} of {held + done.n_left} prompts were finished within the time limit; the same "
        "command with --resume goes on"
    )


def _write_costs(done: Recorded, recording: RecordOptions) -> None:
    from mtpstats.cost import Costs

    assert recording.cost_out is not None
    measured = done.header.get("cost")
    if measured is None:
        raise InputError(
            "--cost-out: this trace was begun with --no-cost; its costs were not measured"
        )
    costs = Costs.from_dict(measured)
    facts = {key: done.header.get(key) for key in ("environment", "model", "settings")}
    replace(costs, facts={**facts, **costs.facts}).save(recording.cost_out)


def _record(done: Recorded) -> dict[str, Any]:
    """Return the JSON form."""
    return {
        "schema": SCHEMA,
        "trace": str(done.path),
        "prompts": done.n_before + done.n_done,
        "left": done.n_left,
        "recorded": {
            "prompts": done.n_done,
            "tokens": done.tokens,
            "roots": done.roots,
            "seconds": done.seconds,
        },
        "bytes": done.size,
        "header": done.header,
    }
