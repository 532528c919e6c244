"""Prompts that are conversations, in OpenAI's form and in ShareGPT's."""

import json
from pathlib import Path

import pytest
from inputs import refusal, write

from mtpstats import prompts


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
