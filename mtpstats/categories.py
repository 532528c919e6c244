"""The figures of a run by the category of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtpstats.stats import Snapshot
from mtpstats.summary import Estimate, Known, summarise


@dataclass(frozen=True)
class Category:
    """The prompts of one category; intervals as in :class:`mtpstats.summary.Summary`."""

    name: str | None
    prompts: int
    tokens: int
    acceptance: Estimate
    """accepted / reached at the first position."""
    rank2: Estimate
    """How often the second choice was right there."""
    acceptance_length: Estimate
    coverage: Estimate


def by_category(
    names: Sequence[str | None],
    by_prompt: Sequence[Snapshot],
    tokens: Sequence[int],
    *,
    known: Known | None = None,
    most: int | None = None,
    seed: int = 0,
) -> list[Category]:
    """The figures of each category, the one with most prompts first, else in order of appearance.

    Args:
        names, by_prompt, tokens: of each prompt its category, counters, generated tokens.
        known: of the same prompts, as of :func:`mtpstats.summary.summarise`.
        most: how many categories, of those with most prompts; None: all.
        seed: of the bootstrap.
    """
    groups: dict[str | None, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [
        _category(
            name,
            [by_prompt[i] for i in members],
            [tokens[i] for i in members],
            known and _of(known, members),
            seed,
        )
        for name, members in largest[:most]
    ]


def of_categories(result: dict[str, Any], most: int | None = None) -> tuple[list[Category], int]:
    """The largest categories of a result, and how many more there are.

    None for a run without statistics, or of one category.
    """
    prompts = result["prompts"]
    names = [prompt["category"] for prompt in prompts]
    if result["total"]["positions"] is None or len(set(names)) < 2:
        return [], 0
    by_prompt, unknown = Snapshot.from_partial([prompt["positions"] for prompt in prompts])
    known = Known([p["drafted"] for p in prompts], [p["accepted"] for p in prompts], unknown)
    found = by_category(
        names,
        by_prompt,
        [prompt["tokens"] for prompt in prompts],
        known=known if unknown else None,
        most=most,
    )
    return found, len(set(names)) - len(found)


def _of(known: Known, members: Sequence[int]) -> Known:
    return Known(
        [known.drafted[i] for i in members], [known.accepted[i] for i in members], known.unknown
    )


def _category(
    name: str | None,
    parts: Sequence[Snapshot],
    made: Sequence[int],
    known: Known | None,
    seed: int,
) -> Category:
    found = summarise(Snapshot.merge(*parts), parts, made, known=known, positions=1, seed=seed)
    first = found.positions[0] if found.positions else None
    return Category(
        name=name,
        prompts=len(parts),
        tokens=found.tokens,
        acceptance=first.acceptance if first else None,
        rank2=first.rank2 if first else None,
        acceptance_length=found.acceptance_length,
        coverage=found.coverage,
    )
