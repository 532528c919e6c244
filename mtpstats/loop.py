"""The prompts of a run through its drivers, and the record each leaves in the result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from mtpstats import result as results
from mtpstats.generation import Generation
from mtpstats.prompts import Prompt
from mtpstats.stats import Collector, Snapshot, repeated_4grams

if TYPE_CHECKING:
    from mtpstats.run import BenchSettings

WARM_UP_TOKENS = 8
TURN = 32  # tokens per sequence until the other driver has its turn


@dataclass(frozen=True)
class Progress:
    """How far a stage is: ``done`` of ``total`` in ``unit``; total None where nobody knows."""

    stage: str
    done: float = 0.0
    total: float | None = None
    unit: str = ""


class Driver(Protocol):
    """What generates: :class:`mtpstats.speculate.Speculator`, or a stand-in.

    ``n_max`` is the draft length in force, which may be less than was asked for; ``tree`` what a
    result says of drafts that branch, None for chains.
    """

    n_ctx: int
    n_max: int

    @property
    def tree(self) -> dict[str, Any] | None:
        """``settings.tree`` of a result."""

    def rounds(
        self,
        prompts: Sequence[Sequence[int]],
        n_predict: int,
        *,
        on_text: Callable[[int, bytes], None] | None = None,
        on_done: Callable[[int, Generation], None] | None = None,
    ) -> Generator[int, None, None]:
        """Continue every prompt; yield how many tokens each round of verifications made."""

    def close(self) -> None:
        """Free what it holds."""


class Keeper(Protocol):
    """Where finished prompts are safe while the run goes on: :class:`mtpstats.journal.Journal`."""

    def begin(
        self, result: dict[str, Any], prompts: Sequence[Prompt]
    ) -> Mapping[int, dict[str, Any]]:
        """Take what is about to run; return the records, by prompt, that it holds of it already.

        ``result`` is complete but for its prompts, ``prompts`` have the text that the model reads.
        Raises ``InputError`` if what it holds is of another run.
        """

    def append(self, index: int, record: dict[str, Any]) -> None:
        """Keep the record of a finished prompt, whole when this returns.

        Raises ``MtpStatsError``, which ends the run, when it cannot be kept.
        """


def expected_tokens(n_predict: int, n_done: int, made: int) -> float | None:
    """Return how long a text will be, from those that are done; None where nobody knows."""
    if n_done:
        return made / n_done
    return float(n_predict) if n_predict >= 0 else None


class _Side:
    """One driver's way through the prompts: how many texts and tokens it made.

    ``waiting`` holds the texts that the other driver has not finished.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.made = 0
        self.n_done = 0
        self.made_in_done = 0
        self.waiting: dict[int, Generation] = {}


