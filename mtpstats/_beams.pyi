"""Types of the beams; the documentation is in ``_beams.pyx``."""

from typing import Final

import numpy as np
import numpy.typing as npt

MAX_WIDTH: Final[int]

class Beams:
    def __init__(self, width: int) -> None: ...
    def grow(self, rows: npt.NDArray[np.float32]) -> list[tuple[int, int]]: ...

def first_wrong(
    node: npt.NDArray[np.uint8],
    p: npt.NDArray[np.float32],
    roots: int,
    depth: int,
    width: int,
) -> int: ...
