"""Options of commands that write traces or work on them, each defined once."""

# ruff: noqa: RUF009  (option only wraps dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from mtpstats.cli import values
from mtpstats.cli.groups import option


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded."""

    HEADING = "Recording"

    output: Path = option(
        "-o",
        "--output",
        type=values.file(written=True),
        required=True,
        metavar="TRACE",
        help="The trace to write. One that exists is never overwritten.",
    )
    n_predict: int = option(
        "-n",
        "--predict",
        "--n-predict",
        type=values.whole(-1, 2**31 - 1),
        default=128,
        show_default=True,
        metavar="N",
        help="Tokens per prompt that a replay can generate; -1: until the model ends or the "
        "context is full. A few more are recorded.",
    )
    depth: int = option(
        "--depth",
        type=values.whole(1, 16),
        default=8,
        show_default=True,
        metavar="N",
        help="Draft steps recorded at each position: the longest draft that can be replayed.",
    )
    width: int = option(
        "--width",
        type=values.whole(0, 16),
        default=0,
        show_default=True,
        metavar="N",
        help="Also record what the head offers below its second and further choices, as far as "
        "the N most probable nodes of a depth go: trees grown while they are drafted (opttree, "
        "eagle2) can then be replayed. Slower and larger: see docs/planning.md.",
    )
    every: int = option(
        "--every",
        type=values.whole(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Record at every Nth position: faster and smaller, enough for what the head is like "
        "and for trees, not for replaying a run.",
    )
    no_cost: bool = option(
        "--no-cost",
        is_flag=True,
        help="Do not measure first what target passes and head steps take here.",
    )
    cost_out: Path | None = option(
        "--cost-out",
        type=values.file(written=True),
        default=None,
        metavar="FILE",
        help="Also write the measured costs here, to plan with them on another machine.  "
        "[default: in the trace only]",
    )


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed from a trace."""

    HEADING = "Replay"

    policy: tuple[str, ...] = option(
        "--policy",
        multiple=True,
        metavar="SPEC",
        help="chain:n_max=4,p_min=0.6 (and n_min); gated:n_max=4,p1_max=0.7,p2_min=0.2 (and "
        "p_min, n_min, p3_min); adaptive:n_max=8 (and low, start, up, down, p_min); "
        "tree:[[0],[1],[0,0]] or tree:FILE.json; from a trace with a --width, trees grown while "
        "they are drafted: opttree:n_nodes=8,depth=6,width=2 (and delta), "
        "eagle2:n_nodes=8,depth=4,width=2. Repeatable.  [default: llama.cpp's own, "
        "chain:n_max=3, and the longest chain recorded]",
    )
    starts: str = option(
        "--starts",
        type=click.Choice(["policy", "uniform"]),
        default="policy",
        show_default=True,
        help="policy: the roots at which the policy starts, as in a run; uniform: every root once.",
    )
    n_predict: int | None = option(
        "-n",
        "--predict",
        "--n-predict",
        type=values.whole(0),
        default=None,
        metavar="N",
        help="Tokens to generate per prompt.  [default: as many as were recorded]",
    )
    n_ctx: int | None = option(
        "-c",
        "--ctx-size",
        type=values.whole(1),
        default=None,
        metavar="N",
        help="Context of the run, in tokens.  [default: large enough]",
    )
    trees: tuple[int, ...] = option(
        "--trees",
        type=values.whole(1, 256),
        multiple=True,
        metavar="N",
        help="Also find, score and draw the best tree of N nodes. Repeatable.",
    )


@dataclass(frozen=True)
class TraceModel:
    """The files of a trace's model, where something is to be run."""

    HEADING = "Model"

    model: Path | None = option(
        "-m",
        "--model",
        type=values.file(),
        metavar="FILE",
        help="The model the trace was recorded with, where something is run.  [default: the "
        "built-in one, if the trace is of it]",
    )
    draft_model: Path | None = option(
        "-md",
        "--spec-draft-model",
        "--model-draft",
        type=values.file(),
        metavar="FILE",
        help="The file with its head, if that was one of its own.  [default: none]",
    )


@dataclass(frozen=True)
class CostOptions:
    """What passes and steps cost."""

    HEADING = "Costs"

    cost: Path | None = option(
        "--cost",
        type=values.file(),
        metavar="FILE",
        help="A cost file: another machine's, or one written by hand.  [default: the trace's own "
        "costs; measured now if it has none]",
    )
    measure: bool = option(
        "--measure",
        is_flag=True,
        help="Measure the costs now, with the trace's model and settings.",
    )
    save_cost: Path | None = option(
        "--save-cost",
        type=values.file(written=True),
        metavar="FILE",
        help="Write the costs that were used here, to be read by --cost.  [default: nowhere]",
    )


@dataclass(frozen=True)
class ValidateOptions:
    """What is run for real."""

    HEADING = "Run"

    top: int = option(
        "--top",
        type=values.whole(1, 160),
        default=3,
        show_default=True,
        metavar="K",
        help="Run the K chains that are predicted fastest, beside llama.cpp's defaults, no "
        "drafting and the best tree. Each has contexts of its own.",
    )
    repeat: int = option(
        "--repeat",
        type=values.whole(1, 1000),
        default=3,
        show_default=True,
        metavar="R",
        help="Run each policy R times on each prompt; of each prompt the median counts.",
    )
    n_prompts: int | None = option(
        "--n-prompts",
        type=values.whole(1),
        default=None,
        metavar="N",
        help="Run N of the trace's prompts, evenly spread.  [default: all]",
    )
    server: Path | None = option(
        "--server",
        type=values.file(),
        metavar="PATH",
        help="Also run them through this llama-server, started and stopped for each policy, on "
        "127.0.0.1.  [default: none]",
    )
