"""Types of compiled replay; the documentation is in ``_replay.pyx``."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mtpstats.trace import TracedPrompt

STOPS: Final[tuple[str, ...]]

class Store:
    n: int
    depth: int
    roots: int
    def __init__(self, prompts: list[TracedPrompt], every: int, shared: bool) -> None: ...

class Shape:
    n: int
    depth: int
    def __init__(self, paths: Sequence[Sequence[int]]) -> None: ...

class Run:
    tokens: npt.NDArray[np.int64]
    verifications: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    near_tie: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    counters: npt.NDArray[np.uint64]
    pairs: npt.NDArray[np.int32]
    def __init__(
        self,
        store: Store,
        n_predict: int,
        n_ctx: int,
        uniform: bool,
        n_nodes: int,
        width: int,
        full: bool,
    ) -> None: ...
    def chain(
        self, n_max: int, p_min: float, n_min: int, gate: tuple[float, float, float] | None = None
    ) -> None: ...
    def tree(self, shape: Shape) -> None: ...
    def grown(
        self, n_nodes: int, depth: int, width: int, ranks: int, delta: float | None
    ) -> None: ...
    def adaptive(
        self, low: int, start: int, n_max: int, up: int, down: int, p_min: float
    ) -> None: ...
    def python(
        self,
        begin: Callable[[], None],
        draft: Callable[[Any], Any],
        verified: Callable[[int, int], None],
        shape_of: Callable[[Any], Shape],
    ) -> None: ...

class Paths:
    parent: npt.NDArray[np.int32]
    rank: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.uint8]
    n: int
    def __init__(self, store: Store, n_predict: int, n_ctx: int) -> None: ...
    def keep(self, kept: npt.NDArray[np.uint8]) -> None: ...
    def counts(self, weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def walk(
        self, chosen: npt.NDArray[np.uint8], weights: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
