"""Conversations as people keep them: OpenAI's ``messages`` and ShareGPT's ``conversations``.

Both become messages in OpenAI's form, with the keys that llama.cpp hands to templates and in its
order. Whatever is wrong is an :class:`~mtpstats.errors.InputError` that begins with the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtpstats import reading
from mtpstats.errors import InputError
from mtpstats.text import printable

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_TEXTS = ("reasoning_content", "name", "tool_call_id")

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What the assistant is to answer to: ``messages`` of which none follows the last question.

    A message has ``role``, ``content`` (a string, or a list of ``{"type": "text", "text": ...}``)
    and where it had them ``reasoning_content``, ``name``, ``tool_call_id``, ``tool_calls``.
    ``kwargs`` are variables for the chat template that the conversation brings along.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def plain(self) -> str:
        """Return the texts of the messages with a blank line between, for use without template."""
        texts = (_text(message["content"]) for message in self.messages)
        return "\n\n".join(text for text in texts if text)


def from_openai(entry: Mapping[str, Any], messages: Any, where: str) -> Conversation:
    """Return the conversation of an object with OpenAI's ``messages``, ``tools`` and the like.

    ``messages`` stand apart because they may come under another key. The assistant's last turn is
    left out: it is what will be generated.
    """
    found = [
        _message(message, f"{where}: message {number}")
        for number, message in enumerate(_listed(messages, "messages", where), 1)
    ]
    tools = [
        _tool(tool, f"{where}: tool {number}")
        for number, tool in enumerate(_listed(entry.get("tools") or [], "tools", where), 1)
    ]
    kwargs = entry.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InputError(f'{where}: "chat_template_kwargs" must be an object')
    while found and found[-1]["role"] == "assistant":
        found.pop()
    if not found:
        raise InputError(f"{where}: no message that an assistant could answer")
    return Conversation(tuple(found), tuple(tools), kwargs)


def from_sharegpt(entry: Mapping[str, Any], where: str) -> Conversation:
    """Return the conversation of an object with ShareGPT's ``conversations``."""
    messages = []
    if entry.get("system"):
        messages.append({"role": "system", "content": entry["system"]})
    for number, turn in enumerate(_listed(entry["conversations"], "conversations", where), 1):
        messages.append(_turn(turn, f"{where}: message {number}"))
    tools = entry.get("tools") or []
    if isinstance(tools, str):
        tools = _parsed(tools, f'{where}: "tools"')
    tools = [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "function" not in tool
        else tool
        for tool in _listed(tools, "tools", where)
    ]
    return from_openai({**entry, "tools": tools}, messages, where)


def _turn(turn: Any, where: str) -> Any:
    """Return one turn of ShareGPT as a message of OpenAI's."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # mixed files have some in OpenAI's form
    if not isinstance(turn["from"], str):
        raise InputError(f'{where}: "from" must be a string')
    speaker, value = turn["from"].lower(), turn.get("value")
    if speaker == "function_call":
        call = _parsed(value, where)
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": _SHAREGPT_ROLES.get(speaker, speaker), "content": value}


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InputError(f"{where}: must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f'{where}: needs "role", for instance "user"')
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if content is None and not (role == "assistant" and calls):
        raise InputError(f'{where}: needs "content" with a text')
    made: Message = {"role": role, "content": "" if content is None else _content(content, where)}
    for key in _TEXTS:
        value = message.get(key)
        if isinstance(value, str):
            made[key] = value
        elif value is not None:
            raise InputError(f'{where}: "{key}" must be a string')
    if calls:
        made["tool_calls"] = [_call(call, where) for call in _listed(calls, "tool_calls", where)]
    return made


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f'{where}: "content" must be a text or a list of texts')
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = printable(kind)[:40] if isinstance(kind, str) and kind != "text" else "no text"
            raise InputError(f"{where}: its content holds {shown}; only text can be run")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f'{where}: a tool call needs "function" with "name" and "arguments"')
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # OpenAI's form is JSON in a string
        arguments = json.dumps(
            {} if arguments is None else arguments, ensure_ascii=False, separators=(",", ":")
        )
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f'{where}: needs "function" with "name" and "parameters"')
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {},
        },
    }


def _listed(value: Any, key: str, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise InputError(f'{where}: "{key}" must be a list')
    return value


def _parsed(text: Any, where: str) -> Any:
    try:
        return reading.loads(text, nan=True)
    except (TypeError, ValueError):
        raise InputError(f"{where}: is not valid JSON") from None


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
