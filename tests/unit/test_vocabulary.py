"""Which vocabularies and texts llama.cpp is not given, and a call on a larger stack."""

from __future__ import annotations

import sys
import threading

import pytest

from mtpstats.errors import ModelError
from mtpstats.llama.stack import call_with_stack
from mtpstats.llama.vocabulary import Vocabulary, longest_run

BYTES = [b"<0x%02X>" % byte for byte in range(256)]
SPACE = "\u2581".encode()


def vocabulary(tokens: list[bytes], kind: object = "llama", pre: object = None) -> Vocabulary:
    return Vocabulary.of({"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre}, tokens)


def refusal(found: Vocabulary) -> str:
    def refuse(what: str) -> None:
        raise ModelError(what)

    with pytest.raises(ModelError) as raised:
        found.check(refuse)  # type: ignore[arg-type]
    return str(raised.value)


def accepted(found: Vocabulary) -> bool:
    found.check(lambda what: pytest.fail(what))  # type: ignore[arg-type]
    return True


def test_tokens_occur_once() -> None:
    assert accepted(vocabulary([b"a", b"b", b""], "gpt2"))
    assert refusal(vocabulary([b"a", b"b", b"a"], "gpt2")) == (
        "the token 'a' occurs twice in its vocabulary"
    )
    # llama.cpp names the empty token at 1 so.
    assert "[EMPTY_1]" in refusal(vocabulary([b"[EMPTY_1]", b""], "gpt2"))
    assert accepted(vocabulary([b"", b""], "gpt2"))
    assert "\\x1b" in refusal(vocabulary([b"\x1b", b"\x1b"], "gpt2"))
    assert accepted(vocabulary([b"a", b"a"], "none"))


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "test", ""])
def test_tokenizers_that_may_throw_or_loop(kind: str) -> None:
    assert f"its tokenizer is '{kind}'" in refusal(vocabulary([b"a"], kind))


def test_what_is_no_text_is_left_to_libllama() -> None:
    assert accepted(vocabulary([b"a"], None))
    assert accepted(vocabulary([b"a"], 7, pre=7))


def test_pre_tokenizers() -> None:
    assert "'whitespace' cannot run" in refusal(vocabulary([b"a"], "gpt2", "whitespace"))
    assert accepted(vocabulary([b"a"], "gpt2", "qwen2"))


def test_a_character_that_no_piece_stands_for() -> None:
    whole = vocabulary(BYTES)
    assert whole.obstacle("\0 \U0001f600 any") is None
    # Letters, the space and "é" are pieces; other bytes are not.
    poor = vocabulary([SPACE, b"a", b"b", "é".encode()])
    assert poor.obstacle("ab é") is None
    assert poor.obstacle("abc") == "the vocabulary has no token for 'c'"
    assert poor.obstacle("è") == "the vocabulary has no token for 'è'"
    # A space is put in front of every text.
    assert vocabulary([b"a"]).obstacle("a") == "the vocabulary has no token for '\u2581'"
    # All but one byte: the first of "é" is C3.
    lacking = vocabulary([token for token in BYTES if token != b"<0xC3>"])
    assert lacking.obstacle("e") is None
    assert "'é'" in (lacking.obstacle("é") or "")
    assert vocabulary([b"a"], "gpt2").obstacle("c") is None


def test_longest_run() -> None:
    assert longest_run("word " * 100_000) == 0
    assert longest_run("x" * 1999) == 0
    assert longest_run("x" * 2000) == 2000
    assert longest_run("a " + "x" * 5000 + " " * 7000 + "\n\t" + "y" * 3000) == 7002
    assert longest_run("日" * 2500) == 2500
    assert vocabulary(BYTES, "gpt2").obstacle("x" * (1 << 20)) is None
    assert "1048576" in (vocabulary(BYTES, "gpt2").obstacle("x" * ((1 << 20) + 1)) or "")


def test_call_with_stack() -> None:
    before = threading.stack_size()
    assert call_with_stack(64 << 20, lambda: threading.current_thread().name) != "MainThread"
    assert threading.stack_size() == before
    with pytest.raises(ZeroDivisionError):
        call_with_stack(1 << 20, lambda: 1 // 0)
    with pytest.raises(MemoryError, match="no room for a stack"):
        call_with_stack(sys.maxsize // 4096 * 4096 // 2, int)
    assert threading.stack_size() == before
