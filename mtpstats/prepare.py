"""Prompts into tokens: the chat template, the tokenizer, and which prompts are run at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mtpstats import reading
from mtpstats.chat import ChatTemplate, Renderer
from mtpstats.conversation import Conversation
from mtpstats.errors import InputError
from mtpstats.forms import Prompt, usable
from mtpstats.text import printable


@dataclass(frozen=True)
class Selection:
    """Which prompts run, and what makes text of them.

    ``chat`` None: conversations go through the chat template and texts stay as they are; True:
    each text is a user's message, too; False: no template, conversations are their texts.
    ``template`` is one to use instead of the model's, ``template_name`` what to call it in errors.
    A prompt runs if it has ``min_tokens`` to ``max_tokens`` tokens; the first ``limit`` of these
    do. ``shuffled`` only says that they came so.
    """

    chat: bool | None = None
    template: str | None = None
    template_name: str = "the chat template"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    limit: int | None = None
    shuffled: bool = False


class Tokenizer(Protocol):
    """What a model gives: its tokens, and its chat template."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def chat_template(self) -> ChatTemplate:
        """Return the template that the model carries, without source if it carries none."""


@dataclass(frozen=True)
class Prepared:
    """The prompts that run, each with its text, their tokens, and what the result records."""

    prompts: list[Prompt]
    tokens: list[list[int]]
    settings: dict[str, Any]


def prepare(model: Tokenizer, prompts: Iterable[Prompt], selection: Selection) -> Prepared:
    """Return the prompts to run; InputError names the prompt that cannot be, and why."""
    kept: list[Prompt] = []
    tokens: list[list[int]] = []
    shortest, longest = 1 << 62, 0
    with ExitStack() as stack:
        writer = _Writer(model, selection, stack)
        for prompt in prompts:
            if selection.limit is not None and len(kept) >= selection.limit:
                break
            ready = writer.written(prompt)
            ids = model.tokenize(ready.text)
            if not ids:
                raise InputError(f"prompt {printable(prompt.id)}: the model reads no token in it")
            shortest, longest = min(shortest, len(ids)), max(longest, len(ids))
            if selection.min_tokens <= len(ids) <= (selection.max_tokens or len(ids)):
                kept.append(ready)
                tokens.append(ids)
    if not kept:
        raise InputError(
            f"no prompt is of a length that was asked for: they have {shortest} to {longest} tokens"
        )
    return Prepared(kept, tokens, writer.settings())


class _Writer:
    """Makes text of conversations; starts no template before there is one."""

    def __init__(self, model: Tokenizer, selection: Selection, stack: ExitStack) -> None:
        self._model = model
        self._selection = selection
        self._stack = stack
        self._renderer: Renderer | None = None
        self._template: ChatTemplate | None = None
        self._rendered = 0

    def written(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its text."""
        talk, chat = prompt.conversation, self._selection.chat
        if talk is None and not chat:
            return prompt
        where = f"prompt {printable(prompt.id)}"
        if talk is None:
            talk = Conversation(({"role": "user", "content": prompt.text},))
        if chat is False:
            text = talk.plain()
        else:
            try:
                text = self._started().render(talk)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            self._rendered += 1
        return replace(prompt, text=usable(text, where), conversation=None)

    def _started(self) -> Renderer:
        if self._renderer is None:
            selection = self._selection
            template = self._model.chat_template()
            if selection.template is not None:
                template = replace(
                    template,
                    source=selection.template,
                    name=selection.template_name,
                    tool_use=None,
                )
            if not template.source:
                raise InputError(
                    "the model carries no chat template: give one with --chat-template, or take "
                    "conversations as plain text with --no-chat"
                )
            self._template = template
            self._renderer = self._stack.enter_context(
                Renderer(template, selection.template_kwargs)
            )
        return self._renderer

    def settings(self) -> dict[str, Any]:
        """Return what the result records of it."""
        selection, template = self._selection, self._template
        name = None
        if template is not None:
            # No path of this machine, as for the model.
            name = "model" if selection.template is None else os.path.basename(template.name)
        return {
            "chat_prompts": self._rendered,
            "chat_template": name,
            "chat_template_sha256": (
                None if template is None else hashlib.sha256(template.source.encode()).hexdigest()
            ),
            "chat_template_kwargs": dict(selection.template_kwargs),
            "min_tokens": selection.min_tokens,
            "max_tokens": selection.max_tokens,
            "limit": selection.limit,
            "shuffle": selection.shuffled,
        }


def read_template(path: Path) -> tuple[str, str]:
    """Return (source, name for errors) of a template file, once it is known to be one."""
    source, name = reading.read(path), reading.shown(path)
    with Renderer(ChatTemplate(source, name)) as renderer:
        renderer.check()
    return source, name
