"""Prompts through the driver into results.

``bench`` knows nothing of ctypes: it asks an :class:`Engine` for tokens and drivers, and libllama
is one engine. Tests bring a smaller one.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mtpstats import describe
from mtpstats import result as results
from mtpstats.chat import ChatTemplate
from mtpstats.errors import InputError, Interrupted, MtpStatsError
from mtpstats.prepare import Selection, prepare
from mtpstats.prompts import Prompt
from mtpstats.speculate import DraftSettings, Generation, Sampling, Speculator
from mtpstats.stats import Collector, Snapshot, repeated_4grams
from mtpstats.text import printable

WARM_UP_TOKENS = 8
CTX_STEP = 256  # libllama rounds contexts up to this


def builtin_model() -> Path:
    """Return the path of the small model that ships with mtpstats."""
    return Path(__file__).parent / "data" / "tiny-qwen35-mtp.gguf"


@dataclass(frozen=True)
class BenchSettings:
    """What ``bench`` runs. ``n_ctx`` None: as large as the prompts need; 0: the model's own.

    ``n_threads`` None: one per core. ``sampling.seed`` -1: a random seed, drawn once.
    ``temp_source`` says who chose the temperature: ``asked``, ``default`` or ``built-in model``.
    ``hash_model`` decides whether ``model.sha256`` is filled in, which reads the whole file.
    ``selection`` says which of the prompts run, and how conversations become text.
    """

    model: Path
    n_predict: int = 128
    draft: DraftSettings = field(default_factory=DraftSettings)
    sampling: Sampling = field(default_factory=Sampling)
    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int = -1
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    baseline: bool = False
    temp_source: str = "asked"
    stats: bool = True
    stats_every: int = 0
    hash_model: bool = True
    selection: Selection = field(default_factory=Selection)


@dataclass(frozen=True)
class Progress:
    """How far a stage is: ``done`` of ``total`` in ``unit``; total None where nobody knows."""

    stage: str
    done: float = 0.0
    total: float | None = None
    unit: str = ""


class BenchStopped(MtpStatsError):
    """The run ended early; ``result`` holds what was finished, possibly no prompt at all.

    ``exit_code`` is that of what stopped it: 130 when the user did.
    """

    def __init__(self, result: dict[str, Any], cause: MtpStatsError | None = None) -> None:
        done, planned = len(result["prompts"]), result["settings"]["n_prompts"]
        super().__init__(f"{cause or 'interrupted'}: {done} of {planned} prompts were finished")
        self.result = result
        self.exit_code = cause.exit_code if cause is not None else Interrupted.exit_code


class Driver(Protocol):
    """What generates: :class:`mtpstats.speculate.Speculator`, or a stand-in.

    ``n_max`` is the draft length in force, which may be less than was asked for.
    """

    n_ctx: int
    n_max: int

    def generate(
        self,
        prompt: Sequence[int],
        n_predict: int,
        *,
        on_text: Callable[[bytes], None] | None = None,
    ) -> Generation:
        """Continue the prompt."""

    def close(self) -> None:
        """Free what it holds."""


class Engine(Protocol):
    """A loaded model, its file(s), and the threads a driver gets. Drivers close before it."""

    n_ctx_train: int
    n_threads: int
    files: Sequence[Path]

    def environment(self, command: Sequence[str]) -> dict[str, Any]:
        """Return the result file's ``environment``."""

    def model(self) -> dict[str, Any]:
        """Return the result file's ``model``, without the hash."""

    def tokenize(self, text: str) -> list[int]:
        """Return the prompt's tokens."""

    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template, without source if it carries none."""

    def driver(
        self, draft: DraftSettings | None, n_ctx: int, collector: Collector | None
    ) -> Driver:
        """Return a driver with contexts of its own; no ``draft``: plain decoding."""

    def close(self) -> None:
        """Free the model."""


class LlamaEngine:
    """libllama as an :class:`Engine`."""

    def __init__(
        self,
        settings: BenchSettings,
        tell: Callable[[Progress], None],
        on_log: Callable[[str, str], None] | None = None,
        on_abort: Callable[[str], None] | None = None,
    ) -> None:
        """Load library and model; ``on_log`` receives (level, line) of llama.cpp's log.

        ``on_abort`` is ``Library.on_abort``'s listener.
        """
        from mtpstats import llama

        self._settings = settings
        self._library = llama.load()
        self._library.verbose(on_log)
        self._library.on_abort(on_abort)
        self._model = llama.Model(
            self._library,
            settings.model,
            n_gpu_layers=settings.n_gpu_layers,
            progress=lambda share: tell(Progress("loading the model", 100 * share, 100, "%")),
        )
        self.files: Sequence[Path] = [file.path for file in self._model.header.files]
        self.n_ctx_train = self._model.n_ctx_train
        self.n_threads = settings.n_threads or llama.default_threads()

    def environment(self, command: Sequence[str]) -> dict[str, Any]:
        """See :class:`Engine`."""
        return results.environment(
            describe.library(self._library), describe.devices(self._library), command
        )

    def model(self) -> dict[str, Any]:
        """See :class:`Engine`."""
        return describe.model(self._model)

    def tokenize(self, text: str) -> list[int]:
        """See :class:`Engine`."""
        return self._model.tokenize(text)

    def chat_template(self) -> ChatTemplate:
        """See :class:`Engine`."""
        return describe.chat_template(self._model)

    def driver(
        self, draft: DraftSettings | None, n_ctx: int, collector: Collector | None
    ) -> Speculator:
        """See :class:`Engine`."""
        settings = self._settings
        return Speculator(
            self._model,
            draft=draft,
            sampling=settings.sampling,
            n_ctx=n_ctx,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            n_threads=self.n_threads,
            n_threads_batch=settings.n_threads_batch,
            flash_attn=settings.flash_attn,
            type_k=settings.type_k,
            type_v=settings.type_v,
            collector=collector,
        )

    def close(self) -> None:
        """See :class:`Engine`."""
        self._model.close()
        self._library.verbose(None)
        self._library.on_abort(None)


def bench(
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_stats: Callable[[Snapshot], None] | None = None,
    on_text: Callable[[Prompt, bytes], None] | None = None,
    on_log: Callable[[str, str], None] | None = None,
    on_abort: Callable[[str], None] | None = None,
    command: Sequence[str] = (),
    engine: Callable[..., Engine] = LlamaEngine,
) -> dict[str, Any]:
    """Run every prompt, one after another, and return the result (DESIGN section 6).

    ``on_stats`` hears the statistics of the run so far every ``settings.stats_every``
    verifications, ``on_text`` the text as it is made, ``on_abort`` why llama.cpp is about to abort
    the process. Raises ``InputError`` for prompts that do
    not fit, before anything is generated, and :class:`BenchStopped`, which carries the
    finished prompts, when the user or an error stops the run.
    """
    if not prompts:
        raise InputError("no prompt to run")
    if settings.sampling.seed < 0:
        drawn = replace(settings.sampling, seed=secrets.randbelow(2**32))
        settings = replace(settings, sampling=drawn)
    tell = on_progress or _silent
    with ExitStack() as stack:
        loaded = engine(settings, tell, on_log, on_abort)
        stack.callback(loaded.close)
        prepared = prepare(loaded, prompts, settings.selection)
        prompts, tokens = prepared.prompts, prepared.tokens
        n_ctx = _context_size(settings, loaded.n_ctx_train, tokens)
        loop = _Loop(settings, on_stats, on_text, on_progress, len(prompts))
        loop.drafting = loaded.driver(settings.draft, n_ctx, loop.collector)
        stack.callback(loop.drafting.close)
        if settings.baseline:
            loop.plain = loaded.driver(None, n_ctx, None)
            stack.callback(loop.plain.close)
        _check_fit(prompts, tokens, loop.drafting.n_ctx)

        result = results.make(
            loaded.environment(command),
            loaded.model(),
            {
                **_recorded(settings, loop.drafting, loaded.n_threads, len(prompts)),
                **prepared.settings,
            },
            (),
        )
        try:
            tell(Progress("warming up"))
            loop.warm_up(tokens[0])
            for prompt, ids in zip(prompts, tokens, strict=True):
                loop.add(prompt, ids)
            if settings.hash_model:
                result["model"]["sha256"] = _hashed(loaded.files, tell)
        except (KeyboardInterrupt, MtpStatsError) as stop:
            cause = None if isinstance(stop, KeyboardInterrupt | Interrupted) else stop
            raise BenchStopped(results.with_prompts(result, loop.records), cause) from stop
    return results.with_prompts(result, loop.records)


class _Loop:
    """The state of a run from prompt to prompt."""

    drafting: Driver
    plain: Driver | None = None

    def __init__(
        self,
        settings: BenchSettings,
        on_stats: Callable[[Snapshot], None] | None,
        on_text: Callable[[Prompt, bytes], None] | None,
        on_progress: Callable[[Progress], None] | None,
        n_prompts: int,
    ) -> None:
        self.settings = settings
        self.records: list[dict[str, Any]] = []
        self.collector = Collector(
            settings.draft.n_max,
            enabled=settings.stats,
            every=settings.stats_every if on_stats else 0,
            sink=self._on_snapshot,
        )
        self._on_stats, self._on_text, self._on_progress = on_stats, on_text, on_progress
        self._n_prompts = n_prompts
        self._finished = Snapshot()
        self._warm = False

    def warm_up(self, ids: Sequence[int]) -> None:
        """Touch weights and buffers, so that the first prompt is not the slow one."""
        for driver in filter(None, (self.drafting, self.plain)):
            driver.generate(ids[:WARM_UP_TOKENS], WARM_UP_TOKENS)
        self.collector.reset()
        self._warm = True

    def add(self, prompt: Prompt, ids: Sequence[int]) -> None:
        """Run one prompt and keep its record."""
        first_plain = len(self.records) % 2 == 1  # in turns: neither gets the cooler machine
        plain = self._run_plain(ids) if first_plain else None
        drafted = self.drafting.generate(
            ids, self.settings.n_predict, on_text=self._listener(prompt)
        )
        if not first_plain:
            plain = self._run_plain(ids)
        if drafted.snapshot is not None:
            self._finished += drafted.snapshot
        self.records.append(_record(prompt, len(ids), drafted, plain))
        self._tell(0)

    def _run_plain(self, ids: Sequence[int]) -> Generation | None:
        return self.plain.generate(ids, self.settings.n_predict) if self.plain else None

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if self._on_stats is not None and self._warm:
            self._on_stats(self._finished + snapshot)

    def _listener(self, prompt: Prompt) -> Callable[[bytes], None] | None:
        """Return what hears each verification's text; None when nobody wants to know."""
        if self._on_text is None and self._on_progress is None:
            return None
        verifications = 0

        def heard(piece: bytes) -> None:
            nonlocal verifications
            verifications += 1
            if self._on_text is not None:
                self._on_text(prompt, piece)
            self._tell(verifications)

        self._tell(0)
        return heard

    def _tell(self, verifications: int) -> None:
        """Say how far the run is; the prompt in flight counts by what its like gave so far."""
        if self._on_progress is None:
            return
        done = sum(record["tokens"] for record in self.records)
        before = sum(record["verifications"] for record in self.records)
        running = verifications * (done / before if before else 1.0)
        n_predict = self.settings.n_predict
        planned = None
        if n_predict >= 0:
            running = min(running, n_predict)
            planned = float(done + (self._n_prompts - len(self.records)) * n_predict)
        number = min(len(self.records) + 1, self._n_prompts)
        self._on_progress(
            Progress(f"prompt {number}/{self._n_prompts}", done + running, planned, "tokens")
        )


