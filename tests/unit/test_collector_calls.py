"""Calls that a collector refuses, its reports, and its switch."""

from __future__ import annotations

from typing import Any

import pytest
from drafts import VOCAB, feed, row

from mtpstats import _core
from mtpstats.errors import InputError
from mtpstats.stats import Collector, Snapshot, compact

# ---- calls out of order


def refused(c: Collector, call: str, *args: object, match: str) -> None:
    """The call raises, and the collector goes on as if it had not been made."""
    before = c.snapshot()
    with pytest.raises(InputError, match=match):
        getattr(c, call)(*args)
    assert c.snapshot() == before


def test_calls_out_of_order_are_refused_and_change_nothing() -> None:
    c = Collector(n_max=3)
    logits = row(2, 3)
    for call, args in {
        "candidates": (0, 0, logits),
        "candidates_at": (0, 0, logits.ctypes.data, VOCAB),
        "stop": (0, 0),
        "verify": (0, [2]),
        "drop": (0,),
        "invalid": (0,),
    }.items():
        refused(c, call, *args, match="no draft")
    c.draft(0, 0, 1)
    refused(c, "candidates", 0, 1, logits, match="position 0, not 1")
    refused(c, "candidates", 0, -1, logits, match="not -1")
    refused(c, "candidates", 0, 0, logits.astype(float), match="float32")
    refused(c, "candidates", 0, 0, logits, 31, match="31 is more")
    refused(c, "candidates", 0, 0, logits, -1, match="-1")
    refused(c, "stop", 0, 0, match="not the last")
    c.candidates(0, 0, logits)
    refused(c, "candidates", 0, 0, logits, match="position 1, not 0")
    refused(c, "stop", 0, 1, match="not the last")
    c.candidates(0, 1, logits)
    c.candidates(0, 2, logits)
    refused(c, "candidates", 0, 3, logits, match="beyond a draft of 3")
    refused(c, "verify", 0, [2, 2, 2, 2], match="4 tokens sent")
    refused(c, "verify", 0, [2, -1, 2], match="padding")
    refused(c, "verify", 0, [-2], match="no token")
    refused(c, "verify", 0, [2**31], match="no token")
    refused(c, "verify", 0, [2] * 1025, match="1024")
    refused(c, "verify", 0, [2], "boredom", match="boredom")
    refused(c, "finish", 0, 5, match="both")
    refused(c, "finish", 0, -5, 2, match="-5")
    refused(c, "draft", 0, -1, 2, match="-1")
    refused(c, "draft", -1, 0, 2, match="-1")
    refused(c, "snapshot", -1, match="-1")
    c.verify(0, [2, 2])
    refused(c, "stop", 0, 2, match="closed")
    refused(c, "drop", 0, match="closed")
    refused(c, "candidates", 0, 3, logits, match="closed")
    c.draft(0, 2, 3)
    s = c.snapshot()
    assert (s.verifications, s.cut_tokens) == (1, 1)
    assert s.rank[:2].tolist() == [[1] + [0] * 7, [0, 1] + [0] * 6]


def test_bad_constructor_arguments() -> None:
    for n_max in (0, -1, 1025):
        with pytest.raises(InputError, match="n_max"):
            Collector(n_max)
    with pytest.raises(InputError, match="every"):
        Collector(every=-1)


def test_a_row_read_without_softmax_is_refused() -> None:
    c = Collector()
    logits = row(2)
    quick = _core.Row()
    quick.best_at(logits.ctypes.data, VOCAB)
    c.draft(0, 0, 1)
    refused(c, "candidates_row", 0, 0, quick, match="read_at")


def test_iterating_tokens_may_reset_the_collector() -> None:
    c = Collector()
    feed(c, 0, 1, 2)

    def tokens() -> Any:
        c.reset()
        yield 2

    with pytest.raises(InputError, match="no draft"):
        c.verify(0, tokens())


# ---- reports and switches


def test_sink_is_called_every_so_many_verifications() -> None:
    seen: list[Snapshot] = []
    c = Collector(every=3, sink=seen.append)
    for i in range(8):
        feed(c, 2 * i, 1, 2, seq=i % 2)
    c.finish(0, 14, 9)
    # sequence 0 starts anew each time two positions late, so its drafts resolve as rewinds;
    # count what the collector itself says instead of guessing
    assert [s.verifications for s in seen] == list(range(3, c.snapshot().verifications + 1, 3))


def test_what_a_sink_raises_reaches_the_caller_after_the_draft_is_open() -> None:
    def sink(_: Snapshot) -> None:
        raise RuntimeError("full disk")

    c = Collector(every=1, sink=sink)
    feed(c, 0, 1, 2)
    with pytest.raises(RuntimeError, match="full disk"):
        c.draft(0, 2, 9)
    c.candidates(0, 0, row(2))
    assert c.snapshot().verifications == 1


def test_from_env_is_on_only_for_1() -> None:
    for value in (None, "", "0", "true", "yes", " 1", "2"):
        env = {} if value is None else {"LLAMA_MTP_TOPK_STATS": value}
        assert not Collector.from_env(env).enabled
    c = Collector.from_env({"LLAMA_MTP_TOPK_STATS": "1"})
    assert c.enabled
    assert c.every == 128


@pytest.mark.parametrize("value", ["0", "-3", "often", "", "1.5", str(2**63)])
def test_from_env_refuses_a_bad_interval(value: str) -> None:
    env = {"LLAMA_MTP_TOPK_STATS": "1", "LLAMA_MTP_TOPK_STATS_EVERY": value}
    with pytest.raises(InputError, match="LLAMA_MTP_TOPK_STATS_EVERY"):
        Collector.from_env(env)
    env["LLAMA_MTP_TOPK_STATS"] = "0"
    assert not Collector.from_env(env).enabled


def test_from_env_reports_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_MTP_TOPK_STATS", "1")
    monkeypatch.setenv("LLAMA_MTP_TOPK_STATS_EVERY", "2")
    c = Collector.from_env()
    twin = Collector()
    for i in range(4):
        feed(c, 2 * i, 1, 2)
        if i < 3:
            feed(twin, 2 * i, 1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == compact(twin.snapshot()) + "\n"
    assert "2 verifications, 2 drafted, 2 accepted" in err


def test_compact_table_fits_80_columns_whatever_the_counts() -> None:
    s = Snapshot()
    for name in ("drafted", "reached", "accepted", "miss"):
        getattr(s, name)[:] = 2**63
    s.rank[:] = 2**63
    s.verifications = 2**64 - 1
    lines = compact(s).splitlines()
    assert len(lines) == 18
    assert max(map(len, lines)) <= 80
    assert compact(Snapshot()).count("\n") == 1


def test_off_collects_nothing_and_checks_nothing() -> None:
    c = Collector(enabled=False)
    c.begin(-5)
    c.draft(0, -1, 2)
    c.candidates(0, 7, "no row", -3)
    c.candidates_at(0, 7, 0, -1)
    c.stop(0, 9)
    c.verify(0, None, "boredom")
    c.drop(0)
    c.invalid(0)
    c.finish(0, 3)
    assert not c.enabled
    assert c.snapshot() == c.take() == Snapshot()
    assert c.sequences() == []
