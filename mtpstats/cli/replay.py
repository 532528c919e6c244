"""``mtpstats replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtpstats.cli import options
from mtpstats.cli.streams import to_stdout
from mtpstats.cli.trace_options import ReplayOptions

if TYPE_CHECKING:
    from mtpstats.replay import AnyPolicy, Replay
    from mtpstats.report.replay import Report
    from mtpstats.trace import Trace

SCHEMA = "mtpstats.replay/1"

EXAMPLES = """\
Examples:
  mtpstats replay run.trace
      llama.cpp's default draft, the longest chain recorded, and the head itself
  mtpstats replay run.trace --policy chain:n_max=4,p_min=0.6 \\
      --policy gated:n_max=4,p1_max=0.7,p2_min=0.15 --policy adaptive:n_max=8
      what each of these would have done
  mtpstats replay wide.trace --policy opttree:n_nodes=8,depth=6,width=2,delta=0.1
      a tree grown at every position, from a trace recorded with --width
  mtpstats replay run.trace --trees 8 --trees 16
      the best trees of 8 and of 16 nodes, drawn, and as choices for other engines
  mtpstats replay run.trace --policy 'tree:[[0],[1],[0,0]]' --json
      a tree of your own (ranks from 0); all counters as JSON
"""


@click.command("replay", cls=options.Command, epilog=EXAMPLES)
@options.file_argument("trace")
@options.takes(replay=ReplayOptions, output=options.JsonOption)
def command(trace: Path, replay: ReplayOptions, output: options.JsonOption) -> None:
    """Say from a trace what drafting policies would have done.

    A trace is recorded once, by mtpstats record. What is replayed from it are the very
    verifications that a run with these flags would make, near ties aside. Needs no libllama.
    """
    from mtpstats.trace import Trace

    loaded = Trace.load(trace)
    policies = _policies(loaded, replay)
    found = _replays(loaded, policies, replay)
    report = _report(loaded, found, replay)
    if output.json:
        to_stdout(json.dumps(_record(report, found), allow_nan=False) + "\n")
    else:
        from mtpstats.report.replay import render

        to_stdout(render(report))


def _policies(trace: Trace, asked: ReplayOptions) -> list[AnyPolicy]:
    """Return what was asked for, else llama.cpp's default and the longest chain there is."""
    from mtpstats.policy import Chain, parse_policy
    from mtpstats.replay import reach

    if asked.policy:
        return [parse_policy(spec) for spec in asked.policy]
    longest = reach(trace)
    return [Chain(n_max) for n_max in sorted({min(3, longest), longest})]


def _replays(trace: Trace, policies: list[AnyPolicy], asked: ReplayOptions) -> list[Replay]:
    from mtpstats.replay import replay

    return [
        replay(trace, policy, n_predict=asked.n_predict, n_ctx=asked.n_ctx, starts=asked.starts)
        for policy in policies
    ]


def _report(trace: Trace, found: list[Replay], asked: ReplayOptions) -> Report:
    from mtpstats import trees, uniform
    from mtpstats.figures import figures
    from mtpstats.report.replay import Report

    budgets = sorted(set(asked.trees))
    return Report(
        header=trace.header,
        n_prompts=len(trace.prompts),
        n_tokens=sum(prompt.n_generated for prompt in trace.prompts),
        n_roots=trace.n_roots,
        incomplete=trace.incomplete,
        policies=[figures(one) for one in found],
        head=uniform.head_summary(trace),
        continuations=uniform.continuations(trace),
        overlaps=uniform.overlaps(trace),
        choices=trees.choose(trace, budgets, n_predict=asked.n_predict) if budgets else (),
        unseen=trees.unseen_lengths(trace, budgets, n_predict=asked.n_predict),
    )


def _record(report: Report, found: list[Replay]) -> dict[str, Any]:
    """Return the JSON form: counters, and what is derived from them."""
    return {
        "schema": SCHEMA,
        "trace": {
            "prompts": report.n_prompts,
            "tokens": report.n_tokens,
            "roots": report.n_roots,
            "depth": report.header["depth"],
            "width": report.header.get("width", 0),
            "every": report.header["every"],
            "incomplete": report.incomplete,
        },
        "policies": [
            {
                **one.to_dict(),
                "rows": replay.totals.rows.sum(axis=0).tolist(),
                "widths": replay.totals.widths.sum(axis=0).tolist(),
                "lengths": replay.totals.lengths.sum(axis=0).tolist(),
                "positions": replay.snapshot.to_dict(),
                "prompts": [
                    {
                        "id": prompt.id,
                        "tokens": prompt.tokens,
                        "verifications": prompt.verifications.tolist(),
                        "near_tie": prompt.near_tie,
                        "stop": prompt.stop,
                    }
                    for prompt in replay.prompts
                ],
            }
            for one, replay in zip(report.policies, found, strict=True)
        ],
        "head": {
            "positions": [
                {
                    "position": position.index,
                    "reached": position.reached,
                    "ranks": list(position.rank_counts or ()),
                    "miss": position.miss_count,
                    "overlap": _interval(report.overlaps[position.index]),
                }
                for position in report.head.positions
            ],
            "continuations": [
                {
                    "position": one.position,
                    "rank": one.rank,
                    "cases": one.cases,
                    "hits": one.hits,
                }
                for one in report.continuations
            ],
        },
        "trees": [
            {**one.to_dict(), "unseen_length": _interval(unseen)}
            for one, unseen in zip(report.choices, report.unseen, strict=True)
        ],
    }


def _interval(found: Any) -> list[float] | None:
    return None if found is None else list(found)
