"""The text report on results made by hand."""

import copy
import re

import pytest

from mtpstats import result as results
from mtpstats.report import text
from mtpstats.stats import Snapshot

MODEL = {
    "file": "m.gguf",
    "size": 7_014_368,
    "sha256": None,
    "architecture": "qwen35",
    "parameters": 3_428_496,
    "vocabulary": 4096,
    "nextn_blocks": 1,
    "quantisation": "F16",
}
SETTINGS = {
    "n_prompts": 1, "n_predict": 8, "n_max": 2, "n_max_asked": 2, "n_min": 0, "p_min": 0.0,
    "temp": 0.0, "temp_source": "default", "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0,
    "n_ctx": 256, "n_threads": 1,
}  # fmt: skip
ENVIRONMENT = {
    "mtpstats": "0.1.0",
    "time": "2026-01-02T03:04:05+00:00",
    "cpu": "EPYC",
    "library": {"version": "0.5.0", "backend": "cpu"},
    "devices": [{"type": "cpu", "description": "EPYC"}, {"type": "gpu", "description": "H200"}],
}


def counters(verifications: int, drafted, reached, accepted, ranks, misses, p1, p2) -> dict:
    """Counters of one prompt; every argument but the first by position."""
    data = Snapshot().to_dict()
    data["verifications"] = verifications
    for i in range(len(drafted)):
        data["drafted"][i] = drafted[i]
        data["reached"][i] = reached[i]
        data["accepted"][i] = accepted[i]
        data["rank"][i] = ranks[i] + [0] * (8 - len(ranks[i]))
        data["miss"][i] = misses[i]
        data["sum_p"][i] = [p1[i], p2[i], 0, 0, 0, 0, 0, 0]
    return data


def by_hand() -> dict:
    """Four verifications of drafts of 2: accepted 2, 1, 1 and 0."""
    return counters(
        4,
        drafted=[4, 4],
        reached=[4, 3],
        accepted=[3, 1],
        ranks=[[3, 1], [1, 0, 1]],
        misses=[0, 1],
        p1=[2.5, 1.5],
        p2=[0.5, 0.75],
    )


def prompt(name: str = "a", positions: dict | None = None, **changes) -> dict:
    return {
        "id": name, "category": None, "prompt_sha256": "0" * 64, "n_prompt": 11, "tokens": 8,
        "text": "", "verifications": 4, "drafted": 8, "accepted": 4, "near_ties": 3,
        "repeated_4grams": 0.2, "stop": "n_predict", "baseline": None,
        "seconds": {"prompt": 0.125, "target": 1.0, "head": 0.75, "other": 0.25},
        "positions": by_hand() if positions is None else positions,
        **changes,
    }  # fmt: skip


def made(*prompts: dict, **settings) -> dict:
    result = results.make(
        ENVIRONMENT, MODEL, {**SETTINGS, "n_prompts": len(prompts), **settings}, prompts
    )
    results.validate(result, "made")
    return result


