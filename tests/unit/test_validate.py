"""Policies beside their prediction, with drivers that do what the replay says."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import MIXED, costs, text, trace

from mtpstats import plan as plans
from mtpstats import result as results
from mtpstats import served, validate
from mtpstats.cost import Costs
from mtpstats.errors import InputError, Interrupted
from mtpstats.generation import Generation, Seconds
from mtpstats.loop import Progress
from mtpstats.policy import AdaptiveDepth, Chain, GatedSiblings, Tree
from mtpstats.price import NO_DRAFTING, Figure
from mtpstats.replay import replay, totals
from mtpstats.report import validate as report
from mtpstats.run import BenchSettings
from mtpstats.server import Completion
from mtpstats.speculate import DraftSettings

COSTS = costs({1: 10, 2: 11, 3: 13}, draft=0.2, follow={1: 1})
TRACE = trace(text(MIXED, "a"), text(MIXED[1:], "b"), text(MIXED[2:], "c"))
POLICIES = (NO_DRAFTING, Chain(1), Chain(2))


class Driver:
    """Generates what the replay says, each verification in as long as the costs say, times
    ``pace``."""

    n_ctx = 1000

    def __init__(self, engine: Engine, draft: DraftSettings | None) -> None:
        self.engine, self.n_max = engine, draft.n_max if draft else 0
        policy: Any = Chain(draft.n_max, draft.p_min) if draft else NO_DRAFTING
        if draft and draft.tree:
            policy = draft.tree
        self.texts = replay(TRACE, policy).prompts
        self.steps = totals(TRACE, policy).widths.sum(axis=1)
        self.closed = False

    def rounds(
        self,
        prompts: Sequence[Sequence[int]],
        n_predict: int,
        *,
        on_text: Any = None,
        on_done: Callable[[int, Generation], None] | None = None,
    ) -> Generator[int, None, None]:
        (prompt,) = prompts
        which = prompt[0] - ord("a")
        found = self.texts[which]
        self.engine.log.append((self.n_max, which))
        if len(self.engine.log) == self.engine.interrupt_at:
            raise KeyboardInterrupt
        got = Generation()
        for drafted, accepted in found.verifications.tolist():
            got.verifications.append((drafted, accepted))
            rows = 1 + drafted
            got.seconds.target += float(COSTS.verify(rows))
            got.seconds.head += 1 if self.n_max else 0
            yield accepted + 1
        got.tokens = list(range(found.tokens))
        got.seconds.head += 0.2 * int(self.steps[which])
        got.seconds = Seconds(0.0, *(self.engine.pace * s for s in
                                     (got.seconds.target, got.seconds.head, 0.0)))  # fmt: skip
        if (self.n_max, which) == self.engine.odd:
            got.verifications[0] = (got.verifications[0][0], 0)
        assert on_done is not None
        on_done(0, got)

    def close(self) -> None:
        self.closed = True


class Engine:
    def __init__(self, pace: float = 1.0, **options: Any) -> None:
        self.pace = pace
        self.log: list[tuple[int, int]] = []
        self.drivers: list[Driver] = []
        self.interrupt_at: int | None = options.get("interrupt_at")
        self.odd = options.get("odd")

    def driver(self, draft: DraftSettings | None, n_ctx: int, collector: None) -> Driver:
        assert n_ctx == 1000
        self.drivers.append(Driver(self, draft))
        return self.drivers[-1]


def test_a_machine_that_is_as_predicted() -> None:
    engine = Engine()
    found = validate.run(TRACE, POLICIES, engine, costs=COSTS, repeats=2)
    # No drafting: 6 + 5 + 4 tokens, 10 s each.
    assert found.policies[0].measured.value == pytest.approx(15 / 150)
    for checked in found.policies:
        assert checked.error == pytest.approx(0)
        assert (checked.same, checked.different) == (3, ())
        assert checked.predicted.value == pytest.approx(checked.measured.value)
    # n_max 2: 2, 4 and 3 passes of 13 s, with 1 s to follow and two steps of 0.2 s.
    chain = found.policies[2].measured
    assert chain.value == pytest.approx(15 / (9 * 14.4))
    assert chain.lo == pytest.approx(5 / (4 * 14.4))  # all prompts drawn are the second
    assert chain.hi == pytest.approx(6 / (2 * 14.4))  # or all the first
    assert found.median_error == pytest.approx(0)
    assert found.shortfall == 0
    assert all(driver.closed for driver in engine.drivers)
    assert validate.verdict(found) == (
        "The prediction held: predictions are 0.0 % off in the median, and the pick, n_max 2, "
        "p_min 0, is the fastest."
    )


def test_a_machine_that_is_slower() -> None:
    found = validate.run(TRACE, POLICIES, Engine(pace=1.25), costs=COSTS)
    assert [checked.error for checked in found.policies] == pytest.approx([0.25] * 3)
    assert found.median_error == pytest.approx(0.25)


def test_every_policy_has_every_prompt_in_turns() -> None:
    engine = Engine()
    validate.run(TRACE, POLICIES, engine, costs=COSTS, repeats=2)
    warm_up, runs = engine.log[:3], engine.log[3:]
    assert sorted(warm_up) == [(0, 0), (1, 0), (2, 0)]
    assert [which for _, which in runs] == [0] * 3 + [1] * 3 + [2] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    orders = [tuple(n_max for n_max, _ in runs[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert {order[0] for order in orders} == {0, 1, 2}  # nobody is always first


def test_costs_are_measured_between_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # A run of a prompt takes 2 s, measuring 1 s: the first, then after every 4 s of runs.
    engine, now = Engine(), [100.0]
    before: list[int] = []
    measured = iter([costs({1: 9}, draft=2), costs({1: 30}, draft=2), costs({1: 10}, draft=2)])

    def clock() -> float:
        return now[0] + 2.0 * len(engine.log)

    def measure() -> Costs:
        before.append(len(engine.log) - 1)  # without the warm-up
        now[0] += 1.0
        return next(measured)

    monkeypatch.setattr(validate, "perf_counter", clock)
    found = validate.run(TRACE, POLICIES[:1], engine, measure=measure, repeats=2)
    assert before == [0, 2, 4]  # of 3 prompts twice
    assert found.policies[0].predicted.value == pytest.approx(1 / 10)  # the median of the three


def test_measurements_are_merged_point_by_point() -> None:
    def check(measured: float) -> dict[str, Any]:
        return {"check": {"4": {"measured": measured, "by_medians": 2.0, "by_means": 3.0}}}

    a = costs({1: 10, 2: 20}, draft=1, other_token=0.1, facts=check(5.0))
    b = costs({1: [11, 12, 13]}, draft=3, other_token=0.3, facts=check(6.0))
    both = validate.merged([a, b])
    assert both.verify.points[1].median == 11  # of 10 and 12
    assert both.verify.points[1].samples == 4
    assert both.verify.points[2].median == 20
    assert both.draft.points[1].median == 2
    assert both.other_token == pytest.approx(0.2)
    assert both.facts == {"check": {"4": {"measured": 11, "by_medians": 4, "by_means": 6}}}
    shared = Costs(a.verify, a.draft, None)
    assert validate.merged([shared, shared]).follow is None
    assert validate.merged([shared, shared]).plain is None


def test_the_median_of_the_repeats_counts_prompt_by_prompt() -> None:
    taken = validate.Taken()
    for seconds in ((1.0, 50.0), (9.0, 4.0), (2.0, 5.0)):
        taken.begin()
        for one in seconds:
            taken.add(10, one, 0, 0)
    assert taken.speed().value == 20 / (2 + 5)


def test_drafts_that_are_not_as_replayed_are_named() -> None:
    found = validate.run(TRACE, POLICIES, Engine(odd=(2, 0)), costs=COSTS, repeats=1)
    assert [checked.different for checked in found.policies] == [(), (), ("a",)]
    assert found.policies[2].same == 2
    # In this text nothing was close.
    assert found.policies[2].unexplained == ("a",)
    shown = " ".join(report.render(found).split())
    assert (
        "1 of 9 texts drafted or accepted otherwise than replayed, some without a near tie: a"
        in (shown)
    )
    explained = replace(found, policies=(replace(found.policies[2], unexplained=()),))
    assert "1 of 3 texts drafted or accepted otherwise than replayed, all after near ties" in (
        " ".join(report.render(explained).split())
    )


def test_an_interrupt_closes_everything() -> None:
    engine = Engine(interrupt_at=5)
    with pytest.raises(Interrupted):
        validate.run(TRACE, POLICIES, engine, costs=COSTS)
    assert all(driver.closed for driver in engine.drivers)


def test_what_cannot_be_run() -> None:
    with pytest.raises(InputError, match="no costs"):
        validate.run(TRACE, POLICIES, Engine())
    with pytest.raises(InputError, match="nothing to run"):
        validate.run(TRACE, (), Engine(), costs=COSTS)
    with pytest.raises(InputError, match=r"llama\.cpp runs chains only"):
        validate.run(TRACE, (AdaptiveDepth(2),), Engine(), costs=COSTS)  # type: ignore[arg-type]


def checked(policy: Any, predicted: float, measured: float) -> validate.Checked:
    return validate.Checked(
        policy, Figure(predicted, None, None), Figure(measured, None, None), 1, ()
    )


def test_verdicts() -> None:
    def words(*policies: validate.Checked) -> str:
        return validate.verdict(validate.Validation(policies, COSTS, 1, 1))

    assert words(checked(Chain(1), 110, 100), checked(Chain(2), 126, 98)) == (
        "The prediction held: predictions are 19.3 % off in the median, and the pick, n_max 2, "
        "p_min 0, measures 2.0 % below the fastest, n_max 1, p_min 0."
    )
    assert words(checked(NO_DRAFTING, 100, 100), checked(Chain(2), 101, 90)) == (
        "The prediction did not hold: predictions are 6.1 % off in the median, and its pick, "
        "n_max 2, p_min 0, measures 10.0 % below no drafting."
    )


def test_prompts_are_spread_evenly() -> None:
    assert [p.id for p in validate.chosen(TRACE, 2).prompts] == ["a", "b"]
    assert validate.chosen(TRACE, None) is TRACE
    assert validate.chosen(TRACE, 9) is TRACE
    many = trace(*(text(MIXED, chr(97 + i)) for i in range(10)))
    assert "".join(p.id for p in validate.chosen(many, 4).prompts) == "acfh"


def test_what_is_run() -> None:
    picked = [Chain(3), Chain(4, 0.3)]
    assert validate.policies_to_run(picked, Chain(3)) == [NO_DRAFTING, Chain(3), Chain(4, 0.3)]
    assert validate.policies_to_run(picked[1:], None) == [NO_DRAFTING, Chain(4, 0.3)]


# ---- through a server


class Stub:
    """In place of a server: each token takes as long as its flags' n_max says, in seconds."""

    def __init__(self, log: list[Any], flags: Sequence[str]) -> None:
        self.log, self.flags = log, list(flags)
        self.n_max = (
            int(flags[flags.index("--spec-draft-n-max") + 1]) if "draft-mtp" in flags else 0
        )
        log.append(("start", self.n_max))

    def complete(self, prompt: Sequence[int], n_predict: int, **sampling: float) -> Completion:
        self.sampling = sampling
        self.log.append((prompt, n_predict, sampling))
        return Completion(10, 10.0 * (1 + self.n_max), 4 * self.n_max, 3 * self.n_max)

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(("stop", self.n_max))


