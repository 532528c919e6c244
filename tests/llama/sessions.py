"""What the tests of models and contexts share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from mtpstats.llama import Batch, Context, Model

BUILTIN = Path(__file__).parents[2] / "mtpstats" / "data" / "tiny-qwen35-mtp.gguf"
# Exact arithmetic: F32 caches, no flash attention; the models are F32 as well.
EXACT = {"n_threads": 1, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
Tiny = Callable[..., Path]


def tokens(count: int, seed: int = 0, n_vocab: int = 500) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, count).tolist()


def run(context: Context, ids: list[int], pos: int = 0, seq: int = 0) -> np.ndarray:
    """Decode and return the logits of the last token."""
    batch = Batch(len(ids))
    batch.extend(ids, pos, seq, "last")
    context.decode(batch)
    return context.logits(len(ids) - 1).copy()


def fresh(model: Model, ids: list[int]) -> np.ndarray:
    """Logits of the last token in a context that saw nothing else."""
    with Context(model, **EXACT) as context:
        return run(context, ids)


def with_eog(source: Path, target: Path, token: int) -> Path:
    """Copy a GGUF and make ``token`` its end-of-generation token."""
    shutil.copy(source, target)
    target.chmod(0o644)
    reader = gguf.GGUFReader(target, "r+")
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        field = reader.fields.get(key)
        if field is not None:
            field.parts[field.data[0]][0] = token
    reader.data.flush()
    return target


def with_few(source: Path, target: Path, tokens: tuple[int, ...]) -> Path:
    """Copy a GGUF and leave these tokens alone a logit that is a number."""
    shutil.copy(source, target)
    target.chmod(0o644)
    reader = gguf.GGUFReader(target, "r+")
    (output,) = (tensor for tensor in reader.tensors if tensor.name == "output.weight")
    output.data[np.isin(np.arange(len(output.data)), tokens, invert=True)] = np.nan
    reader.data.flush()
    return target