# Worked out by hand: 3/4, 1/3; Wilson's intervals of 3 of 4 (30.1 to 95.4) and of 1 of 3 (6.1 to
# 79.2) as in published tables; p1 2.5/4 and 1.5/3; adds 3/4 and 1/4; wider 1/4 and 0; ranks 1 or 2
# 4/4 and 1/3; length 1 + 4/4; 8 tokens in 2 seconds.
GOLDEN = """\
model    m.gguf, qwen35, 3.43 M parameters, F16, 1 NextN block
machine  EPYC, 1 thread, H200, llama.cpp 0.5.0, cpu
run      1 prompt, 8 tokens, n_max 2, context 256
target   temperature 0, greedy (the default)

pos  drafted  reached   accepted % (95 %)     p1    p2 rank 2 %    adds   wider
  1        4        4    75.0 (30.1-95.4)   .625  .125     25.0  +0.750  +0.250
  2        4        3     33.3 (6.1-79.2)   .500  .250      0.0  +0.250  +0.000
  accepted % of those reached. p1, p2: the head's mean probability of its first
  and second choice; rank 2 %: how often the second was right. Tokens per
  verification: adds, what this position gave; wider, what its second choice as
  one more leaf would give.

rank of the target's choice among the head's candidates, counts
pos      1      2      3      4      5      6      7      8   miss  1 or 2 %
  1      3      1      0      0      0      0      0      0      0     100.0
  2      1      0      1      0      0      0      0      0      1      33.3

mean acceptance length    2.00 (1.31 to 2.69) tokens
accepted of drafted       4 of 8 tokens, 50.0 %
coverage                  1.00 (0.71 to 1.41) drafted tokens per generated one
tokens/s                  4.0
time in the target        1.00 s, 50.0 %
time in the head          0.75 s, 37.5 %
time in everything else   0.25 s, 12.5 %
reading the prompts       0.12 s
repeated 4-grams          20.0 %

Deeper or wider? Cannot tell deeper from wider: 4 verifications are too few (at
least 100).
"""


def test_golden():
    assert text.render(made(prompt())) == GOLDEN


def line(report: str, start: str) -> str:
    """Return the one line that begins so."""
    (found,) = [line for line in report.splitlines() if line.startswith(start)]
    return found


# By hand: "b" has two prompts alike, so its counts are twice those of GOLDEN and Wilson's interval
# is that of 6 of 8 (40.9 to 92.9); the two without a category are 3 of 4 and 0 of 2, in all 3 of 6,
# and a bootstrap of two prompts reaches from the one's rate to the other's; with so few, Wilson's
# interval (of 3 of 6: 18.8 to 81.2) is held as well. Accepted per verification of "b" are 2, 1, 1,
# 0 twice, of variance 1/2: 1.96 times the root of 1/16 is 0.49. Of the others they are 2, 1, 1, 0,
# 0, 0, of mean 2/3 and variance 5/9: 1.96 times the root of 5/54 is 0.60.
CATEGORIES = """\
by category; accepted and rank 2 are of position 1
category       prompts  tokens  accepted % (95 %) rank 2     length (95 %)  cov.
-                    2      10    50.0 (0.0-81.2)   16.7  1.67 (1.00-2.26)  1.00
b                    2      16   75.0 (40.9-92.9)   25.0  2.00 (1.51-2.49)  1.00
  length: mean acceptance length; cov.: drafted per generated token.
"""


def test_categories_stand_apart_if_there_are_two():
    none = counters(2, [2], [2], [0], [[0, 0, 2]], [0], [1], [1])
    prompts = [
        prompt("1"),
        prompt("2", category="b"),
        prompt("3", positions=none, verifications=2, tokens=2, drafted=2, accepted=0),
        prompt("4", category="b"),
    ]
    assert CATEGORIES in text.render(made(*prompts))
    assert "by category" not in text.render(made(prompt("1", category="b")))


def test_many_categories_and_long_names_stay_in_their_place():
    names = [f"{'x' * 40}\x1b{i}" for i in range(25)]
    report = text.render(made(*[prompt(name, category=name) for name in names]))
    lines = report.splitlines()
    start = lines.index("by category; accepted and rank 2 are of position 1")
    rows = lines[start + 2 : start + 22]
    assert all(row.startswith("xxxxxxxxxxx...") for row in rows)
    assert lines[start + 22] == "  and 5 more, each with no more prompts than these"
    assert max(map(len, lines)) <= 80


def test_chat_template_and_its_variables_are_named():
    chat = {"chat_prompts": 3, "chat_template": "model", "chat_template_kwargs": {}}
    report = text.render(made(prompt(), **chat))
    assert line(report, "chat ") == "chat     3 conversations by the model's template"
    chat = {"chat_prompts": 1, "chat_template": "a\x1b.jinja", "chat_template_kwargs": {"x": False}}
    report = text.render(made(prompt(), **chat))
    assert line(report, "chat ") == "chat     1 conversation by template a\\x1b.jinja, x false"