def test_llama_server_is_started_for_each_policy_in_turns() -> None:
    found = validate.run(TRACE, POLICIES, Engine(), costs=COSTS, repeats=2)
    log: list[Any] = []
    flags: list[list[str]] = []

    def start(program: Path, given: Sequence[str]) -> Any:
        assert program == Path("llama-server")
        flags.append(list(given))
        return Stub(log, given)

    settings = BenchSettings(Path("m.gguf"), n_threads=2)
    seen: list[Progress] = []
    found = served.run_server(
        TRACE, found, settings, Path("llama-server"), start=start, on_progress=seen.append
    )
    assert [entry for entry in log if entry[0] == "start"] == [
        ("start", n) for n in (0, 1, 2, 1, 2, 0)
    ]
    assert log[1][:2] == ([97], 8)  # the warm-up
    assert log[2] == ([97], TRACE.n_predict, log[1][2])
    assert log[2][2] == {"temperature": 0, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0}
    assert flags[0] == [
        "-m", "m.gguf", "-c", "1000", "-np", "1", "-b", "2048", "-ub", "512", "-t", "2",
        "-fa", "auto", "-ctk", "f16", "-ctv", "f16", "--spec-type", "none",
    ]  # fmt: skip
    assert [one.server.value for one in found.policies] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [one.server_drafted for one in found.policies] == [0, 12, 24]
    assert [one.server_accepted for one in found.policies] == [0, 9, 18]
    assert len(seen) == 6


