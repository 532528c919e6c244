"""Markdown, CSV and JSON on the result that test_report_text works out by hand."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from test_report_text import by_hand, made, prompt

from mtpstats import cli
from mtpstats import result as results
from mtpstats.report import derived, markdown, page, tidy
from mtpstats.stats import Snapshot

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
HOSTILE = "<script>x</script> | [a](http://b) *c* `d` www.e.f $g$\n# h \x1b[2J"


def hostile() -> dict:
    """A result whose every foreign string is hostile."""
    result = json.loads(json.dumps(made(prompt(HOSTILE, stop="nan"), prompt("b"))))
    for key in ("file", "architecture", "quantisation"):
        result["model"][key] = HOSTILE
    result["environment"]["cpu"] = result["environment"]["devices"][1]["description"] = HOSTILE
    result["environment"]["library"] = {"version": HOSTILE, "backend": HOSTILE}
    result["environment"]["source"] = {"kind": HOSTILE, "files": [HOSTILE], "notes": [HOSTILE]}
    results.validate(result, "hostile")
    return result


def unknown() -> dict:
    """What an import may know: lengths only."""
    counters = Snapshot()
    counters.verifications = 4
    names = set(counters.to_dict()) - {"verifications"}
    seconds = {"prompt": 0.5, "target": None, "head": None, "other": None, "generation": 2.0}
    return made(prompt(positions=counters.to_dict(names), seconds=seconds))


def wilson(k: float, n: float) -> tuple[float, float, float]:
    """Wilson's bounds are the roots p of (k/n - p)**2 = z**2 p (1 - p) / n."""
    z2 = 1.959963984540054**2
    low, high = sorted(np.roots([1 + z2 / n, -2 * k / n - z2 / n, (k / n) ** 2]).real)
    return k / n, low, high


def test_golden_markdown():
    assert markdown.render(made(prompt())) == (GOLDEN / "report.md").read_text()


def test_markdown_shows_foreign_text_as_it_is():
    shown = markdown.render(hostile())
    for harm in ("<script", "[a](", "http://", "www.", "*c*", "`d`", "$g$", "\n# h", "\x1b"):
        assert harm not in shown
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {3, 10, 12}
    assert r"&lt;script&gt;x&lt;/script&gt; \| \[a\](http\://b) \*c\*" in shown
    assert markdown.cell("1. a") == r"1\. a"
    assert markdown.cell("- a") == r"\- a"


def test_csv_holds_every_figure():
    rows = list(csv.DictReader(io.StringIO(tidy.render(made(prompt())))))
    assert list(rows[0]) == ["figure", "position", "value", "lo", "hi", "category"]
    found = {(row["figure"], row["position"]): row for row in rows}
    assert len(found) == len(rows) == 16 + 2 * 29

    def row(figure: str, position: str = "") -> list[float]:
        return [float(found[figure, position][key]) for key in ("value", "lo", "hi")]

    assert row("acceptance") == pytest.approx(wilson(4, 8))
    assert row("acceptance", "1") == pytest.approx(wilson(3, 4))
    assert row("acceptance", "2") == pytest.approx(wilson(1, 3))
    assert row("unconditional", "2") == pytest.approx(wilson(1, 4))
    assert row("widening", "1") == pytest.approx(wilson(1, 4))
    assert row("rank2", "1") == pytest.approx(wilson(1, 4))
    assert row("rank3", "2") == pytest.approx(wilson(1, 3))
    assert row("recall3", "2") == pytest.approx(wilson(2, 3))
    assert row("miss", "2") == pytest.approx(wilson(1, 3))
    assert row("p1", "1") == pytest.approx(wilson(2.5, 4))
    assert row("p2", "2") == pytest.approx(wilson(0.75, 3))
    # accepted lengths 2, 1, 1, 0: variance 1/2
    half = 1.959964 * (0.5 / 4) ** 0.5
    assert row("acceptance_length") == pytest.approx([2, 2 - half, 2 + half], abs=1e-6)
    assert found["survival", "2"]["value"] == "0.25"
    assert found["expected_length", ""]["value"] == "2.0"
    assert found["tokens_per_second", ""]["value"] == "4.0"
    assert found["seconds_head", ""]["value"] == "0.75"
    assert found["reached", "2"]["value"] == "3"
    assert found["speedup", ""]["value"] == found["stopped_hit", "1"]["value"] == ""


