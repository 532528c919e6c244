"""No string from outside reaches a terminal with its controls alive."""

from __future__ import annotations

import pytest

from mtpstats.text import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, ümläut, 中文, 🙂", "plain text, ümläut, 中文, 🙂"),
        ("a\x1b[31mred\x1b[0m", "a\\x1b[31mred\\x1b[0m"),
        ("two\nlines\tand\rmore", "two\\nlines\\tand\\rmore"),
        ("\x00\x07\x7f\x9b", "\\x00\\x07\\x7f\\x9b"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("a\u2028b\u2029", "a\\u2028b\\u2029"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("👩\u200d🔬", "👩\u200d🔬"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
    ],
)
def test_printable(text: str | bytes, expected: str) -> None:
    assert printable(text) == expected


def test_generated_text_keeps_its_lines() -> None:
    assert printable("a\n\tb\r\x1b", keep_newlines=True) == "a\n\tb\\r\\x1b"


def test_every_character_is_harmless_afterwards() -> None:
    everything = "".join(map(chr, range(0x30000)))
    shown = printable(everything, keep_newlines=True)
    for char in map(chr, (*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029, 0x202E)):
        assert char not in shown
