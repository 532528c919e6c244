"""Hostile model files, prompts and options: no signal, no traceback, no hang, one line of error.

Most run in forked children (``forkserver``), some in processes of their own. What a mutation does
to a file is in ``mutations``; those that were fatal before there was a check are in ``deadly``.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mutations
import pytest
from archs import HEAD, TRUNK
from deadly import DEADLY
from forkserver import ForkServer, Outcome
from ggufparts import key_of, parse
from sessions import BUILTIN

from mtpstats.errors import ModelError
from mtpstats.llama import Library, Model, gguf
from mtpstats.speculate import DraftSettings, Speculator

TIMEOUT = 20.0
BENCH = ("bench", "-p", "the time of é <|end|>", "-n", "4", "-t", "1")


@dataclass(frozen=True)
class Base:
    """A sound tiny model and how many mutations of it are drawn.

    ``target``: architecture and options of the model that it is only the head of; ``head``: those
    of its own head, in a file that stays sound. Without an ``arch``: the built-in model.
    """

    count: int
    arch: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    target: tuple[str, dict[str, Any]] | None = None
    head: tuple[str, dict[str, Any]] | None = None


BASES = {
    "built-in": Base(30),
    "hybrid": Base(70, "qwen35"),
    "Mamba 2": Base(45, "nemotron_h_moe"),
    "delta attention": Base(45, "bailingmoe3"),
    "attention": Base(50, "glm4moe"),
    "SPM": Base(50, "glm4moe", {"spm": True}),
    "windows, chain": Base(50, "step35", {"n_nextn": 3}),
    "windows": Base(45, "cohere2moe"),
    "latent": Base(45, "deepseek2"),
    "sparse": Base(30, "deepseek32"),
    "compressed": Base(45, "deepseek4"),
    "shared, target": Base(25, "gemma4", head=("gemma4-assistant", {})),
    "shared, head": Base(25, "gemma4-assistant", target=("gemma4", {})),
    "head alone": Base(25, "hy_v3", {"only": HEAD}, target=("hy_v3", {"without": TRUNK})),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ForkServer]]:
    with ForkServer(timeout=TIMEOUT) as one, ForkServer(timeout=TIMEOUT) as two:
        yield [one, two]


@pytest.fixture
def server(servers: list[ForkServer]) -> ForkServer:
    return servers[0]


@pytest.fixture(scope="module")
def content(tiny: Callable[..., Path]) -> Callable[[str], bytes]:
    """``content(base)``: the bytes of a sound model."""

    def read(name: str) -> bytes:
        base = BASES[name]
        return (tiny(base.arch, **base.options) if base.arch else BUILTIN).read_bytes()

    return read


@pytest.fixture(scope="module")
def companions(tiny: Callable[..., Path]) -> Callable[[str], tuple[Any, ...]]:
    """``companions(base)``: options of ``bench`` that come before the model's own path."""

    def options(name: str) -> tuple[Any, ...]:
        base = BASES[name]
        if base.target:
            return ("-m", tiny(base.target[0], **base.target[1]), "-md")
        return ("-md", tiny(base.head[0], **base.head[1]), "-m") if base.head else ("-m",)

    return options


def fault(outcome: Outcome) -> str | None:
    """Return what is wrong with how a command ended, None if it is as it should be."""
    if outcome.timed_out:
        return f"still running after {TIMEOUT:.0f} s"
    if outcome.status not in (0, 1, 2):
        return f"ended with {outcome.status}"
    if outcome.status and not re.fullmatch(r"mtpstats: error: [^\n]+\n", outcome.stderr):
        return "not one line of error"
    if "Traceback" in outcome.stderr or "unexpected" in outcome.stderr:
        return "an error that nobody expected"
    # The last resort, for what cannot be known beforehand.
    return "an assertion of llama.cpp" if "gave up" in outcome.stderr else None


def faults(
    server: ForkServer, path: Path, drawn: list[mutations.Mutation], options: tuple[Any, ...]
) -> list[str]:
    found = []
    for mutation in drawn:
        path.write_bytes(mutation())
        for command in (("info", "-m"), (*BENCH, *options)):
            outcome = server.run(*command, path)
            wrong = fault(outcome)
            if wrong:
                found.append(f"{command[0]}, {mutation.name}: {wrong}: {outcome.stderr[-300:]}")
            if outcome.status == 2:  # not a model: the other command reads no further
                break
    return found


@pytest.mark.parametrize("base", BASES)
def test_mutated_models(
    servers: list[ForkServer],
    content: Callable[[str], bytes],
    companions: Callable[[str], tuple[Any, ...]],
    tmp_path: Path,
    base: str,
) -> None:
    options = companions(base)
    drawn = random.Random(1).sample(mutations.of(content(base), seed=1), BASES[base].count)
    with ThreadPoolExecutor() as pool:
        halves = [
            pool.submit(faults, server, tmp_path / f"{half}.gguf", drawn[half::2], options)
            for half, server in enumerate(servers)
        ]
    assert [fault for half in halves for fault in half.result()] == []


def test_there_are_at_least_500_mutations() -> None:
    assert sum(base.count for base in BASES.values()) >= 500


@pytest.mark.parametrize("arch", DEADLY)
def test_what_was_deadly_is_refused_by_name(
    tiny: Callable[..., Path], tmp_path: Path, arch: str
) -> None:
    named = {mutation.name: mutation for mutation in mutations.of(tiny(arch).read_bytes())}
    path = tmp_path / "deadly.gguf"
    for name, words in DEADLY[arch].items():
        path.write_bytes(named[name]())
        with pytest.raises(ModelError, match=re.escape(words)):
            gguf.read_model(path)