def test_csv_and_json_hold_the_same_figures():
    found = json.loads(json.dumps(derived.as_json(made(prompt())), allow_nan=False))
    assert found["schema"] == "mtpstats.report/1"
    assert found["model"]["file"] == "m.gguf"
    assert found["timing"]["shares"]["head"] == 0.375
    assert found["deeper_or_wider"].startswith("Cannot tell")
    summary = found["summary"]
    assert summary["positions"][1]["rank_counts"] == [1, 0, 1, 0, 0, 0, 0, 0]
    assert summary["positions"][0]["calibration1"][9] == [0, 0]
    assert summary["discarded"] == 0
    for row in csv.DictReader(io.StringIO(tidy.render(made(prompt())))):
        place = summary["positions"][int(row["position"]) - 1] if row["position"] else summary
        value = place.get(row["figure"])
        if isinstance(value, dict):
            assert [float(row[key]) for key in ("value", "lo", "hi")] == list(value.values())
        elif row["figure"] in place:
            assert row["value"] == ("" if value is None else str(value))


def test_what_is_not_known_is_empty_or_null():
    result = unknown()
    report = json.loads(json.dumps(derived.as_json(result), allow_nan=False))
    summary = report["summary"]
    assert summary["positions"] == []
    assert summary["acceptance_length"] == {"value": 2.0, "lo": None, "hi": None}
    assert summary["discarded"] is summary["nan_rows"] is None
    assert report["timing"]["seconds"]["head"] is None
    lines = tidy.render(result).splitlines()
    assert "acceptance_length,,2.0,,," in lines
    assert "seconds_head,,,,," in lines
    shown = markdown.render(result)
    assert "| mean acceptance length | 2.00 tokens |" in shown
    assert "None" not in shown
    assert "nan" not in shown
    bare = made({**prompt(), "positions": None})
    assert derived.as_json(bare)["summary"] is None
    assert tidy.render(bare).splitlines()[1].startswith("tokens,,8")
    assert "tokens/s" in markdown.render(bare)


def test_categories_are_in_every_form():
    # as in test_report_text: twice GOLDEN's counts, and once
    result = made(*(prompt(f"p{i}", category=name) for i, name in enumerate(["b|", "b|", "<a>"])))
    assert (
        r"| b\| | 2 | 16 | 75.0 (40.9-92.9) | 25.0 | 2.00 (1.51-2.49) | 1.00 |"
        "\n| &lt;a&gt; | 1 | 8 | 75.0 (30.1-95.4) | 25.0 | 2.00 (1.31-2.69) | 1.00 |\n"
    ) in markdown.render(result)
    cells = "<td>16</td><td>75.0 (40.9-92.9)</td><td>25.0</td><td>2.00 (1.51-2.49)</td>"
    assert cells in page.render(result)
    first, second = derived.as_json(result)["categories"]
    assert (first["name"], first["prompts"], second["name"]) == ("b|", 2, "<a>")
    assert first["acceptance"]["lo"] == pytest.approx(wilson(6, 8)[1])
    assert derived.as_json(made(prompt()))["categories"] == []


def test_csv_has_the_figures_of_each_category():
    names = ["b,\x1b", "b,\x1b", None]
    result = made(*(prompt(f"p{i}", category=name) for i, name in enumerate(names)))
    rows = list(csv.DictReader(io.StringIO(tidy.render(result))))
    assert len(rows) == 16 + 2 * 29 + 2 * 6
    found = {(row["category"], row["figure"]): row for row in rows if row["category"]}
    assert {name for name, _ in found} == {"b,\\x1b", "-"}
    for name, n in (("b,\\x1b", 2), ("-", 1)):
        assert found[name, "prompts"]["value"] == str(n)
        assert found[name, "tokens"]["value"] == str(8 * n)
        for figure, k in (("acceptance", 3), ("rank2", 1)):
            row = found[name, figure]
            assert row["position"] == "1"
            bounds = [float(row[key]) for key in ("value", "lo", "hi")]
            assert bounds == pytest.approx(wilson(k * n, 4 * n))
        assert found[name, "acceptance_length"]["value"] == "2.0"
        assert found[name, "coverage"]["value"] == "1.0"


@pytest.mark.parametrize("form", ["markdown", "csv", "json"])
def test_the_command_prints_each_form(form, tmp_path, capsys):
    path = tmp_path / "r.json"
    results.write(path, made(prompt(positions=by_hand())))
    render = {"markdown": markdown.render, "csv": tidy.render, "json": derived.as_json}[form]
    assert cli.main(["report", str(path), f"--{form}"]) == 0
    shown = capsys.readouterr().out
    expected = render(results.read(path))
    assert (json.loads(shown) if form == "json" else shown) == expected


def test_forms_are_asked_for_one_at_a_time(tmp_path, capsys):
    path = tmp_path / "r.json"
    results.write(path, made(prompt()))
    assert cli.main(["report", str(path), "--csv", "--json"]) == 2
    assert "ask for one" in capsys.readouterr().err
    assert cli.main(["report", str(path)]) == 0
    assert "mean acceptance length    2.00" in capsys.readouterr().out