def _silent(_progress: Progress) -> None:
    return


def _context_size(
    settings: BenchSettings, n_ctx_train: int, tokens: Sequence[Sequence[int]]
) -> int:
    """Return the context to ask for: as given, else what the prompts need and the model allows."""
    if settings.n_ctx is not None:
        return settings.n_ctx
    if settings.n_predict < 0:
        return 0
    # The verification that passes n_predict is kept whole, and one row more is written.
    need = max(map(len, tokens)) + settings.n_predict + settings.draft.n_max + 2
    need = math.ceil(need / CTX_STEP) * CTX_STEP
    return min(need, n_ctx_train) if n_ctx_train > 0 else need


def _check_fit(prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], n_ctx: int) -> None:
    for prompt, ids in zip(prompts, tokens, strict=True):
        if len(ids) >= n_ctx:
            raise InputError(
                f"prompt {printable(prompt.id)} has {len(ids)} tokens, the context holds {n_ctx}: "
                "shorten it, raise --ctx-size, or leave it out with --max-tokens"
            )


def _recorded(
    settings: BenchSettings, driver: Driver, n_threads: int, n_prompts: int
) -> dict[str, Any]:
    """Return ``settings`` of the result: every option that can change a number."""
    draft, sampling = settings.draft, settings.sampling
    return {
        "n_prompts": n_prompts,
        "n_predict": settings.n_predict,
        "n_max": driver.n_max,
        "n_max_asked": draft.n_max,
        "n_min": draft.n_min,
        "p_min": draft.p_min,
        "temp": sampling.temp,
        "temp_source": settings.temp_source,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "n_ctx": driver.n_ctx,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "n_threads": n_threads,
        "n_threads_batch": settings.n_threads_batch or n_threads,
        "n_gpu_layers": settings.n_gpu_layers,
        "flash_attn": settings.flash_attn,
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "baseline": settings.baseline,
        "stats": settings.stats,
    }


