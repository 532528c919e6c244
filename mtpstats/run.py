"""Prompts through the driver into results.

``bench`` knows nothing of ctypes: it asks an :class:`Engine` for tokens and drivers, and libllama
is one engine. Tests bring a smaller one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from mtpstats import describe
from mtpstats import result as results
from mtpstats.chat import ChatTemplate
from mtpstats.errors import InputError, Interrupted, MtpStatsError
from mtpstats.llama import limits
from mtpstats.llama.placement import Placement
from mtpstats.loop import Driver, Keeper, Loop, Progress
from mtpstats.prepare import Selection, prepare
from mtpstats.prompts import Prompt
from mtpstats.speculate import DraftSettings, Sampling, Speculator
from mtpstats.stats import Collector, Snapshot
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.cost import Costs
    from mtpstats.llama import Model

__all__ = [
    "BenchSettings",
    "BenchStopped",
    "Driver",
    "Engine",
    "Keeper",
    "LlamaEngine",
    "Progress",
    "bench",
    "builtin_model",
]


def builtin_model() -> Path:
    """Return the path of the small model that ships with mtpstats."""
    return Path(__file__).parent / "data" / "tiny-qwen35-mtp.gguf"


@dataclass(frozen=True)
class BenchSettings:
    """What ``bench`` runs. ``n_ctx`` None: as large as the prompts need; 0: the model's own.

    ``n_parallel`` prompts run at a time, each with ``n_ctx`` positions of its own. The head is
    ``draft_model``'s if one is given. ``rpc`` holds servers, host:port. ``n_threads`` None: one
    per core. ``sampling.seed`` -1: a random seed, drawn once. ``temp_source`` says who chose the
    temperature: ``asked``, ``default`` or ``built-in model``.
    ``hash_model`` decides whether ``model.sha256`` is filled in, which reads the whole file.
    ``selection`` says which of the prompts run, and how conversations become text.
    """

    model: Path
    draft_model: Path | None = None
    n_parallel: int = 1
    n_predict: int = 128
    draft: DraftSettings = field(default_factory=DraftSettings)
    sampling: Sampling = field(default_factory=Sampling)
    n_ctx: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int = -1
    placement: Placement = field(default_factory=Placement)
    rpc: tuple[str, ...] = ()
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    compat_counts: bool = False
    baseline: bool = False
    temp_source: str = "asked"
    stats: bool = True
    stats_every: int = 0
    hash_model: bool = True
    selection: Selection = field(default_factory=Selection)


class BenchStopped(MtpStatsError):
    """The run ended early; ``result`` holds what was finished, possibly no prompt at all.

    ``exit_code`` is that of what stopped it: 130 when the user did.
    """

    def __init__(self, result: dict[str, Any], cause: MtpStatsError | None = None) -> None:
        done, planned = len(result["prompts"]), result["settings"]["n_prompts"]
        super().__init__(f"{cause or 'interrupted'}: {done} of {planned} prompts were finished")
        self.result = result
        self.exit_code = cause.exit_code if cause is not None else Interrupted.exit_code

    def add(self, said: str) -> None:
        """Say more at the end of the message."""
        self.args = (f"{self}{said}",)


class Engine(Protocol):
    """A loaded model, its file(s), and the threads a driver gets. Drivers close before it."""

    n_ctx_train: int
    n_threads: int
    files: Sequence[Path]
    draft_files: Sequence[Path]

    def environment(self, command: Sequence[str]) -> dict[str, Any]:
        """Return the result file's ``environment``."""

    def model(self) -> dict[str, Any]:
        """Return the result file's ``model``, without the hashes."""

    def tokenize(self, text: str) -> list[int]:
        """Return the prompt's tokens."""

    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template, without source if it carries none."""

    def driver(
        self,
        draft: DraftSettings | None,
        n_ctx: int,
        collector: Collector | None,
        **options: Any,
    ) -> Driver:
        """Return a driver with contexts of its own; no ``draft``: plain decoding.

        ``options`` are ``Speculator``'s, for recording and measuring.
        """

    def costs(
        self,
        n_max: int,
        n_ctx: int,
        text: Sequence[int],
        n_past: int,
        tell: Callable[[Progress], None],
    ) -> Costs:
        """Measure what the passes and steps of drafts up to ``n_max`` take; see ``measure``."""

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
        for server in settings.rpc:
            self._library.add_rpc_server(server)

        def loaded(path: Path, what: str, placement: Placement) -> llama.Model:
            return llama.Model(
                self._library,
                path,
                n_gpu_layers=settings.n_gpu_layers,
                placement=placement,
                progress=lambda share: tell(Progress(f"loading the {what}", 100 * share, 100, "%")),
            )

        self._model = loaded(settings.model, "model", settings.placement)
        self._draft_model: llama.Model | None = None
        if settings.draft_model is not None:
            # llama.cpp has an option of its own for the draft model's tensors.
            placement = replace(settings.placement, override_tensor=())
            try:
                self._draft_model = loaded(settings.draft_model, "draft model", placement)
            except BaseException:
                self._model.close()
                raise
        self.files: Sequence[Path] = _files(self._model)
        self.draft_files: Sequence[Path] = _files(self._draft_model)
        self.n_ctx_train = self._model.n_ctx_train
        self.n_threads = settings.n_threads or llama.default_threads()
        self.n_ubatch = settings.n_ubatch

    def environment(self, command: Sequence[str]) -> dict[str, Any]:
        """See :class:`Engine`."""
        return results.environment(
            describe.library(self._library), describe.devices(self._library), command
        )

    def model(self) -> dict[str, Any]:
        """See :class:`Engine`."""
        return describe.model(self._model, self._draft_model)

    def tokenize(self, text: str) -> list[int]:
        """See :class:`Engine`."""
        return self._model.tokenize(text)

    def chat_template(self) -> ChatTemplate:
        """See :class:`Engine`."""
        return describe.chat_template(self._model)

    def driver(
        self,
        draft: DraftSettings | None,
        n_ctx: int,
        collector: Collector | None,
        **options: Any,
    ) -> Speculator:
        """See :class:`Engine`."""
        settings = self._settings
        made: Callable[..., Speculator] = Speculator
        if draft is not None and draft.tree is not None:
            from mtpstats.treedraft import TreeSpeculator

            made = TreeSpeculator
        return made(
            self._model,
            draft=draft,
            draft_model=self._draft_model if draft is not None else None,
            sampling=settings.sampling,
            n_parallel=settings.n_parallel,
            n_ctx=n_ctx,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            n_threads=self.n_threads,
            n_threads_batch=settings.n_threads_batch,
            flash_attn=settings.flash_attn,
            type_k=settings.type_k,
            type_v=settings.type_v,
            compat_counts=settings.compat_counts,
            collector=collector,
            **options,
        )

    def costs(
        self,
        n_max: int,
        n_ctx: int,
        text: Sequence[int],
        n_past: int,
        tell: Callable[[Progress], None],
    ) -> Costs:
        """See :class:`Engine`."""
        from mtpstats.measure import MOST_ROWS, measure, sample_tree

        with ExitStack() as stack:
            driver = self.driver(DraftSettings(n_max), n_ctx, None, n_rows=MOST_ROWS)
            stack.enter_context(driver)
            plain = stack.enter_context(self.driver(None, n_ctx, None))
            tree = None
            with suppress(InputError):  # not every memory can branch
                branching = DraftSettings.branching(sample_tree(driver.n_max))
                tree = stack.enter_context(self.driver(branching, n_ctx, None))
            return measure(driver, text, n_past, plain=plain, tree=tree, on_progress=tell)

    def close(self) -> None:
        """See :class:`Engine`."""
        self._model.close()
        if self._draft_model is not None:
            self._draft_model.close()
        self._library.verbose(None)
        self._library.on_abort(None)


def bench(
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    *,
    keeper: Keeper | None = None,
    time_limit: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_stats: Callable[[Snapshot], None] | None = None,
    on_text: Callable[[Prompt, bytes], None] | None = None,
    on_log: Callable[[str, str], None] | None = None,
    on_abort: Callable[[str, dict[str, Any] | None], None] | None = None,
    command: Sequence[str] = (),
    engine: Callable[..., Engine] = LlamaEngine,
) -> dict[str, Any]:
    """Run every prompt, ``n_parallel`` at a time, and return the result (DESIGN section 6).

    ``keeper`` says which prompts are finished already, and receives every other one as soon as it
    is. ``time_limit`` seconds after the call, loading included, no round of verifications begins
    any more: the result holds the prompts that were finished. ``on_stats`` hears the statistics of
    the run so far every ``settings.stats_every`` verifications, ``on_text`` the text as it is made
    and ``b""`` at the end of a prompt's, ``on_abort`` why llama.cpp is about to abort the process
    and the result of what was finished, None if nothing was begun; it may be called on any thread.
    Raises ``InputError`` for prompts that do not fit, before anything is generated, and
    :class:`BenchStopped`, which carries the finished prompts, when the user or an error stops the
    run.
    """
    until = None if time_limit is None else monotonic() + time_limit
    if not prompts:
        raise InputError("no prompt to run")
    settings = drawn(settings, len(prompts))
    tell = on_progress or _silent
    so_far: list[Callable[[], dict[str, Any]]] = []

    def gave_up(why: str) -> None:
        assert on_abort is not None
        on_abort(why, so_far[0]() if so_far else None)

    with ExitStack() as stack:
        loaded = engine(settings, tell, on_log, gave_up if on_abort else None)
        stack.callback(loaded.close)
        prepared = prepare(loaded, prompts, settings.selection)
        prompts, tokens = prepared.prompts, prepared.tokens
        n_ctx = context_size(settings, loaded.n_ctx_train, prepared.longest)
        loop = Loop(
            settings, prompts, tokens, on_record=keeper.append if keeper is not None else None,
            on_stats=on_stats, on_text=on_text, on_progress=on_progress,
        )  # fmt: skip
        drafting = loaded.driver(settings.draft, n_ctx, loop.collector)
        stack.callback(drafting.close)
        plain = None
        if settings.baseline:
            plain = loaded.driver(None, n_ctx, None)
            stack.callback(plain.close)
        check_fit(prompts, map(len, tokens), drafting.n_ctx)

        result = results.make(
            loaded.environment(command),
            loaded.model(),
            {
                **recorded(settings, drafting, loaded.n_threads, len(prompts)),
                **prepared.settings,
            },
            (),
        )
        if settings.hash_model:
            hash_files(result["model"], loaded, tell)
        done = keeper.begin(result, prompts) if keeper is not None else None
        so_far.append(lambda: results.with_prompts(result, loop.records))
        try:
            tell(Progress("warming up"))
            loop.run(drafting, plain, done=done, until=until)
        except (KeyboardInterrupt, MtpStatsError) as stop:
            cause = None if isinstance(stop, KeyboardInterrupt | Interrupted) else stop
            raise BenchStopped(so_far[0](), cause) from stop
    return so_far[0]()


def drawn(settings: BenchSettings, n_prompts: int) -> BenchSettings:
    """Return the settings with what the run decides: a random seed, how many at once."""
    sampling = settings.sampling
    if sampling.seed < 0:
        sampling = replace(sampling, seed=secrets.randbelow(2**32))
    return replace(settings, sampling=sampling, n_parallel=min(settings.n_parallel, n_prompts))


def _files(model: Model | None) -> list[Path]:
    return [file.path for file in model.header.files] if model is not None else []


def _silent(_progress: Progress) -> None:
    return


def context_size(settings: BenchSettings, n_ctx_train: int, longest: int) -> int:
    """Return the context to ask for: as given, else what the prompts need and the model allows.

    ``longest`` is the longest prompt's length in tokens.
    """
    if settings.n_ctx is not None:
        return settings.n_ctx
    if settings.n_predict < 0:
        return 0
    # The verification that passes n_predict is kept whole, and one row more is written.
    need = limits.cells(longest + settings.n_predict + settings.draft.n_max + 2)
    return min(need, n_ctx_train) if n_ctx_train > 0 else need


def check_fit(prompts: Iterable[Prompt], lengths: Iterable[int], n_ctx: int) -> None:
    """Raise ``InputError`` for a prompt that leaves no room in the context."""
    for prompt, length in zip(prompts, lengths, strict=True):
        if length >= n_ctx:
            raise InputError(
                f"prompt {printable(prompt.id)} has {length} tokens, the context holds {n_ctx}: "
                "shorten it, raise --ctx-size, or leave it out with --max-tokens"
            )


def recorded(
    settings: BenchSettings, driver: Driver, n_threads: int, n_prompts: int
) -> dict[str, Any]:
    """Return ``settings`` of the result: every option that can change a number."""
    draft, sampling = settings.draft, settings.sampling
    return {
        "n_prompts": n_prompts,
        "n_parallel": settings.n_parallel,
        "n_predict": settings.n_predict,
        "draft_model": settings.draft_model.name if settings.draft_model else None,
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
        **placed(settings.placement),
        "rpc": list(settings.rpc),
        "flash_attn": settings.flash_attn,
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "compat_counts": settings.compat_counts,
        "baseline": settings.baseline,
        "stats": settings.stats,
        **({"tree": driver.tree} if draft.tree is not None else {}),
    }


def placed(placement: Placement) -> dict[str, Any]:
    """Return a result's ``settings`` of devices."""
    devices = placement.devices
    return {
        "devices": list(devices) if devices is not None else None,
        "split_mode": placement.split_mode,
        "tensor_split": list(placement.tensor_split),
        "main_gpu": placement.main_gpu,
        "override_tensor": ["=".join(pair) for pair in placement.override_tensor],
    }


def hash_files(model: dict[str, Any], loaded: Engine, tell: Callable[[Progress], None]) -> None:
    """Fill in the hashes of the model file and of the draft model's."""
    model["sha256"] = _hashed(loaded.files, "model", tell)
    if "draft_model" in model:
        model["draft_model"]["sha256"] = _hashed(loaded.draft_files, "draft model", tell)


def _hashed(files: Sequence[Path], what: str, tell: Callable[[Progress], None]) -> str:
    total = sum(file.stat().st_size for file in files)
    stage = f"hashing the {what} file"
    tell(Progress(stage, 0, total, "bytes"))
    return results.sha256(files, lambda done: tell(Progress(stage, done, total, "bytes")))
