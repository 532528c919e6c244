"""``bench`` and ``record`` with the prompts spread over workers.

The driver here reads prompts, hands them out and writes; it loads no model. What comes out equals a
local run's, times aside: in the result prompts stand in their order, in a trace in that of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from mtpstats import merge
from mtpstats import record as records
from mtpstats import result as results
from mtpstats import run as runs
from mtpstats.dispatch import Dispatcher, Pool, Task
from mtpstats.errors import InputError, Interrupted, MtpStatsError
from mtpstats.loop import Keeper, Progress, is_over
from mtpstats.prepare import Choice, Selection
from mtpstats.prompts import Prompt
from mtpstats.record import Recorded, RecordSettings, RecordStopped
from mtpstats.run import BenchSettings, BenchStopped
from mtpstats.text import printable
from mtpstats.tracefile import TraceWriter, begun, check_new
from mtpstats.tracemerge import rewrite_header
from mtpstats.worker import Facts, Read

CHUNK = 256  # prompts that are read at once
COST_PROMPTS = 64  # whose texts costs are measured on

Tell = Callable[[Progress], None]


class _Run:
    """What bench and record have in common: workers that are alike, prompts that are read."""

    def __init__(
        self,
        pool: Pool,
        n_workers: int,
        command: Sequence[str],
        tell: Tell | None,
        on_note: Callable[[str], None] | None,
    ) -> None:
        self._tell = tell or (lambda _: None)
        self._stage = Progress("loading the model")
        self._first: tuple[int, Facts] | None = None
        self.hosts: dict[int, str] = {}
        self.dispatcher = Dispatcher(
            pool,
            n_workers,
            [("load", (list(command),))],
            on_ready=self._ready,
            on_note=on_note or (lambda _: None),
            on_tick=lambda: self._tell(self._stage),
        )

    @property
    def facts(self) -> Facts:
        assert self._first is not None, "a worker was called first"
        return self._first[1]

    def stage(self, name: str, done: float = 0.0, total: float | None = None) -> None:
        """Say how far it is."""
        self._stage = Progress(name, done, total, "prompts" if total else "")
        self._tell(self._stage)

    def _ready(self, number: int, facts: Facts) -> None:
        """Refuse a worker that is not like the first one."""
        self.hosts[number] = facts.host
        if self._first is None:
            self._first = number, facts
            return
        first_number, first = self._first

        def refused(field: str, here: str, there: str) -> MtpStatsError:
            return InputError(
                f"worker {number} (on {printable(facts.host)}) is not like worker {first_number} "
                f"(on {printable(first.host)}): {field} is {there} there and {here} here"
            )

        if facts.fingerprint != first.fingerprint:
            names = [printable(str(one.model.get("file"))) for one in (facts, first)]
            sizes = [f"another file, {one.model.get('size')} bytes" for one in (facts, first)]
            raise refused(f"the model file {names[0]}", *sizes)
        unlike = merge.difference(
            *(
                {"model": f.model, "environment": f.environment, "settings": {}}
                for f in (first, facts)
            )
        )
        if unlike is not None:
            field, there, here = unlike
            raise refused(field, here, there)

    def read(
        self, prompts: Sequence[Prompt], selection: Selection
    ) -> tuple[list[Prompt], dict[str, Any], Choice]:
        """Let workers read the prompts, in chunks; return those that run, as ``prepare`` does."""
        self.stage("loading the model")
        choice, lengths = Choice(selection), []
        arrived: dict[int, Read] = {}
        due, settings = 0, dict[str, Any]()

        def chunks() -> Iterator[Task]:
            source = iter(prompts)
            number = 0
            while not choice.full and (chunk := list(islice(source, CHUNK))):
                yield Task("read", (number,), (chunk, selection))
                number += 1

        for task, read in self.dispatcher.run(chunks(), whole=True):
            arrived[task.items[0]] = read
            while due in arrived:
                read = arrived.pop(due)
                due += 1
                if not settings or read.settings["chat_template"] is not None:
                    settings = read.settings
                for prompt, n_tokens, rendered in read.prompts:
                    if choice.full:
                        break
                    if choice.add(prompt, n_tokens, rendered=rendered):
                        lengths.append(n_tokens)
                if read.problem is not None and not choice.full:
                    raise InputError(read.problem)
            self.stage("reading prompts", due * CHUNK, max(len(prompts), due * CHUNK))
        chosen, more = choice.chosen()
        self.lengths = lengths
        return chosen, {**settings, **more}, choice

    def go(
        self, prompts: Sequence[Prompt], done: set[int], group: int, until: float | None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (index, what the workers made of that prompt) as they come.

        After ``until`` no more prompts are handed out.
        """
        index = {prompt.id: number for number, prompt in enumerate(prompts)}
        waiting = (prompt for number, prompt in enumerate(prompts) if number not in done)

        def tasks() -> Iterator[Task]:
            while not is_over(until) and (chunk := tuple(islice(waiting, group))):
                yield Task("run", chunk)

        n_done = len(done)
        for task, made in self.dispatcher.run(tasks()):
            for prompt, one in zip(task.items, made, strict=True):
                n_done += 1
                yield index[prompt.id], one
            workers = self.dispatcher.n_ready
            self.stage(f"{n_done}/{len(prompts)} on {workers} workers", n_done, len(prompts))


