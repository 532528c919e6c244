"""Trees for real: beside their replay, plain decoding, and the linear decode of every path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archs import CASES, LATER, PROMPTS, Loaded, loaded
from sessions import EXACT, Tiny, tokens, with_eog, with_few
from test_probe import record

from mtpstats import result as results
from mtpstats import speculate
from mtpstats.branches import Chains, Coupled, Nodes
from mtpstats.errors import InputError, ModelError
from mtpstats.head import DraftSettings
from mtpstats.llama import Batch, Context, Library, Model
from mtpstats.policy import GatedSiblings, Tree
from mtpstats.probe import Prober
from mtpstats.prompts import builtin
from mtpstats.replay import PromptReplay, replay
from mtpstats.speculate import Generation, Sampling, Speculator
from mtpstats.stats import Collector
from mtpstats.trace import Trace, trace_header
from mtpstats.treedraft import TreeSpeculator

WIDE = Tree([(1,), (2,), (3,), (1, 1), (1, 2), (2, 1), (1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 1, 3)])
SMALL = Tree(WIDE.paths[:6])
LOPSIDED = Tree([(2,), (3,), (2, 1), (2, 1, 1), (2, 1, 1, 2)])
GATE = GatedSiblings(4, p1_max=0.8, p2_min=0.05, p3_min=0.1)
SURE = GatedSiblings(3, 0.3, 1, p1_max=0.9, p2_min=0.02)
LEAFY = Tree([(1,), (2,), (2, 1), (2, 1, 1)])
KEEN = GatedSiblings(4, 0.2, 3, p1_max=0.9, p2_min=0.02)
BUSHY = Tree([*((rank,) for rank in range(1, 9)), *((rank, 1) for rank in range(1, 9))])
POLICIES = (WIDE, LOPSIDED, Tree.chain(4), GATE, SURE)

IMPOSSIBLE = {
    "qwen3next": "qwen3next cannot verify a tree: its memory takes no token back",
    "deepseek4": "deepseek4 cannot verify a tree: its sequences can only be copied whole",
}
CAPABLE = [name for name in CASES if name not in IMPOSSIBLE]
Policy = Tree | GatedSiblings


def traced(one: Loaded, prompts: list[list[int]], n: int, sampling: Sampling) -> Trace:
    """Record the texts."""
    prober = Prober(4, together=5)
    with one.speculator(draft=DraftSettings(2), prober=prober, sampling=sampling) as recorder:
        texts = [record(recorder, prober, prompt, n) for prompt in prompts]
    heads, blocks = prober.head_kind, prober.n_blocks
    return Trace(
        trace_header(depth=prober.depth, every=1, n_predict=n, heads=heads, n_blocks=blocks), texts
    )


def drafted(
    one: Loaded, policy: Policy, prompts: list[list[int]], n: int, **options: Any
) -> list[Generation]:
    """Run a tree for real."""
    with TreeSpeculator(
        one.model, draft=DraftSettings.branching(policy), draft_model=one.draft,
        collector=Collector(), n_ctx=256, **EXACT, **options,
    ) as live:  # fmt: skip
        return live.generate_all(prompts, n)


ARRAYS = ("drafted", "reached", "accepted", "rank", "miss", "censored", "stopped", "stopped_hit",
          "stopped_reached")  # fmt: skip
NUMBERS = ("verifications", "discarded", "unresolved", "invalid", "cut_tokens", "dropped_drafts",
           "dropped_tokens")  # fmt: skip


def agree(live: Generation, replayed: PromptReplay, text: list[int]) -> bool:
    """True when everything is equal; fails unless the two part at a near tie."""
    mine = [(int(a), int(b)) for a, b in replayed.verifications]
    for i, (a, b) in enumerate(zip(mine, live.verifications, strict=False)):
        if a != b:
            assert replayed.near_tie is not None, (i, a, b)
            assert i >= replayed.near_tie, (i, a, b)
            return False
    assert mine == live.verifications
    assert live.tokens == text[: len(live.tokens)]
    assert live.stop == replayed.stop
    ours, theirs = live.snapshot, replayed.snapshot
    assert ours is not None
    assert live.trees is not None
    assert live.trees.nodes == live.drafted == sum(nodes for nodes, _ in mine)
    assert live.trees.levels == ours.drafted.sum() or live.stop == "eog"
    if replayed.near_tie is not None:
        return True
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)
    for name in NUMBERS:
        assert getattr(ours, name) == getattr(theirs, name), name
    np.testing.assert_allclose(ours.sum_p, theirs.sum_p, atol=1e-3)
    np.testing.assert_allclose(ours.sum_p_top10, theirs.sum_p_top10, atol=1e-3)
    return True


def compare(
    one: Loaded,
    texts: tuple[str, ...],
    policies: tuple[Policy, ...],
    n: int,
    sampling: Sampling | None = None,
) -> None:
    """Record, replay, and run every policy; the text is that of plain decoding."""
    drawn = sampling or Sampling()
    prompts = [one.model.tokenize(text) for text in texts]
    trace = traced(one, prompts, n, drawn)
    with one.speculator(draft=None, sampling=drawn) as plain:
        expected = [run.tokens for run in plain.generate_all(prompts, n + trace.depth)]
    same = []
    for policy in policies:
        if isinstance(policy, Tree) and policy.depth > trace.depth:
            policy = Tree(path for path in policy.paths if len(path) <= trace.depth)
        found = replay(trace, policy)
        runs = drafted(one, policy, prompts, n, sampling=drawn)
        for run, mine, text in zip(runs, found.prompts, expected, strict=True):
            same.append(agree(run, mine, text))
    assert sum(same) >= 0.8 * len(same)


@pytest.mark.parametrize("name", CAPABLE)
def test_every_memory_and_head_drafts_what_the_replay_says(
    lib: Library, tiny: Tiny, name: str
) -> None:
    with loaded(lib, tiny, CASES[name]) as one:
        compare(one, PROMPTS[1:3], POLICIES[:2], 24)
        compare(one, PROMPTS[:1], POLICIES[3:4], 24)


@pytest.mark.parametrize("name", ["glm4moe", "hy_v3-chain", "gemma4-assistant", "qwen35", "step35"])
def test_all_kinds_of_trees_also_with_a_sampled_target(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as one:
        compare(one, PROMPTS[:2], POLICIES, 30)
        compare(one, PROMPTS[1:2], POLICIES[::2], 30, Sampling(temp=0.8, seed=3))


@pytest.mark.parametrize("name", LATER)
def test_an_architecture_of_later_versions(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, LATER[name]) as one:
        if not one.model.has_mtp:
            with pytest.raises(ModelError, match="cannot draft with MTP"):
                drafted(one, WIDE, [[1, 2]], 4)
            return
        compare(one, PROMPTS[1:2], POLICIES[:4], 24)


def test_the_built_in_model(model: Model) -> None:
    """F16 weights and a long text: near ties are what may differ."""
    ids = [model.tokenize(prompt.text) for prompt in builtin()[:3]]
    sampling = Sampling(temp=0.7)
    options: dict[str, Any] = {"n_threads": 1, "n_ctx": 256, "sampling": sampling}
    prober = Prober(4)
    with Speculator(model, draft=DraftSettings(3), prober=prober, **options) as recorder:
        texts = [record(recorder, prober, prompt, 48) for prompt in ids]
    trace = Trace(trace_header(depth=4, every=1, n_predict=48), texts)
    same = []
    for policy in (WIDE, SURE):
        found = replay(trace, policy).prompts
        with TreeSpeculator(
            model, draft=DraftSettings.branching(policy), collector=Collector(), **options
        ) as live:
            for prompt, mine, text in zip(ids, found, texts, strict=True):
                run = live.generate(prompt, 48)
                same.append(agree(run, mine, text.tokens.tolist()[len(prompt) :]))
    assert sum(same) >= 4


@pytest.mark.parametrize("name", ["glm4moe", "qwen35", "hy_v3-chain", "gemma4-assistant"])
def test_where_a_text_ends(lib: Library, tiny: Tiny, tmp_path: Path, name: str) -> None:
    """With a token of its own: on a path, after one, at a leaf; and where the context does."""
    case = CASES[name]
    with loaded(lib, tiny, case) as one:
        prompt = one.model.tokenize(PROMPTS[1])
        with one.speculator(draft=None) as plain:
            text = plain.generate(prompt, 16).tokens
        long = [tokens(225, 3)]
        trace = traced(one, long, -1, Sampling())
        for policy in (SMALL, GATE, BUSHY):
            (run,) = drafted(one, policy, long, -1)
            assert run.stop == "context"
            assert len(run.tokens) == 256 - 225 + 1
            (mine,) = replay(trace, policy).prompts
            agree(run, mine, trace.prompts[0].tokens.tolist()[225:])
        path = one.model.path
    for place in range(3, 8):
        made = with_eog(path, tmp_path / f"{place}.gguf", text[place])
        with loaded(lib, tiny, case, made) as ends:
            compare(ends, PROMPTS[1:2], (SMALL, GATE), 16)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_what_a_budget_cuts(lib: Library, tiny: Tiny, name: str) -> None:
    """It cuts no leaf that it leaves in the tree, and a draft only when n_min has judged it."""
    with loaded(lib, tiny, CASES[name]) as one:
        for n in (2, 3, 4, 5):
            compare(one, PROMPTS[:2], (LEAFY, KEEN), n)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_fewer_candidates_than_ranks(lib: Library, tiny: Tiny, tmp_path: Path, name: str) -> None:
    """All but two tokens have no logit, of the target as of the head."""
    made = with_few(tiny(CASES[name].arch, f32=True), tmp_path / "few.gguf", (70, 71))
    always = GatedSiblings(3, p1_max=1.0, p2_min=0.0, p3_min=0.0)
    with loaded(lib, tiny, CASES[name], made) as one:
        compare(one, PROMPTS[:2], (*POLICIES, always), 16)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35", "gemma4-assistant"])
def test_a_prompt_of_one_token(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as one:
        compare(one, ("x",), (SMALL, GATE), 12)


def test_a_head_without_a_finite_logit_drafts_nothing(lib: Library, tiny: Tiny) -> None:
    with Model(lib, tiny("glm4moe", f32=True, nan_in="blk.2.nextn.eh_proj.weight")) as model:
        one = Loaded(CASES["glm4moe"], model, None)
        prompt = model.tokenize(PROMPTS[0])
        with one.speculator(draft=None) as plain:
            expected = plain.generate(prompt, 8)
        for policy in (WIDE, GATE):
            (run,) = drafted(one, policy, [prompt], 8)
            assert set(run.verifications) == {(0, 0)}
            assert run.tokens[:8] == expected.tokens[:8]
            assert run.snapshot is not None
            assert run.snapshot.invalid == len(run.verifications)


def test_a_target_without_a_finite_logit_ends_the_text(lib: Library, tiny: Tiny) -> None:
    with Model(lib, tiny("glm4moe", f32=True, nan_in="output_norm.weight")) as model:
        one = Loaded(CASES["glm4moe"], model, None)
        for policy in (WIDE, GATE):
            (run,) = drafted(one, policy, [model.tokenize(PROMPTS[0])], 8)
            assert (run.stop, run.tokens, run.verifications) == ("nan", [], [])
            assert run.snapshot is not None
            assert (run.snapshot.invalid, run.snapshot.unresolved) == (1, 0)


# ---- logits


def random_tree(rng: np.random.Generator) -> Tree:
    """Up to 32 nodes, up to 8 deep, ranks up to 4."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(int(rng.integers(1, 33))):
        parent = paths[int(rng.integers(max(0, len(paths) - 8), len(paths)))]
        path = (*parent, int(rng.integers(1, 5)))
        if len(path) <= 8 and path not in paths:
            paths.append(path)
    return Tree(paths[1:])


