"""Turn unpacked Debian packages of CPython into token arrays and a tokenizer.

The text is Python's standard library without its tests (code) and the reStructuredText sources of
its documentation (prose). Nothing here draws random numbers: files are split and ordered by a hash
of their name, so the same packages give the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = 0
HELD_OUT_ONE_IN = 16
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "pydoc_data", "encodings", "dist-packages"}

# What llama.cpp applies before BPE when a GGUF says `tokenizer.ggml.pre = qwen35`: contractions,
# words with their marks, single digits, runs of punctuation, line ends, spaces.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


@dataclass(frozen=True)
class TextFile:
    """One file of the corpus: its name inside the packages, its kind and its text."""

    name: str
    kind: str  # "code" or "prose"
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training, decided by its name alone."""
        return name_hash("split", self.name) % HELD_OUT_ONE_IN == 0


def name_hash(purpose: str, name: str) -> int:
    """Hash a file name to 64 bits; `purpose` keeps the split and the order independent."""
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def read_files(packages: Path) -> list[TextFile]:
    """Read the corpus from a folder into which the packages were unpacked (`dpkg -x`).

    Returns the files in training order. Files that are not UTF-8, are nearly empty, or repeat
    another file's text are left out.

    Raises:
        FileNotFoundError: if code or prose is missing from the folder.
    """
    sources = {
        "code": ("usr/lib/python3.11", "*.py"),
        "prose": ("usr/share/doc/python3.11/html/_sources", "*.rst.txt"),
    }
    files: list[TextFile] = []
    seen: set[str] = set()
    for kind, (folder, pattern) in sources.items():
        before = len(files)
        for path in sorted((packages / folder).rglob(pattern)):
            name = path.relative_to(packages).as_posix()
            if path.is_symlink() or SKIPPED_FOLDERS & set(name.split("/")):
                continue
            try:
                text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            if len(text) < 64 or text in seen:
                continue
            seen.add(text)
            files.append(TextFile(name, kind, text))
        if len(files) == before:
            raise FileNotFoundError(f"no {pattern} files under {packages / folder}")
    return sorted(files, key=lambda file: name_hash("order", file.name))


def corpus_hash(files: list[TextFile]) -> str:
    """SHA-256 over names and texts, in training order."""
    digest = hashlib.sha256()
    for file in files:
        for part in (file.name, file.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
    return digest.hexdigest()


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE of 4,096 entries that llama.cpp reads as `gpt2` / `qwen35`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}")
    return tokenizer


def encode(tokenizer: Tokenizer, files: list[TextFile]) -> np.ndarray:
    """Concatenate files as uint16 ids of shape [n_tokens], each preceded by an end-of-text."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([file.text for file in files]):
        ids.append(END_OF_TEXT)
        ids.extend(encoding.ids)
    ids.append(END_OF_TEXT)
    return np.asarray(ids, dtype=np.uint16)


def prepare(packages: Path, work: Path) -> dict[str, object]:
    """Write tokenizer.json, train.npy, heldout_code.npy, heldout_prose.npy and corpus.json.

    Returns what corpus.json holds: hashes of the corpus and the tokenizer, and sizes.
    """
    files = read_files(packages)
    training = [file for file in files if not file.held_out]
    tokenizer = train_tokenizer(file.text for file in training)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work / "tokenizer.json"))
    arrays = {"train": encode(tokenizer, training)}
    for kind in ("code", "prose"):
        held_out = [file for file in files if file.held_out and file.kind == kind]
        arrays[f"heldout_{kind}"] = encode(tokenizer, held_out)
    for name, array in arrays.items():
        np.save(work / f"{name}.npy", array)
    facts: dict[str, object] = {
        "corpus_sha256": corpus_hash(files),
        "tokenizer_sha256": hashlib.sha256((work / "tokenizer.json").read_bytes()).hexdigest(),
        "files": {kind: sum(file.kind == kind for file in files) for kind in ("code", "prose")},
        "bytes": {
            kind: sum(len(file.text.encode()) for file in files if file.kind == kind)
            for kind in ("code", "prose")
        },
        "tokens": {name: int(array.size) for name, array in arrays.items()},
    }
    (work / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main() -> None:
    """Run as `python corpus.py PACKAGES WORK`."""
    if len(sys.argv) != 3:
        sys.exit("usage: python corpus.py PACKAGES WORK")
    print(json.dumps(prepare(Path(sys.argv[1]), Path(sys.argv[2])), indent=2))


if __name__ == "__main__":
    main()