def bench(
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    pool: Pool,
    n_workers: int,
    *,
    keeper: Keeper | None = None,
    time_limit: float | None = None,
    on_progress: Tell | None = None,
    on_note: Callable[[str], None] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Run every prompt on the workers of a pool and return the result, as ``run.bench`` does.

    The pool's workers are :class:`mtpstats.worker.BenchWorker` of the same settings. Each runs
    ``n_parallel`` prompts at a time. After ``time_limit`` seconds no more are handed out.
    ``on_note`` hears, in a line, of workers that died. Prompts that killed two workers are in
    ``environment.set_aside``. ``environment.workers`` says how many there were, and the
    ``seconds`` from the first prompt's start to the last one's end.
    """
    if not prompts:
        raise InputError("no prompt to run")
    until = None if time_limit is None else monotonic() + time_limit
    run = _Run(pool, n_workers, command, on_progress, on_note)
    made: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        stack.callback(run.dispatcher.close)
        chosen, how, choice = run.read(prompts, settings.selection)
        n_ctx = runs.context_size(settings, run.facts.n_ctx_train, choice.longest)
        run.dispatcher.extend(("open", (n_ctx,)))
        recorded = run.dispatcher.first("opened")
        runs.check_fit(chosen, run.lengths, recorded["n_ctx"])
        model = run.facts.model
        if settings.hash_model:
            run.stage("hashing the model file")
            model = run.dispatcher.first("hashes")
        environment = dict(run.facts.environment)
        result = results.make(environment, model, {**recorded, "n_prompts": len(chosen), **how}, ())
        done: Mapping[int, dict[str, Any]] = {}
        if keeper is not None:
            done = keeper.begin(result, chosen)
        made.update(done)
        began = perf_counter()

        def so_far() -> dict[str, Any]:
            environment["workers"] = {
                "number": n_workers,
                "hosts": sorted(set(run.hosts.values())),
                "died": run.dispatcher.n_died,
                "seconds": perf_counter() - began,
            }
            if run.dispatcher.set_aside:
                environment["set_aside"] = _named(run.dispatcher.set_aside)
            return results.with_prompts(result, [made[number] for number in sorted(made)])

        try:
            for number, record in run.go(chosen, set(done), settings.n_parallel, until):
                made[number] = record
                if keeper is not None:
                    keeper.append(number, record)
        except (KeyboardInterrupt, MtpStatsError) as stop:
            cause = None if isinstance(stop, KeyboardInterrupt | Interrupted) else stop
            raise BenchStopped(so_far(), cause) from stop
        return so_far()


def record(
    settings: RecordSettings,
    prompts: Sequence[Prompt],
    path: Path,
    pool: Pool,
    n_workers: int,
    *,
    time_limit: float | None = None,
    on_progress: Tell | None = None,
    on_note: Callable[[str], None] | None = None,
    command: Sequence[str] = (),
) -> Recorded:
    """Record every prompt on the workers of a pool into the trace at ``path``.

    As ``record.record``, with :class:`mtpstats.worker.RecordWorker` of the same settings. Costs are
    measured on one worker before the others run anything. Prompts that killed two workers are
    named in the header's ``set_aside``.
    """
    if not prompts:
        raise InputError("no prompt to record")
    if not settings.resume:
        check_new(path)
    results.check_writable(path)
    found = begun(path) if settings.resume else None
    until = None if time_limit is None else monotonic() + time_limit
    run = _Run(pool, n_workers, command, on_progress, on_note)
    tokens = roots = n_done = 0
    with ExitStack() as stack:
        stack.callback(run.dispatcher.close)
        chosen, how, choice = run.read(prompts, settings.run.selection)
        unread: list[list[int]] = [[] for _ in chosen]
        waiting = {prompt.id for prompt, _ in records.waiting_of(chosen, unread, found, path)}
        longer = records.going_beyond(settings, settings.run)
        n_ctx = runs.context_size(longer, run.facts.n_ctx_train, choice.longest)
        cost = None
        if settings.costs and found is None:
            run.stage("measuring costs")
            cost = run.dispatcher.first("costs", n_ctx, chosen[:COST_PROMPTS])
        run.dispatcher.extend(("open", (n_ctx,)))
        header = run.dispatcher.first("opened")
        runs.check_fit(chosen, run.lengths, header["settings"]["n_ctx"])
        header["environment"] = run.facts.environment
        header["prompts"] = how
        if cost is not None:
            header["cost"] = cost
        run.stage("hashing the model file")
        header["model"] = run.dispatcher.first("hashes")
        writer = stack.enter_context(TraceWriter(path, header, settings.resume, on_note))
        said = records.Said(path, writer, len(chosen))
        n_before = len(writer.done_ids)
        done = {number for number, p in enumerate(chosen) if p.id not in waiting}
        began = perf_counter()
        try:
            for _, traced in run.go(chosen, done, 1, until):
                writer.append(traced)
                n_done += 1
                tokens += traced.n_generated
                roots += len(traced.roots)
        except (KeyboardInterrupt, MtpStatsError) as stop:
            cause = None if isinstance(stop, KeyboardInterrupt | Interrupted) else stop
            raise RecordStopped(len(writer.done_ids), str(said), cause) from stop
        seconds = perf_counter() - began
        aside = _named(run.dispatcher.set_aside)
    if writer.header.get("set_aside", []) != aside:
        rewrite_header(path, {**writer.header, "set_aside": aside})
    n_left = len(waiting) - n_done - len(aside)
    return Recorded(
        path, writer.header, n_before, n_done, tokens, roots, seconds, path.stat().st_size,
        n_left, tuple(one["id"] for one in aside),
    )  # fmt: skip


def _named(items: Sequence[tuple[Prompt, str]]) -> list[dict[str, str]]:
    return [{"id": prompt.id, "why": why} for prompt, why in items]
