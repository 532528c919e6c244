"""The HTML page, its figures and picture files: well formed, harmless, drawn to scale."""

import json
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from test_report_forms import unknown
from test_report_text import by_hand, counters, made, prompt

from mtpstats import cli
from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.intervals import Interval
from mtpstats.report import figures, page, plot, svg
from mtpstats.summary import of_result

HARM = "\"'><script>window.harm=1</script><img src=x onerror=window.harm=1>\x1b[2J\x00"
VOID = {"meta"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "strong", "div"),
    *("figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("footer", "svg", "text", "line", "rect", "polyline", "circle"),
}


def hostile() -> dict:
    """A result with something harmful wherever a string may stand."""
    result = json.loads(json.dumps(made(prompt(HARM, category=HARM, stop=HARM), prompt("b"))))
    for key in ("file", "architecture", "quantisation", "sha256"):
        result["model"][key] = HARM
    result["environment"] |= {
        "cpu": HARM, "time": HARM, "mtpstats": HARM, HARM: [HARM],
        "library": {"version": HARM, "backend": HARM},
        "devices": [{"type": HARM, "description": HARM}],
        "source": {"kind": HARM, "files": [HARM], "notes": [HARM]},
    }  # fmt: skip
    result["settings"] |= {"temp_source": HARM, HARM: HARM}
    results.validate(result, "hostile")
    return result


