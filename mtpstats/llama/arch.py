"""What each architecture with an MTP route is and can do; the one place that says so.

An architecture that is not listed is tried by its properties: ``of`` makes them up from the number
of its NextN blocks, and the contexts say the rest (``Context.rollback``, ``shares_memory``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """How an architecture's head is driven and what its target's memory is.

    ``heads``: "single" (one NextN block, fed with its own rows), "chain" (one or more, a block per
    draft step), "shared" (a GGUF of its own that reads the memory of its ``target``, the
    architecture it was made for). ``memory`` in words. ``rollback``: what the target can take back
    of its last tokens, as ``Context.rollback``; "" where only a context can tell.

    ``rows_of_all``: the MTP graph gives the hidden rows of all tokens where llama.cpp takes it to
    give those of the tokens with logits. A chain, where only the last token of a draft has them,
    then goes on from the row of the draft's first token. ``whole_sequences``: they are copied
    whole only and no token belongs to several; libllama aborts otherwise. ``unmasked``: asked
    for the rows of the tokens with logits only, libllama crashes: it reserved another graph.
    """

    heads: str
    memory: str = ""
    rollback: str = ""
    target: str = ""
    rows_of_all: bool = False
    whole_sequences: bool = False
    unmasked: bool = False

    def branches(self, rollback: str) -> str:
        """How drafts that branch can share the target's memory; "" where they cannot.

        "coupled": a token belongs to all branches below it. "chains": each branch is a sequence of
        its own, all equally long. ``rollback`` is the context's, or this architecture's.
        """
        if self.whole_sequences or rollback == "none":
            return ""
        return "chains" if rollback == "snapshots" else "coupled"


_DELTA_NET = "hybrid: attention and gated delta net"

KNOWN: dict[str, Arch] = {
    "qwen35": Arch("single", _DELTA_NET, "snapshots"),
    "qwen35moe": Arch("single", _DELTA_NET, "snapshots"),
    "qwen3next": Arch("single", _DELTA_NET, "none"),
    "nemotron_h_moe": Arch("single", "hybrid: attention and Mamba 2", "snapshots"),
    "bailingmoe3": Arch("single", "hybrid: latent attention and Kimi delta attention", "snapshots"),
    "deepseek4": Arch(
        "single", "sliding window and compressed state", "snapshots", whole_sequences=True
    ),
    "qwen4exp": Arch(
        "single", "hybrid: sparse attention and gated delta net", "snapshots", unmasked=True
    ),
    "glm4moe": Arch("single", "attention", "any"),
    "deepseek2": Arch("single", "latent attention", "any"),
    "cohere2moe": Arch("single", "attention, sliding windows", "any"),
    "deepseek32": Arch("single", "sparse latent attention", "any"),
    "glm-dsa": Arch("single", "sparse latent attention", "any"),
    "hy_v3": Arch("chain", "attention", "any", rows_of_all=True),
    "step35": Arch("chain", "attention, sliding windows", "any"),
    "mimo2": Arch("chain", "attention, sliding windows", "any"),
    "gemma4-assistant": Arch("shared", "its target's", "any", target="gemma4"),
}

# Their files may carry NextN blocks, but llama.cpp has no graph that runs them.
NO_MTP_GRAPH = frozenset({"exaone-moe", "exaone4", "glm4", "dots3note", "bailingmoe2", "glm5-next"})

# A target whose head is a GGUF of its own, and the head's architecture.
COMPANIONS: dict[str, str] = {arch.target: name for name, arch in KNOWN.items() if arch.target}

# What graphs ask of metadata and tensors, beyond what llama.cpp checks by itself.
DELTA_NET = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
HYBRID = DELTA_NET | {"nemotron_h_moe", "bailingmoe3"}
LATENT = frozenset({"deepseek2", "deepseek32", "glm-dsa", "bailingmoe3"})
INDEXED = frozenset({"deepseek32", "glm-dsa", "deepseek4"})
WINDOWED = frozenset({"step35", "mimo2", "cohere2moe", "gemma4", "gemma4-assistant"})
# Hidden rows that are wider than the embeddings.
WIDE_ROWS = frozenset({"gemma4-assistant", "deepseek4", "qwen4exp"})
# Keys and values may differ in length.
UNEQUAL_HEADS = frozenset({"step35", "mimo2", *LATENT})
UNROTATED = frozenset({"nemotron_h_moe"})
ROTATED_WHOLE = frozenset({"hy_v3", "cohere2moe"})
# Experts in every model, and in every NextN block; no gating function of its own stands for 0.
ROUTED = frozenset({"qwen35moe", "qwen4exp", "glm4moe"})
ROUTED_HEADS = frozenset({"glm4moe", "deepseek2", "deepseek32", "glm-dsa", "cohere2moe"})
GATED_AS_TOLD = frozenset({"deepseek32", "bailingmoe3"})


def of(name: str, n_layer_nextn: int) -> Arch:
    """Return what is known of the architecture, or what its NextN blocks suggest."""
    return KNOWN.get(name) or Arch("chain" if n_layer_nextn > 1 else "single")
