"""Comparisons: against enumeration and formulas by hand, refusals, verdicts, every form."""

import copy
import itertools
import json
import math
from pathlib import Path

import pytest
from test_report_text import counters, made, prompt

from mtpstats import cli
from mtpstats import result as results
from mtpstats.compare import BETTER, CANNOT_TELL, SAME, WORSE, compare, failure
from mtpstats.errors import InputError
from mtpstats.intervals import wilson
from mtpstats.report import comparison as forms

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def one(n: int, accepted: int, name: str, seconds: float = 2.0, **changes) -> dict:
    """A prompt of n verifications of one drafted token each."""
    positions = counters(n, [n], [n], [accepted], [[accepted]], [n - accepted], [0], [0])
    return prompt(
        name,
        positions,
        verifications=n,
        drafted=n,
        accepted=accepted,
        tokens=n + accepted,
        seconds={"prompt": 0.1, "target": seconds, "head": 0.0, "other": 0.0},
        **changes,
    )


def run(*accepted: int, n: int = 20, seconds: float = 2.0, **settings) -> dict:
    prompts = [one(n + i, k, f"p{i}", seconds) for i, k in enumerate(accepted)]
    return copy.deepcopy(made(*prompts, **settings))


def pair(a: dict, b: dict):
    return compare(("a.json", a), ("b.json", b))


def bounds(values: list[float]) -> tuple[float, float]:
    """The 2.5 % and 97.5 % points of equally likely values."""
    ordered = sorted(values)
    return ordered[round(0.025 * len(ordered))], ordered[round(0.975 * len(ordered))]


def test_paired_intervals_are_those_of_all_resamples():
    k, other = [5, 9, 12, 3, 7, 10], [4, 9, 10, 3, 6, 8]
    n = [20 + i for i in range(6)]
    found = pair(run(*k), run(*other))
    length, speed, first = [], [], []
    for drawn in itertools.product(range(6), repeat=6):
        steps = sum(n[i] for i in drawn)
        a, b = sum(k[i] for i in drawn) / steps, sum(other[i] for i in drawn) / steps
        length.append(b - a)
        first.append((b - a) / (1 + a))
        speed.append((1 + b) / (1 + a) - 1)
    value = sum(other) / sum(n) - sum(k) / sum(n)
    assert found.paired
    assert found.length.a == pytest.approx(1 + sum(k) / sum(n))
    assert found.length.change.value == pytest.approx(value)
    assert found.length.change[1:] == pytest.approx(bounds(length), abs=3e-3)
    assert found.length.relative[1:] == pytest.approx(bounds(first), abs=3e-3)
    assert found.acceptance.change == pytest.approx(found.length.change)
    # the same seconds for fewer tokens
    assert found.speed.relative[1:] == pytest.approx(bounds(speed), abs=3e-3)
    assert found.positions[0].change == pytest.approx(found.length.change)
    assert [d.verdict for d in found.overall] == [WORSE] * 3
    assert found.positions[0].verdict is None
    assert [d.verdict for d in pair(run(*other), run(*k)).overall] == [BETTER] * 3


def test_what_makes_a_prompt_easy_falls_out_of_a_pair():
    # between 1 and 19 of 20 by prompt, one fewer in each: unpaired nothing could be told
    easy = [1, 4, 7, 10, 13, 16, 19]
    found = pair(run(*[k + 1 for k in easy]), run(*easy))
    assert found.length.verdict == WORSE
    assert found.length.change.hi - found.length.change.lo < 0.01


def test_noise_is_not_told_from_a_change():
    found = pair(run(5, 9, 12, 3, 7, 10), run(7, 7, 14, 1, 9, 8))
    assert found.length.verdict == CANNOT_TELL
    assert found.length.change.lo < 0 < found.length.change.hi


def test_the_same_run_twice_is_the_same():
    found = pair(run(5, 9), run(5, 9))
    assert [d.verdict for d in found.overall] == [SAME] * 3
    assert found.length.change == (0, 0, 0)
    assert found.differs == ()


