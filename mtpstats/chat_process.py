"""The process in which chat templates run: :class:`mtpstats.chat.Renderer` starts it.

A template comes with a model file and is a program by a stranger. jinja2's sandbox keeps it from
everything but its input; that it ends, and in how much memory, only limits on a process can say.
Reads JSON lines from standard input, the template first, and answers each with a JSON line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
MAX_MEMORY = 512 << 20
MAX_TEXT = 16 << 20
"""Most characters of one rendered conversation: more than any context holds."""

_MARK = "mtpstats-probe"
_LIST_METHODS = ("append", "pop")
_TRIMMED = "You have access to the following functions in JSONSchema format"
"""Step-3.5's template says so; blanks around its messages drive that model into loops."""

Json = dict[str, Any]


class _Stop(BaseException):
    """Ends a template; not an Exception, so that nothing on the way takes it for its own."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the two list methods that some templates queue tool calls with."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in _LIST_METHODS:
            return True
        return super().is_safe_attribute(obj, attr, value)


class _Generation(Extension):
    """``{% generation %}``, which marks for training what the assistant said: only its inside."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Undefined(Undefined):
    """A variable nobody set: nothing where text is added up, an error elsewhere, as before."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike jinja2's own, which escapes for HTML and sorts.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        default=_listable,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _listable(value: Any) -> Any:
    if isinstance(value, Iterator):
        return list(value)  # what filters like map and selectattr give
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _now() -> datetime:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return datetime.fromtimestamp(int(epoch)) if epoch.isdecimal() else datetime.now()


class Template:
    """A chat template, and in what form it wants its messages.

    Args:
        settings: ``source``; ``bos`` and ``eos``, the texts of those tokens; ``kwargs``, variables
            for the template.
    """

    def __init__(self, settings: Json) -> None:
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            undefined=_Undefined,
        )
        environment.filters["safe"] = str  # nothing is escaped here, so nothing is safer
        environment.filters["tojson"] = _tojson
        environment.filters["from_json"] = json.loads
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: _now().strftime(form)
        self._template = environment.from_string(settings["source"])
        self._settings = settings
        self._trims = _TRIMMED in settings["source"]
        self._developer = "<|channel|>" in settings["source"]  # gpt-oss tells it from the system
        self._typed = self._takes_parts = self._objects = False
        self._system = self._thinks = True
        self._probed = False

    def render(self, messages: list[Json], tools: list[Json], kwargs: Json) -> str:
        """Return the prompt of a conversation, with what makes the assistant answer at its end."""
        if not self._probed:
            self._probe()
            self._probed = True
        return self._run(self._adapted(messages), tools, kwargs)

    def _run(self, messages: list[Json], tools: list[Json], kwargs: Json) -> str:
        context = self._template.new_context(self._variables(messages, tools, kwargs))
        pieces, size = [], 0
        # Not Template.render: its traceback has lost where a _Stop came from.
        for piece in self._template.root_render_func(context):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise _Stop(f"it makes more than {MAX_TEXT >> 20} million characters")
        return "".join(pieces)

    def _variables(self, messages: list[Json], tools: list[Json], kwargs: Json) -> Json:
        """Return what a template may use: llama-server's variables under llama-server's names."""
        now = _now()
        given = {**self._settings["kwargs"], **kwargs}
        found: Json = {
            "enable_thinking": self._thinks,
            "datetime": now.strftime("%b %d %Y"),
            "date_string": now.strftime("%d %b %Y"),
        }
        keep = given.get("preserve_reasoning", True)
        if isinstance(keep, bool):
            found["preserve_thinking"] = keep
            for name in ("clear_thinking", "truncate_history_thinking", "drop_thinking"):
                found[name] = not keep
        if isinstance(given.get("reasoning_effort"), str):
            found["reasoning_strength"] = given["reasoning_effort"]
        found.update(given)
        if tools:
            found["tools"] = tools
        found.update(
            messages=messages,
            bos_token=self._settings["bos"],
            eos_token=self._settings["eos"],
            add_generation_prompt=True,
        )
        return found

    # ---- what form of messages it wants

    def _probe(self) -> None:
        """Render small conversations and see what comes of them, as llama.cpp does."""
        user = _message("user", _MARK)
        text = self._tried([user])
        listed = self._tried([_message("user", [{"type": "text", "text": _MARK}])])
        self._typed = _MARK not in text and _MARK in listed
        self._takes_parts = self._typed or (_MARK in text and listed == text)

        system = self._tried(self._form([_message("system", _MARK), _message("user", "Hello")]))
        self._system = _MARK in system

        answer = {**_message("assistant", "Rain."), "reasoning_content": _MARK}
        talk = self._form([_message("user", "Hello"), answer])
        ends = {
            self._tried(self._form([user]), enable_thinking=on).rpartition(_MARK)[2]
            for on in (True, False)
        }
        self._thinks = len(ends) > 1 or _MARK in self._tried(talk, enable_thinking=True)

        arguments = {"city": _MARK}
        call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
        answer = {**_message("assistant", ""), "tool_calls": [{**call, "id": "call00001"}]}
        result = {**_message("tool", "Rain."), "tool_call_id": "call00001"}
        talk = self._form([_message("user", "Hello"), answer, result])
        called = self._tried(talk, [_TOOL])
        self._objects = _MARK in called and str(arguments) not in called

    def _tried(self, messages: list[Json], tools: Sequence[Json] = (), **kwargs: bool) -> str:
        try:
            return self._run(messages, list(tools), kwargs)
        except Exception:
            return ""  # what a template refuses it does not support

    def _adapted(self, messages: list[Json]) -> list[Json]:
        """Return the messages in the form that the template can read."""
        messages = self._form(messages)
        if not self._system and messages[0]["role"] == "system":
            first, *messages = messages
            if messages:
                messages[0] = {**messages[0], "content": _joined(first, messages[0])}
        for message in messages:
            for call in message.get("tool_calls", ()) if self._objects else ():
                call["function"]["arguments"] = _parsed(call["function"]["arguments"])
        return messages

    def _form(self, messages: list[Json]) -> list[Json]:
        """Return copies with their content as text or as a list, as the template reads it."""
        formed = [{**message, "content": self._content(message["content"])} for message in messages]
        for message in formed:
            if message["role"] == "developer" and not self._developer:
                message["role"] = "system"
        return formed

    def _content(self, content: Any) -> Any:
        if isinstance(content, str) and self._trims:
            content = content.strip()
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._typed else content
        return content if self._takes_parts else "\n".join(part["text"] for part in content)


_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Say what the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}


def _message(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


def _joined(first: Json, second: Json) -> Any:
    one, other = first["content"], second["content"]
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n{other}"
    return [*_listed(one), *_listed(other)]


def _listed(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        raise TemplateError(
            "it takes the arguments of tool calls as objects, and these are not JSON"
        ) from None


# ---- the process


def _line(error: BaseException) -> int | None:
    """Return the line of the template at which it was when the error came, None if nowhere."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        number: int | None = trace.tb_lineno  # None for a signal at a jump the compiler added
        if template is not None and number is not None:
            line = template.get_corresponding_lineno(number)
        trace = trace.tb_next
    return line


