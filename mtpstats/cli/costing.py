"""What ``plan`` and ``validate`` share: the costs they predict from, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpstats.cli import options
from mtpstats.cli.live import ProgressLine
from mtpstats.cli.streams import last_words, show_log
from mtpstats.cli.trace_options import CostOptions, TraceModel
from mtpstats.errors import InputError, MtpStatsError

if TYPE_CHECKING:
    from mtpstats.cost import Costs
    from mtpstats.run import BenchSettings, LlamaEngine
    from mtpstats.trace import Trace


def check_outputs(output: options.OutputOptions, costs: CostOptions) -> None:
    """Refuse before a long run what could not be written after it."""
    from mtpstats import result

    for path in filter(None, (output.output, costs.save_cost)):
        if str(path) == "-":
            raise InputError("a file name is wanted; --json writes to standard output")
        result.check_writable(path)
    if costs.cost is not None and costs.measure:
        raise InputError("--cost and --measure: the costs come from a file or are measured")


def costs_of(
    trace: Trace,
    path: Path,
    asked: CostOptions,
    model: TraceModel,
    line: ProgressLine,
    log: options.LogOption,
) -> Costs:
    """Return the costs to predict from, saved if that was asked for."""
    costs = known_costs(trace, path, asked)
    if costs is None:
        from mtpstats.origin import measured

        with engine(trace, model, line, log) as (_, loaded):
            costs = measured(loaded, trace, line)
    if asked.save_cost is not None:
        costs.save(asked.save_cost)
    return costs


def known_costs(trace: Trace, path: Path, asked: CostOptions) -> Costs | None:
    """Return the costs of the file asked for or of the trace; None: they are to be measured."""
    from mtpstats.cost import Costs
    from mtpstats.text import printable

    if asked.cost is not None:
        return Costs.load(asked.cost)
    stored = trace.header.get("cost")
    if asked.measure or stored is None:
        return None
    costs = Costs.from_dict(stored, f"{printable(str(path))}: cost")
    known = {key: trace.header.get(key) for key in ("environment", "model", "settings")}
    return replace(costs, facts={k: v for k, v in known.items() if v is not None} | costs.facts)


@contextmanager
def engine(
    trace: Trace, model: TraceModel, line: ProgressLine, log: options.LogOption
) -> Iterator[tuple[BenchSettings, LlamaEngine]]:
    """Load the trace's model, checked by its hash, with the settings of the recording."""
    from mtpstats import origin
    from mtpstats.run import LlamaEngine

    def on_abort(text: str) -> None:
        line.clear()
        last_words(text)

    path = origin.find_model(trace, model.model)
    settings = origin.settings_of(trace, path, model.draft_model)
    loaded = LlamaEngine(settings, line, show_log if log.verbose else None, on_abort)
    try:
        origin.check_model(trace, loaded.files)
        yield settings, loaded
    finally:
        loaded.close()


def deliver(
    record: dict[str, Any],
    shown: Callable[[], str],
    output: options.OutputOptions,
    write: Callable[[str], None],
) -> None:
    """Write the file, then print; a file that fails at last does not take the report with it."""
    from mtpstats import result as results

    failure: MtpStatsError | None = None
    if output.output is not None:
        try:
            results.write(output.output, record)
        except MtpStatsError as error:
            failure = error
    write(results.dumps(record) if output.json else shown())
    if failure is not None:
        raise failure
