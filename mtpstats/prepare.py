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
from mtpstats.closing import Closing
from mtpstats.conversation import Conversation
from mtpstats.errors import InputError
from mtpstats.forms import Prompt, usable
from mtpstats.text import printable


@dataclass(frozen=True)
class Shard:
    """Every ``of``-th prompt, from ``number`` (1 to ``of``) on: the same ones on every machine."""

    number: int
    of: int


@dataclass(frozen=True)
class Selection:
    """Which prompts run, and what makes text of them.

    ``chat`` None: conversations go through the chat template and texts stay as they are; True:
    each text is a user's message, too; False: no template, conversations are their texts.
    ``template`` is one to use instead of the model's, ``template_name`` what to call it in errors.
    A prompt runs if it has ``min_tokens`` to ``max_tokens`` tokens; the first ``limit`` of these
    do, or of those only what falls to ``shard``. ``shuffled`` only says that they came so.
    """

    chat: bool | None = None
    template: str | None = None
    template_name: str = "the chat template"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    limit: int | None = None
    shuffled: bool = False
    shard: Shard | None = None


class Tokenizer(Protocol):
    """What a model gives: its tokens, and its chat template."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def chat_template(self) -> ChatTemplate:
        """Return the template that the model carries, without source if it carries none."""


@dataclass(frozen=True)
class Prepared:
    """The prompts that run, each with its text, their tokens, and what the result records.

    ``longest`` is the length in tokens of the longest prompt, of all shards if this is one: their
    contexts are then equal.
    """

    prompts: list[Prompt]
    tokens: list[list[int]]
    longest: int
    settings: dict[str, Any]


def prepare(model: Tokenizer, prompts: Iterable[Prompt], selection: Selection) -> Prepared:
    """Return the prompts to run; InputError names the prompt that cannot be, and why."""
    choice = Choice(selection)
    tokens: list[list[int]] = []
    with Reader(model, selection) as reader:
        for prompt in prompts:
            if choice.full:
                break
            ready, ids = reader.read(prompt)
            if choice.add(ready, len(ids), rendered=reader.renders(prompt)):
                tokens.append(ids)
        chosen, settings = choice.chosen()
        return Prepared(chosen, tokens, choice.longest, {**reader.settings(), **settings})


class Choice:
    """Which prompts run, told one after another as their lengths become known."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._prompts: list[Prompt] = []
        self._n_kept = self._n_rendered = 0
        self._lengths = 1 << 62, 0
        self.longest = 0
        """Tokens of the longest prompt that runs, in whatever shard."""

    @property
    def full(self) -> bool:
        """Whether no further prompt is asked for."""
        limit = self._selection.limit
        return limit is not None and self._n_kept >= limit

    def add(self, prompt: Prompt, n_tokens: int, *, rendered: bool) -> bool:
        """Take the next prompt, whose text a template ``rendered`` or not; say if it runs here."""
        selection = self._selection
        self._lengths = min(self._lengths[0], n_tokens), max(self._lengths[1], n_tokens)
        if not selection.min_tokens <= n_tokens <= (selection.max_tokens or n_tokens):
            return False
        self.longest = max(self.longest, n_tokens)
        index, shard = self._n_kept, selection.shard
        self._n_kept += 1
        if shard is not None:
            if index % shard.of != shard.number - 1:
                return False
            prompt = replace(prompt, index=index)
        self._prompts.append(prompt)
        self._n_rendered += rendered
        return True

    def chosen(self) -> tuple[list[Prompt], dict[str, Any]]:
        """Return those that run, and what the result records; InputError if none does."""
        if not self._n_kept:
            shortest, longest = self._lengths
            raise InputError(
                "no prompt is of a length that was asked for: they have "
                f"{shortest} to {longest} tokens"
            )
        shard, n_kept = self._selection.shard, self._n_kept
        settings: dict[str, Any] = {"chat_prompts": self._n_rendered}
        if shard is not None:
            if not self._prompts:
                raise InputError(
                    f"shard {shard.number}/{shard.of}: of {n_kept} prompts none is left for it; "
                    f"there can be {n_kept} shards at most"
                )
            settings["shard"] = {"numbers": [shard.number], "of": shard.of, "prompts": n_kept}
        return self._prompts, settings


class Reader(Closing):
    """Makes text of conversations and tokens of text; starts no template before there is one."""

    def __init__(self, model: Tokenizer, selection: Selection) -> None:
        self._model = model
        self._selection = selection
        self._stack = ExitStack()
        self._renderer: Renderer | None = None
        self._template: ChatTemplate | None = None

    def close(self) -> None:
        """End the template's process."""
        self._stack.close()

    def read(self, prompt: Prompt) -> tuple[Prompt, list[int]]:
        """Return the prompt with its text, and its tokens; InputError if it cannot be read."""
        ready = self._written(prompt)
        ids = self._model.tokenize(ready.text)
        if not ids:
            raise InputError(f"prompt {printable(prompt.id)}: the model reads no token in it")
        return ready, ids

    def renders(self, prompt: Prompt) -> bool:
        """Whether the chat template makes the prompt's text."""
        chat = self._selection.chat
        return bool(chat) or (prompt.conversation is not None and chat is not False)

    def _written(self, prompt: Prompt) -> Prompt:
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
