"""Recording: prompts through the driver and its prober into a trace.

A recording goes a little further than a run of ``n_predict`` tokens, so that whatever a policy
drafts at its end can be answered. What is finished is in the file; a recording that was cut off
goes on with ``resume``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from mtpstats import result as results
from mtpstats import run as runs
from mtpstats.cost import Costs
from mtpstats.errors import InputError, Interrupted, MtpStatsError
from mtpstats.generation import Generation
from mtpstats.loop import WARM_UP_TOKENS, Driver, Progress, expected_tokens, is_over
from mtpstats.prepare import prepare
from mtpstats.probe import Prober
from mtpstats.prompts import Prompt
from mtpstats.run import BenchSettings, Engine, LlamaEngine
from mtpstats.speculate import DraftSettings
from mtpstats.text import printable
from mtpstats.trace import MAX_DEPTH, MAX_WIDTH, Trace, TracedPrompt, trace_header
from mtpstats.tracefile import TraceWriter, begun, check_new

N_MAX = 3
"""Drafts the text is made with; it does not depend on them."""
MEASURING_ROOM = 512  # tokens of context


@dataclass(frozen=True)
class RecordSettings:
    """What ``record`` does. ``run``: model, context, sampling, ``n_predict``; no drafting options.

    ``depth`` draft steps at each root, at most 16; ``width``: what beams of as many nodes a depth
    expand there, 0 for nothing off the head's own path and the text's; ``every``: a root at every
    so many positions.
    ``resume``: go on with a trace that is there. ``costs``: measure what passes and steps cost.
    """

    run: BenchSettings
    depth: int = 8
    width: int = 0
    every: int = 1
    resume: bool = False
    costs: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_DEPTH:
            raise InputError(f"depth is {self.depth}: 1 to {MAX_DEPTH} can be recorded")
        if not 0 <= self.width <= MAX_WIDTH:
            raise InputError(f"width is {self.width}: 0 to {MAX_WIDTH} can be recorded")
        if self.every < 1:
            raise InputError(f"every is {self.every}: it must be at least 1")


@dataclass(frozen=True)
class Recorded:
    """What a recording did: ``n_done`` prompts beside ``n_before`` that the trace held already.

    ``n_left`` were not finished within the time limit; those ``set_aside`` killed their workers.
    ``tokens``, ``roots`` and ``seconds`` are those of the prompts done; ``size`` the file's bytes.
    """

    path: Path
    header: dict[str, Any]
    n_before: int
    n_done: int
    tokens: int
    roots: int
    seconds: float
    size: int
    n_left: int = 0
    set_aside: tuple[str, ...] = ()


class RecordStopped(MtpStatsError):
    """The recording ended early; the trace holds ``n_done`` prompts.

    ``exit_code`` is that of what stopped it: 130 when the user did.
    """

    def __init__(self, n_done: int, said: str, cause: MtpStatsError | None) -> None:
        super().__init__(f"{cause or 'interrupted'}: {said}")
        self.n_done = n_done
        self.exit_code = cause.exit_code if cause is not None else Interrupted.exit_code


def record(
    settings: RecordSettings,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    time_limit: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[str, str], None] | None = None,
    on_abort: Callable[[str, str], None] | None = None,
    on_removed: Callable[[str], None] | None = None,
    command: Sequence[str] = (),
    engine: Callable[..., Engine] = LlamaEngine,
) -> Recorded:
    """Record every prompt, one after another, into the trace at ``path``.

    ``time_limit`` seconds after the call, loading included, no round of verifications begins any
    more, and the prompt it was in is dropped. ``on_removed`` hears, in a line, that somebody
    removed the trace and it was put back; ``on_abort`` why llama.cpp is about to abort the process
    and what the trace holds, and may be called on any thread. Raises ``InputError`` for prompts
    that do not fit, for a file that is there already and not to be resumed, or holds another
    recording, and :class:`RecordStopped` when the user or an error stops the run once the trace is
    begun.
    """
    until = None if time_limit is None else monotonic() + time_limit
    if not prompts:
        raise InputError("no prompt to record")
    if not settings.resume:
        check_new(path)
    results.check_writable(path)
    found = begun(path) if settings.resume else None
    run = run_of(settings)
    tell = on_progress or (lambda _: None)
    said = Said(path)

    def gave_up(why: str) -> None:
        assert on_abort is not None
        on_abort(why, str(said))

    with ExitStack() as stack:
        loaded = engine(run, tell, on_log, gave_up if on_abort else None)
        stack.callback(loaded.close)
        prepared = prepare(loaded, prompts, run.selection)
        prompts, tokens = prepared.prompts, prepared.tokens
        said.planned = len(prompts)
        waiting = waiting_of(prompts, tokens, found, path)
        longer = going_beyond(settings, run)
        n_ctx = runs.context_size(longer, loaded.n_ctx_train, prepared.longest)
        costs = None
        if settings.costs and found is None:
            costs = measured_costs(settings, loaded, n_ctx, tokens, tell)
        prober, driver = opened(settings, run, loaded, n_ctx)
        stack.callback(driver.close)
        runs.check_fit(prompts, map(len, tokens), driver.n_ctx)
        header = header_of(settings, run, loaded, driver, prober, command)
        header["prompts"] = prepared.settings
        if costs is not None:
            header["cost"] = costs.to_dict()
        runs.hash_files(header["model"], loaded, tell)
        writer = stack.enter_context(TraceWriter(path, header, settings.resume, on_removed))
        said.writer = writer
        recorder = Recorder(driver, prober, run.n_predict, longer.n_predict, tell)
        recorder.planned = len(prompts)
        recorder.earlier = _earlier(prompts, found)
        n_before = len(writer.done_ids)
        try:
            tell(Progress("warming up"))
            recorder.warm_up(tokens[0])
            for prompt, ids in waiting:
                recorded = recorder.record(prompt, ids, until)
                if recorded is None:
                    break
                writer.append(recorded)
        except (KeyboardInterrupt, MtpStatsError) as stop:
            cause = None if isinstance(stop, KeyboardInterrupt | Interrupted) else stop
            raise RecordStopped(len(writer.done_ids), str(said), cause) from stop
    return Recorded(
        path,
        writer.header,
        n_before,
        recorder.n_done,
        recorder.tokens,
        recorder.roots,
        recorder.seconds,
        path.stat().st_size,
        len(waiting) - recorder.n_done,
    )


def run_of(settings: RecordSettings) -> BenchSettings:
    """Return what the driver is made with; a random seed is drawn."""
    run = replace(settings.run, draft=DraftSettings(N_MAX), n_parallel=1, compat_counts=False)
    if run.sampling.seed < 0:
        drawn = replace(run.sampling, seed=secrets.randbelow(2**32))
        run = replace(run, sampling=drawn)
    return run


def going_beyond(settings: RecordSettings, run: BenchSettings) -> BenchSettings:
    """Return the run with the tokens that a recording goes on for."""
    # A run's last verification may draft as deep as is recorded, and adds one more.
    beyond = settings.depth + 2 if run.n_predict >= 0 else 0
    return replace(run, n_predict=run.n_predict + beyond)


def opened(
    settings: RecordSettings, run: BenchSettings, loaded: Engine, n_ctx: int
) -> tuple[Prober, Driver]:
    """Return a driver that probes every text it makes, and its prober."""
    prober = Prober(settings.depth, settings.every, width=settings.width, n_batch=run.n_batch)
    return prober, loaded.driver(run.draft, n_ctx, None, prober=prober)


class Said:
    """What the trace holds at the moment, in words."""

    def __init__(self, path: Path, writer: TraceWriter | None = None, planned: int = 0) -> None:
        self._where = printable(str(path))
        self.writer, self.planned = writer, planned

    def __str__(self) -> str:
        if self.writer is None:
            return "nothing was recorded"
        done = len(self.writer.done_ids)
        return (
            f"{done} of {self.planned} prompts are in {self._where}; the same command with "
            "--resume goes on"
        )


class Recorder:
    """Goes from prompt to prompt; counts what was recorded.

    ``planned`` prompts are in the trace at the end, ``earlier`` the tokens of those in it already.
    """

    planned = 0
    earlier: Sequence[int] = ()

    def __init__(
        self,
        driver: Driver,
        prober: Prober,
        n_predict: int,
        n_made: int,
        tell: Callable[[Progress], None],
    ) -> None:
        self._driver, self._prober, self._tell = driver, prober, tell
        self._n_predict, self._n_made = n_predict, n_made
        self.n_done = 0
        self.tokens = self.roots = 0
        self.seconds = 0.0

    def warm_up(self, ids: Sequence[int]) -> None:
        """Touch weights and buffers, so that the first prompt is not the slow one."""
        for _ in self._driver.rounds([ids[:WARM_UP_TOKENS]], WARM_UP_TOKENS):
            pass

    def record(
        self, prompt: Prompt, ids: Sequence[int], until: float | None = None
    ) -> TracedPrompt | None:
        """Make a text and probe it; None if the time is over first."""
        if is_over(until):
            return None
        began = perf_counter()
        self._prober.ns = 0
        self._prober.begin(ids, self._n_predict)
        ended: list[Generation] = []
        made = 0
        self._progress(made)
        rounds = self._driver.rounds(
            [ids], self._n_made, on_done=lambda _, generation: ended.append(generation)
        )
        with closing(rounds):
            for more in rounds:
                made += more
                self._progress(made)
                if not ended and is_over(until):
                    return None
        (text,) = ended
        inside = self._prober.ns * 1e-9  # the driver counts it among everything else
        probed = self._prober.finish()
        seconds = perf_counter() - began
        self.n_done += 1
        self.tokens += len(text.tokens)
        self.roots += len(probed.roots)
        self.seconds += seconds
        parts = {part: getattr(text.seconds, part) for part in results.SECONDS}
        parts["other"] = max(parts["other"] - inside, 0.0)
        return TracedPrompt(
            id=prompt.id,
            category=prompt.category,
            n_prompt=len(ids),
            stop=text.stop,
            n_ctx=self._driver.n_ctx,
            seconds=seconds,
            tokens=np.array([*ids, *text.tokens], np.int32),
            margin=np.array(text.margins, np.float32),
            **vars(probed),
            facts={
                "prompt_sha256": prompt.sha256,
                **({} if prompt.index is None else {"index": prompt.index}),
                "seconds": {**parts, "probe": self._prober.ns * 1e-9},
            },
        )

    def _progress(self, made: int) -> None:
        n_done, total = len(self.earlier) + self.n_done, None
        tokens = sum(self.earlier) + self.tokens
        each = expected_tokens(self._n_made, n_done, tokens)
        if each is not None:
            total = max(tokens + (self.planned - n_done) * each, tokens + made)
        stage = f"prompt {n_done + 1}/{self.planned}"
        self._tell(Progress(stage, tokens + made, total, "tokens"))


def _earlier(prompts: Sequence[Prompt], found: Trace | None) -> list[int]:
    """Return how many tokens were made for the prompts that the trace holds."""
    asked = {prompt.id for prompt in prompts}
    held = found.prompts if found is not None else []
    return [prompt.n_generated for prompt in held if prompt.id in asked]


def recorded_seed(path: Path, seed: int) -> int:
    """Return the seed to resume a trace with: for a random one (-1) that of the trace."""
    found = begun(path) if seed < 0 else None
    recorded = (found.header.get("sampling") or {}).get("seed") if found is not None else None
    return seed if recorded is None else int(recorded)


def waiting_of(
    prompts: Sequence[Prompt], tokens: Sequence[list[int]], found: Trace | None, path: Path
) -> list[tuple[Prompt, list[int]]]:
    """Return the prompts that the trace does not hold yet."""
    done = {prompt.id: prompt.facts for prompt in found.prompts} if found else {}
    waiting = []
    for prompt, ids in zip(prompts, tokens, strict=True):
        if prompt.id not in done:
            waiting.append((prompt, ids))
        elif done[prompt.id].get("prompt_sha256") != prompt.sha256:
            raise InputError(
                f"{printable(str(path))}: prompt {printable(prompt.id)} was recorded with another "
                "text: it cannot be resumed with these prompts"
            )
    return waiting


def measured_costs(
    settings: RecordSettings,
    loaded: Engine,
    n_ctx: int,
    tokens: Sequence[Sequence[int]],
    tell: Callable[[Progress], None],
) -> Costs:
    """Measure in the middle of a text of the usual length."""
    n_predict = settings.run.n_predict
    n_past = int(median(map(len, tokens))) + max(n_predict, 0) // 2
    if n_ctx:
        # Some passes move on by as many tokens as they verify; beginning anew takes time.
        n_ctx = max(min(n_ctx + MEASURING_ROOM, loaded.n_ctx_train), n_ctx)
    # Recurrent memory needs a ubatch that is longer than a draft.
    n_max = max(1, min(settings.depth, settings.run.n_ubatch - 2))
    return loaded.costs(n_max, n_ctx, [i for ids in tokens for i in ids], n_past, tell)


def header_of(
    settings: RecordSettings,
    run: BenchSettings,
    loaded: Engine,
    driver: Driver,
    prober: Prober,
    command: Sequence[str],
) -> dict[str, Any]:
    """Return the trace's header; ``settings`` are what can change a number in it."""
    return trace_header(
        depth=prober.depth,
        width=prober.width,
        every=settings.every,
        n_predict=run.n_predict,
        heads=prober.head_kind,
        n_blocks=prober.n_blocks,
        sampling=asdict(run.sampling),
        settings={
            "n_ctx": driver.n_ctx,
            "n_batch": run.n_batch,
            "n_ubatch": run.n_ubatch,
            "n_threads": loaded.n_threads,
            "n_threads_batch": run.n_threads_batch or loaded.n_threads,
            "n_gpu_layers": run.n_gpu_layers,
            **runs.placed(run.placement),
            "rpc": list(run.rpc),
            "flash_attn": run.flash_attn,
            "type_k": run.type_k,
            "type_v": run.type_v,
        },
        temp_source=run.temp_source,
        environment=loaded.environment(command),
        model=loaded.model(),
    )