def test_plain_text_given_to_a_chat_model_is_pointed_out():
    result = made(prompt())
    result["model"] = {**MODEL, "chat_template": True}
    assert "! the prompts were continued as plain text" in text.render(result)
    result["settings"] = {**result["settings"], "chat_prompts": 1}
    assert "continued as plain text" not in text.render(result)
    assert "continued as plain text" not in text.render(made(prompt()))


def test_accepted_never_passes_100_percent():
    # CASES 1: three drafted, three accepted, and the bonus token.
    positions = counters(1, [1] * 3, [1] * 3, [1] * 3, [[1]] * 3, [0] * 3, [1] * 3, [0] * 3)
    report = text.render(made(prompt(positions=positions, verifications=1, tokens=4)))
    for number in ("1", "2", "3"):
        assert f"\n  {number}        1        1  100.0 (" in report
    assert "mean acceptance length    4.00 (" in report


def test_a_run_without_drafts_shows_no_rate_and_no_zero():
    # CASES 8
    report = text.render(made(prompt(positions=Snapshot().to_dict(), drafted=0, accepted=0)))
    assert line(report, "mean acceptance length").endswith(" - tokens")
    assert line(report, "accepted of drafted").endswith(" 0 of 0 tokens")
    assert "Nothing was drafted" in report


def test_coverage_stands_beside_the_acceptance():
    # CASES 17: 19 drafted, 18 accepted, 101 generated.
    positions = counters(83, [19], [19], [18], [[18, 1]], [0], [18], [1])
    report = text.render(made(prompt(positions=positions, tokens=101, drafted=19, accepted=18)))
    assert "18 of 19 tokens, 94.7 %" in line(report, "accepted of drafted")
    assert "0.19 (" in line(report, "coverage")


def test_without_statistics_speed_is_left():
    bare = {**prompt(), "positions": None}
    report = text.render(made(bare))
    assert "tokens/s                  4.0" in report
    assert "miss" not in report
    assert "Deeper or wider" not in report


def test_baseline_and_a_text_that_differs():
    seconds = {"prompt": 0.0, "target": 0.9, "head": 0.0, "other": 0.1}
    plain = {"tokens": 8, "same_text": True, "seconds": seconds}
    prompts = [prompt("a", baseline=plain), prompt("b", baseline={**plain, "same_text": False})]
    report = text.render(made(*prompts))
    # 16 tokens in 4 s against 16 in 2 s
    assert line(report, "tokens/s").endswith(" 4.0; plain decoding 8.0: speed-up 0.50")
    assert "! drafted and plain text differ in 1 of 2 prompts (b)" in report
    assert "Deeper or wider? Leave it: with drafting this ran at 0.50 times" in report


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("built-in model", "temperature 0.7 (the built-in model's default: it loops when greedy)"),
        ("asked", "temperature 0.7, top-k 40, top-p 0.95, min-p 0.05, seed 3"),
    ],
)
def test_temperature_and_why(source, words):
    report = text.render(made(prompt(), temp=0.7, temp_source=source, seed=3))
    assert words in " ".join(report.split())


def test_a_result_that_knows_little_is_shown_all_the_same():
    # What an import of another program's log may leave open.
    result = made(prompt(), **dict.fromkeys(SETTINGS))
    result["environment"] = {**ENVIRONMENT, "library": None, "devices": []}
    result["model"] = {**MODEL, "parameters": None, "quantisation": None}
    results.validate(result, "made")
    report = text.render(result)
    assert "None" not in report
    assert "model    m.gguf, qwen35, 1 NextN block\n" in report
    assert "run      1 prompt, 8 tokens\n" in report
    assert "target   unknown\n" in report


def test_clamped_draft_length_is_said():
    # CASES 18
    report = text.render(made(prompt(), n_max=2, n_max_asked=8))
    assert "n_max 2 (all this model has heads for; 8 were asked for)" in " ".join(report.split())


