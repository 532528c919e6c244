"""What each architecture with an MTP route is and can do; the one place that says so.

An architecture that is not listed is tried by its properties.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """``heads``: "single" (one NextN block), "chain" (one or more), "shared" (own GGUF).

    A shared head reads the memory of the one ``target`` architecture it was made for.
    """

    heads: str
    target: str = ""


_SINGLE = (
    "qwen35", "qwen35moe", "qwen3next", "nemotron_h_moe", "bailingmoe3", "deepseek4", "glm4moe",
    "deepseek2", "cohere2moe", "deepseek32", "glm-dsa",
)  # fmt: skip
_CHAIN = ("hy_v3", "step35", "mimo2")

KNOWN: dict[str, Arch] = {
    **{name: Arch("single") for name in _SINGLE},
    **{name: Arch("chain") for name in _CHAIN},
    "gemma4-assistant": Arch("shared", target="gemma4"),
}

# Their files may carry NextN blocks, but llama.cpp has no graph that runs them.
NO_MTP_GRAPH = frozenset({"exaone-moe", "exaone4", "glm4", "dots3note", "bailingmoe2", "glm5-next"})
