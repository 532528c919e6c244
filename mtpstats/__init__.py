"""mtpstats: how a GGUF model's MTP head drafts, and whether deeper or wider would pay.

Names load on first use, so that ``import mtpstats`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpstats._core import top_k as top_k
    from mtpstats.stats import Collector as Collector
    from mtpstats.stats import Snapshot as Snapshot

__version__ = "0.1.0"

_HOME = {"Collector": "stats", "Snapshot": "stats", "top_k": "_core"}

__all__ = ["Collector", "Snapshot", "__version__", "top_k"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mtpstats' has no attribute {name!r}")
    return getattr(import_module(f"mtpstats.{_HOME[name]}"), name)
