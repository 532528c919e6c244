"""``run.bench`` over a stand-in for libllama: a driver whose every number is known."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import PROMPTS, FakeDriver, FakeEngine, bench

from mtpstats import loop, run
from mtpstats import result as results
from mtpstats.errors import DecodeError, InputError, Interrupted, ModelError
from mtpstats.llama import Placement
from mtpstats.prompts import Prompt
from mtpstats.run import BenchStopped, Progress
from mtpstats.speculate import DraftSettings, Generation, Sampling


def test_every_prompt_is_run_once_after_a_warm_up(settings):
    result = bench(settings)
    results.validate(result, "result")
    assert FakeEngine.last.calls == [
        ("draft", [2], loop.WARM_UP_TOKENS),
        ("draft", [2, 3], 8),
    ]
    assert [p["id"] for p in result["prompts"]] == ["a", "b"]
    assert [p["category"] for p in result["prompts"]] == ["code", None]
    assert [p["n_prompt"] for p in result["prompts"]] == [2, 3]
    assert result["settings"]["n_prompts"] == 2


def test_a_prompt_record_holds_what_the_driver_gave(settings):
    record = bench(settings)["prompts"][0]
    assert record["tokens"] == 8
    assert record["verifications"] == 4
    assert record["drafted"] == 8
    assert record["accepted"] == 4
    assert record["near_ties"] == 4
    assert record["text"] == "x�" * 4
    assert record["stop"] == "n_predict"
    assert record["seconds"] == {"prompt": 0.25, "target": 1.0, "head": 0.5, "other": 0.125}
    # Eight equal tokens: five 4-grams, the last four of which occurred before.
    assert record["repeated_4grams"] == 4 / 5
    assert record["baseline"] is None
    # sha256 of "one two", from coreutils
    assert record["prompt_sha256"].startswith("8ab63e29")


def test_warm_up_is_not_counted(settings):
    total = bench(settings)["total"]
    assert total["verifications"] == 8
    assert total["positions"]["verifications"] == 8
    assert total["positions"]["drafted"][:3] == [8, 8, 0]
    assert total["positions"]["accepted"][:3] == [8, 0, 0]
    assert total["tokens_per_second"] == 16 / (2 * 1.625)


def test_baseline_runs_in_turns_and_compares_texts(settings, monkeypatch):
    monkeypatch.setattr(loop, "TURN", 4)
    monkeypatch.setattr(FakeEngine, "lengths", {1: 4})
    result = bench(replace(settings, baseline=True))
    warm = loop.WARM_UP_TOKENS
    assert FakeEngine.last.calls[:2] == [("draft", [2], warm), ("plain", [2], warm)]
    assert sorted(FakeEngine.last.calls[2:]) == [("draft", [2, 3], 8), ("plain", [2, 3], 8)]
    # Rounds of two tokens: whoever is behind goes on until it is four ahead.
    turns = [(name[0], *numbers) for name, numbers in FakeEngine.last.rounds[8:]]
    d, p = ("d", 0), ("p", 0)
    assert turns == [d, d, p, p, p, p, d, d, ("d", 1), ("d", 1), ("p", 1), ("p", 1)]
    assert result["prompts"][1]["baseline"] == {
        "tokens": 4,
        "same_text": True,
        "seconds": {"prompt": 0.25, "target": 0.5, "head": 0.0, "other": 0.125},
    }
    assert result["total"]["baseline_tokens_per_second"] == 12 / (2 * 0.625)


def test_a_text_that_differs_from_plain_decoding_is_noticed(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "last_plain", 6)
    result = bench(replace(settings, baseline=True))
    assert [p["baseline"]["same_text"] for p in result["prompts"]] == [False, False]


@pytest.mark.parametrize(
    ("drafted", "plain", "same"),
    [
        ([1, 2, 3], [1, 2], True),  # the last verification gave more than was asked for
        ([1, 2], [1, 2, 3], True),
        ([1, 3, 3], [1, 2], False),
    ],
)
def test_texts_are_the_same_as_far_as_both_go(drafted, plain, same):
    found = loop._baseline(Generation(tokens=drafted), Generation(tokens=plain))
    assert (found["same_text"], found["tokens"]) == (same, len(plain))


def test_no_stats_means_null(settings):
    result = bench(replace(settings, stats=False))
    assert result["prompts"][0]["positions"] is None
    assert result["total"]["positions"] is None
    assert result["total"]["drafted"] == 16


def test_statistics_on_the_way_are_those_of_the_whole_run(settings):
    heard = []
    bench(replace(settings, stats_every=3), on_stats=heard.append)
    # Eight verifications; the one in flight is not resolved until the next draft.
    assert [snapshot.verifications for snapshot in heard] == [3, 6]


def test_text_is_streamed_by_prompt_and_its_end_is_told(settings):
    heard = []
    bench(
        replace(settings, baseline=True),
        on_text=lambda prompt, piece: heard.append((prompt.id, piece)),
    )
    ended = [("a", b"x\xff")] * 4 + [("a", b"")]
    assert heard == ended + [("b", piece) for _, piece in ended]


@pytest.mark.parametrize("baseline", [False, True])
def test_progress_never_goes_back_and_ends_at_its_total(settings, monkeypatch, baseline):
    monkeypatch.setattr(FakeEngine, "lengths", {0: 4})
    heard = []
    bench(replace(settings, baseline=baseline), on_progress=heard.append)
    assert heard[0] == Progress("loading the model", 50, 100, "%")
    tokens = [p for p in heard if p.unit == "tokens"]
    assert [p.done for p in tokens] == sorted(p.done for p in tokens)
    sides = 1 + baseline
    assert tokens[0] == Progress("prompt 1/2", 0.0, sides * 16.0, "tokens")
    assert tokens[1].done == 2.0
    assert tokens[-1] == Progress("prompt 2/2", sides * 12.0, sides * 12.0, "tokens")
    hashed = [p for p in heard if p.unit == "bytes"]
    assert hashed[-1].done == hashed[-1].total == 3


def test_time_left_is_judged_by_the_texts_that_are_finished(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "lengths", {0: 4, 1: 4, 2: 10})
    heard = []
    bench(replace(settings, n_predict=-1), [*PROMPTS, Prompt("c", None, "x")],
          on_progress=heard.append)  # fmt: skip
    # Nobody knows before the first text ends; then there are two of 4 tokens to come, then one,
    # and that one grows longer than the others.
    assert [(p.done, p.total) for p in heard if p.unit == "tokens"] == [
        (0, None), (2, None), (4, 12), (6, 12), (8, 12), (10, 12), (12, 12), (14, 14), (16, 16),
        (18, 18),
    ]  # fmt: skip


def test_nobody_listens_then_the_driver_is_left_alone(settings, monkeypatch):
    listeners = []
    rounds = FakeDriver.rounds

    def spy(self, prompts, n_predict, *, on_text=None, on_done=None):
        listeners.append(on_text)
        return rounds(self, prompts, n_predict, on_text=on_text, on_done=on_done)

    monkeypatch.setattr(FakeDriver, "rounds", spy)
    bench(settings)
    assert listeners == [None] * 2


def test_model_file_is_hashed_when_asked(settings):
    # sha256 of "abc", FIPS 180-2
    assert bench(settings)["model"]["sha256"].startswith("ba7816bf8f01cfea")
    assert bench(replace(settings, hash_model=False))["model"]["sha256"] is None


def test_a_draft_model_has_a_hash_of_its_own(settings, tmp_path):
    draft = tmp_path / "d.gguf"
    draft.touch()
    model = {"sha256": None, "draft_model": {"sha256": None}}
    loaded = SimpleNamespace(files=[settings.model], draft_files=[draft])
    run.hash_files(model, loaded, lambda progress: None)
    assert model["sha256"].startswith("ba7816bf8f01cfea")
    # sha256 of nothing, from coreutils
    assert model["draft_model"]["sha256"].startswith("e3b0c44298fc1c14")


def test_everything_is_closed_drivers_first(settings):
    bench(replace(settings, baseline=True))
    assert FakeEngine.last.closed == ["driver", "driver", "model"]


@pytest.mark.parametrize("by", [KeyboardInterrupt(), Interrupted("llama_decode returned 2")])
def test_interrupt_keeps_the_finished_prompts(settings, monkeypatch, by):
    monkeypatch.setattr(FakeEngine, "interrupt_at", 10)
    monkeypatch.setattr(FakeEngine, "interrupt_by", by)
    with pytest.raises(BenchStopped, match=r"^interrupted: 1 of 2 prompts") as caught:
        bench(settings)
    assert caught.value.exit_code == 130
    result = caught.value.result
    results.validate(result, "result")
    assert [p["id"] for p in result["prompts"]] == ["a"]
    assert result["settings"]["n_prompts"] == 2
    assert result["total"]["tokens"] == 8
    assert FakeEngine.last.closed == ["driver", "model"]


def test_interrupt_ends_the_rounds_of_both_drivers_before_they_close(settings, monkeypatch):
    monkeypatch.setattr(loop, "TURN", 4)
    # Eight rounds of warming up, ddpp, and then both are in the middle of a.
    monkeypatch.setattr(FakeEngine, "interrupt_at", 8 + 5)
    with pytest.raises(BenchStopped, match="0 of 2 prompts"):
        bench(replace(settings, baseline=True))
    assert FakeEngine.last.closed == ["driver", "driver", "model"]


@pytest.mark.parametrize("kind", [DecodeError, InputError])
def test_an_error_in_the_middle_keeps_the_finished_prompts(settings, monkeypatch, kind):
    monkeypatch.setattr(FakeEngine, "interrupt_at", 10)
    monkeypatch.setattr(FakeEngine, "interrupt_by", kind("llama_decode: no memory"))
    with pytest.raises(BenchStopped, match="no memory: 1 of 2 prompts") as caught:
        bench(settings)
    assert caught.value.exit_code == {DecodeError: 1, InputError: 2}[kind]
    assert [p["id"] for p in caught.value.result["prompts"]] == ["a"]


def test_interrupt_before_the_first_prompt_keeps_nothing(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "interrupt_at", 5)
    with pytest.raises(BenchStopped, match="0 of 2 prompts") as caught:
        bench(settings)
    assert caught.value.result["prompts"] == []


# ---- context


@pytest.mark.parametrize(
    ("n_ctx", "n_predict", "expected"),
    [
        (None, 8, 256),  # 3 + 8 + 2 + 2, rounded up as libllama does
        (None, 300, 512),
        (None, 5000, 512),  # no more than the model has
        (None, -1, 512),
        (0, 8, 512),
        (100, 8, 100),
    ],
)
def test_context_is_what_the_prompts_need(settings, n_ctx, n_predict, expected):
    result = bench(replace(settings, n_ctx=n_ctx, n_predict=n_predict))
    assert FakeEngine.last.drivers[0].n_ctx == expected
    assert result["settings"]["n_ctx"] == expected


def test_the_context_holds_all_that_is_needed_and_no_more(settings):
    # 3 of the prompt, 249 to come, a draft of 2 that goes beyond them, and 2
    assert run.context_size(replace(settings, n_predict=249), 1024, 3) == 256
    assert run.context_size(replace(settings, n_predict=250), 1024, 3) == 512
    # a model that does not say what it was trained for
    assert run.context_size(settings, 0, 300) == 512


def test_a_prompt_that_fills_the_context_leaves_no_room(settings):
    bench(replace(settings, n_ctx=6), [Prompt("a", None, "w " * 5)])
    with pytest.raises(InputError, match="prompt a has 6 tokens, the context holds 6"):
        bench(replace(settings, n_ctx=6), [Prompt("a", None, "w " * 6)])


def test_a_prompt_that_does_not_fit_is_named_before_anything_runs(settings):
    long = Prompt("long\x1b", None, "word " * 600)
    with pytest.raises(InputError, match=r"prompt long\\x1b has 600 tokens.* holds 512"):
        bench(settings, [*PROMPTS, long])
    assert FakeEngine.last.calls == []
    assert FakeEngine.last.closed[-1] == "model"


def test_a_prompt_without_tokens_is_named(settings):
    with pytest.raises(InputError, match="prompt blank"):
        bench(settings, [Prompt("blank", None, "  ")])


def test_no_prompt_is_refused(settings):
    with pytest.raises(InputError, match="no prompt"):
        bench(settings, [])


def test_a_driver_that_cannot_be_made_frees_the_model(settings, monkeypatch):
    def refuse(self, *args):
        raise ModelError("no head")

    monkeypatch.setattr(FakeEngine, "driver", refuse)
    with pytest.raises(ModelError):
        bench(settings)
    assert FakeEngine.last.closed == ["model"]


# ---- when llama.cpp gives up


def test_an_abort_gets_what_was_finished(settings, monkeypatch):
    told = []

    class Aborting(FakeEngine):
        def driver(self, draft, n_ctx, collector):
            driver = super().driver(draft, n_ctx, collector)
            generation = driver.generation

            def then_abort(text):
                if text.number == 1:
                    self.on_abort("ggml.c:1: no")
                return generation(text)

            driver.generation = then_abort
            return driver

        def close(self):
            self.on_abort("ggml.c:2: too late")

    bench(settings, engine=Aborting, on_abort=lambda why, result: told.append((why, result)))
    whys = [why for why, _ in told]
    assert whys == ["ggml.c:1: no", "ggml.c:2: too late"]
    for _, result in told:
        results.validate(result, "result")
    assert [[p["id"] for p in result["prompts"]] for _, result in told] == [["a"], ["a", "b"]]
    assert told[0][1]["total"]["tokens"] == 8


def test_an_abort_before_anything_was_run_has_nothing_to_tell(settings):
    told = []

    class Aborting(FakeEngine):
        def tokenize(self, text):
            self.on_abort("no")
            return super().tokenize(text)

    bench(settings, PROMPTS[:1], engine=Aborting, on_abort=lambda *args: told.append(args))
    assert told == [("no", None)]


# ---- settings


def test_every_setting_that_can_change_a_number_is_recorded(settings):
    recorded = bench(
        replace(
            settings,
            draft=DraftSettings(5, 2, 0.25),
            sampling=Sampling(0.5, 3, 0.75, 0.125, 9),
            n_threads_batch=2,
            type_k="q8_0",
            temp_source="asked",
            draft_model=Path("heads/h.gguf"),
            compat_counts=True,
            rpc=("host:1",),
            placement=Placement(("CUDA1",), "row", (3.0, 1.0), 0, (("exps", "CPU"),)),
        )
    )["settings"]
    for key, value in {
        "n_max": 5, "n_min": 2, "p_min": 0.25, "temp": 0.5, "top_k": 3, "top_p": 0.75,
        "min_p": 0.125, "seed": 9, "n_threads": 4, "n_threads_batch": 2, "type_k": "q8_0",
        "temp_source": "asked", "n_predict": 8, "n_parallel": 1, "draft_model": "h.gguf",
        "compat_counts": True, "rpc": ["host:1"], "devices": ["CUDA1"], "split_mode": "row",
        "tensor_split": [3.0, 1.0], "main_gpu": 0, "override_tensor": ["exps=CPU"],
    }.items():  # fmt: skip
        assert recorded[key] == value


def test_a_draft_length_that_was_clamped_is_recorded_beside_the_one_asked_for(
    settings, monkeypatch
):
    monkeypatch.setattr(FakeEngine, "n_heads", 1)
    recorded = bench(settings)["settings"]
    assert (recorded["n_max"], recorded["n_max_asked"]) == (1, 2)


def test_random_seed_is_drawn_once_and_recorded(settings):
    wanted = replace(settings, sampling=Sampling(temp=1.0, seed=-1))
    seeds = set()
    for _ in range(4):
        recorded = bench(wanted)["settings"]["seed"]
        assert FakeEngine.last.settings.sampling.seed == recorded
        assert 0 <= recorded < 2**32
        seeds.add(recorded)
    assert len(seeds) > 1


def test_builtin_model_lies_in_the_package():
    assert run.builtin_model().parent == Path(run.__file__).parent / "data"
