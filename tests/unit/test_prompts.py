import contextlib
import errno
import json
import os
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest

from mtpstats import prompts
from mtpstats.errors import InputError
from mtpstats.prompts import Prompt


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


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


# ---- conversations


def only(path: Path):
    (prompt,) = prompts.load(path)
    return prompt


def jsonl(tmp_path: Path, entry: dict) -> Path:
    return write(tmp_path / "p.jsonl", json.dumps(entry))


def test_openai_messages_without_the_last_answer(tmp_path):
    call = {"id": "c1", "function": {"name": "f", "arguments": {"a": "é", "b": 2}}, "x": 1}
    function = {"name": "f", "strict": True}
    entry = {
        "id": "talk",
        "category": "tools",
        "messages": [
            {"role": "system", "content": "s", "weight": 0},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
            {"content": "t", "role": "tool", "tool_call_id": "c1", "name": None},
            {"role": "assistant", "content": "answer"},
        ],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    prompt = only(jsonl(tmp_path, entry))
    assert (prompt.id, prompt.category, prompt.text) == ("talk", "tools", "")
    talk = prompt.conversation
    # The form and the order that llama.cpp gives to templates.
    assert json.dumps(talk.messages) == json.dumps([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a":"é","b":2}'},
             "id": "c1"}]},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
    ])  # fmt: skip
    assert talk.tools == (
        {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}},
    )
    assert talk.kwargs == {"enable_thinking": False}
    assert talk.plain() == "s\n\nu\n\nt"


def test_a_conversation_that_ends_with_a_question_is_kept_whole(tmp_path):
    messages = [{"role": "user", "content": "a"}]
    assert only(jsonl(tmp_path, {"messages": messages})).conversation.messages == tuple(messages)
    assert only(jsonl(tmp_path, {"prompt": messages})).conversation.messages == tuple(messages)
    longer = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = only(jsonl(tmp_path, {"messages": [*longer, *longer[1:2]]})).conversation
    assert found.messages == tuple(longer)


def test_sharegpt(tmp_path):
    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    entry = {
        "system": "s",
        "tools": json.dumps([tool]),
        "conversations": [
            {"from": "human", "value": "h"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "o"},
            {"from": "GPT", "value": "g"},
            {"from": "user", "value": "u"},
            {"from": "gpt", "value": "last"},
        ],
    }
    talk = only(jsonl(tmp_path, entry)).conversation
    assert [m["role"] for m in talk.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert [m["content"] for m in talk.messages] == ["s", "h", "", "o", "g", "u"]
    (call,) = talk.messages[2]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert talk.tools == ({"type": "function", "function": tool},)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"messages": "a"}, ['"messages" must be a list']),
        ({"messages": []}, ["no message that an assistant could answer"]),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ["no message"]),
        ({"messages": ["a"]}, ["message 1", "must be an object"]),
        ({"messages": [USER, {"content": "a"}]}, ["message 2", 'needs "role"']),
        ({"messages": [{"role": "user"}]}, ["message 1", 'needs "content"']),
        ({"messages": [{"role": "user", "content": 3}]}, ['"content" must be a text']),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}]},
            ["holds image_url", "only text"],
        ),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [1]}, USER]}, ["a tool call"]),
        ({"messages": [{**USER, "name": 1}]}, ['"name" must be a string']),
        ({"messages": [USER], "tools": {}}, []),
        ({"messages": [USER], "tools": {"a": 1}}, ['"tools" must be a list']),
        ({"messages": [USER], "tools": [{}]}, ["tool 1", 'needs "function"']),
        ({"messages": [USER], "chat_template_kwargs": 1}, ["chat_template_kwargs"]),
        ({"conversations": {}}, ['"conversations" must be a list']),
        ({"conversations": [{"from": 1}]}, ['"from" must be a string']),
        ({"conversations": [{"from": "human"}]}, ["message 1", 'needs "content"']),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, ["not valid JSON"]),
    ],
)
def test_bad_conversations_are_named_with_their_place(tmp_path, entry, words):
    path = write(tmp_path / "p.jsonl", f'"a"\n{json.dumps(entry)}\n')
    if not words:  # nothing in it, so nothing is wrong with it
        assert len(prompts.load(path)) == 2
        return
    message = refusal(prompts.load, path)
    for word in ["p.jsonl:2", *words]:
        assert word in message


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