def test_a_head_for_another_target_is_refused(
    lib: Library, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    named = {m.name: m for m in mutations.of(tiny("gemma4-assistant").read_bytes())}
    path = tmp_path / "head.gguf"
    # Its target has one head of keys.
    path.write_bytes(named["gemma4-assistant.attention.head_count_kv = 2"]())
    with (
        Model(lib, tiny("gemma4")) as target,
        Model(lib, path) as head,
        pytest.raises(ModelError, match="layer 0 cannot read the cells of the target's layer 1"),
    ):
        Speculator(target, draft=DraftSettings(), draft_model=head, n_ctx=256)


@pytest.mark.parametrize("base", ["hybrid", "attention"])
def test_mutated_models_in_processes_of_their_own(
    content: Callable[[str], bytes], tmp_path: Path, base: str
) -> None:
    path = tmp_path / "mutated.gguf"
    for mutation in random.Random(2).sample(mutations.of(content(base), seed=2), 6):
        path.write_bytes(mutation())
        for command in (("info",), BENCH):
            outcome = run(*command, "-m", path)
            assert fault(outcome) is None, (mutation.name, outcome)


def run(*args: Any) -> Outcome:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mtpstats", *map(str, args)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
    )
    seconds = time.monotonic() - start
    return Outcome(done.returncode, done.stdout, done.stderr, seconds, seconds > TIMEOUT)


# ---- prompts


HOSTILE_TEXTS = {
    "NUL": b"a\0b\0",
    "not UTF-8": bytes(range(128, 256)),
    "surrogates": b"\xed\xa0\x80\xed\xbf\xbf",
    "special tokens": b"<|end|><s></s><|im_start|><|endoftext|><unk><0x00>",
    "nothing": b"",
    "a byte order mark": b"\xef\xbb\xbf",
    "one long word": b"x" * 10_000_000,
    "many spaces": b" " * 1_000_000,
    "many emoji": "\U0001f468\u200d\U0001f469".encode() * 20_000,
    "many lines": b"\r\n" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_hostile_prompts(server: ForkServer, tmp_path: Path, name: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(HOSTILE_TEXTS[name])
    for option in ("-f", "--prompts"):
        outcome = server.run("bench", option, path, "-n", 4, "-t", 1)
        assert fault(outcome) is None, outcome


@pytest.mark.parametrize("text", ["x", "!", " ", "7", "日"])
def test_long_words_where_the_pre_tokenizer_recurses(
    server: ForkServer, content: Callable[[str], bytes], tmp_path: Path, text: str
) -> None:
    file = parse(content("hybrid"))
    pre = key_of("tokenizer.ggml.pre", "deepseek-v3")
    model, prompt = tmp_path / "m.gguf", tmp_path / "p.txt"
    model.write_bytes(file.with_key(pre.name, pre).encode())
    prompt.write_text(text * 200_000)
    outcome = server.run("bench", "-m", model, "-f", prompt, "-t", 1)
    assert fault(outcome) is None, outcome
    assert "200000 tokens, the context holds" in outcome.stderr or "600000" in outcome.stderr


# ---- options


@pytest.mark.parametrize(
    "options",
    [
        "-c 1", "-c 2147483647", "-c 0", "-b 1", "-ub 1", "-b 9 -ub 9", "-b 2147483647",
        "-ub 2147483647", "-t 512 -n 1", "-t 0", "-t 513", "-ngl 2147483647",
        "-ngl -2147483648", "-n 0", "-c 256 -n 2147483647 -p x", "-s 4294967295", "-s -1",
        "--spec-draft-n-max 1024", "--spec-draft-n-max 254 -c 256", "--spec-draft-n-max 1 -b 2",
        "--spec-draft-n-min 1024", "--spec-draft-p-min 1", "--spec-draft-p-min nan",
        "--temp 1e308", "--temp 1e-300", "--temp nan", "--top-k 2147483647", "--top-p 0",
        "--min-p 1", "--stats-every 2147483647", "-ctk q4_0 -ctv q4_0 -fa on", "-ctk iq4_nl",
        "-ctv q5_1 -fa auto",
    ],
)  # fmt: skip
def test_options_at_their_bounds(
    server: ForkServer, tiny: Callable[..., Path], options: str
) -> None:
    model = ("-m", tiny("qwen35"), "-p", "the time of", "-n", 4, "-t", 1)
    outcome = server.run("bench", *model, *options.split())
    assert fault(outcome) is None, outcome


# ---- the watch itself


def test_the_fork_server_answers_as_a_process_does(server: ForkServer, tmp_path: Path) -> None:
    for args in (("info",), ("info", "-m", tmp_path), ("bench", "-c", "many")):
        forked, own = server.run(*args), run(*args)
        assert forked.status == own.status
        assert forked.stderr == own.stderr


@pytest.mark.parametrize(
    ("arch", "name", "wrong"),
    [
        ("qwen35", "qwen35.full_attention_interval = 0", "ended with -8"),
        ("qwen35", "blk.0.attn_gate.weight left out", "ended with -11"),
        ("qwen35", "as SPM", "not one line of error"),
        ("glm4moe", "glm4moe.expert_count = 0", "an assertion of llama.cpp"),
        ("glm4moe", "glm4moe.rope.dimension_count = 0", "still running"),
    ],
)
def test_without_the_checks_the_watch_sees_it(
    tiny: Callable[..., Path], tmp_path: Path, arch: str, name: str, wrong: str
) -> None:
    path = tmp_path / "deadly.gguf"
    named = {mutation.name: mutation for mutation in mutations.of(tiny(arch).read_bytes())}
    path.write_bytes(named[name]())
    with ForkServer(timeout=3, checks=False) as unchecked:
        assert (fault(unchecked.run(*BENCH, "-m", path)) or "").startswith(wrong)
