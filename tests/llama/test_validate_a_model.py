"""Plan and validate on the built-in model: what is run is what was replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest

from mtpstats.llama import Library
from mtpstats.policy import Chain, GatedSiblings, Tree, parse_policy
from mtpstats.replay import totals
from mtpstats.trace import Trace

PROMPTS = ("The lighthouse keeper", "def total(items):", "3, 6, 9, 12,")


def mtpstats(*args: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "mtpstats", *map(str, args)],
        stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=300,
        env={**os.environ},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(lib: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A greedy trace of 3 prompts with 40 tokens each, 4 deep."""
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    words = [word for prompt in PROMPTS for word in ("-p", prompt)]
    done = mtpstats("record", "-o", path, "-t", 1, "-n", 40, "--depth", 4, "--temp", 0, *words)
    assert done.returncode == 0, done.stderr
    return path


def record_of(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_a_plan_measures_or_takes_costs_and_says_what_to_do(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cost.json"
    measured = record_of(mtpstats("plan", run, "--measure", "--save-cost", kept, "--json"))
    again = record_of(mtpstats("plan", run, "--cost", kept, "--json"))
    for one, other in zip(measured["policies"], again["policies"], strict=True):
        assert one["policy"] == other["policy"]
        # A cost file has seven digits.
        speeds = [p["tokens_per_second"]["value"] for p in (one, other)]
        assert speeds[0] == pytest.approx(speeds[1], rel=1e-5)
    assert measured["costs"]["model"]["sha256"] == Trace.load(run).header["model"]["sha256"]
    assert len(measured["costs"]["verify"]) > 10
    none = measured["policies"][measured["none"]]
    assert none["tokens_per_second"]["value"] > 0


def test_what_is_run_is_what_was_replayed(run: Path) -> None:
    found = record_of(mtpstats("validate", run, "--top", 2, "--repeat", 1, "--json"))
    policies = [one["policy"] for one in found["policies"]]
    assert policies[0] == "none"
    assert len(policies) in (4, 5)  # the defaults may be among the two fastest
    # And what branches, last, with a sentence of its own.
    tree = parse_policy(policies[-1])
    assert isinstance(tree, Tree | GatedSiblings)
    assert tree.leaves > 1
    told = found["tree"]
    assert told["policy"] == len(policies) - 1
    assert told["fastest_other"] < told["policy"]
    assert told["verdict"].startswith("Branching ")
    assert "chain:n_max=3" in policies
    for one in found["policies"]:
        assert one["prompts_as_replayed"] + len(one["prompts_different"]) == 3
        assert one["measured_tokens_per_second"]["value"] > 0
    # A near tie in one of the prompts is possible, in all of them it is not.
    assert all(one["prompts_as_replayed"] >= 2 for one in found["policies"])


def test_the_same_through_llama_server(run: Path, lib: Library) -> None:
    server = oracle.tool(lib.prefix, "llama-server")
    done = mtpstats("validate", run, "--top", 1, "--repeat", 1, "--server", server, "--json")
    found = record_of(done)
    trace = Trace.load(run)
    for one in found["policies"]:
        told = one["llama_server"]
        if one["flags"] is None:
            assert told is None  # a tree: llama.cpp runs chains
            continue
        assert told["tokens_per_second"]["value"] > 0
        if one["policy"] == "none":
            assert (told["drafted"], told["accepted"]) == (0, 0)
            continue
        # The server drafts only after a first token, and stops at n_predict: two drafts a prompt.
        policy = parse_policy(one["policy"])
        assert isinstance(policy, Chain)
        ours, margin = totals(trace, policy), 2 * policy.n_max * len(PROMPTS)
        assert told["drafted"] == pytest.approx(int(ours.drafted.sum()), abs=margin)
        assert told["accepted"] == pytest.approx(int(ours.accepted.sum()), abs=margin)
        assert one["flags"][:3] == ["--spec-type", "draft-mtp", "--spec-draft-n-max"]


def test_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    done = mtpstats("validate", run, "-m", other)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"mtpstats: error: ")
    assert done.stderr.count(b"\n") == 1


def test_a_server_that_cannot_start_is_one_line(run: Path, tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho error: out of order\nexit 4\n")
    program.chmod(0o755)
    done = mtpstats(
        "validate", run, "--top", 1, "--repeat", 1, "--n-prompts", 1, "--server", program
    )
    assert done.returncode == 1
    assert done.stderr == b"mtpstats: error: server ended with code 4: error: out of order\n"
