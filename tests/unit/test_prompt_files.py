"""Prompts from many to a file, in directories and on standard input."""

import contextlib
import errno
import os
import subprocess
import threading
from pathlib import Path

import pytest
from inputs import refusal, write

from mtpstats import prompts
from mtpstats.prompts import Prompt

# ---- --prompts


def test_txt_has_one_prompt_per_line(tmp_path):
    path = write(tmp_path / "p.txt", "one\r\n\n  two \n\t\nthree")
    assert prompts.load(path) == [
        Prompt("p.txt:1", None, "one"),
        Prompt("p.txt:3", None, "  two "),
        Prompt("p.txt:5", None, "three"),
    ]


def test_txt_takes_backslashes_as_they_are(tmp_path):
    assert prompts.load(write(tmp_path / "p.txt", r"a\nb"))[0].text == r"a\nb"


def test_jsonl_has_strings_and_objects(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        '\ufeff"plain"\n\n{"prompt": "two\\nlines", "id": "x", "category": "code"}\r\n'
        '{"prompt": "three", "id": 7, "other": [1]}\n',
    )
    assert prompts.load(path) == [
        Prompt("p.jsonl:1", None, "plain"),
        Prompt("x", "code", "two\nlines"),
        Prompt("7", None, "three"),
    ]


def test_json_is_a_list(tmp_path):
    path = write(tmp_path / "P.JSON", '["a",\n {"prompt": "b", "id": null, "category": null}]')
    assert prompts.load(path) == [Prompt("P.JSON:1", None, "a"), Prompt("P.JSON:2", None, "b")]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("p.txt", "\n \n", ["no prompt"]),
        ("p.jsonl", "", ["no prompt"]),
        ("p.json", "[]", ["no prompt"]),
        ("p.md", "a,b", [".txt, .jsonl, .json, .csv and .tsv", "-f"]),
        ("p", "a", [".txt, .jsonl, .json, .csv and .tsv"]),
        ("p.jsonl", '"a"\n{"prompt": ', ["p.jsonl:2", "not valid JSON"]),
        ("p.json", '["a",\n"b"', ["not valid JSON", "line 2"]),
        ("p.json", '{"prompt": "a"}', ["a list of prompts, found an object"]),
        ("p.jsonl", "[1]", ["p.jsonl:1", "a string or an object, found a list"]),
        ("p.jsonl", "null", ["found null"]),
        ("p.jsonl", "3", ["found a number"]),
        ("p.jsonl", '{"question": "a", "tools": 1}', ['or "prompt"', "question, tools"]),
        ("p.jsonl", '{"prompt": 3}', ['or "prompt"']),
        ("p.jsonl", "{}", ['or "prompt"', "nothing"]),
        ("p.jsonl", '{"prompt": "a", "id": true}', ['"id"', "true or false"]),
        ("p.jsonl", '{"prompt": "a", "category": ["x"]}', ['"category"', "a list"]),
        ("p.jsonl", '{"prompt": ""}', ["p.jsonl:1", "empty"]),
        ("p.jsonl", '{"prompt": "a\\u0000b"}', ["NUL"]),
        ("p.jsonl", '{"prompt": "\\ud800"}', ["surrogate"]),
        ("p.json", "[" * 100_000, ["not usable JSON"]),
        ("p.json", "[" + "9" * 5000 + "]", ["not usable JSON"]),
    ],
)
def test_bad_prompt_file_is_named_with_its_place(tmp_path, name, data, words):
    message = refusal(prompts.load, write(tmp_path / name, data))
    for word in [*words, name]:
        assert word in message


def test_csv_has_a_header_and_quoted_line_ends(tmp_path):
    path = write(
        tmp_path / "p.csv",
        '\ufeffid,prompt,category\r\n7,"one, ""two""\r\nlines",code\r\n\r\n,three,\r\n',
    )
    assert prompts.load(path) == [
        Prompt("7", "code", 'one, "two"\r\nlines'),
        Prompt("p.csv:5", None, "three"),
    ]


def test_csv_of_one_column_and_other_separators(tmp_path):
    assert prompts.load(write(tmp_path / "p.csv", "question\nwhy?\n")) == [
        Prompt("p.csv:2", None, "why?")
    ]
    for name, data in [("p.tsv", "prompt\tn\na,b\t1\n"), ("q.csv", "prompt;n\na,b;1\n")]:
        assert [p.text for p in prompts.load(write(tmp_path / name, data))] == ["a,b"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a,b\n1,2\n", ["p.csv", 'column "prompt"', "a, b", "--prompt-field"]),
        ("prompt,n\nx,1\ny\n", ["p.csv:3", "1 cells under 2 columns"]),
        ('prompt,n\nx,1\n"y,2\n', ["p.csv:3", "not valid CSV"]),
        ("prompt,prompt\nx,1\n", ["p.csv", "same name"]),
        ("prompt,n\n,1\n", ["p.csv:2", "empty"]),
        ("prompt,n\n", ["p.csv", "no prompt in it"]),
        ("", ["p.csv", "column"]),
    ],
)
def test_bad_csv_is_named_with_its_line(tmp_path, data, words):
    message = refusal(prompts.load, write(tmp_path / "p.csv", data))
    for word in words:
        assert word in message


