"""libllama through ctypes: ``load`` a build, open a ``Model``, a ``Context`` on it, decode.

>>> lib = load()
>>> with Model(lib, path) as model, Context(model) as context:
...     batch = Batch(8)
...     batch.extend(model.tokenize("Hello"), pos=0, outputs="last")
...     context.decode(batch)
"""

from mtpstats.llama.batch import Batch
from mtpstats.llama.context import Context
from mtpstats.llama.installed import Build, builds, builds_dir
from mtpstats.llama.library import Device, Library, load
from mtpstats.llama.limits import default_threads
from mtpstats.llama.model import Model
from mtpstats.llama.placement import Placement

__all__ = [
    "Batch",
    "Build",
    "Context",
    "Device",
    "Library",
    "Model",
    "Placement",
    "builds",
    "builds_dir",
    "default_threads",
    "load",
]
