"""Where a trace comes from: the model and the settings that it takes to run its prompts again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mtpstats import result as results
from mtpstats.cost import Costs
from mtpstats.errors import InputError
from mtpstats.generation import Sampling
from mtpstats.llama.placement import Placement
from mtpstats.loop import Progress
from mtpstats.record import MEASURING_ROOM
from mtpstats.replay import reach
from mtpstats.run import BenchSettings, LlamaEngine, builtin_model
from mtpstats.text import printable
from mtpstats.trace import Trace

__all__ = ["check_model", "find_model", "measured", "settings_of"]

_SETTINGS: Final = {
    **dict.fromkeys(("n_batch", "n_ubatch", "n_threads", "n_threads_batch"), int),
    "n_gpu_layers": results.Signed,
    **dict.fromkeys(("flash_attn", "type_k", "type_v"), str),
}
_PLACEMENT: Final = {
    **{name: [str] for name in ("devices", "rpc", "override_tensor")},
    **dict.fromkeys(("draft_model", "split_mode"), str),
    "tensor_split": [float],
    "main_gpu": int,
}
_SAMPLING: Final = {"temp": float, "top_k": int, "top_p": float, "min_p": float, "seed": int}


def settings_of(trace: Trace, model: Path, draft_model: Path | None = None) -> BenchSettings:
    """Return the settings a trace was recorded with; ``InputError`` if its header lacks them."""
    settings, sampling = trace.header.get("settings"), trace.header.get("sampling")
    if not isinstance(settings, dict) or not isinstance(sampling, dict):
        raise InputError("the trace does not say how it was recorded, so it cannot be run again")
    _check(settings, {**_SETTINGS, **_PLACEMENT}, "settings")
    _check(sampling, _SAMPLING, "sampling")

    def known(record: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        return {name: record[name] for name in names if record.get(name) is not None}

    if settings.get("draft_model") and draft_model is None:
        name = printable(str(settings["draft_model"]))
        raise InputError(f"the trace was recorded with the head of {name}: name its file with -md")
    return BenchSettings(
        model=model,
        draft_model=draft_model,
        n_predict=trace.n_predict,
        n_ctx=max(prompt.n_ctx for prompt in trace.prompts),
        sampling=Sampling(**known(sampling, _SAMPLING)),
        placement=_placement(settings),
        rpc=tuple(settings.get("rpc") or ()),
        **known(settings, _SETTINGS),
    )


def _check(record: dict[str, Any], kinds: dict[str, Any], key: str) -> None:
    """Raise ``InputError`` for what no recording writes, which may have been made by hand."""
    spec = {f"{name}?": (kind, None) for name, kind in kinds.items()}
    results.check(record, spec, "the trace's header", key)
    for name, kind in kinds.items():
        value = record.get(name)
        if kind is int and value is not None and value >= 2**32:
            raise InputError(f"the trace's header: {key}.{name} is {value}, too large")


def _placement(settings: dict[str, Any]) -> Placement:
    devices = settings.get("devices")
    pairs = [pair.rpartition("=") for pair in settings.get("override_tensor") or ()]
    return Placement(
        devices=None if devices is None else tuple(devices),
        split_mode=settings.get("split_mode"),
        tensor_split=tuple(settings.get("tensor_split") or ()),
        main_gpu=settings.get("main_gpu"),
        override_tensor=tuple((pattern, where) for pattern, _, where in pairs),
    )


def find_model(trace: Trace, asked: Path | None) -> Path:
    """Return the model's file: the one asked for, else the built-in one if the trace is of it."""
    if asked is not None:
        return asked
    model = trace.header.get("model") or {}
    if model.get("sha256") == results.sha256([builtin_model()]):
        return builtin_model()
    name = printable(str(model.get("file") or "a model without a name"))
    raise InputError(f"the trace is of {name}: say with -m where that file is")


def check_model(trace: Trace, files: Sequence[Path]) -> None:
    """Raise ``InputError`` unless the files are the model the trace was recorded with."""
    model = trace.header.get("model") or {}
    if model.get("sha256") and results.sha256(files) != model["sha256"]:
        raise InputError(
            f"{printable(str(files[0]))} is not the model the trace was recorded with, "
            f"{printable(str(model.get('file')))}: its hash differs"
        )


def measured(engine: LlamaEngine, trace: Trace, tell: Callable[[Progress], None]) -> Costs:
    """Measure what passes and steps cost now, with the trace's text, at its usual length."""
    text = np.concatenate([prompt.tokens for prompt in trace.prompts]).tolist()
    n_past = int(np.mean([p.n_prompt + p.n_generated / 2 for p in trace.prompts]))
    n_ctx = max(prompt.n_ctx for prompt in trace.prompts)
    if engine.n_ctx_train > 0:
        n_ctx = max(min(n_ctx + MEASURING_ROOM, engine.n_ctx_train), n_ctx)
    costs = engine.costs(reach(trace), n_ctx, text, n_past, tell)
    facts = {
        "environment": engine.environment(()),
        "model": engine.model() | {"sha256": (trace.header.get("model") or {}).get("sha256")},
        "settings": trace.header["settings"],
    }
    return replace(costs, facts=costs.facts | facts)
