"""``mtpstats bench``."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mtpstats.cli import inputs, options
from mtpstats.cli.output import check, deliver
from mtpstats.cli.streams import last_words, show_log, to_stderr
from mtpstats.cli.tree import TreeOptions, draft_settings

if TYPE_CHECKING:
    from mtpstats.head import DraftSettings
    from mtpstats.run import BenchSettings

EXAMPLES = """\
Examples:
  mtpstats bench
      the built-in model and prompts
  mtpstats bench -m model.gguf -f notes.txt -f main.py -n 256 --baseline
      two prompts of your own, and the measured speed-up over plain decoding
  mtpstats bench -m model.gguf --prompts mine.jsonl --temp 0.8 -o result.json
      many prompts, sampled; the table on the terminal, everything in the file
  mtpstats bench -m gemma4.gguf -md assistant.gguf -np 4 -c 4096
      a head of its own file; four prompts at a time, 4096 tokens of context each
  mtpstats bench -m model.gguf --rpc 10.0.0.2:50052,10.0.0.3:50052 -ts 3,1
      layers on two machines that run llama.cpp's rpc-server
  mtpstats bench -m model.gguf --prompts chats.jsonl --shuffle --limit 100 -n 256
      100 of your conversations through the model's chat template; each category apart
  mtpstats bench -m model.gguf --tree best:6 --trace run.trace --baseline
      the best tree of 6 nodes for what was recorded, drafted and verified for real
  mtpstats bench -m model.gguf --suite --chat-template-kwargs '{"enable_thinking": false}'
      the built-in conversations, answered without thinking first
"""


@click.command("bench", cls=options.Command, epilog=EXAMPLES)
@options.takes(
    model=options.ModelOptions,
    devices=options.DeviceOptions,
    texts=options.PromptOptions,
    choice=options.SelectionOptions,
    drafting=options.DraftOptions,
    sampling=options.SamplingOptions,
    tree=TreeOptions,
    run=options.RunOptions,
    output=options.OutputOptions,
    log=options.LogOption,
)
def command(
    model: options.ModelOptions,
    devices: options.DeviceOptions,
    texts: options.PromptOptions,
    choice: options.SelectionOptions,
    drafting: options.DraftOptions,
    sampling: options.SamplingOptions,
    tree: TreeOptions,
    run: options.RunOptions,
    output: options.OutputOptions,
    log: options.LogOption,
) -> None:
    """Run prompts, and show how the MTP head drafts for them.

    The head drafts as in llama.cpp's draft-mtp, and the target verifies. The table shows, per
    draft position, how often a drafted token was accepted, and which rank among the head's
    candidates the target's own choice had: whether to draft deeper or wider.
    """
    check(output)
    draft = draft_settings(drafting, tree)
    sampling = inputs.with_seed(sampling)
    prompts = inputs.gather(texts, sampling.seed if choice.shuffle else None)
    selection = inputs.selection(choice)

    from mtpstats import run as runs
    from mtpstats.cli.live import ProgressLine, TextStream

    base = inputs.settings(model, devices, sampling, selection, run.n_predict)
    settings = _settings(base, draft, run, output)
    line = ProgressLine(None if log.verbose or run.stream else sys.stderr)
    stream = TextStream(to_stderr) if run.stream else None

    def on_stats(snapshot: Any) -> None:
        from mtpstats.stats import compact

        line.clear()
        to_stderr(compact(snapshot) + "\n")

    def on_abort(text: str, finished: dict[str, Any] | None) -> None:
        line.clear()
        last_words(text, partial(_rescue, finished, output) if finished else None)

    try:
        result = runs.bench(
            settings,
            prompts,
            on_progress=line if line.enabled else None,
            on_stats=on_stats if settings.stats_every else None,
            on_text=stream,
            on_log=show_log if log.verbose else None,
            on_abort=on_abort,
            command=["mtpstats", *sys.argv[1:]],
        )
    except runs.BenchStopped as stop:
        line.clear()
        if stop.result["prompts"]:
            deliver(stop.result, output)
        raise
    finally:
        line.clear()
        if stream is not None:
            stream.close()
    deliver(result, output)


def _settings(
    base: BenchSettings,
    draft: DraftSettings,
    run: options.RunOptions,
    output: options.OutputOptions,
) -> BenchSettings:
    return replace(
        base,
        n_parallel=run.n_parallel,
        draft=draft,
        compat_counts=run.compat_counts,
        baseline=run.baseline,
        stats=not run.no_stats,
        stats_every=run.stats_every,
        hash_model=output.json or output.output is not None,
    )


def _rescue(finished: dict[str, Any], output: options.OutputOptions) -> str:
    """Deliver what was finished before llama.cpp gave up; say what it was."""
    done, planned = len(finished["prompts"]), finished["settings"]["n_prompts"]
    said = f"{done} of {planned} prompts were finished"
    if not done:
        return f"{said}, nothing was written"
    deliver(finished, output)
    return said if output.output is None else f"{said} and are in {output.output}"
