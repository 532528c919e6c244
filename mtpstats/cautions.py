"""What a reader of a run's figures must be warned of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mtpstats.stats import Snapshot

LOOP_SHARE: Final = 0.30  # of 4-grams: above it a text loops, and loops inflate acceptance
BROKEN_RATE: Final = 0.20  # of position 1, over at least ...
BROKEN_COUNT: Final = 200  # ... this many verifications: no head that works is so bad
RANKED_COUNT: Final = 20  # rank-1 and rank-2 hits before their order means anything


def warnings(total: Snapshot, shares: Sequence[float], unknown: frozenset[str]) -> tuple[str, ...]:
    """Return the warnings, one sentence each; ``shares`` are the texts' repeated 4-grams."""
    found = []
    looping = [s for s in shares if s > LOOP_SHARE]
    if looping:
        which = (
            "the text loops" if len(shares) == 1 else f"{len(looping)} of {len(shares)} texts loop"
        )
        found.append(
            f"{which} (up to {max(looping):.0%} of the 4-grams occurred before): loops inflate"
            " acceptance"
        )
    reached, accepted = int(total.reached[0]), int(total.accepted[0])
    first, second = int(total.rank[0, 0]), int(total.rank[0, 1])
    if total.verifications >= BROKEN_COUNT and reached and accepted / reached < BROKEN_RATE:
        found.append(
            f"the head looks broken, not weak: position 1 accepted {accepted} of {reached}"
        )
    elif "rank" not in unknown and first + second >= RANKED_COUNT and first <= second:
        found.append(
            "the head looks broken, not weak: at position 1 its first choice was right"
            f" {first} times, its second {second}"
        )
    if total.invalid:
        found.append(f"{total.invalid} rounds had no usable logits (NaN) and are left out")
    if total.padded_rows:
        found.append(
            f"the head put padding first in {total.padded_rows} rows: its vocabulary may not be"
            " the target's"
        )
    return tuple(found)
