"""What a worker does: it loads the model once and runs the prompts it is given.

Ordinary classes without a cluster in them. What they take and return goes from one process to
another, so it is plain data; a driver (:mod:`mtpstats.spread`) puts it together.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpstats import record as records
from mtpstats import run as runs
from mtpstats.errors import InputError
from mtpstats.loop import Loop, Progress
from mtpstats.prepare import Reader, Selection
from mtpstats.prompts import Prompt
from mtpstats.record import RecordSettings
from mtpstats.run import BenchSettings, Engine, LlamaEngine
from mtpstats.stats import Collector
from mtpstats.trace import TracedPrompt

SAMPLES, SAMPLE = 64, 1 << 16  # blocks of a model file that tell it from others, and their bytes


@dataclass(frozen=True)
class Facts:
    """What a worker is: ``model`` and ``environment`` as in a result, who and where it is."""

    host: str
    pid: int
    model: dict[str, Any]
    environment: dict[str, Any]
    fingerprint: str
    n_ctx_train: int


@dataclass(frozen=True)
class Read:
    """Prompts with their texts: (prompt, tokens, whether a template made it), and the settings.

    ``problem`` is what is wrong with the prompt after the last one here, None if nothing is.
    """

    prompts: list[tuple[Prompt, int, bool]]
    settings: dict[str, Any]
    problem: str | None


class Worker:
    """A model in memory. ``load`` comes first, ``close`` last."""

    def __init__(
        self, settings: BenchSettings, engine: Callable[..., Engine] = LlamaEngine
    ) -> None:
        self._settings, self._make = settings, engine
        self._stack = ExitStack()
        self._engine: Engine | None = None

    def load(self, command: Sequence[str]) -> Facts:
        """Load the model; say what this worker is."""
        engine = self._engine = self._make(self._settings, _silent, None, None)
        self._stack.callback(engine.close)
        return Facts(
            platform.node(),
            os.getpid(),
            engine.model(),
            engine.environment(command),
            fingerprint([*engine.files, *engine.draft_files]),
            engine.n_ctx_train,
        )

    def read(self, prompts: Iterable[Prompt], selection: Selection) -> Read:
        """Make text of conversations, and count the tokens of every prompt."""
        found: list[tuple[Prompt, int, bool]] = []
        problem = None
        with Reader(self._loaded, selection) as reader:
            for prompt in prompts:
                try:
                    ready, ids = reader.read(prompt)
                except InputError as error:
                    problem = str(error)
                    break
                found.append((ready, len(ids), reader.renders(prompt)))
            return Read(found, reader.settings(), problem)

    def hashes(self) -> dict[str, Any]:
        """Return the model as in a result, with the hashes of its files."""
        model = self._loaded.model()
        runs.hash_files(model, self._loaded, _silent)
        return model

    def close(self) -> None:
        """Free the model."""
        self._stack.close()

    @property
    def _loaded(self) -> Engine:
        assert self._engine is not None, "load comes first"
        return self._engine


class BenchWorker(Worker):
    """Runs prompts as ``bench`` does."""

    def open(self, n_ctx: int) -> None:
        """Make the contexts."""
        settings, engine = self._settings, self._loaded
        self._collector = Collector(settings.draft.n_max, enabled=settings.stats)
        self._drafting = engine.driver(settings.draft, n_ctx, self._collector)
        self._stack.callback(self._drafting.close)
        self._plain = None
        if settings.baseline:
            self._plain = engine.driver(None, n_ctx, None)
            self._stack.callback(self._plain.close)
        self._warm = False

    def opened(self) -> dict[str, Any]:
        """Return a result's settings, number and choice of prompts aside."""
        return runs.recorded(self._settings, self._drafting, self._loaded.n_threads, 0)

    def run(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Run prompts together; return the record of each."""
        tokens = [self._loaded.tokenize(prompt.text) for prompt in prompts]
        loop = Loop(self._settings, prompts, tokens, collector=self._collector)
        loop.run(self._drafting, self._plain, warm_up=not self._warm)
        self._warm = True
        return loop.records


class RecordWorker(Worker):
    """Records prompts as ``record`` does."""

    def __init__(
        self, settings: RecordSettings, engine: Callable[..., Engine] = LlamaEngine
    ) -> None:
        super().__init__(settings.run, engine)
        self._recording = settings

    def costs(self, n_ctx: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Measure what passes and steps take; return a trace's ``cost``."""
        tokens = [self._loaded.tokenize(prompt.text) for prompt in prompts]
        return records.measured_costs(
            self._recording, self._loaded, n_ctx, tokens, _silent
        ).to_dict()

    def open(self, n_ctx: int) -> None:
        """Make the contexts."""
        settings, engine = self._recording, self._loaded
        prober, driver = records.opened(settings, settings.run, engine, n_ctx)
        self._stack.callback(driver.close)
        n_made = records.going_beyond(settings, settings.run).n_predict
        self._recorder = records.Recorder(driver, prober, settings.run.n_predict, n_made, _silent)
        self._warm = False
        self._header = records.header_of(settings, settings.run, engine, driver, prober, ())

    def opened(self) -> dict[str, Any]:
        """Return a trace's header, prompts and hashes aside."""
        return self._header

    def run(self, prompts: Sequence[Prompt]) -> list[TracedPrompt]:
        """Record prompts one after another."""
        found = []
        for prompt in prompts:
            ids = self._loaded.tokenize(prompt.text)
            if not self._warm:
                self._recorder.warm_up(ids)
                self._warm = True
            traced = self._recorder.record(prompt, ids)
            assert traced is not None  # there is no time limit here
            found.append(traced)
        return found


def fingerprint(files: Sequence[Path]) -> str:
    """Return what tells model files apart without reading all of them: sizes and samples."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(b"%d\n" % size)
        with open(path, "rb") as file:
            for i in range(SAMPLES):
                file.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _silent(_progress: Progress) -> None:
    return
