"""The tokenizer in a model's metadata, and which files and texts llama.cpp would not survive.

A C++ exception inside ``llama_tokenize`` ends the process: nothing can catch it there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mtpstats.text import printable

TOKENS = "tokenizer.ggml.tokens"
_SPM = "llama"
_NONE = ("none", "no_vocab")
# Models with NextN blocks have no others. Some of the rest loop for ever, or throw, where a
# letter is missing.
_KINDS = ("gpt2", _SPM, "gemma4", *_NONE)
# An assertion fails on every space; a run of digits takes quadratic time.
_UNFIT_PRE = ("whitespace", "superbpe")
_SPACE = "\u2581"  # how SPM writes a space

# Many pre-tokenizers are a std::regex, which recurses once per character of what it matches: never
# more than a run without spaces, or one of spaces, and the one after it.
_SHORT_RUN = 2000
_LONG_RUN = re.compile(f"[^ \t-\r]{{{_SHORT_RUN},}}|[ \t-\r]{{{_SHORT_RUN},}}")
_LONGEST_RUN = 1 << 20
_STACK_PER_CHARACTER = 2 * 512  # both runs; somewhat more than measured


@dataclass(frozen=True)
class Vocabulary:
    """What is to be known of a tokenizer before llama.cpp reads it or a text.

    ``kind`` and ``pre`` are llama.cpp's names of the tokenizer, None where the file has none, and
    of the pre-tokenizer; ``twice`` is a token that occurs twice. ``unspoken`` are the bytes that
    no token of an SPM vocabulary stands for; where there are some, ``letters`` are the characters
    that are tokens all the same.
    """

    kind: str | None
    pre: str = ""
    twice: bytes | None = None
    unspoken: frozenset[int] = frozenset()
    letters: frozenset[str] = frozenset()

    @classmethod
    def of(cls, metadata: Mapping[str, Any], tokens: Sequence[bytes]) -> Vocabulary:
        """Gather it from a file's metadata and its tokens."""
        kind = metadata.get("tokenizer.ggml.model")
        if not isinstance(kind, str) or kind in _NONE:
            return cls(kind if kind in _NONE else None)
        pre = metadata.get("tokenizer.ggml.pre")
        pre = pre if isinstance(pre, str) else ""
        # llama.cpp gives empty tokens a name of its own.
        named = [token or b"[EMPTY_%d]" % number for number, token in enumerate(tokens)]
        known = set(named)
        twice = Counter(named).most_common(1)[0][0] if len(known) < len(named) else None
        if kind != _SPM:
            return cls(kind, pre, twice)
        unspoken = frozenset(
            byte
            for byte in range(256)
            if b"<0x%02X>" % byte not in known and bytes([byte]) not in known
        )
        if not unspoken:
            return cls(kind, pre, twice)
        short = (token.decode("utf-8", "replace") for token in known if len(token) < 5)
        return cls(kind, pre, twice, unspoken, frozenset(text for text in short if len(text) == 1))

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        """Refuse a file whose tokenizer llama.cpp would not survive to load."""
        if self.kind is not None and self.kind not in _KINDS:
            refuse(f"its tokenizer is '{printable(self.kind)}'; one of {', '.join(_KINDS)} can run")
        if self.pre in _UNFIT_PRE:
            refuse(f"its pre-tokenizer '{self.pre}' cannot run")
        if self.twice is not None:
            refuse(f"the token {printable(repr(self.twice)[1:])} occurs twice in its vocabulary")

    def obstacle(self, text: str) -> str | None:
        """Return why ``text`` cannot become tokens, None if it can."""
        if self.unspoken:
            for char in {_SPACE, *text.replace(" ", _SPACE)}:
                if char not in self.letters and not self.unspoken.isdisjoint(char.encode()):
                    return f"the vocabulary has no token for {printable(repr(char))}"
        if longest_run(text) > _LONGEST_RUN:
            return f"more than {_LONGEST_RUN} characters are in one word, or between two"
        return None


def longest_run(text: str) -> int:
    """Return the length of the longest run without spaces or of spaces, 0 if all are short."""
    if len(text) < _SHORT_RUN:
        return 0
    return max((match.end() - match.start() for match in _LONG_RUN.finditer(text)), default=0)


def stack_size(text: str) -> int:
    """Return the bytes of stack that its tokenization may need, 0 if little."""
    return longest_run(text) * _STACK_PER_CHARACTER