class Linear:
    """A context that decodes one path after another, each from a copy of the text."""

    def __init__(self, model: Model) -> None:
        self.context = Context(
            model, n_ctx=512, n_seq_max=2, kv_unified=True, swa_full=True, n_ubatch=64, **EXACT
        )
        self.batch = Batch(64)

    def decode(self, ids: list[int], start: int, seq: int) -> list[np.ndarray]:
        self.batch.clear()
        self.batch.extend(ids, start, seq, "all")
        self.context.decode(self.batch)
        return [self.context.logits(i).copy() for i in range(len(ids))]

    def path(self, ids: list[int], start: int) -> list[np.ndarray]:
        self.context.seq_rm(1)
        self.context.seq_cp(0, 1)
        return self.decode(ids, start, 1)


def random_trees(model: Model, n: int, seed: int) -> float:
    """Verify ``n`` trees on a growing text; return how far logits are off at most.

    Each tree begins where a random node of the one before ended.
    """
    rng = np.random.default_rng(seed)
    kind = Chains if model.is_hybrid else Coupled
    options = kind.options(32, 8)
    worst = 0.0
    with Context(model, n_ctx=512, n_ubatch=320, **EXACT, **options) as target:
        layout, linear = kind(target, 32, 32, 8), Linear(model)
        slot, start = Slot0(), 0
        text: list[int] = []
        for _ in range(n):
            if not text or start > 120:
                layout.clear(slot)  # type: ignore[arg-type]
                linear.context.clear()
                text = tokens(12, int(rng.integers(1 << 30)))
                start = len(text) - 1
                batch = Batch(16)
                batch.extend(text[:-1], 0)
                target.decode(batch)
                linear.decode(text[:-1], 0, 0)
            nodes = Nodes(random_tree(rng).paths)
            ids = [text[-1], *rng.integers(0, 500, nodes.n).tolist()]
            slot.n_past = start
            index = layout.place(slot, nodes, ids)  # type: ignore[arg-type]
            target.decode(layout.batch)
            for leaf in nodes.leaves:
                path = nodes.path(leaf)
                rows = linear.path([ids[node] for node in path], start)
                for node, row in zip(path, rows, strict=True):
                    worst = max(worst, float(np.abs(target.logits(index[node]) - row).max()))
            kept = int(rng.integers(0, nodes.n + 1))
            layout.settle(nodes, kept, start)
            path = [ids[node] for node in nodes.path(kept)]
            linear.decode(path, start, 0)
            start += len(path)
            text += [*path[1:], int(rng.integers(0, 500))]
            assert target.seq_pos_max(0) == start - 1
        linear.context.close()
    return worst


