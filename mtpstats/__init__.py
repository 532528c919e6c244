"""mtpstats: how a GGUF model's MTP head drafts, and whether deeper or wider would pay.

Names load on first use, so that ``import mtpstats`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpstats._core import top_k as top_k
    from mtpstats.policy import AdaptiveDepth as AdaptiveDepth
    from mtpstats.policy import Chain as Chain
    from mtpstats.policy import Eagle2 as Eagle2
    from mtpstats.policy import GatedSiblings as GatedSiblings
    from mtpstats.policy import OptTree as OptTree
    from mtpstats.policy import Policy as Policy
    from mtpstats.policy import Tree as Tree
    from mtpstats.replay import AnyPolicy
    from mtpstats.stats import Collector as Collector
    from mtpstats.stats import Snapshot as Snapshot
    from mtpstats.trace import Trace as Trace

    def replay(trace: Trace, policy: AnyPolicy, **options: Any) -> Snapshot:
        """Call the module ``mtpstats.replay``, which is this function, too."""


__version__ = "0.1.0"

_HOME = {
    "AdaptiveDepth": "policy",
    "Chain": "policy",
    "Collector": "stats",
    "Eagle2": "policy",
    "GatedSiblings": "policy",
    "OptTree": "policy",
    "Policy": "policy",
    "Snapshot": "stats",
    "Trace": "trace",
    "Tree": "policy",
    "top_k": "_core",
}

__all__ = [
    "AdaptiveDepth",
    "Chain",
    "Collector",
    "Eagle2",
    "GatedSiblings",
    "OptTree",
    "Policy",
    "Snapshot",
    "Trace",
    "Tree",
    "__version__",
    "replay",
    "top_k",
]


def __getattr__(name: str) -> Any:
    if name == "replay":  # a module that can be called
        return import_module("mtpstats.replay")
    if name not in _HOME:
        raise AttributeError(f"module 'mtpstats' has no attribute {name!r}")
    return getattr(import_module(f"mtpstats.{_HOME[name]}"), name)
