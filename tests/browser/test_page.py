"""The HTML report in a real browser: it renders, runs nothing, loads nothing."""

import html
from collections.abc import Iterator

import pytest
from chromium import Browser
from test_report_page import HARM, calibrated, hostile
from test_report_text import made, prompt

from mtpstats.report import page

pytestmark = pytest.mark.browser

FIGURES = ["chart-acceptance", "chart-ranks", "chart-calibration", "chart-gains"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def opened(browser: Browser, tmp_path, text: str) -> Browser:
    path = tmp_path / "report.html"
    path.write_text(text)
    browser.open(path)
    return browser


def complaints(browser: Browser) -> list:
    logged = [e for e in browser.heard("Log.entryAdded") if e["entry"]["level"] != "info"]
    return [*browser.heard("Runtime.exceptionThrown"), *logged,
            *browser.heard("Runtime.consoleAPICalled")]  # fmt: skip


def requests(browser: Browser) -> list[str]:
    return [event["request"]["url"] for event in browser.heard("Network.requestWillBeSent")]


def test_it_renders_with_its_figures(browser, tmp_path):
    opened(browser, tmp_path, page.render(made(prompt(positions=calibrated()))))
    assert complaints(browser) == []
    assert len(requests(browser)) == 1
    assert browser.value("document.title") == "mtpstats: m.gguf"
    assert browser.value("[...document.querySelectorAll('svg')].map(e => e.id)") == FIGURES
    for name in FIGURES:
        box = f"document.getElementById('{name}').getBoundingClientRect()"
        assert browser.value(f"{box}.width") > 300
        assert browser.value(f"{box}.height") > 200
    # every mark lies inside its drawing, and lines have a colour
    outside = """[...document.querySelectorAll('svg')].flatMap(s => {
        const f = s.getBoundingClientRect();
        return [...s.querySelectorAll('circle,rect,line,text')].filter(e => {
            const b = e.getBoundingClientRect();
            return b.left < f.left - 1 || b.right > f.right + 1 || b.top < f.top - 1
                || b.bottom > f.bottom + 1;
        }).map(e => s.id + ': ' + e.outerHTML); })"""
    assert browser.value(outside) == []
    stroke = "getComputedStyle(document.querySelector('polyline.s0')).stroke"
    assert browser.value(stroke) == "rgb(9, 105, 218)"
    assert "Cannot tell deeper from wider" in browser.value("document.body.innerText")
    # wide tables scroll in their own box, the page does not
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")


def test_dark_and_paper(browser, tmp_path):
    opened(browser, tmp_path, page.render(made(prompt())))
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('svg text')).fill"
    seen = {}
    for medium, scheme in (("screen", "light"), ("screen", "dark"), ("print", "dark")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.send("Emulation.setEmulatedMedia", media=medium, features=features)
        seen[medium, scheme] = browser.value(ground), browser.value(ink)
    browser.send("Emulation.setEmulatedMedia", media="", features=[])
    assert seen["screen", "light"] == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    assert seen["screen", "dark"] == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")
    assert seen["print", "dark"] == seen["screen", "light"]


def test_nothing_hostile_runs(browser, tmp_path):
    opened(browser, tmp_path, page.render(hostile()))
    assert browser.value("window.harm") is None
    assert browser.value("document.querySelectorAll('script,img,iframe,object,a').length") == 0
    assert complaints(browser) == []
    assert len(requests(browser)) == 1
    assert HARM[:20] in browser.value("document.title")
    assert browser.value("document.querySelectorAll('svg').length") == 3


def test_these_tests_would_notice(browser, tmp_path):
    # the same page without its escapes and its policy does run what is in it
    text = html.unescape(page.render(hostile())).replace("Content-Security-Policy", "x")
    opened(browser, tmp_path, text)
    assert browser.value("window.harm") == 1
    assert len(requests(browser)) > 1
    # and with its policy it is stopped, and says so
    opened(browser, tmp_path, html.unescape(page.render(hostile())))
    assert browser.value("window.harm") is None
    assert complaints(browser) != []