class Slot0:
    seq, n_past = 0, 0


# Every memory that can hold a tree.
KINDS = ("glm4moe", "deepseek2", "step35", "deepseek32", "qwen35", "nemotron_h_moe", "bailingmoe3")
N_TREES = 143  # 1,001 in all


@pytest.mark.parametrize("arch", KINDS)
def test_logits_of_random_trees_are_those_of_their_paths(
    lib: Library, tiny: Tiny, arch: str
) -> None:
    with Model(lib, tiny(arch, f32=True)) as model:
        assert random_trees(model, N_TREES, seed=KINDS.index(arch)) < 1e-4


def test_logits_where_an_activation_is_a_table_of_f16(lib: Library, tiny: Tiny) -> None:
    """Chains are as far off there."""
    with Model(lib, tiny("gemma4", f32=True)) as model:
        assert random_trees(model, 40, seed=7) < 5e-3


# ---- what is refused, and the command line


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_memory_that_cannot_branch(lib: Library, tiny: Tiny, name: str) -> None:
    with loaded(lib, tiny, CASES[name]) as one, pytest.raises(InputError, match=IMPOSSIBLE[name]):
        drafted(one, WIDE, [[1, 2]], 4)


def test_what_does_not_fit_is_refused(lib: Library, tiny: Tiny) -> None:
    def refused(name: str, policy: Policy, words: str, **options: Any) -> None:
        with loaded(lib, tiny, CASES[name]) as one, pytest.raises(InputError, match=words):
            drafted(one, policy, [[1, 2]], 4, **options)

    refused("hy_v3-chain", Tree.chain(4), "the tree is 4 deep, this model has heads for 3")
    refused("glm4moe", WIDE, "n_batch is 10; a tree of 10 nodes makes 11 rows", n_batch=10)
    refused("qwen35", WIDE, "n_ubatch is 16; 5 branches of 3 tokens and one more each make 20 rows",
            n_ubatch=16)  # fmt: skip
    refused("glm4moe", WIDE, "one text at a time", n_parallel=2)
    refused("glm4moe", Tree(), "the tree has no nodes")
    some = range(1, 8)
    full = [*((a,) for a in some), *((a, b) for a in some for b in some),
            *((a, b, c) for a in some for b in some for c in some)]  # fmt: skip
    refused("glm4moe", Tree(full), "the tree has 343 leaves; 256 are possible")
    with loaded(lib, tiny, CASES["glm4moe"]) as one:
        with pytest.raises(InputError, match="need a TreeSpeculator"):
            one.speculator(draft=DraftSettings.branching(WIDE))
        with pytest.raises(InputError, match="needs a tree"):
            TreeSpeculator(one.model, draft=DraftSettings(2))
        drafted(one, WIDE, [[1, 2]], 4, n_batch=11)
    with loaded(lib, tiny, CASES["qwen35"]) as one:
        drafted(one, WIDE, [[1, 2]], 4, n_ubatch=20)


