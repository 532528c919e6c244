"""``run.bench`` over a stand-in for libllama: a driver whose every number is known."""

from dataclasses import replace
from pathlib import Path

import pytest

from mtpstats import result as results
from mtpstats import run
from mtpstats.errors import DecodeError, InputError, ModelError
from mtpstats.prompts import Prompt
from mtpstats.run import BenchSettings, BenchStopped, Progress
from mtpstats.speculate import DraftSettings, Generation, Sampling, Seconds

PROMPTS = [Prompt("a", "code", "one two"), Prompt("b", None, "three four five")]


class FakeDriver:
    """Generates ``n_predict`` tokens 7; to the collector: 7 accepted, then 5 instead of 7."""

    def __init__(self, engine, draft, n_ctx, collector):
        self.engine = engine
        self.draft = draft
        self.n_ctx = n_ctx
        self.n_max = min(draft.n_max, engine.n_heads) if draft else 0
        self.collector = collector
        self.closed = False

    def generate(self, prompt, n_predict, *, on_text=None):
        name = "plain" if self.draft is None else "draft"
        self.engine.calls.append((name, len(prompt), n_predict))
        if self.engine.interrupt_at == len(self.engine.calls):
            raise self.engine.interrupt_by
        n = n_predict if n_predict >= 0 else 4
        collector = self.collector if self.collector and self.collector.enabled else None
        if collector:
            collector.begin(0)
        verifications = []
        for i in range(n // 2):
            if collector:
                collector.draft(0, 10 + 2 * i, 5)
                collector.candidates(0, 0, ROW)
                collector.candidates(0, 1, ROW)
                collector.verify(0, [7, 7])
            verifications.append((2, 1))
            if on_text:
                on_text(b"x\xff")
        if collector:
            collector.finish(0, 10 + n // 2 * 2, 5)
        target = 1.0 if self.draft else 0.5
        return Generation(
            tokens=[7] * n if self.draft else [7] * (n - 1) + [self.engine.last_plain],
            text=b"x\xff" * (n // 2),
            verifications=verifications,
            margins=[0.001, 1.0] * (n // 2),
            stop="n_predict",
            seconds=Seconds(0.25, target, 0.5 if self.draft else 0.0, 0.125),
            snapshot=collector.take(0) if collector else None,
        )

    def close(self):
        self.closed = True
        self.engine.closed.append("driver")


def row():
    import array

    values = array.array("f", [0.0] * 12)
    values[7] = 5.0
    return values


ROW = row()


class FakeEngine:
    last = None
    interrupt_at = None
    interrupt_by = KeyboardInterrupt()
    n_ctx_train = 512
    last_plain = 7
    n_heads = 99

    def __init__(self, settings, tell, on_log, on_abort):
        self.settings = settings
        self.calls = []
        self.closed = []
        self.drivers = []
        self.files = [settings.model]
        self.n_threads = settings.n_threads or 4
        FakeEngine.last = self
        tell(Progress("loading the model", 50, 100, "%"))

    def environment(self, command):
        return results.environment({"version": "0"}, [], command)

    def model(self):
        return {
            "file": "m.gguf",
            "size": 1,
            "sha256": None,
            "architecture": "qwen35",
            "parameters": 1,
            "vocabulary": 12,
            "nextn_blocks": 1,
            "quantisation": "F16",
        }

    def tokenize(self, text):
        return list(range(len(text.split())))

    def driver(self, draft, n_ctx, collector):
        self.drivers.append(FakeDriver(self, draft, n_ctx or self.n_ctx_train, collector))
        return self.drivers[-1]

    def close(self):
        self.closed.append("model")


@pytest.fixture
def settings(tmp_path) -> BenchSettings:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"abc")
    return BenchSettings(model, n_predict=8, draft=DraftSettings(2))


def bench(settings, prompts=PROMPTS, engine=FakeEngine, **hooks):
    return run.bench(settings, prompts, engine=engine, **hooks)


def test_every_prompt_is_run_once_after_a_warm_up(settings):
    result = bench(settings)
    results.validate(result, "result")
    assert FakeEngine.last.calls == [
        ("draft", 2, run.WARM_UP_TOKENS),
        ("draft", 2, 8),
        ("draft", 3, 8),
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


def test_baseline_runs_in_turns_and_compares_texts(settings):
    result = bench(replace(settings, baseline=True))
    warm = run.WARM_UP_TOKENS
    assert FakeEngine.last.calls == [
        ("draft", 2, warm),
        ("plain", 2, warm),
        ("draft", 2, 8),
        ("plain", 2, 8),
        ("plain", 3, 8),
        ("draft", 3, 8),
    ]
    assert result["prompts"][1]["baseline"] == {
        "tokens": 8,
        "same_text": True,
        "seconds": {"prompt": 0.25, "target": 0.5, "head": 0.0, "other": 0.125},
    }
    assert result["total"]["baseline_tokens_per_second"] == 16 / (2 * 0.625)


def test_a_text_that_differs_from_plain_decoding_is_noticed(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "last_plain", 6)
    result = bench(replace(settings, baseline=True))
    assert [p["baseline"]["same_text"] for p in result["prompts"]] == [False, False]


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


def test_text_is_streamed_by_prompt(settings):
    heard = []
    bench(settings, on_text=lambda prompt, piece: heard.append((prompt.id, piece)))
    assert heard == [("a", b"x\xff")] * 4 + [("b", b"x\xff")] * 4


def test_progress_never_goes_back_and_ends_at_its_total(settings):
    heard = []
    bench(settings, on_progress=heard.append)
    assert heard[0] == Progress("loading the model", 50, 100, "%")
    tokens = [p for p in heard if p.unit == "tokens"]
    assert [p.done for p in tokens] == sorted(p.done for p in tokens)
    assert tokens[0].stage == "prompt 1/2"
    assert tokens[-1] == Progress("prompt 2/2", 16.0, 16.0, "tokens")
    assert heard[-1].unit == "bytes"
    assert heard[-1].done == heard[-1].total == 3


def test_nobody_listens_then_the_driver_is_left_alone(settings, monkeypatch):
    listeners = []
    generate = FakeDriver.generate

    def spy(self, prompt, n_predict, *, on_text=None):
        listeners.append(on_text)
        return generate(self, prompt, n_predict, on_text=on_text)

    monkeypatch.setattr(FakeDriver, "generate", spy)
    bench(settings)
    assert listeners == [None] * 3


def test_model_file_is_hashed_when_asked(settings):
    # sha256 of "abc", FIPS 180-2
    assert bench(settings)["model"]["sha256"].startswith("ba7816bf8f01cfea")
    assert bench(replace(settings, hash_model=False))["model"]["sha256"] is None


def test_everything_is_closed_drivers_first(settings):
    bench(replace(settings, baseline=True))
    assert FakeEngine.last.closed == ["driver", "driver", "model"]


def test_interrupt_keeps_the_finished_prompts(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "interrupt_at", 3)
    with pytest.raises(BenchStopped, match="1 of 2 prompts") as caught:
        bench(settings)
    assert caught.value.exit_code == 130
    result = caught.value.result
    results.validate(result, "result")
    assert [p["id"] for p in result["prompts"]] == ["a"]
    assert result["settings"]["n_prompts"] == 2
    assert result["total"]["tokens"] == 8
    assert FakeEngine.last.closed == ["driver", "model"]


def test_an_error_in_the_middle_keeps_the_finished_prompts(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "interrupt_at", 3)
    monkeypatch.setattr(FakeEngine, "interrupt_by", DecodeError("llama_decode: no memory", -3))
    with pytest.raises(BenchStopped, match="no memory: 1 of 2 prompts") as caught:
        bench(settings)
    assert caught.value.exit_code == 1
    assert [p["id"] for p in caught.value.result["prompts"]] == ["a"]


def test_interrupt_before_the_first_prompt_keeps_nothing(settings, monkeypatch):
    monkeypatch.setattr(FakeEngine, "interrupt_at", 1)
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
        )
    )["settings"]
    for key, value in {
        "n_max": 5, "n_min": 2, "p_min": 0.25, "temp": 0.5, "top_k": 3, "top_p": 0.75,
        "min_p": 0.125, "seed": 9, "n_threads": 4, "n_threads_batch": 2, "type_k": "q8_0",
        "temp_source": "asked", "n_predict": 8,
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
