"""``mtpstats bench``."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mtpstats.cli import inputs, options
from mtpstats.cli import spread as spreading
from mtpstats.cli.long_options import LongRunOptions
from mtpstats.cli.output import check, deliver, journal
from mtpstats.cli.spread_options import SpreadOptions
from mtpstats.cli.streams import discard, last_words, show_log, to_stderr
from mtpstats.cli.tree import TreeOptions, draft_settings
from mtpstats.errors import MtpStatsError, SetAside

if TYPE_CHECKING:
    from mtpstats.head import DraftSettings
    from mtpstats.journal import Journal
    from mtpstats.run import BenchSettings, BenchStopped

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
  mtpstats bench -m model.gguf --prompts many.jsonl -o run.json --time-limit 8h
  mtpstats bench -m model.gguf --prompts many.jsonl -o run.json --resume
      as far as it gets in a night; the next night the rest, after a crash or kill too
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
    long=LongRunOptions,
    spread=SpreadOptions,
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
    long: LongRunOptions,
    spread: SpreadOptions,
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
    inputs.check_shard(spread.shard, sampling)
    spreading.check(spread, log, run)

    from mtpstats import run as runs
    from mtpstats.cli.live import ProgressLine, TextStream

    line = ProgressLine(None if log.verbose or run.stream else sys.stderr)

    def say(text: str) -> None:
        line.clear()
        to_stderr(text)

    def on_stats(snapshot: Any) -> None:
        from mtpstats.stats import compact

        say(compact(snapshot) + "\n")

    with journal(output, long.resume, lambda text: say(f"mtpstats: {text}\n")) as keeper:
        if sampling.seed < 0 and keeper is not None and keeper.seed is not None:
            sampling = replace(sampling, seed=keeper.seed)
        sampling = inputs.with_seed(sampling)
        prompts = inputs.gather(texts, sampling.seed if choice.shuffle else None)
        selection = inputs.selection(choice, spread.shard)
        base = inputs.settings(model, devices, sampling, selection, run.n_predict)
        settings = _settings(base, draft, run, output)
        stream = TextStream(to_stderr) if run.stream else None

        def on_abort(text: str, finished: dict[str, Any] | None) -> None:
            line.clear()
            rescue = partial(_rescue, finished, output, keeper) if finished else None
            last_words(text, rescue)

        try:
            if spread.ray is not None:
                result = spreading.bench(
                    spread,
                    settings,
                    prompts,
                    keeper=keeper,
                    time_limit=long.time_limit,
                    on_progress=line if line.enabled else None,
                    on_note=lambda text: say(f"mtpstats: {text}\n"),
                )
            else:
                result = runs.bench(
                    settings,
                    prompts,
                    keeper=keeper,
                    time_limit=long.time_limit,
                    on_progress=line if line.enabled else None,
                    on_stats=on_stats if settings.stats_every else None,
                    on_text=stream,
                    on_log=show_log if log.verbose else None,
                    on_abort=on_abort,
                    command=["mtpstats", *sys.argv[1:]],
                )
        except runs.BenchStopped as stop:
            line.clear()
            _deliver_stopped(stop, output, keeper)
            raise
        finally:
            line.clear()
            if stream is not None:
                stream.close()
        _deliver(result, output, keeper)


def _deliver(result: dict[str, Any], output: options.OutputOptions, keeper: Journal | None) -> None:
    """Deliver a result that is complete, or as far as the time limit let it come."""
    if keeper is not None and keeper.complete is not None:
        # It stays as it is, with the command and the machine it was made with.
        deliver(keeper.complete, replace(output, output=None))
        return
    done, planned = len(result["prompts"]), result["settings"]["n_prompts"]
    if done == planned:
        deliver(result, output, written=keeper.remove if keeper is not None else None)
        return
    aside = result.get("environment", {}).get("set_aside")
    if aside:
        deliver(result, output)
        raise SetAside([one["id"] for one in aside], planned)
    said = f"{done} of {planned} prompts were finished within the time limit"
    if not done:
        raise MtpStatsError(f"{said}; nothing was written")
    deliver(result, output)
    to_stderr(f"mtpstats: {said}{_advice(keeper)}\n")


def _deliver_stopped(
    stop: BenchStopped, output: options.OutputOptions, keeper: Journal | None
) -> None:
    """Deliver what was finished, and let the error say all there is to say."""
    if stop.result["prompts"] and not (keeper is not None and keeper.complete is not None):
        try:
            deliver(stop.result, output)
        except MtpStatsError as error:
            stop.add(f"; {error}")
        except OSError as error:
            stop.add(f"; standard output: {error.strerror or error}")
            discard()
    stop.add(_advice(keeper))


def _advice(keeper: Journal | None) -> str:
    return "; the same command with --resume goes on" if keeper and keeper.n_kept else ""


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


def _rescue(finished: dict[str, Any], output: options.OutputOptions, keeper: Journal | None) -> str:
    """Deliver what was finished before llama.cpp gave up; say what it was."""
    done, planned = len(finished["prompts"]), finished["settings"]["n_prompts"]
    said = f"{done} of {planned} prompts were finished"
    if not done:
        return f"{said}, nothing was written"
    where = "" if output.output is None else f" and are in {output.output}"
    try:
        deliver(finished, output)
    except MtpStatsError as error:
        if keeper is None or not keeper.n_kept:
            raise
        where = f"; {error}"
    return f"{said}{where}{_advice(keeper)}"
