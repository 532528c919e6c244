"""Prompts one by one: built in, as text, as a file each; and those of all sources together."""

import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from inputs import refusal, write

from mtpstats import prompts
from mtpstats.prompts import Prompt

# ---- the built-in ones


def test_builtin_prompts_are_twelve_or_more_in_three_categories_or_more():
    found = prompts.builtin()
    categories = Counter(prompt.category for prompt in found)
    assert len(found) >= 12
    assert len(categories) >= 3
    assert None not in categories
    assert min(categories.values()) >= 3
    assert len({prompt.id for prompt in found}) == len(found)
    assert len({prompt.text for prompt in found}) == len(found)


def test_builtin_prompts_mean_the_same_to_llama_cpp():
    # Without backslashes its --escape cannot change them; without trailing blanks the first
    # generated token does not depend on how the tokenizer splits spaces.
    for prompt in prompts.builtin():
        assert "\\" not in prompt.text
        assert prompt.text == prompt.text.rstrip(" \t")
        assert 10 <= len(prompt.text.split()) + prompt.text.count("\n") <= 80


# ---- -p


def test_text_escapes_as_llama_cpp_does():
    # Expected values: string_process_escapes of llama.cpp's common.cpp, by hand.
    for given, expected in [
        (r"a\nb", "a\nb"),
        (r"a\tb\r", "a\tb\r"),
        (r"\'\"\\", "'\"\\"),
        (r"\\n", "\\n"),
        (r"\x41\x7a", "Az"),
        (r"\xc3\xa9", "é"),
        (r"\x4", r"\x4"),
        (r"\xzz", r"\xzz"),
        (r"\q \0", r"\q \0"),
        ("ends with \\", "ends with \\"),
        ("é\\n", "é\n"),
    ]:
        assert prompts.from_text(given, "p").text == expected
        assert prompts.from_text(given, "p", escape=False).text == given


def test_text_has_id_and_no_category():
    assert prompts.from_text("x", "prompt-3") == Prompt("prompt-3", None, "x")


@pytest.mark.parametrize(
    ("text", "word"), [("", "empty"), (r"\x00", "NUL"), (r"\xff", "UTF-8"), ("\ud83d", "UTF-8")]
)
def test_text_that_is_no_text_is_refused(text, word):
    assert word in refusal(prompts.from_text, text, "prompt-1")


def test_text_whose_bytes_the_locale_could_not_read_is_read_as_utf8():
    # What sys.argv holds for the bytes of "é" where the locale's encoding is ASCII.
    argument = "é".encode().decode("ascii", "surrogateescape")
    assert prompts.from_text(argument, "p").text == "é"


# ---- -f


def test_file_is_one_prompt_and_loses_one_line_end(tmp_path):
    for data, expected in [
        ("one\ntwo\n", "one\ntwo"),
        ("one\n\n", "one\n"),
        ("one", "one"),
        ("one\r\n", "one"),
        ("one\r\ntwo\r\n", "one\r\ntwo"),
        (b"\xef\xbb\xbfone\n", "one"),
    ]:
        prompt = prompts.from_file(write(tmp_path / "a.txt", data))
        assert prompt == Prompt("a.txt", None, expected)


def test_file_escapes_unless_told_not_to(tmp_path):
    path = write(tmp_path / "a.py", r'print("a\n")')
    assert prompts.from_file(path).text == 'print("a\n")'
    assert prompts.from_file(path, escape=False).text == r'print("a\n")'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (b"\n", ["empty"]),
        (b"one\ntwo \xff\n", ["UTF-8", "byte 8", "line 2"]),
        (b"one\n\0two", ["NUL", "line 2"]),
        ("text".encode("utf-16"), ["UTF-16"]),
    ],
)
def test_file_that_is_no_text_is_refused(tmp_path, data, words):
    message = refusal(prompts.from_file, write(tmp_path / "a.txt", data))
    for word in [*words, "a.txt"]:
        assert word in message


def test_missing_file_and_directory_are_refused(tmp_path):
    assert "No such file" in refusal(prompts.from_file, tmp_path / "none.txt")
    assert "is a directory" in refusal(prompts.from_file, tmp_path)