def test_flags_of_the_recording_reach_the_server() -> None:
    from mtpstats.llama.placement import Placement

    settings = BenchSettings(
        Path("m.gguf"), draft_model=Path("d.gguf"), n_gpu_layers=9, rpc=("a:1", "b:2"),
        placement=Placement((), "layer", (3, 1), 1, (("exps", "CPU"), ("x", "B"))),
    )  # fmt: skip
    flags = served.server_flags(settings, 512)
    joined = " ".join(flags)
    assert "-ngl 9 -md d.gguf -dev none -sm layer -ts 3,1 -mg 1 -ot exps=CPU,x=B --rpc a:1,b:2" in (
        joined
    )


# ---- output


def test_json_and_text() -> None:
    found = validate.run(TRACE, POLICIES, Engine(pace=1.1), costs=COSTS)
    record = json.loads(results.dumps(validate.to_dict(found, TRACE)))
    assert record["schema"] == "mtpstats.validate/1"
    assert [one["policy"] for one in record["policies"]] == [
        "none",
        "chain:n_max=1",
        "chain:n_max=2",
    ]
    assert record["best_predicted"] == record["best_measured"] == 2
    assert record["median_absolute_error"] == pytest.approx(0.1)
    assert record["policies"][1]["llama_server"] is None
    lines = report.render(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "3 policies on 3 prompts, each 3 times, in turns"
    row = next(line for line in lines if line.startswith("no drafting"))
    assert row.split()[2] == row.split()[3][:0] + "0.1"  # predicted; measured 1 / 11
    assert "0.09091" in row
    assert row.endswith("+10.0")


def test_the_report_with_a_server_fits() -> None:
    found = validate.run(TRACE, POLICIES, Engine(pace=1e-5), costs=COSTS)
    found = served.run_server(
        TRACE, found, BenchSettings(Path("m")), Path("s"), start=lambda _, f: Stub([], f)  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    shown = report.render(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert "through llama-server, by its own timings" in shown
    assert np.isfinite(found.policies[0].server.value)


def test_a_tree_beside_the_others() -> None:
    """First and second choice: passes of 13 s, each followed for 1 s, and a step of 0.2 s."""
    tree = Tree([(1,), (2,)])
    found = validate.run(TRACE, (*POLICIES, tree), Engine(), costs=COSTS)
    checked = found.policies[3]
    passes = int(totals(TRACE, tree).verifications.sum())
    assert checked.error == pytest.approx(0)
    assert checked.measured.value == pytest.approx(15 / (passes * 14.2))
    assert (checked.same, checked.different) == (3, ())
    record = json.loads(results.dumps(validate.to_dict(found, TRACE)))
    assert record["policies"][3]["policy"] == str(tree)
    assert record["policies"][3]["flags"] is None
    told = record["tree"]
    assert (told["policy"], told["fastest_other"]) == (3, 2)
    assert told["gain"] == pytest.approx(9 * 14.4 / (passes * 14.2))
    # Two rows more cost 3 s of the 10 of a single one.
    assert told["row_cost"] == pytest.approx(0.15)
    shown = " ".join(report.render(found).split())
    assert told["verdict"] in shown
    # llama.cpp's server is not asked for it.
    server = served.run_server(
        TRACE, found, BenchSettings(Path("m")), Path("s"), start=lambda _, f: Stub([], f)  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    assert server.policies[3].server is None
    assert report.render(server).count("tree of 2 nodes") == 2  # its row, and the sentence


def test_the_best_tree_that_can_be_run() -> None:
    def best(architecture: str, n_ubatch: int = 512) -> Any:
        recorded = trace(*TRACE.prompts, model={"architecture": architecture})
        return validate.best_tree(plans.make(recorded, COSTS), n_ubatch)

    for name in ("glm4moe", "qwen35"):
        found = best(name)
        assert isinstance(found, Tree | GatedSiblings)
        assert found.leaves > 1
    # Two chains of two rows are the least that branches.
    assert best("qwen35", 3) is None
    assert best("glm4moe", 3) is not None
    assert best("qwen3next") is best("deepseek4") is None