class Loop:
    """The state of a run: ``drafting`` and ``plain``, the baseline's driver, go on in turns.

    ``on_record`` receives each prompt's index and record once all drivers have finished it, before
    another prompt takes its place; what it raises ends the run. ``on_stats`` hears the statistics
    of the run so far, ``on_text`` the text by prompt as it is made and ``b""`` at the end of each.
    Drivers that already have a ``collector`` go on with it.
    """

    def __init__(
        self,
        settings: BenchSettings,
        prompts: Sequence[Prompt],
        tokens: Sequence[Sequence[int]],
        *,
        on_record: Callable[[int, dict[str, Any]], None] | None = None,
        on_stats: Callable[[Snapshot], None] | None = None,
        on_text: Callable[[Prompt, bytes], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        collector: Collector | None = None,
    ) -> None:
        self.collector = collector or Collector(
            settings.draft.n_max,
            enabled=settings.stats,
            every=settings.stats_every if on_stats else 0,
            sink=self._on_snapshot,
        )
        self._settings, self._prompts, self._tokens = settings, prompts, tokens
        self._on_record, self._on_stats = on_record, on_stats
        self._on_text, self._on_progress = on_text, on_progress
        self._sides: list[_Side] = []
        self._records: dict[int, dict[str, Any]] = {}
        self._waiting: list[int] = []  # the prompts that run, by the number that drivers know
        self._made_before = 0
        self._finished = Snapshot()
        self._warm = False

    @property
    def records(self) -> list[dict[str, Any]]:
        """What every finished prompt left, in the order of the prompts."""
        return [self._records[number] for number in sorted(self._records)]

    def run(
        self,
        drafting: Driver,
        plain: Driver | None,
        *,
        done: Mapping[int, dict[str, Any]] | None = None,
        until: float | None = None,
        warm_up: bool = True,
    ) -> None:
        """Run every prompt that is not ``done`` through both drivers.

        Whoever is behind in tokens goes on, so that a machine that slows down slows both; a turn
        ends between two rounds, whose time alone counts. ``done`` are records of an earlier run of
        the same prompts. At ``until``, of ``time.monotonic()``, the run ends after the round it is
        in, and prompts that are not finished leave no record.
        """
        self._sides = [_Side(driver) for driver in (drafting, plain) if driver is not None]
        self._take(done or {})
        if not self._waiting or is_over(until):
            return
        if warm_up:
            self._warm_up()
        self._warm = True
        self._tell()
        tokens = [self._tokens[index] for index in self._waiting]
        with ExitStack() as stack:
            going = []
            for side in self._sides:
                rounds = side.driver.rounds(
                    tokens,
                    self._settings.n_predict,
                    on_text=self._heard if side is self._sides[0] and self._on_text else None,
                    on_done=self._receiver(side),
                )
                going.append((side, stack.enter_context(closing(rounds))))
            turn = TURN * self._settings.n_parallel
            while going:
                side, rounds = min(going, key=lambda pair: pair[0].made)
                others = [other.made for other, _ in going if other is not side]
                goal = others[0] + turn if others else None
                for made in rounds:
                    side.made += made
                    self._tell()
                    if is_over(until):
                        return
                    if goal is not None and side.made >= goal:
                        break
                else:
                    going.remove((side, rounds))

    def _take(self, done: Mapping[int, dict[str, Any]]) -> None:
        """Take over the records of an earlier run."""
        self._records.update(done)
        self._waiting = [i for i in range(len(self._prompts)) if i not in done]
        for record in done.values():
            for part in (record, record["baseline"])[: len(self._sides)]:
                self._made_before += part["tokens"]
            if record["positions"] is not None:
                self._finished += Snapshot.from_dict(record["positions"])

    def _warm_up(self) -> None:
        """Touch weights and buffers, so that the first prompt is not the slow one."""
        first = [ids[:WARM_UP_TOKENS] for ids in self._tokens[: self._settings.n_parallel]]
        for side in self._sides:
            for _ in side.driver.rounds(first, WARM_UP_TOKENS):
                pass
        self.collector.reset()

    def _receiver(self, side: _Side) -> Callable[[int, Generation], None]:
        """Return what takes a driver's finished texts and makes a record when all have it."""

        def received(number: int, generation: Generation) -> None:
            index = self._waiting[number]
            side.waiting[index] = generation
            side.n_done += 1
            side.made_in_done += len(generation.tokens)
            if side is self._sides[0]:
                if generation.snapshot is not None:
                    self._finished += generation.snapshot
                if self._on_text is not None:
                    self._on_text(self._prompts[index], b"")
            if all(index in one.waiting for one in self._sides):
                drafted, *plain = (one.waiting.pop(index) for one in self._sides)
                record = _record(self._prompts[index], len(self._tokens[index]), drafted, *plain)
                self._records[index] = record
                if self._on_record is not None:
                    self._on_record(index, record)

        return received

    def _heard(self, number: int, piece: bytes) -> None:
        if self._on_text is not None:
            self._on_text(self._prompts[self._waiting[number]], piece)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if self._on_stats is not None and self._warm:
            self._on_stats(self._finished + snapshot)

    def _tell(self) -> None:
        """Say how far the run is, in tokens of all drivers."""
        if self._on_progress is None:
            return
        done = float(self._made_before + sum(side.made for side in self._sides))
        n_before = (len(self._prompts) - len(self._waiting)) * len(self._sides)
        n_done = n_before + sum(side.n_done for side in self._sides)
        made = self._made_before + sum(side.made_in_done for side in self._sides)
        total = None
        each = expected_tokens(self._settings.n_predict, n_done, made)
        if each is not None:
            left = len(self._prompts) * len(self._sides) - n_done
            total = max(made + left * each, done)
        number = min(len(self._records) + 1, len(self._prompts))
        self._on_progress(Progress(f"prompt {number}/{len(self._prompts)}", done, total, "tokens"))


def is_over(until: float | None) -> bool:
    """Whether this moment of ``time.monotonic()`` has come; None never does."""
    return until is not None and monotonic() >= until


def _record(
    prompt: Prompt, n_prompt: int, drafted: Generation, plain: Generation | None = None
) -> dict[str, Any]:
    """Return one entry of the result's ``prompts``."""
    return {
        "id": prompt.id,
        **({} if prompt.index is None else {"index": prompt.index}),
        "category": prompt.category,
        "prompt_sha256": prompt.sha256,
        "n_prompt": n_prompt,
        "tokens": len(drafted.tokens),
        "text": drafted.text.decode("utf-8", "replace"),
        "verifications": len(drafted.verifications),
        "drafted": drafted.drafted,
        "accepted": drafted.accepted,
        "near_ties": drafted.near_ties,
        "repeated_4grams": repeated_4grams(drafted.tokens),
        "stop": drafted.stop,
        "seconds": _seconds(drafted),
        "positions": drafted.snapshot.to_dict() if drafted.snapshot is not None else None,
        "baseline": None if plain is None else _baseline(drafted, plain),
        **({"tree": asdict(drafted.trees)} if drafted.trees is not None else {}),
    }


def _baseline(drafted: Generation, plain: Generation) -> dict[str, Any]:
    common = min(len(drafted.tokens), len(plain.tokens))
    return {
        "tokens": len(plain.tokens),
        "same_text": drafted.tokens[:common] == plain.tokens[:common],
        "seconds": _seconds(plain),
    }


def _seconds(generation: Generation) -> dict[str, float]:
    return {part: getattr(generation.seconds, part) for part in results.SECONDS}