class Strict(HTMLParser):
    """Refuses what a page of ours may not hold; keeps its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS, tag
        self.counts[tag] = self.counts.get(tag, 0) + 1
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        for name in names:
            assert not name.startswith("on")
            assert name not in ("href", "src", "srcdoc", "action", "style", "data"), name
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def parsed(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def calibrated() -> dict:
    """4 with p1 in 0.5 to 0.6 at position 1, 3 of them right; 2 at position 2, none right."""
    positions = by_hand()
    positions["calib_p1"][0][5] = [4, 3]
    positions["calib_p1"][1][5] = [2, 0]
    positions["calib_p1"][1][9] = [1, 1]
    return positions


def drawings(text: str) -> dict[str, ElementTree.Element]:
    """The figures of a page by name; every one has to be well-formed XML."""
    found = {}
    for part in text.split("<svg ")[1:]:
        drawing = ElementTree.fromstring("<svg " + part.split("</svg>")[0] + "</svg>")
        found[drawing.get("id").removeprefix("chart-")] = drawing
    return found


def test_the_page_is_well_formed_and_says_what_the_text_says():
    text = page.render(made(prompt(positions=calibrated())))
    found = parsed(text)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "default-src 'none'" in text
    assert found.counts["svg"] == 4
    for words in (
        "m.gguf, qwen35, 3.43 M parameters", "75.0 (30.1-95.4)", "33.3 (6.1-79.2)",
        "2.00 (1.31 to 2.69) tokens", "Cannot tell deeper from wider", "+0.250",
    ):  # fmt: skip
        assert words in found.text
    assert set(drawings(text)) == {"acceptance", "ranks", "calibration", "gains"}


def test_nothing_of_a_hostile_result_is_markup():
    text = page.render(hostile())
    found = parsed(text)  # which refuses script, img and handlers
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\x00" not in text
    # as often as it is shown, it is shown as text
    assert found.text.count("<script>window.harm=1</script>") > 10
    assert text.count("harm=1") == found.text.count("harm=1")


def test_no_text_of_a_prompt_is_passed_on():
    result = made(prompt(text="secret"))
    result["environment"] = {**result["environment"], "command": ["mtpstats", "-p", "secret"]}
    text = page.render(result)
    assert "secret" not in text
    assert "n_predict" in parsed(text).text


def test_unknown_figures_leave_their_charts_out():
    text = page.render(unknown())
    assert "svg" not in parsed(text).counts
    assert "None" not in text
    names = {"rank", "miss", "calib_p1", "calib_p2"}
    result = made(prompt(positions={**by_hand(), **dict.fromkeys(names)}))
    assert set(drawings(page.render(result))) == {"acceptance"}
    bare = page.render(made({**prompt(), "positions": None}))
    assert "tokens/s" in parsed(bare).text


def test_many_prompts_are_folded():
    prompts = [prompt(f"p{i}") for i in range(101)]
    assert parsed(page.render(made(*prompts))).counts["details"] == 2
    assert parsed(page.render(made(*prompts[:100]))).counts["details"] == 1


# ---- figures to scale


def charted(*positions: dict) -> dict[str, ElementTree.Element]:
    return drawings(page.render(made(*(prompt(f"p{i}", p) for i, p in enumerate(positions)))))


def scale(drawing: ElementTree.Element) -> list[float]:
    """Places of the horizontal grid lines, from 0 upwards."""
    return [float(line.get("y1")) for line in drawing.findall("line[@class='grid']")]


def test_points_lie_where_their_values_are():
    drawing = charted(by_hand())["acceptance"]
    grid = scale(drawing)  # 0 to 100 %
    labels = [text.text for text in drawing.findall("text") if text.text and "%" in text.text]
    assert labels[0] == "0 %"
    assert labels[len(grid) - 1] == "100 %"

    def at(share: float) -> float:
        return grid[0] + share * (grid[-1] - grid[0])

    first, second, *rest = (float(c.get("cy")) for c in drawing.findall("circle"))
    assert first == pytest.approx(at(3 / 4), abs=0.06)
    assert second == pytest.approx(at(1 / 3), abs=0.06)
    assert rest == pytest.approx([at(3 / 4), at(1 / 4)], abs=0.06)
    bars = drawing.findall("line[@class='bar s0']")
    assert float(bars[0].get("y1")) == pytest.approx(at(0.3006), abs=0.06)
    assert float(bars[0].get("y2")) == pytest.approx(at(0.9544), abs=0.06)
    tips = [c.find("title").text for c in drawing.findall("circle")]
    assert tips[0] == "of those reached, draft position 1: 75.0 % (30.1 % to 95.4 %)"


def test_ranks_stack_up_to_all_of_them():
    drawing = charted(by_hand())["ranks"]
    grid = scale(drawing)
    heights: dict[str, float] = {}
    bars = [r for r in drawing.findall("rect") if r.find("title") is not None]
    for bar in bars:
        heights[bar.get("x")] = heights.get(bar.get("x"), 0) + float(bar.get("height"))
    assert list(heights.values()) == pytest.approx([grid[0] - grid[-1]] * 2, abs=0.5)
    # position 1: rank 1 is 3/4 of it, at the bottom
    assert float(bars[0].get("height")) == pytest.approx(0.75 * (grid[0] - grid[-1]), abs=0.1)
    assert bars[0].get("class") == "r0"


def test_calibration_pools_the_positions():
    summary = of_result(made(prompt(positions=calibrated())))
    (chart,) = [c for c in figures.charts(summary) if c.name == "calibration"]
    points = chart.series[0].points
    assert [(p.x, p.y) for p in points] == [(pytest.approx(0.55), 0.5), (pytest.approx(0.95), 1.0)]


@pytest.mark.parametrize("high", [1e-9, 0.003, 0.11, 0.8, 1.0, 3.3, 7, 99, 12345.6, 1e12])
def test_ticks_are_few_round_and_reach_the_top(high):
    found = svg.ticks(high)
    assert found[0] == 0
    assert found[-1] >= high * (1 - 1e-9)
    assert found[-1] <= 1.6 * high
    assert 3 <= len(found) <= 7


def test_a_plans_figure_takes_plain_series():
    chart = figures.speed(
        [("chain", [(1, Interval(50, 45, 55)), (2, None), (3, Interval(60, 52, 66))]),
         ("tree <b>", [(3, Interval(58, 50, 64))])],
        measured=[(3, 59.5)],
    )  # fmt: skip
    assert [len(series.points) for series in chart.series] == [2, 1, 1]
    text = page.render(made(prompt()), [chart])
    assert parsed(text).counts["svg"] == 4
    drawing = drawings(text)["speed"]
    grid = scale(drawing)
    dot = float(drawing.findall("circle")[-1].get("cy"))
    top = svg.ticks(66)[-1]
    assert dot == pytest.approx(grid[0] + 59.5 / top * (grid[-1] - grid[0]), abs=0.06)


def entry(policy: str, kind: str, rate: float, **where: float) -> dict:
    figure = {"value": rate, "lo": rate - 5, "hi": rate + 5}
    return {"policy": policy, "kind": kind, "n_max": None, "p_min": None, "n_nodes": None,
            "tokens_per_second": figure, **where}  # fmt: skip


PLAN = {
    "schema": "mtpstats.plan/1",
    "policies": [
        entry("chain:n_max=2", "chain", 60, n_max=2, p_min=0.0),
        entry("chain:n_max=1", "chain", 55, n_max=1, p_min=0.0),
        entry("chain:n_max=2,p_min=0.5", "chain", 99, n_max=2, p_min=0.5),
        entry("none", "none", 50),
        entry("tree:[[0],[1]]", "tree", 58, n_nodes=2),
        entry("gated:n_max=2", "gated", 99, n_max=2),
    ],
}
CHECK = {
    "schema": "mtpstats.validate/1",
    "policies": [
        {"policy": policy, "measured_tokens_per_second": {"value": rate, "lo": None, "hi": None}}
        for policy, rate in (("chain:n_max=2", 57), ("chain:n_max=9", 9))
    ],
}


def test_a_plan_and_its_validation_are_drawn(tmp_path, capsys):
    for name, record in (("r", made(prompt())), ("p", PLAN), ("v", CHECK)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    r, p, v, page_ = (str(tmp_path / name) for name in ("r.json", "p.json", "v.json", "r.html"))
    assert cli.main(["report", r, "--html", page_, "--plan", p, "--validation", v]) == 0
    drawing = drawings((tmp_path / "r.html").read_text())["speed"]
    assert [c.find("title").text.split(", d")[0] for c in drawing.findall("circle")] == [
        *["chain, predicted"] * 3, *["tree, predicted"] * 2, "measured",
    ]  # fmt: skip
    assert ": 57" in drawing.findall("circle")[-1].find("title").text
    written = ["--html", page_]
    for bad in (["--plan", p], [*written, "--validation", v], [*written, "--plan", r],
                [*written, "--plan", p, "--validation", p]):  # fmt: skip
        assert cli.main(["report", r, *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    broken = {**PLAN, "policies": [{**PLAN["policies"][0], "n_max": "2"}]}
    (tmp_path / "p.json").write_text(json.dumps(broken))
    assert cli.main(["report", r, "--html", page_, "--plan", p]) == 2
    assert "policies[0].n_max is '2', expected a count" in capsys.readouterr().err


# ---- picture files


def test_a_picture_as_svg_is_one_file_that_stands_alone(tmp_path):
    charts = figures.charts(of_result(made(prompt(positions=calibrated()))))
    data = plot.picture(tmp_path / "a.SVG", charts, HARM)
    root = ElementTree.fromstring(data)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert len(root.findall(f"{space}svg")) == len(charts) == 4
    allowed = "svg", "style", "text", "title", "rect", "line", "polyline", "circle"
    assert {child.tag for child in root.iter()} == {space + tag for tag in allowed}
    assert "<script>window.harm=1" in root.find(f"{space}text").text


def test_a_picture_as_png(tmp_path):
    charts = figures.charts(of_result(made(prompt())))
    data = plot.picture(tmp_path / "a.png", charts, "cost: $5 to $9 " + HARM)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 < height


def test_pictures_that_cannot_be_are_refused(tmp_path, monkeypatch):
    charts = figures.charts(of_result(made(prompt())))
    with pytest.raises(InputError, match=r"ends in \.svg or \.png"):
        plot.picture(tmp_path / "a.jpg", charts, "")
    with pytest.raises(InputError, match="nothing to draw"):
        plot.picture(tmp_path / "a.png", [], "")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'mtpstats\[plot\]'"):
        plot.picture(tmp_path / "a.png", charts, "")


def test_the_command_writes_page_and_picture(tmp_path, capsys):
    ranks = [[100, 30], [50, 9], [25, 4], [12, 1]]
    many = counters(
        *(200, [200] * 4, [200, 100, 50, 25], [100, 50, 25, 12]),
        *(ranks, [70, 41, 21, 12], [1] * 4, [1] * 4),
    )
    results.write(tmp_path / "r.json", made(prompt(positions=many)))
    args = ["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert cli.main([*args, "--plot", str(tmp_path / "r.svg")]) == 0
    assert capsys.readouterr().out == ""
    assert "Wider rather than deeper" in parsed((tmp_path / "r.html").read_text()).text
    assert ElementTree.parse(tmp_path / "r.svg").getroot().get("role") == "img"
    assert cli.main([*args, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("figure,position")
    for bad in (["--html", "/proc/r.html"], ["--plot", str(tmp_path / "r.gif")], ["--html", ""]):
        assert cli.main([*args[:2], *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.json", "r.svg"]
