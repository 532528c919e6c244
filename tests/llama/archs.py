"""The models the architecture tests run: one case per row of what llama.cpp can draft with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sessions import EXACT

from mtpstats.llama import Library, Model
from mtpstats.speculate import Speculator

TRUNK, HEAD = r"blk\.2\.", r"blk\.2\.|^token_embd|^output"


@dataclass(frozen=True)
class Case:
    """``draft``: architecture and options of the draft model's file, if it is one of its own."""

    arch: str
    options: dict[str, Any] = field(default_factory=dict)
    draft: tuple[str, dict[str, Any]] | None = None
    n_blocks: int = 1


def _split(arch: str, **trunk: Any) -> Case:
    return Case(arch, trunk or {"without": TRUNK}, (arch, {"only": HEAD}))


CASES: dict[str, Case] = {
    **{
        arch: Case(arch)
        for arch in (
            *("qwen35", "qwen35moe", "qwen3next", "nemotron_h_moe", "bailingmoe3", "deepseek4"),
            *("glm4moe", "deepseek2", "hy_v3", "cohere2moe", "step35", "mimo2", "deepseek32"),
        )
    },
    # Otherwise the same as deepseek32.
    "glm-dsa": Case("glm-dsa", {"seed": 2}),
    **{
        f"{arch}-chain": Case(arch, {"n_nextn": 3}, n_blocks=3)
        for arch in ("hy_v3", "step35", "mimo2")
    },
    "gemma4-assistant": Case("gemma4", {}, ("gemma4-assistant", {})),
    **{f"{arch}-split": _split(arch) for arch in ("glm4moe", "step35", "hy_v3")},
    # Its trunk cannot be loaded with metadata that promises blocks the file does not have.
    "qwen35-split": _split("qwen35", n_nextn=0),
}

# Not in every version that is tested.
LATER = {"qwen4exp": Case("qwen4exp")}

PROMPTS = (
    "the time of",
    "a house on the hill, and then some more of it, as it was",
    "x",
    "def f(x):\n    return x\n",
    "on and on and on",
)


@dataclass(frozen=True)
class Loaded:
    """A case's models: exact arithmetic, one thread."""

    case: Case
    model: Model
    draft: Model | None

    def speculator(self, **options: Any) -> Speculator:
        plain = options.get("draft") is None
        draft_model = {} if plain else {"draft_model": self.draft}
        return Speculator(self.model, n_ctx=256, **EXACT, **draft_model, **options)

    @property
    def oracle(self) -> tuple[str, ...]:
        """Options that make llama.cpp's programs run the same."""
        draft = ("-md", str(self.draft.path)) if self.draft else ()
        return ("-c", "256", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32",
                "-fa", "off", *draft)  # fmt: skip


@contextmanager
def loaded(
    lib: Library, tiny: Callable[..., Path], case: Case, path: Path | None = None
) -> Iterator[Loaded]:
    """Load the models of a case; ``path`` stands in for the target's."""
    with ExitStack() as stack:
        target = path or tiny(case.arch, f32=True, **case.options)
        model = stack.enter_context(Model(lib, target))
        draft = None
        if case.draft is not None:
            arch, options = case.draft
            draft = stack.enter_context(Model(lib, tiny(arch, f32=True, **options)))
        yield Loaded(case, model, draft)