def _record(
    prompt: Prompt, n_prompt: int, drafted: Generation, plain: Generation | None
) -> dict[str, Any]:
    """Return one entry of the result's ``prompts``."""
    return {
        "id": prompt.id,
        "category": prompt.category,
        "prompt_sha256": hashlib.sha256(prompt.text.encode()).hexdigest(),
        "n_prompt": n_prompt,
        "tokens": len(drafted.tokens),
        "text": drafted.text.decode("utf-8", "replace"),
        "verifications": len(drafted.verifications),
        "drafted": drafted.drafted,
        "accepted": drafted.accepted,
        "near_ties": drafted.near_ties,
        "repeated_4grams": repeated_4grams(drafted.tokens),
        "stop": drafted.stop,
        "seconds": _seconds(drafted),
        "positions": drafted.snapshot.to_dict() if drafted.snapshot is not None else None,
        "baseline": None if plain is None else _baseline(drafted, plain),
    }


def _baseline(drafted: Generation, plain: Generation) -> dict[str, Any]:
    common = min(len(drafted.tokens), len(plain.tokens))
    return {
        "tokens": len(plain.tokens),
        "same_text": drafted.tokens[:common] == plain.tokens[:common],
        "seconds": _seconds(plain),
    }


def _seconds(generation: Generation) -> dict[str, float]:
    return {part: getattr(generation.seconds, part) for part in results.SECONDS}


def _hashed(files: Sequence[Path], tell: Callable[[Progress], None]) -> str:
    total = sum(file.stat().st_size for file in files)
    stage = "hashing the model file"
    tell(Progress(stage, 0, total, "bytes"))
    return results.sha256(files, lambda done: tell(Progress(stage, done, total, "bytes")))