def test_few_prompts_tell_nothing():
    a, b = run(*[19] * 5), run(*[1] * 5)
    found = pair(a, b)
    assert found.length.verdict == CANNOT_TELL
    assert "5 prompts are too few to tell: at least 6 are needed" in found.remarks
    with pytest.raises(InputError, match=r"b\.json cannot be checked against a\.json"):
        failure(found, "length", 0.02)
    assert failure(pair(a, a), "length", 0.02) is None
    assert pair(run(*[19] * 6), run(*[1] * 6)).length.verdict == WORSE


def unknown_prompts(result: dict) -> dict:
    for record in result["prompts"]:
        record["prompt_sha256"] = None
    return result


def test_unpaired_intervals_by_hand():
    a, b = (unknown_prompts(run(k, n=100)) for k in (60, 45))
    found = pair(a, b)
    assert not found.paired
    assert found.prompts == 0
    assert any("taken to be alike" in remark for remark in found.remarks)
    # Newcombe's interval of a difference of proportions, from Wilson's of each
    p, q = wilson(60, 100), wilson(45, 100)
    low = -0.15 - math.sqrt((q.value - q.lo) ** 2 + (p.hi - p.value) ** 2)
    high = -0.15 + math.sqrt((q.hi - q.value) ** 2 + (p.value - p.lo) ** 2)
    assert found.acceptance.change == pytest.approx((-0.15, low, high))
    assert found.acceptance.verdict == WORSE
    assert found.positions[0].change == pytest.approx((-0.15, low, high))
    ratio = math.exp(-math.hypot(math.log(q.value / q.lo), math.log(p.hi / p.value)))
    assert found.acceptance.relative.lo == pytest.approx(0.75 * ratio - 1)
    # one request's speed has no interval
    assert found.speed.a == 80.0
    assert found.speed.change is None
    assert found.speed.verdict == CANNOT_TELL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.vocabulary", 5000),
        ("settings.n_predict", 9),
        ("settings.n_max", 3),
        ("settings.n_min", 1),
        ("settings.p_min", 0.5),
        ("settings.temp", 1.0),
        ("prompts.0.prompt_sha256", "1" * 64),
        ("prompts.0.n_prompt", 12),
        ("prompts.0.id", "other"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(field, value):
    a, b = run(5, 9, 12), run(5, 9, 12)
    *path, last = [int(part) if part.isdigit() else part for part in field.split(".")]
    place = b
    for key in path:
        place = place[key]
    place[last] = value
    name = "prompts differ" if last == "id" else last if path[0] == "prompts" else field
    with pytest.raises(InputError, match=r"a\.json and b\.json cannot be compared") as caught:
        pair(a, b)
    assert name in str(caught.value)


def test_sampling_matters_only_when_sampled():
    assert pair(run(5, 9), run(5, 9, top_k=3)).differs == (("settings.top_k", 40, 3),)
    with pytest.raises(InputError, match=r"settings\.top_k is 40"):
        pair(run(5, 9, temp=0.7), run(5, 9, temp=0.7, top_k=3))


def test_with_and_without_a_template_the_same_prompts_are_other_texts():
    a, b = run(5, 9, 12), run(5, 9, 12, chat_template_sha256="ab")
    for record in b["prompts"]:
        record["prompt_sha256"], record["n_prompt"] = "2" * 64, 17
    found = pair(a, b)
    assert found.paired
    assert any("template differs" in remark for remark in found.remarks)


def test_prompts_that_one_run_did_not_finish_are_left_out():
    a, b = run(5, 9, 12, 3, 7, 10, 20), run(5, 9, 12, 3, 7, 10)
    found = pair(a, b)
    assert found.prompts == 6
    assert found.length.verdict == SAME
    assert "1 prompts that only one of the two finished are left out" in found.remarks


def test_what_differs_is_listed_and_machines_are_remarked_on():
    a, b = run(5, 9), run(5, 9, type_k="q8_0", n_threads=2)
    b["model"]["quantisation"] = "Q4_0"
    b["environment"]["library"]["version"] = "0.6.0"
    b["environment"]["devices"][1]["memory_free"] = 3
    found = pair(a, b)
    assert found.differs == (
        ("model.quantisation", "F16", "Q4_0"),
        ("environment.library.version", "0.5.0", "0.6.0"),
        ("settings.n_threads", 1, 2),
        ("settings.type_k", None, "q8_0"),
    )
    assert "tokens/s are of unlike machines or loads: settings.n_threads differ" in found.remarks


def test_settings_that_one_does_not_say_are_remarked_on():
    found = pair(run(5, 9), run(5, 9, n_max=None, p_min=None))
    assert any("settings.n_max, settings.p_min" in remark for remark in found.remarks)


def test_runs_without_statistics_are_compared_by_their_totals():
    a, b = (made(*({**p, "positions": None} for p in run(*ks)["prompts"]))
            for ks in ([9] * 6, [6] * 6))  # fmt: skip
    found = pair(a, b)
    assert found.length.verdict == WORSE
    assert found.positions == ()


def test_a_check_fails_only_beyond_chance_and_beyond_the_limit():
    # 10 of 20 to 25 verifications against 9: 1 - (1 + 54/135) / (1 + 60/135) = 3.1 %
    found = pair(run(*[10] * 6), run(*[9] * 6))
    assert found.length.relative.value == pytest.approx(-0.0308, abs=1e-4)
    assert failure(found, "length", 0.04) is None
    text = failure(found, "length", 0.02)
    assert text == (
        "mean acceptance length of b.json is 3.1% worse than of a.json: 1.4 against 1.444, and at "
        "most 2.0% is allowed"
    )
    assert failure(found, "acceptance", 0.09) is not None
    assert failure(found, "acceptance", 0.11) is None
    noisy = pair(run(5, 9, 12, 3, 7, 10), run(7, 7, 14, 1, 8, 8))
    assert noisy.length.relative.value < -0.005
    assert failure(noisy, "length", 0.0) is None


# ---- forms


def golden_pair():
    """Six times test_report_text's prompt, and the same with 2 and 1 accepted of 4 and 2."""
    worse = counters(4, [4, 4], [4, 2], [2, 1], [[2, 2], [1, 1]], [0, 0], [2, 1], [1, 0])
    names = [f"p{i}" for i in range(6)]
    a = made(*map(prompt, names))
    b = copy.deepcopy(made(*(prompt(name, worse, accepted=3) for name in names)))
    b["model"]["quantisation"] = "Q4_0"
    return compare(("a.json", a), ("b\x1b.json", b))


def test_golden_text():
    assert forms.render([golden_pair()]) == (GOLDEN / "comparison.txt").read_text()


def test_golden_markdown():
    assert forms.markdown([golden_pair()]) == (GOLDEN / "comparison.md").read_text()


def test_json_form():
    found = json.loads(json.dumps(forms.as_json([golden_pair()]), allow_nan=False))
    assert found["schema"] == "mtpstats.comparison/1"
    (only,) = found["comparisons"]
    assert only["length"] == {
        "figure": "length", "position": None, "a": 2.0, "b": 1.75, "verdict": "worse",
        "change": {"value": -0.25, "lo": -0.25, "hi": -0.25},
        "relative": {"value": -0.125, "lo": -0.125, "hi": -0.125},
    }  # fmt: skip
    assert only["positions"][1]["b"] == 0.5
    assert only["differs"] == [{"field": "model.quantisation", "a": "F16", "b": "Q4_0"}]


def test_the_command_compares_each_with_the_first_and_checks(tmp_path, capsys):
    for name, ks in (("a", [10] * 6), ("b", [9] * 6), ("c", [10] * 6)):
        results.write(tmp_path / f"{name}.json", run(*ks))
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    assert cli.main(["compare", a, c, b, "--fail-if-worse", "4%"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("mean acceptance length") == 2
    assert max(map(len, shown.splitlines())) <= 80 or "/" in shown  # but for long paths
    assert cli.main(["compare", a, c, b, "--fail-if-worse", "2 %", "--json"]) == 3
    captured = capsys.readouterr()
    verdicts = [c["length"]["verdict"] for c in json.loads(captured.out)["comparisons"]]
    assert verdicts == ["same", "worse"]
    assert captured.err.startswith("mtpstats: error: mean acceptance length of ")
    assert captured.err.count("\n") == 1
    assert cli.main(["compare", a, b, "--fail-if-worse", "2", "--fail-on", "speed"]) == 3
    capsys.readouterr()
    assert cli.main(["compare", a, b, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("**A** ")
    for args in ([a], [a, b, "--fail-if-worse", "-1"], [a, b, "--fail-if-worse", "much"]):
        assert cli.main(["compare", *args]) == 2