def test_several_at_a_time_and_a_head_of_its_own_are_said():
    result = made(prompt(), n_parallel=4)
    result["model"] = {
        **MODEL,
        "nextn_blocks": 0,
        "draft_model": {**MODEL, "file": "h.gguf\x1b", "parameters": None, "nextn_blocks": 3},
    }
    lines = text.render(result).splitlines()
    assert lines[1] == "head     h.gguf\\x1b, qwen35, F16, 3 NextN blocks"
    assert lines[3] == "run      1 prompt, 4 at a time, 8 tokens, n_max 2, context 256"
    assert "at a time" not in text.render(made(prompt(), n_parallel=1))


def test_limits_are_shown_when_they_are_set():
    assert "n_max 2, n_min 1, p_min 0.25," in text.render(made(prompt(), n_min=1, p_min=0.25))


def test_interrupted_run_says_so():
    report = text.render(made(prompt(), n_prompts=12))
    assert "run      1 of 12 prompts, 8 tokens" in report
    assert "! interrupted: 1 of 12 prompts were finished" in report


def test_what_ended_a_text_early_is_named():
    prompts = [prompt(f"p{i}", stop="context") for i in range(5)]
    report = text.render(made(prompt("bad", stop="nan"), *prompts))
    assert "! the target gave no finite logit: bad\n" in report
    assert "! the context was full before the end: p0, p1, p2, ...\n" in report


def test_what_is_not_in_the_statistics_is_counted_apart():
    positions = {**by_hand(), "discarded": 2, "dropped_tokens": 5, "beyond_drafted": 7}
    report = " ".join(text.render(made(prompt(positions=positions))).split())
    assert (
        "! counted apart from the statistics: 2 drafts whose outcome could not be told, "
        "5 drafted tokens thrown away by n_min, 7 drafted tokens at positions above 16"
    ) in report


def test_looping_text_is_warned_about():
    report = text.render(made(prompt("a", repeated_4grams=0.5), prompt("b", repeated_4grams=0.1)))
    assert line(report, "repeated 4-grams").endswith(" at most 50.0 % of a text")
    assert "! 1 of 2 texts loop" in report


def test_text_too_short_for_4grams_has_no_share():
    report = text.render(made(prompt(repeated_4grams=None)))
    assert line(report, "repeated 4-grams").endswith(" -")


def test_control_characters_stay_out():
    hostile = "\x1b[2J\x07\u202e\r\n"
    result = made(prompt(hostile, stop="nan"), prompt("b"))
    result["model"] = {**result["model"], "file": hostile, "architecture": hostile}
    result["environment"] = copy.deepcopy(ENVIRONMENT)
    result["environment"]["cpu"] = result["environment"]["library"]["version"] = hostile
    result["environment"]["devices"][1]["description"] = hostile
    report = text.render(result)
    assert all(char.isprintable() or char == "\n" for char in report)


@pytest.mark.parametrize("scale", [1, 10**3, 10**5, 10**7, 10**12, 10**15])
def test_eighty_columns_at_any_size(scale):
    many = counters(
        10 * scale,
        drafted=[9 * scale] * 16,
        reached=[8 * scale] * 16,
        accepted=[7 * scale] * 16,
        ranks=[[scale] * 7 + [0]] * 16,
        misses=[scale] * 16,
        p1=[1.0] * 16,
        p2=[1.0] * 16,
    )
    other = prompt("b", positions=many, tokens=scale, category="x" * 99)
    result = made(prompt(positions=many, tokens=scale), other)
    result["model"] = {**MODEL, "file": "x" * 200 + ".gguf", "parameters": 7 * scale}
    report = text.render(result)
    assert max(map(len, report.splitlines())) <= 80
    rows = [line for line in report.splitlines() if re.match(r" {1,2}\d{1,2} ", line)]
    assert [int(row[:3]) for row in rows] == [*range(1, 17)] * 2
    assert len({len(row) for row in rows[:16]}) == len({len(row) for row in rows[16:]}) == 1
