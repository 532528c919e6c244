"""Several prompts at a time through the command line: as alone, in order, and in wall time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from archs import CASES, PROMPTS
from oracle import speculative_simple
from sessions import Tiny, tokens, with_eog

from mtpstats import Collector, Snapshot
from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context, Library, Model
from mtpstats.slot import Text
from mtpstats.speculate import DraftSettings, Speculator

ORACLE = ("-c", "256", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off")
EXACT = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-c", "256")


def bench(*args: Any, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "mtpstats", "bench", "--json", *EXACT, *map(str, args)]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (code, b"")
    result: dict[str, Any] = json.loads(done.stdout)
    results.validate(result, "standard output")
    return result


def texts(*prompts: str) -> list[str]:
    return [word for text in prompts for word in ("-p", text)]


KEYS = ("id", "n_prompt", "tokens", "text", "verifications", "drafted", "accepted", "stop")


def counted(prompt: dict[str, Any]) -> tuple[Any, ...]:
    return (*(prompt[key] for key in KEYS), prompt["positions"]["rank"])


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
def test_every_prompt_as_if_it_were_alone(
    lib: Library, tiny: Tiny, tmp_path: Path, arch: str
) -> None:
    path = tiny(arch, f32=True)
    with Model(lib, path) as model, Speculator(model, draft=None, n_threads=1) as plain:
        # Ends one of the texts early, wherever else it may occur.
        eog = plain.generate(model.tokenize(PROMPTS[1]), 12).tokens[5]
    path = with_eog(path, tmp_path / "eog.gguf", eog)
    args = ("-m", path, "-n", 24, "--spec-draft-n-max", 3, "--no-escape", *texts(*PROMPTS))
    alone = bench(*args)
    assert len({prompt["n_prompt"] for prompt in alone["prompts"]}) == len(PROMPTS)
    assert {prompt["stop"] for prompt in alone["prompts"]} == {"eog", "n_predict"}
    for n_parallel in (2, 4):
        result = bench(*args, "-np", n_parallel, "--baseline")
        assert result["settings"]["n_parallel"] == n_parallel
        assert result["settings"]["n_ctx"] == 256
        assert list(map(counted, result["prompts"])) == list(map(counted, alone["prompts"]))
        # Batches of another shape round otherwise, which probabilities show and counts do not.
        for key in ("verifications", "drafted", "reached", "accepted", "rank", "miss", "censored"):
            assert result["total"]["positions"][key] == alone["total"]["positions"][key]
        assert all(prompt["baseline"]["same_text"] for prompt in result["prompts"])
        merged = Snapshot.merge(*(Snapshot.from_dict(p["positions"]) for p in result["prompts"]))
        assert merged.to_dict() == result["total"]["positions"]
    for text, prompt in zip(PROMPTS, alone["prompts"], strict=True):
        theirs = speculative_simple(lib.prefix, path, text, 24, "--spec-draft-n-max", "3", *ORACLE)
        assert (prompt["drafted"], prompt["accepted"]) == (theirs.drafted, theirs.accepted)


@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
def test_sequences_stay_in_order_when_a_later_prompt_takes_a_place(
    lib: Library, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """llama.cpp would split a batch that has them in another order, and run it in parts."""
    orders = []
    decode = Context.decode

    def seen(self: Context, batch: Batch) -> None:
        orders.append(list(batch.spans))
        decode(self, batch)

    monkeypatch.setattr(Context, "decode", seen)
    with (
        Model(lib, tiny(arch)) as model,
        Speculator(model, draft=DraftSettings(3), n_parallel=3, n_ctx=256, n_threads=1) as driver,
    ):
        # The first ends long before the others for want of context, and the fourth follows it.
        long = model.tokenize(PROMPTS[0] * 100)[:240]
        driver.generate_all([long, *(model.tokenize(text) for text in PROMPTS[1:])], 40)
    assert max(map(len, orders)) == 3
    assert orders == [sorted(order) for order in orders]


def test_drafts_of_unequal_length_take_one_pass_on_recurrent_memory(
    lib: Library, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[set[int]] = []
    verify = Speculator._pass

    def seen(self: Speculator, group: Sequence[Text]) -> None:
        passes.append({len(text.draft) for text in group})
        verify(self, group)

    monkeypatch.setattr(Speculator, "_pass", seen)
    with (
        Model(lib, tiny("qwen35", f32=True)) as model,
        Speculator(
            model, draft=DraftSettings(4, p_min=0.4), n_parallel=3, n_ctx=256, n_threads=1
        ) as driver,
    ):
        rounds = list(driver.rounds([model.tokenize(text) for text in PROMPTS[:3]], 24))
    assert len(passes) == len(rounds)
    assert any(len(lengths) > 1 for lengths in passes)


def test_a_head_of_its_own_file(lib: Library, tiny: Tiny) -> None:
    case = CASES["gemma4-assistant"]
    assert case.draft is not None
    target, head = tiny(case.arch, f32=True), tiny(case.draft[0], f32=True)
    result = bench("-m", target, "-md", head, "-n", 24, *texts(*PROMPTS[:2]), "-np", 2,
                   "--spec-draft-n-max", 4)  # fmt: skip
    assert result["settings"]["draft_model"] == head.name
    draft_model = result["model"]["draft_model"]
    assert draft_model["architecture"] == "gemma4-assistant"
    assert draft_model["size"] == head.stat().st_size
    assert draft_model["sha256"] != result["model"]["sha256"]
    assert len(draft_model["sha256"]) == 64
    for text, prompt in zip(PROMPTS, result["prompts"], strict=False):
        theirs = speculative_simple(
            lib.prefix, target, text, 24, "--spec-draft-n-max", "4", *ORACLE, "-md", str(head)
        )
        assert (prompt["drafted"], prompt["accepted"]) == (theirs.drafted, theirs.accepted)

    info = subprocess.run(
        [sys.executable, "-m", "mtpstats", "info", "-m", target, "-md", head],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    assert f"draft model  {head.name}, gemma4-assistant\n" in info
    assert "can be driven: a head that shares the target's memory" in info


def test_counts_as_llama_cpp_prints_them(lib: Library, tiny: Tiny) -> None:
    path = tiny("qwen3next", f32=True)
    args = ("-m", path, "-n", 24, *texts(*PROMPTS[:3]), "--spec-draft-n-max", 4, "-np", 2)
    ours, compatible = bench(*args), bench(*args, "--compat-counts")
    assert compatible["settings"]["compat_counts"]
    for text, mine, prompt in zip(PROMPTS, ours["prompts"], compatible["prompts"], strict=False):
        theirs = speculative_simple(lib.prefix, path, text, 24, "--spec-draft-n-max", "4", *ORACLE)
        assert (prompt["drafted"], prompt["accepted"]) == (theirs.drafted, theirs.accepted)
        assert prompt["drafted"] == prompt["accepted"] > 0
        assert mine["drafted"] > mine["accepted"]
        # The last verification may bring more or less beyond the 24.
        assert mine["text"].startswith(prompt["text"]) or prompt["text"].startswith(mine["text"])


def test_shares_of_the_time_add_up_to_the_time(model: Model) -> None:
    prompts = [tokens(n, n, 4096) for n in (40, 9, 21, 5, 33)]
    with Speculator(model, draft=DraftSettings(4), n_parallel=3, n_threads=1) as speculator:
        speculator.generate_all(prompts[:3], 4)
        done = {}
        rounds = speculator.rounds(prompts, 24, on_done=done.__setitem__)
        spent, made = 0.0, 0
        while True:
            before = perf_counter()
            one = next(rounds, None)
            spent += perf_counter() - before
            if one is None:
                break
            made += one
            perf_counter()
    seconds = sum(run.seconds.generation + run.seconds.prompt for run in done.values())
    assert 0.9 * spent < seconds < spent
    assert made == sum(len(run.tokens) for run in done.values())
    assert list(done) != sorted(done), "no text overtook another: not the case to test"


def test_rounds_that_are_given_up_leave_a_driver_that_works(model: Model) -> None:
    prompts = [tokens(n, n, 4096) for n in (12, 9, 21)]
    with Speculator(
        model, draft=DraftSettings(4), n_parallel=2, n_threads=1, collector=Collector()
    ) as speculator:
        whole = speculator.generate_all(prompts, 16)
        rounds = speculator.rounds(prompts, 16)
        next(rounds)
        rounds.close()
        again = speculator.generate_all(prompts, 16)
    assert [run.tokens for run in again] == [run.tokens for run in whole]
    # Nor are counters of the texts that were given up left in the others'.
    assert [run.snapshot for run in again] == [run.snapshot for run in whole]


@pytest.mark.parametrize(("n_ctx", "n_max"), [(3, 8), (40, 300)])
def test_a_batch_holds_the_drafts_of_any_context(attention: Model, n_ctx: int, n_max: int) -> None:
    """llama.cpp rounds a small context up to 256 positions, and drafts are as long as these."""
    prompts = [tokens(5), tokens(5)]
    options = {"n_threads": 1, "n_parallel": 2}
    with Speculator(attention, draft=DraftSettings(n_max), n_ctx=n_ctx, **options) as speculator:
        runs = speculator.generate_all(prompts, -1)
    with Speculator(attention, draft=None, n_ctx=256, **options) as speculator:
        plain = speculator.generate_all(prompts, -1)
    assert [run.tokens for run in runs] == [run.tokens for run in plain]
    assert len(runs[0].tokens) > 200


def test_more_than_can_be_is_refused(model: Model, lib: Library, tiny: Tiny) -> None:
    with pytest.raises(InputError, match=r"257 texts at a time: 1 to 256 are possible"):
        Speculator(model, draft=None, n_parallel=257)
    with pytest.raises(InputError, match=r"n_batch is 40; a draft of 8 tokens .* make 45: raise"):
        Speculator(model, draft=DraftSettings(8), n_parallel=5, n_batch=40)
    with Speculator(model, draft=DraftSettings(8), n_parallel=5, n_batch=45, n_threads=1) as most:
        texts = most.generate_all([tokens(5, seed, 4096) for seed in range(5)], 4)
    assert max(text.verifications[0][0] for text in texts) > 0
    with (
        Model(lib, tiny("qwen3next", f32=True)) as twice,
        pytest.raises(InputError, match=r"129 texts at a time: 1 to 128 .* qwen3next, which needs"),
    ):
        Speculator(twice, draft=DraftSettings(1), n_parallel=129, n_ctx=256)