def test_control_characters_of_a_file_name_do_not_come_out(tmp_path):
    path = tmp_path / "a\x1b[31m.txt"
    assert "\x1b" not in refusal(prompts.from_file, path)
    assert "\x1b" not in prompts.from_file(write(path, "x")).id


def test_huge_file_is_refused_at_once(tmp_path):
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.truncate(10 << 30)
    assert "larger than 64 MiB" in refusal(prompts.from_file, path)
    assert "larger than 64 MiB" in refusal(prompts.load, path)


def test_endless_device_is_refused():
    assert "holds a NUL byte (line 1)" in refusal(prompts.from_file, Path("/dev/zero"))


def test_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text("from a pipe\n"))
    writer.start()
    assert prompts.from_file(path).text == "from a pipe"
    writer.join()


def test_pipe_without_writer_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("mtpstats.reading.PIPE_PATIENCE_S", 0.05)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "nothing writes to" in refusal(prompts.from_file, path)


def test_pipe_with_a_slow_writer_is_waited_for(monkeypatch):
    monkeypatch.setattr("mtpstats.reading.PIPE_PATIENCE_S", 0.05)
    reading, writing = os.pipe()
    timer = threading.Timer(0.3, lambda: (os.write(writing, b"late"), os.close(writing)))
    timer.start()
    try:
        assert prompts.from_file(Path(f"/dev/fd/{reading}")).text == "late"
    finally:
        timer.join()
        os.close(reading)


# ---- all sources together


def test_several_files_are_the_categories_of_their_prompts(tmp_path):
    one = write(tmp_path / "maths_1.txt", "a")
    two = write(tmp_path / "code.jsonl", '"b"\n{"prompt": "c", "category": "own"}')
    found = prompts.gather(prompts.Sources(texts=["t"], many=[one, two]))
    assert [p.category for p in found] == [None, "maths", "code", "own"]
    (alone,) = prompts.gather(prompts.Sources(many=[one]))
    assert alone.category is None


def test_nothing_given_is_the_built_in_prompts_and_the_suite_is_no_default():
    assert prompts.gather(prompts.Sources()) == prompts.builtin()
    assert prompts.gather(prompts.Sources(suite=True)) == prompts.suite()


def test_order_is_the_seeds_and_a_prompt_more_changes_no_other():
    some = [Prompt(f"p{i}", None, "x") for i in range(50)]
    first = prompts.shuffled(some, 7)
    assert sorted(p.id for p in first) == sorted(p.id for p in some)
    assert first != some
    assert prompts.shuffled(reversed(some), 7) == first
    assert prompts.shuffled(some, 8) != first
    more = prompts.shuffled([*some, Prompt("new", None, "x")], 7)
    assert [p for p in more if p.id != "new"] == first


def test_suite_has_five_conversations_in_each_of_eight_categories_or_more():
    found = prompts.suite()
    categories = Counter(p.category for p in found)
    wanted = {
        "code", "mathematics", "question-answering", "summarising", "translation", "rewriting",
        "structured-output", "creative",
    }  # fmt: skip
    assert wanted <= set(categories)
    assert min(categories.values()) >= 5
    assert len({p.id for p in found}) == len(found)
    assert len({p.conversation.plain() for p in found}) == len(found)
    for prompt in found:
        assert prompt.conversation.messages[-1]["role"] == "user"
        assert 10 <= len(prompt.conversation.plain().split()) <= 250
    assert any(len(p.conversation.messages) > 2 for p in found)
    assert any(p.conversation.messages[0]["role"] == "system" for p in found)


def test_duplicate_ids_in_one_file_are_refused_by_place(tmp_path):
    lines = ['{"id": "x", "prompt": "a"}', '"b"', '{"id": "x", "prompt": "c"}']
    message = refusal(prompts.load, write(tmp_path / "p.jsonl", "\n".join(lines)))
    assert "p.jsonl:3" in message
    assert "p.jsonl:1" in message


def test_ids_of_several_sources_are_made_unique():
    names = ["a", "b", "a", "a", "a~2", "b"]
    unique = prompts.with_unique_ids(Prompt(name, None, "x") for name in names)
    assert [prompt.id for prompt in unique] == ["a", "b", "a~2", "a~3", "a~2~2", "b~2"]