def test_fields_by_name(tmp_path):
    fields = prompts.Fields("question", "topic")
    lines = '{"question": "why?", "prompt": "no", "topic": "x"}\n'
    path = write(tmp_path / "p.jsonl", lines)
    assert prompts.load(path, fields) == [Prompt("p.jsonl:1", "x", "why?")]
    rows = write(tmp_path / "p.csv", "question,topic,prompt\nwhy?,x,no\n")
    assert prompts.load(rows, fields) == [Prompt("p.csv:2", "x", "why?")]
    chat = write(
        tmp_path / "q.jsonl", '{"question": [{"role": "user", "content": "hi"}], "topic": 1}'
    )
    (prompt,) = prompts.load(chat, fields)
    assert prompt.conversation.messages == ({"role": "user", "content": "hi"},)
    assert prompt.category == "1"
    write(path, '{"question": "a", "topic": "x"}\n{"question": "b"}\n')
    message = refusal(prompts.load, path, fields)
    assert "p.jsonl:2" in message
    assert '"topic" (--category-field)' in message
    assert 'needs "question"' in refusal(prompts.load, write(path, '{"prompt": "a"}'), fields)


def test_more_prompts_than_could_be_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mtpstats.forms.MAX_PROMPTS", 3)
    for name, data in [
        ("p.txt", "a\n" * 4),
        ("p.jsonl", '"a"\n' * 4),
        ("p.json", '["a", "a", "a", "a"]'),
        ("p.csv", "prompt\n" + "a\n" * 5),
    ]:
        assert "more than 3 prompts" in refusal(prompts.load, write(tmp_path / name, data))
    assert len(prompts.load(write(tmp_path / "p.txt", "a\n" * 3))) == 3


# ---- directories and standard input


def test_a_directory_of_many_is_read_by_endings_and_gives_categories(tmp_path):
    write(tmp_path / "b-2.txt", "one\ntwo\n")
    (tmp_path / "code" / "deep").mkdir(parents=True)
    write(tmp_path / "code" / "deep" / "a.jsonl", '"x"\n{"prompt": "y", "category": "own"}\n')
    write(tmp_path / "README.md", "not read")
    write(tmp_path / ".hidden.txt", "not read")
    os.mkfifo(tmp_path / "pipe.txt")
    assert prompts.load(tmp_path) == [
        Prompt("b-2.txt:1", "b", "one"),
        Prompt("b-2.txt:2", "b", "two"),
        Prompt("a.jsonl:1", "code", "x"),
        Prompt("a.jsonl:2", "own", "y"),
    ]


def test_a_directory_of_whole_files(tmp_path):
    write(tmp_path / "code-01.py", "x = 1\ny = 2\n")
    (tmp_path / "prose").mkdir()
    write(tmp_path / "prose" / "42.md", "text\n")
    assert prompts.from_files(tmp_path) == [
        Prompt("code-01.py", "code", "x = 1\ny = 2"),
        Prompt("42.md", "prose", "text"),
    ]


def test_names_that_cannot_be_looked_at_are_refused(tmp_path, monkeypatch):
    endless = Path("x" * 300)  # a name has 255 bytes on every file system of Linux
    for read in (prompts.from_files, prompts.load):
        assert "x: cannot be read: File name too long" in refusal(read, endless)

    real = Path.is_file
    write(tmp_path / "closed.txt", "a")

    def is_file(path: Path) -> bool:
        if path.name == "closed.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    for read in (prompts.from_files, prompts.load):
        assert "closed.txt: cannot be read: Permission denied" in refusal(read, tmp_path)


def test_bad_directories(tmp_path, monkeypatch):
    assert "no .txt" in refusal(prompts.load, tmp_path)
    assert "no file" in refusal(prompts.from_files, tmp_path)
    for number in range(3):
        write(tmp_path / f"{number}.txt", "a")
    monkeypatch.setattr("mtpstats.reading.MAX_FILES", 2)
    assert "more than 2 files" in refusal(prompts.load, tmp_path)
    with open(tmp_path / "0.txt", "wb") as file:
        file.truncate(1 << 30)
    monkeypatch.setattr("mtpstats.reading.MAX_FILES", 3)
    assert "more than 64 MiB" in refusal(prompts.load, tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\r\n[INST] two\n", ["one", "[INST] two"]),
        (b"[INST] two\n", ["[INST] two"]),
        (b'"So," she said.\n', ['"So," she said.']),
        (b'\xef\xbb\xbf{"prompt": "a"}\n"b"\n', ["a", "b"]),
        (b' [\n {"prompt": "a"}, "b"]', ["a", "b"]),
    ],
)
def test_standard_input_is_read_as_what_it_looks_like(monkeypatch, data, expected):
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    with kept_standard_input(reading):
        found = prompts.load(Path("-"))
    assert [p.text for p in found] == expected
    assert found[0].id == "stdin:1" or data.lstrip().startswith(b"{")
    os.close(reading)


@contextlib.contextmanager
def kept_standard_input(replacement: int):
    saved = os.dup(0)
    os.dup2(replacement, 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_endless_standard_input_is_refused():
    with (
        subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes,
        kept_standard_input(yes.stdout.fileno()),
    ):
        yes.stdout.close()
        message = refusal(prompts.from_file, Path("-"))
        yes.kill()
    assert message.startswith("standard input: larger than 64 MiB")


def test_a_pipe_without_ending_is_read_as_what_it_looks_like(tmp_path):
    path = tmp_path / "fd63"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text('{"prompt": "x"}\n'))
    writer.start()
    assert prompts.load(path) == [Prompt("fd63:1", None, "x")]
    writer.join()