def _reason(error: BaseException) -> str:
    """Return what went wrong in the words of one line."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MAX_MEMORY >> 20} MiB of memory"
    if isinstance(error, RecursionError):
        return "it calls itself too deep"
    if isinstance(error, SecurityError):
        return f"the sandbox stopped it: {error}"
    if isinstance(error, _Stop | TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _guarded(call: Callable[[], Json]) -> Json:
    """Return the answer of a call that may take ``CPU_SECONDS``, or why there is none."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    # The timer ends what runs as Python and knows the line; the limit ends everything else.
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + 2 * CPU_SECONDS))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return call()
    except (Exception, _Stop) as error:
        return {"error": _reason(error)[:1000], "line": _line(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, hard))


def _overtime(_signal: int, _frame: object) -> NoReturn:
    raise _Stop(f"it did not end within {CPU_SECONDS:g} s")


def _compiled(settings: Json, into: list[Template]) -> Json:
    into.append(Template(settings))
    return {}


def _answers() -> Iterator[Json]:
    template: list[Template] = []
    yield _guarded(partial(_compiled, json.loads(sys.stdin.readline()), template))
    for line in sys.stdin:
        yield _guarded(partial(_rendered, template[0], json.loads(line)))


def _rendered(template: Template, asked: Json) -> Json:
    return {"text": template.render(**asked)}


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGPROF, _overtime)
    with contextlib.suppress(ValueError, OSError):  # macOS may refuse this one
        _limit(resource.RLIMIT_AS, MAX_MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    for answer in _answers():
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
