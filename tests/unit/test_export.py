"""Sinks: what they write is what the collector counted."""

import json
import sys
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtpstats import Collector, Snapshot
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.export import JsonLines, PrometheusMetrics


def run(stats: Collector, lengths: list[int]) -> None:
    """Drafts of 3 tokens, the head's best each time, of which so many are accepted."""
    row = np.zeros(20, np.float32)
    row[:4] = 4, 3, 2, 1
    n_past = 0
    for length in [*lengths, 0]:
        stats.draft(0, n_past, 1)  # what follows a rejection is rank 2
        for position in range(3):
            stats.candidates(0, position, row)
        stats.verify(0, [0, 0, 0])
        n_past += length + 1


def test_json_lines_go_on_from_line_to_line(tmp_path):
    path = tmp_path / "stats.jsonl"
    for _ in range(2):  # the second run goes on in the same file
        with JsonLines(path) as sink:
            stats = Collector(every=2, sink=sink)
            run(stats, [3, 1, 0, 2, 2])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4
    counted = [Snapshot.from_dict(line["counters"]) for line in lines]
    assert [s.verifications for s in counted] == [2, 4, 2, 4]
    # 3, 1, 0, 2 of 3 accepted
    assert counted[1].accepted[:4].tolist() == [3, 2, 1, 0]
    assert counted[1].rank[:, 1][:4].tolist() == [1, 1, 1, 0]
    assert lines[0]["time"] <= lines[1]["time"]


def test_lines_that_cannot_be_written_are_an_error(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        JsonLines(tmp_path / "none" / "stats.jsonl")
    refused = pytest.raises(MtpStatsError, match=r"/dev/full: not written: No space left")
    with JsonLines(Path("/dev/full")) as sink, refused:
        run(Collector(every=1, sink=sink), [3])


def scraped(metrics: PrometheusMetrics) -> dict[tuple, float]:
    """What a server of the registry would say, by name and labels."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics)
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_sees_what_the_sink_was_given():
    metrics = PrometheusMetrics({"model": 'a"b\\c\n'})
    model = ("model", 'a"b\\c\n')
    assert scraped(metrics) == {
        (f"mtpstats_{name}_total", model): 0
        for name in ("verifications", "discarded", "unresolved", "invalid", "dropped_tokens",
                     "cut_tokens", "nan_rows", "padded_rows")
    }  # fmt: skip
    stats = Collector(every=4, sink=metrics)
    run(stats, [3, 1, 0, 2, 2])  # the fifth is not shown before the eighth
    found = scraped(metrics)
    assert found["mtpstats_verifications_total", model] == 4
    for position, drafted, reached, accepted in ((0, 4, 4, 3), (1, 4, 3, 2), (2, 4, 2, 1)):
        at = ("position", str(position))
        assert found["mtpstats_drafted_total", model, at] == drafted
        assert found["mtpstats_reached_total", model, at] == reached
        assert found["mtpstats_accepted_total", model, at] == accepted
        assert found["mtpstats_choices_total", model, at, ("rank", "1")] == accepted
        assert found["mtpstats_choices_total", model, at, ("rank", "2")] == reached - accepted
        assert found["mtpstats_choices_total", model, at, ("rank", "miss")] == 0
    # e**3 / (e**4 + e**3 + e**2 + e + 16), three times
    p2 = float(np.exp(3) / (np.exp([4, 3, 2, 1]).sum() + 16))
    second = found["mtpstats_probability_total", model, ("position", "1"), ("rank", "2")]
    assert second == pytest.approx(3 * p2, abs=1e-6)
    assert not [key for key in found if ("position", "3") in key]


def test_without_the_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(InputError, match=r"pip install 'mtpstats\[prometheus\]'"):
        PrometheusMetrics()