def test_a_driver_that_is_refused_leaves_no_context_open(
    lib: Library, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Context] = []

    class Seen(Context):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(speculate, "Context", Seen)
    with loaded(lib, tiny, CASES["hy_v3-chain"]) as one:
        with pytest.raises(InputError, match="heads for 3"):
            drafted(one, Tree.chain(4), [[1, 2]], 4)
        assert [context.closed for context in made] == [True] * 3


def run(*args: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtpstats", *map(str, args)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def test_the_command_line_runs_the_best_tree_of_a_trace(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.trace", tmp_path / "r.json"
    texts = ("-p", "import ", "-p", "def main", "-t", "1", "-n", "24")
    run("record", *texts, "--no-cost", "--depth", "4", "-o", trace)
    shown = run("bench", *texts, "--tree", "best:6", "--trace", trace, "--baseline", "-o", out)
    result = results.read(out)
    tree = result["settings"]["tree"]
    assert {key: tree[key] for key in ("nodes", "memory")} == {"nodes": 6, "memory": "chains"}
    assert tree["rows"] == tree["leaves"] * (1 + tree["depth"])
    again = run("replay", trace, "--policy", tree["policy"], "--json")
    (replayed,) = json.loads(again.stdout)["policies"]
    for prompt, mine in zip(result["prompts"], replayed["prompts"], strict=True):
        if mine["near_tie"] is None:
            pairs = mine["verifications"]
            assert prompt["tree"]["nodes"] == prompt["drafted"] == sum(n for n, _ in pairs)
            assert prompt["accepted"] == sum(n for _, n in pairs)
            # Every pass is as wide as the tree at its limit of depth.
            assert prompt["tree"]["rows"] <= tree["rows"] * prompt["verifications"]
            assert prompt["tree"]["levels"] == sum(prompt["positions"]["drafted"])
    nodes, accepted = (result["total"][key] for key in ("drafted", "accepted"))
    assert result["total"]["tree"]["nodes"] == nodes
    assert f"{accepted} of {nodes}, " in shown.stdout
    assert f"{nodes - accepted} wasted" in shown.stdout
    assert "\ntree     6 nodes, " in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    # The same tree, spelled out, and a gate.
    bare = ("-p", "import ", "-t", "1", "-n", "8", "--json")
    spelled = json.loads(run("bench", *bare, "--tree", tree["policy"]).stdout)
    assert spelled["settings"]["tree"] == tree
    gated = json.loads(run("bench", *bare, "--tree-gate", "n_max=3,p2_min=0.1").stdout)
    assert gated["settings"]["tree"]["policy"] == "gated:n_max=3,p2_min=0.1"
    assert gated["settings"]["n_max"] == 3
    said = run("bench", *bare, "-p", "x", "-np", "2", "--tree", "[[0]]", code=2)
    assert said.stderr.count("\n") == 1
    assert "one text at a time" in said.stderr
