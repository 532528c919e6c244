"""``run.bench`` with several prompts at a time, and in parts: what is kept, what is run again."""

from dataclasses import replace

import pytest
from fake_engine import FOUR, FakeEngine, Kept, bench

from mtpstats import loop, run
from mtpstats import result as results
from mtpstats.run import BenchStopped, Progress

# ---- several at once


def test_a_finished_prompt_makes_room_at_once_and_results_stand_in_order(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "lengths", {0: 8, 1: 2, 2: 4, 3: 4})
    result = bench(replace(settings, n_parallel=2), FOUR)
    assert FakeEngine.last.calls[0] == ("draft", [2, 3], loop.WARM_UP_TOKENS)
    assert [numbers for _, numbers in FakeEngine.last.rounds][-5:] == [
        [0, 1], [0, 2], [0, 2], [0, 3], [3]
    ]  # fmt: skip
    assert [p["id"] for p in result["prompts"]] == ["a", "b", "c", "d"]
    assert [p["tokens"] for p in result["prompts"]] == [8, 2, 4, 4]
    assert [p["n_prompt"] for p in result["prompts"]] == [2, 3, 4, 5]
    assert result["settings"]["n_parallel"] == 2
    total = result["total"]
    assert total["tokens"] == 18
    assert total["verifications"] == total["positions"]["verifications"] == 9
    assert total["tokens_per_second"] == 18 / (4 * 1.625)
    results.validate(result, "result")


# ---- a run in parts


def test_each_record_is_kept_before_the_next_prompt_starts(settings):
    keeper = Kept()
    result = bench(settings, FOUR, keeper=keeper)
    # Four rounds of warming up, then four for each prompt.
    assert keeper.engine_rounds == [8, 12, 16, 20]
    assert keeper.appended == list(enumerate(result["prompts"]))
    ((begun, prompts),) = keeper.begun
    assert prompts == [(prompt.id, prompt.text) for prompt in FOUR]
    for key in ("environment", "model", "settings"):
        assert begun[key] == result[key]
    assert begun["model"]["sha256"]


def test_with_a_baseline_a_record_is_kept_when_both_have_the_text(settings, monkeypatch):
    monkeypatch.setattr(loop, "TURN", 4)
    keeper = Kept()
    bench(replace(settings, baseline=True), keeper=keeper)
    # ddppppddddppppdd, of which the first four d and p are a: the second has it after eight.
    warm = 8
    assert keeper.engine_rounds == [warm + 8, warm + 16]
    assert [index for index, _ in keeper.appended] == [0, 1]


@pytest.mark.parametrize("n_parallel", [1, 2])
@pytest.mark.parametrize("baseline", [False, True])
def test_what_is_done_is_not_run_again_and_the_result_is_the_same(settings, n_parallel, baseline):
    settings = replace(settings, n_parallel=n_parallel, baseline=baseline, stats_every=2)
    whole = bench(settings, FOUR)
    done = {index: whole["prompts"][index] for index in (2, 0)}
    keeper, heard, streamed, progress = Kept(done), [], [], []
    result = bench(
        settings, FOUR, keeper=keeper, on_stats=heard.append, on_progress=progress.append,
        on_text=lambda prompt, piece: streamed.append(prompt.id),
    )  # fmt: skip
    for one in (result, whole):
        del one["environment"]["time"]
    assert result == whole
    assert FakeEngine.last.calls[-1] == (("plain" if baseline else "draft"), [3, 5], 8)
    assert [index for index, _ in keeper.appended] == [1, 3]
    assert set(streamed) == {"b", "d"}
    # Statistics and progress are those of the run as a whole: two of four prompts before.
    assert heard[0].verifications == 8 + 2
    tokens = [p for p in progress if p.unit == "tokens"]
    sides = 1 + baseline
    assert tokens[0] == Progress("prompt 3/4", sides * 16.0, sides * 32.0, "tokens")
    assert tokens[-1] == Progress("prompt 4/4", sides * 32.0, sides * 32.0, "tokens")


def test_nothing_is_run_when_all_is_done(settings):
    whole = bench(settings)
    result = bench(settings, keeper=Kept(enumerate(whole["prompts"])))
    assert FakeEngine.last.calls == []
    assert result["prompts"] == whole["prompts"]
    assert result["total"] == whole["total"]


def test_a_keeper_that_fails_ends_the_run_and_takes_nothing_with_it(settings):
    keeper = Kept(full_at=1)
    with pytest.raises(BenchStopped, match="the disk is full: 2 of 4 prompts") as caught:
        bench(settings, FOUR, keeper=keeper)
    assert caught.value.exit_code == 1
    assert [p["id"] for p in caught.value.result["prompts"]] == ["a", "b"]
    assert FakeEngine.last.closed == ["driver", "model"]


@pytest.mark.parametrize("baseline", [False, True])
def test_no_round_begins_past_the_time_limit(settings, monkeypatch, baseline):
    # A clock that goes on by one with each round; the limit is in the middle of b.
    monkeypatch.setattr(loop, "TURN", 4)
    monkeypatch.setattr(run, "monotonic", lambda: 0)
    monkeypatch.setattr(loop, "monotonic", lambda: len(FakeEngine.last.rounds))
    sides = 1 + baseline
    limit = sides * (4 + 4 + 2)
    result = bench(replace(settings, baseline=baseline), time_limit=limit)
    assert len(FakeEngine.last.rounds) == limit
    assert [p["id"] for p in result["prompts"]] == ["a"]
    assert result["settings"]["n_prompts"] == 2
    assert result["total"]["tokens"] == 8
    assert FakeEngine.last.closed == ["driver"] * sides + ["model"]


def test_a_time_limit_that_loading_used_up_leaves_nothing_to_run(settings, monkeypatch):
    monkeypatch.setattr(run, "monotonic", lambda: 0)
    monkeypatch.setattr(loop, "monotonic", lambda: 5)
    assert bench(settings, time_limit=5)["prompts"] == []
    assert FakeEngine.last.calls == []
    assert len(bench(settings, time_limit=6)["prompts"]) == 2


def test_no_more_sequences_than_prompts(settings):
    assert bench(replace(settings, n_parallel=9), FOUR)["settings"]["n_parallel"] == 4
    assert FakeEngine.last.settings.n_parallel == 4


def test_turns_grow_with_the_number_of_sequences(settings, monkeypatch):
    monkeypatch.setattr(loop, "TURN", 4)
    bench(replace(settings, n_parallel=2, baseline=True), FOUR)
    names = [name[0] for name, _ in FakeEngine.last.rounds][-16:]
    # Rounds of four tokens, turns of eight.
    assert "".join(names) == "ddppppddddppppdd"


def test_interrupt_keeps_what_was_finished_out_of_order(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "lengths", {0: 8, 1: 2, 2: 2})
    # Two rounds of warming up, one for b and one for c, and then the user has enough.
    monkeypatch.setattr(FakeEngine, "interrupt_at", 8)
    with pytest.raises(BenchStopped, match="2 of 4 prompts") as caught:
        bench(replace(settings, n_parallel=2), FOUR)
    assert [p["id"] for p in caught.value.result["prompts"]] == ["b", "c"]


def test_statistics_of_several_at_once_are_those_of_the_whole_run(settings):
    heard = []
    bench(replace(settings, n_parallel=2, stats_every=3), FOUR, on_stats=heard.append)
    assert [snapshot.verifications for snapshot in heard] == [3, 6, 9, 12, 15]
