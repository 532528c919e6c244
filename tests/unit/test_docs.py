"""Commands in the documents are commands of the program; links lead somewhere."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from mtpstats import Snapshot, cli
from mtpstats.export import PrometheusMetrics

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def commands(text: str) -> list[list[str]]:
    """Words of every command line in a fenced block that starts mtpstats."""
    found = []
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            start = re.search(r"(?:^|\| |/)mtpstats (.*)", line)
            if start is not None and not line.startswith(" "):
                words = re.split(r"\s[#|>]", start[1])[0]
                found.append(shlex.split(words.replace("[", "").replace("]", "")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_and_take_their_options(page):
    for name, *words in commands(page.read_text()):
        if name == "COMMAND":
            continue
        assert name in cli.COMMANDS, f"mtpstats {name}"
        command = import_module(f"mtpstats.cli.{cli.module(name)}").command
        options = [param for param in command.params if isinstance(param, click.Option)]
        known = {"-h", "--help"}.union(*(option.opts + option.secondary_opts for option in options))
        for word in words:
            option = word.split("=")[0]
            if re.match(r"-{1,2}[a-z]", option):
                assert option in known, f"mtpstats {name} {option}"


def test_there_are_commands_to_look_at():
    found = [name for page in PAGES for name, *_ in commands(page.read_text())]
    assert {"bench", "report", "compare", "merge", "import", "info"} <= set(found)


def test_every_counter_and_figure_is_described():
    files = (ROOT / "docs" / "files.md").read_text()
    for name in Snapshot().to_dict():
        assert f"`{name}`" in files
    attaching = (ROOT / "docs" / "attaching.md").read_text()
    for family in PrometheusMetrics().collect():
        assert f"`{family.name}_total`" in attaching


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            slugs = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert heading in slugs, target
