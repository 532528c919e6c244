"""``mtpstats replay``: what it prints, as JSON too, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made import RANKS, by_chance, prompt

from mtpstats import cli
from mtpstats.policy import Tree
from mtpstats.report.replay import draw
from mtpstats.trace import trace_header
from mtpstats.tracefile import TraceWriter


def save(path, *prompts, **header):
    with TraceWriter(path, trace_header(depth=prompts[0].depth, **header)) as writer:
        for one in prompts:
            writer.append(one)
    return str(path)


@pytest.fixture
def by_hand(tmp_path):
    return save(
        tmp_path / "hand.trace",
        prompt(RANKS, depth=3, n_prompt=2),
        model={"file": "a\x1b[31m.gguf", "architecture": "qwen35"},
        sampling={"temp": 0.7},
    )


@pytest.fixture
def by_luck(tmp_path):
    prompts = [by_chance(i, n_generated=60, depth=5, name=f"p{i}") for i in range(4)]
    return save(tmp_path / "luck.trace", *prompts, n_predict=50)


def output(capsys, *args):
    assert cli.main(["replay", *args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error(capsys, *args):
    assert cli.main(["replay", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", captured.err)
    return captured.err


# ---- text


def test_policies_by_hand(by_hand, capsys):
    shown = output(capsys, by_hand, "--policy", "chain:n_max=2", "--policy", "tree:[[0],[1],[1,0]]")
    assert "model    a\\x1b[31m.gguf, qwen35\n" in shown
    assert "trace    1 prompt, 8 tokens, 8 roots, depth 3\n" in shown
    assert "target   temperature 0.7\n" in shown
    # 3 passes, 8 tokens, 5 of 6 nodes; then 3 passes, 7 tokens, 4 of 9 nodes in 6 steps
    assert re.search(r"\n +3  2\.67 \(\S+ to \S+\) +83\.3 +2\.00 +2\.00  chain:n_max=2\n", shown)
    assert re.search(r"\n +3  2\.33 \(\S+ to \S+\) +44\.4 +3\.00 +2\.00  tree:\[\[0\],", shown)
    assert "Starts: the roots at which each policy starts" in shown


def test_the_head_by_hand(by_hand, capsys):
    shown = output(capsys, by_hand, "--starts", "uniform")
    assert "Starts: every root once" in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r"  [123] ", line)]
    # roots 0 to 5 count: 4 of 6 right, 5 of 6 within two. After rank 1 the first is right at
    # roots 0, 5, 6, not at 1 and 3, unknown at 7; after rank 2 at root 2
    assert [row[:2] for row in rows] == [["1", "6"], ["2", "4"], ["3", "2"]]
    assert rows[0][2] == "66.7"
    assert rows[0][4] == "83.3"
    assert rows[0][-3:] == ["60.0", "100.0", "75.0"]


def test_default_policies(by_luck, capsys):
    shown = output(capsys, by_luck)
    assert re.findall(r"chain:n_max=\d+$", shown, re.MULTILINE) == [
        "chain:n_max=3", "chain:n_max=5",
    ]  # fmt: skip


def test_trees_are_drawn_and_given_as_choices(by_luck, capsys):
    shown = output(capsys, by_luck, "--trees", "4", "--trees", "12")
    choices = re.findall(r"choices (\[\[.*?\]\])", shown, re.DOTALL)
    assert [len(json.loads(one)) for one in choices] == [4, 12]
    assert "\n*\n+- 1  " in shown
    assert re.search(r"\n    4 ", shown)
    assert "on unseen prompts" in shown


def test_it_fits_a_terminal(by_luck, capsys):
    shown = output(
        capsys, by_luck, "--policy", "gated:n_max=5,p_min=0.123456,p1_max=0.654321,p2_min=0.2",
        "--policy", str(Tree.chain(5)), "--trees", "30",
    )  # fmt: skip
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.isascii()
    assert not re.search(r" $", shown, re.MULTILINE)


def test_a_cut_file_is_replayed_and_says_so(by_luck, tmp_path, capsys):
    path = tmp_path / "cut.trace"
    path.write_bytes(Path(by_luck).read_bytes()[:-10])
    assert "! the file is not complete: prompt 4 is cut off" in " ".join(
        output(capsys, str(path)).split()
    )
    assert json.loads(output(capsys, str(path), "--json"))["trace"]["prompts"] == 3


def test_an_empty_trace(tmp_path, capsys):
    path = tmp_path / "empty.trace"
    TraceWriter(path, trace_header(depth=3)).close()
    assert "0 prompts" in output(capsys, str(path), "--trees", "3")
    assert json.loads(output(capsys, str(path), "--json", "--trees", "3"))["policies"]


def test_draw():
    tree = Tree([(1,), (2,), (1, 1), (1, 2), (1, 2, 1)])
    assert draw(tree, {(1,): "60 %"}) == (
        "*\n"
        "+- 1  60 %\n"
        "|  +- 1\n"
        "|  `- 2\n"
        "|     `- 1\n"
        "`- 2\n"
    )  # fmt: skip
    assert draw(Tree()) == "*\n"


# ---- JSON


def test_json_by_hand(by_hand, capsys):
    found = json.loads(output(capsys, by_hand, "--json", "--policy", "chain:n_max=2"))
    assert found["schema"] == "mtpstats.replay/1"
    assert found["trace"] == {
        "prompts": 1, "tokens": 8, "roots": 8, "depth": 3, "width": 0, "every": 1,
        "incomplete": None,
    }  # fmt: skip
    (policy,) = found["policies"]
    assert policy["policy"] == "chain:n_max=2"
    assert (policy["tokens"], policy["verifications"]) == (8, 3)
    assert policy["rows"] == [0, 0, 0, 3]
    assert policy["widths"] == [0, 6]
    assert policy["positions"]["accepted"][:3] == [3, 2, 0]
    assert policy["prompts"] == [
        {
            "id": "made", "tokens": 8, "verifications": [[2, 2], [2, 1], [2, 2]],
            "near_tie": None, "stop": "trace",
        }
    ]  # fmt: skip
    assert found["head"]["positions"][0]["ranks"][:2] == [4, 1]
    assert found["head"]["positions"][0]["miss"] == 1
    after = found["head"]["continuations"][1]
    assert after == {"position": 0, "rank": 2, "cases": 1, "hits": 1}


def test_limits_are_those_asked_for(by_hand, capsys):
    found = json.loads(output(capsys, by_hand, "--json", "--policy", "chain:n_max=3", "-n", "3"))
    assert found["policies"][0]["prompts"][0]["verifications"] == [[2, 2], [3, 1]]
    found = json.loads(output(capsys, by_hand, "--json", "--policy", "chain:n_max=3", "-c", "6"))
    assert found["policies"][0]["prompts"][0]["verifications"] == [[3, 2], [0, 0], [0, 0]]


# ---- refusals


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "wide"], "its kind is none of"),
        (["--policy", "chain:n_max=9"], "record with --depth 9"),
        (["--policy", "chain:n_max=3", "-n", "51"], "the trace holds 50 tokens"),
        (["--policy", "adaptive:n_max=3", "--starts", "uniform"], "has no uniform starts"),
        (["--trees", "0"], "0 is not in the range 1 to 256"),
        (["--starts", "some"], "'some' is not one of"),
    ],
)
def test_bad_usage_is_one_line(args, words, by_luck, capsys):
    assert words in error(capsys, by_luck, *args)


def test_bad_files_are_one_line(tmp_path, capsys):
    assert "none.trace: cannot be read" in error(capsys, str(tmp_path / "none.trace"))
    (tmp_path / "x.trace").write_text("x")
    assert "x.trace: not a trace of mtpstats" in error(capsys, str(tmp_path / "x.trace"))
    assert "Missing argument 'TRACE'" in error(capsys)
    assert "the file name is empty" in error(capsys, "")


def test_every_other_root_is_for_uniform_starts_only(tmp_path, capsys):
    path = save(tmp_path / "e.trace", by_chance(1, every=2), every=2)
    assert "--starts uniform" in error(capsys, path)
    assert "every 2 positions" in output(capsys, path, "--starts", "uniform")
    assert "record without --every" in error(capsys, path, "--starts", "uniform", "--trees", "2")


def test_it_runs_without_libllama(by_luck):
    code = (
        "import sys; from mtpstats.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or any(name.startswith('mtpstats.llama') for name in sys.modules))"
    )
    subprocess.run(
        [sys.executable, "-c", code, "replay", by_luck], check=True, stdout=subprocess.DEVNULL
    )
