"""Rendering of untrusted strings: model metadata, log lines, generated text, file names."""

from __future__ import annotations

import unicodedata

# Cc: controls, Cf: invisible formatting (bidirectional overrides can reorder a whole line),
# Cs: lone surrogates, Zl and Zp: separators some terminals treat as a line end.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Joiners that emoji and several scripts need; they cannot reorder or erase anything.
_HARMLESS = frozenset("\u200c\u200d\u00ad")


def printable(text: str | bytes, *, keep_newlines: bool = False) -> str:
    r"""Return ``text`` with everything a terminal could act on written as an escape.

    Bytes are read as UTF-8, invalid sequences become U+FFFD. With ``keep_newlines`` a newline and
    a tab stay as they are, which suits generated text; without it the result is one line.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if text.isprintable():
        return text
    return "".join(_visible(char, keep_newlines) for char in text)


def _visible(char: str, keep_newlines: bool) -> str:
    if char.isprintable() or char in _HARMLESS or (keep_newlines and char in "\n\t"):
        return char
    if unicodedata.category(char) not in _HIDDEN:
        return char
    code = ord(char)
    if code < 0x100:
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
