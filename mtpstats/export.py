"""Live statistics for others: sinks of a Collector that write JSON Lines, or serve Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mtpstats.closing import Closing
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.stats import SHOWN, Snapshot
from mtpstats.text import printable

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily


class JsonLines(Closing):
    """A sink that appends a line to a file at each call: ``{"time": ..., "counters": {...}}``.

    The counters go on from line to line, as the collector's do, so the last line is the whole run
    and two lines differ by what happened in between; ``Snapshot.from_dict`` reads them. Each line
    is the system's before the call returns. Raises MtpStatsError when it cannot be
    written, which reaches the caller of ``draft()``.

    >>> with JsonLines("stats.jsonl") as sink:
    ...     stats = Collector(every=128, sink=sink)
    """

    def __init__(self, path: Path | str) -> None:
        """Open the file, which may exist. Raises InputError when it cannot be."""
        self._name = printable(str(path))
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise InputError(f"{self._name}: cannot be written: {error.strerror}") from None

    def __call__(self, snapshot: Snapshot) -> None:
        """Append one line."""
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "counters": snapshot.to_dict()}).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise MtpStatsError(f"{self._name}: not written: {error.strerror}") from None
        if written != len(line):
            raise MtpStatsError(f"{self._name}: not written to its end: is the disk full?")

    def close(self) -> None:
        """Close the file; nothing is left to write."""
        self._file.close()


_BY_POSITION: Final = {
    "drafted": "Drafted tokens",
    "reached": "Drafted tokens that the target's choice was put to, all before them accepted",
    "accepted": "Drafted tokens that were accepted",
    "stopped": "Drafts that p_min ended before this position",
}
_SINGLE: Final = {
    "verifications": "Target passes whose draft was resolved",
    "discarded": "Drafts whose outcome could not be told",
    "unresolved": "Drafts cut off by the end",
    "invalid": "Rounds without a usable logit",
    "dropped_tokens": "Drafted tokens thrown away by n_min",
    "cut_tokens": "Tokens cut from drafts that were sent",
    "nan_rows": "Head rows with a NaN",
    "padded_rows": "Head rows whose best logit lay in the padding",
}


class PrometheusMetrics:
    """A sink that a Prometheus registry reads: the counters it was last given.

    Needs ``prometheus_client`` (``pip install 'mtpstats[prometheus]'``). The collector is not
    locked, so a scrape does not touch it: it sees what the sink was last called with.

    >>> metrics = PrometheusMetrics()
    >>> prometheus_client.REGISTRY.register(metrics)
    >>> stats = Collector(every=16, sink=metrics)

    Series are named ``mtpstats_..._total``; ``position`` counts from 0, as llama-server's does, and
    ``rank`` is 1 to 8 or ``miss``.
    """

    def __init__(self, labels: dict[str, str] | None = None) -> None:
        """``labels`` go on every series. Raises InputError when there is no prometheus_client."""
        try:
            import prometheus_client.core
        except ImportError:
            raise InputError(
                "PrometheusMetrics needs prometheus_client: pip install 'mtpstats[prometheus]'"
            ) from None
        self._family: type[CounterMetricFamily] = prometheus_client.core.CounterMetricFamily
        self._labels = dict(labels or {})
        self._last = Snapshot()

    def __call__(self, snapshot: Snapshot) -> None:
        """Take what the next scrape shows."""
        self._last = snapshot

    def describe(self) -> list[Any]:
        """Nothing: the registry need not ask at registration."""
        return []

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield every series; positions as far as anything was drafted."""
        last = self._last
        used = np.flatnonzero(last.drafted + last.stopped)
        depth = int(used[-1]) + 1 if used.size else 0
        for name, words in _SINGLE.items():
            yield self._made(name, words, (), [((), getattr(last, name))])
        for name, words in _BY_POSITION.items():
            counts = getattr(last, name)[:depth].tolist()
            rows = [((str(i),), count) for i, count in enumerate(counts)]
            yield self._made(name, words, ("position",), rows)
        ranks = [str(rank) for rank in range(1, SHOWN + 1)]
        yield self._made(
            "choices",
            "The target's choices by rank among the head's candidates",
            ("position", "rank"),
            [
                ((str(i), rank), count)
                for i in range(depth)
                for rank, count in zip(
                    (*ranks, "miss"), (*last.rank[i].tolist(), int(last.miss[i])), strict=True
                )
            ],
        )
        yield self._made(
            "probability",
            "Sum over reached of the head's probability of its first two choices",
            ("position", "rank"),
            [((str(i), ranks[r]), float(last.sum_p[i, r])) for i in range(depth) for r in range(2)],
        )

    def _made(
        self,
        name: str,
        words: str,
        labels: tuple[str, ...],
        rows: Sequence[tuple[tuple[str, ...], float]],
    ) -> CounterMetricFamily:
        family = self._family(f"mtpstats_{name}", words, labels=[*self._labels, *labels])
        for values, count in rows:
            family.add_metric([*self._labels.values(), *values], count)
        return family
