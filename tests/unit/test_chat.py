"""Chat templates: what they may use, and what stops those that mean harm."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtpstats import chat
from mtpstats.chat import ChatTemplate, Renderer
from mtpstats.conversation import Conversation
from mtpstats.errors import InputError, MtpStatsError

USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}
TALK = Conversation((USER,))
QUICK = chat._START.replace("import main", "import main; import mtpstats.chat_process as p")
QUICK = QUICK.replace("main()", "p.CPU_SECONDS = 0.3; main()")


def render(source, talk=TALK, kwargs=None, **fields):
    with Renderer(ChatTemplate(source, **fields), kwargs) as renderer:
        return renderer.render(talk)


def refusal(source, talk=TALK, **fields):
    with pytest.raises(InputError) as caught:
        render(source, talk, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1200
    return message


@pytest.fixture(scope="module")
def renders():
    """``renders(source, **question)`` in this process, where a debugger can follow."""
    from mtpstats.chat_process import Template

    def call(source, messages=TALK.messages, tools=(), kwargs=None, bos="<s>", eos="</s>"):
        template = Template({"source": source, "bos": bos, "eos": eos, "kwargs": {}})
        copies = json.loads(json.dumps([list(messages), list(tools)]))
        return template.render(*copies, kwargs or {})

    return call


# ---- what templates use


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # trim_blocks and lstrip_blocks: a block takes its line with it
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if add_generation_prompt %}yes{% endif %}", "yes"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}{% continue %}x{% endfor %}", ""),
        ("{% generation %}x{{ messages|length }}{% endgeneration %}", "x1"),
        ("{{ {'b': 'é<&', 'a': [1, true, none]}|tojson }}", '{"b": "é<&", "a": [1, true, null]}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'a': 1}|tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{{ messages|map(attribute='role')|tojson }}", '["user"]'),
        ("{{ ('[1]'|from_json)[0] + 1 }}", "2"),
        ("{{ 'a<b'|safe + '<c>' }}", "a<b<c>"),
        ("{{ nothing }}{{ 'a' + nothing }}{{ nothing + 'b' }}{{ nothing is defined }}", "abFalse"),
        ("{% set q = [] %}{% set _ = q.append('x') %}{{ q.pop(0) }}{{ q|length }}", "x0"),
        ("{{ tools is defined }}", "False"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}", "<a>"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
    ],
)
def test_language_and_helpers(renders, source, expected):
    assert renders(source) == expected


def test_dates_are_todays_or_those_of_source_date_epoch(renders, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(86400 * 365 + 43200))
    source = "{{ strftime_now('%Y-%m-%d') }}|{{ date_string }}|{{ datetime }}"
    assert renders(source) == "1971-01-01|01 Jan 1971|Jan 01 1971"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    year = time.strftime("%Y")
    assert renders("{{ strftime_now('%Y') }}") in (year, str(int(year) + 1))


def test_variables_of_the_user_and_of_the_conversation():
    source = "{{ enable_thinking }} {{ effort }} {{ messages|length }}"
    talk = Conversation(TALK.messages, (), {"effort": "low"})
    assert render(source, talk, {"effort": "high", "enable_thinking": False}) == "False low 1"
    # What the conversation is, no variable replaces.
    assert render(source, talk, {"messages": []}) == "True low 1"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Thinking is on where it makes a difference to how the answer begins, or to the history.
        ("{{ messages[-1].content }}{% if not enable_thinking %}<think></think>{% endif %}", True),
        ("{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}", True),
        ("{{ 'deliberate' if enable_thinking }}{{ messages[-1].content }}", False),
    ],
)
def test_thinking_is_on_where_the_template_knows_it(renders, source, expected):
    assert renders("{{ enable_thinking }} " + source).startswith(f"{expected} ")


def test_old_thoughts_are_kept_unless_told_otherwise(renders):
    source = "{{ preserve_thinking }}{{ clear_thinking }}"
    assert renders(source) == "TrueFalse"
    assert renders(source, kwargs={"preserve_reasoning": False}) == "FalseTrue"
    assert renders(source, kwargs={"clear_thinking": 7}) == "True7"


# ---- the form of the messages


def test_bos_that_the_tokenizer_adds_is_taken_away():
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    marks = {"bos": "<s>", "eos": "</s>"}
    assert render(source, **marks) == "<s>Hello</s>"
    assert render(source, **marks, add_bos=True) == "Hello</s>"
    assert render(source, **marks, add_bos=True, add_eos=True) == "Hello"
    assert render(source, bos="", add_bos=True) == "Hello"


def test_system_message_goes_to_the_user_where_no_template_takes_it(renders):
    refuses = "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' }}"
    ignores = "{% for m in messages if m.role == 'user' %}"
    for start in (refuses, ignores):
        assert (
            renders(start + "[{{ m.content }}]{% endfor %}", [SYSTEM, USER]) == "[Be kind.\nHello]"
        )
    takes = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert renders(takes, [SYSTEM, USER]) == "[Be kind.][Hello]"


def test_content_is_what_the_template_reads(renders):
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    only_text = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}"
    printing = "{% for m in messages %}{{ m.content }}{% endfor %}"
    dumping = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content|tojson }}"
        "{% endfor %}"
    )
    only_parts = (
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    )
    either = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert renders(only_text, parts) == "a\nb."
    assert renders(printing, parts) == "a\nb"
    assert renders(dumping, parts) == "a\nb"
    assert renders(only_parts, parts) == "<a><b>"
    assert renders(only_parts, [USER]) == "<Hello>"
    assert renders(either, parts) == "ab"
    assert renders(either, [USER]) == "Hello"


def test_developer_is_the_system_except_to_gpt_oss(renders):
    talk = [{"role": "developer", "content": "d"}, USER]
    source = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    assert renders(source, talk).startswith("system")
    assert renders(source + "{# <|channel|> #}", talk).startswith("developer")


def test_arguments_of_tool_calls_are_objects_where_those_are_wanted(renders):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "x"}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    loop = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    end = "{% endfor %}{% endfor %}"
    inner = "{{ c.function.arguments }}"
    assert renders(loop + inner + end, talk) == 'Hello{"a": 1}'
    assert renders(loop + "{{ c.function.arguments|tojson }}" + end, talk) == 'Hello{"a": 1}'
    items = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    assert renders(loop + items + end, talk) == "Helloa=1"
    call["function"]["arguments"] = "not JSON"
    assert renders(loop + inner + end, talk) == "Hellonot JSON"
    message = refusal(loop + items + end, Conversation(tuple(talk)))
    assert "arguments of tool calls as objects" in message


def test_tool_template_is_used_for_tools_alone():
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    fields = {"tool_use": "{{ tools[0].function.name }}"}
    assert render("plain", Conversation((USER,), (tool,)), **fields) == "f"
    assert render("plain", **fields) == "plain"


# ---- what is wrong with a template


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("a\n\n{% for %}", 3, "Expected an expression"),
        ("a\n{{ x|no_such_filter }}", 2, "no_such_filter"),
        ("a\n{% if x %}", 2, "end of template"),
        ("a\n{{ 1 // (messages|length - 1) }}", 2, "division"),
        ("a\n\n\n{{ raise_exception('roles must\nalternate') }}", 4, "roles must alternate"),
        ("a\n{{ nothing.at.all }}", 2, "'nothing' is undefined"),
        ("{% macro m() %}\n{{ 1 + 'a' }}\n{% endmacro %}\n\n{{ m() }}", 2, "unsupported operand"),
        ("\n{% include '/etc/passwd' %}", 2, "no loader"),
    ],
)
def test_a_failing_template_names_its_line(source, line, words):
    message = refusal(source, name="my.jinja")
    assert message.startswith(f"my.jinja, line {line}: ")
    assert words in message


def test_control_characters_of_a_template_do_not_come_out():
    message = refusal("{{ raise_exception('\x1b[31m\r\n\u202e') }}", name="a\x1b.jinja")
    assert message.isprintable()


def test_a_template_of_any_size_is_refused(monkeypatch):
    monkeypatch.setattr(chat, "MAX_TEMPLATE", 10)
    assert "is over" in refusal("x" * 11)


def test_check_needs_no_conversation():
    with (
        Renderer(ChatTemplate("{% if %}", "f.jinja")) as renderer,
        pytest.raises(InputError, match=r"f\.jinja, line 1"),
    ):
        renderer.check()


# ---- templates that mean harm


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.os.environ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1)|int + [] }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{% set x = self.__init__.__globals__ %}{{ x.__builtins__ }}",
        "{{ lipsum.__globals__['os'].popen('true').read() }}",
    ],
)
def test_ways_out_of_the_sandbox_are_shut(source):
    refusal(source)


def test_what_the_sandbox_hides_is_not_printed(renders):
    for source in (
        "{{ ''|attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ strftime_now.__code__ }}",
    ):
        assert renders(source) == ""


BOMBS = {
    "endless loop": (
        "a\n{% for a in range(99999) %}{% for b in range(99999) %}\n{% endfor %}{% endfor %}",
        "did not end within",
    ),
    "loop without text": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if a %}{% endif %}"
        "{% endfor %}{% endfor %}",
        "did not end within",
    ),
    "endless text": (
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "million characters",
    ),
    "one giant text": ("{{ 'x' * 10**11 }}", "of memory"),
    "wide format": ("{{ '%0999999999d' % messages|length }}", "of memory"),
    "huge range": ("{{ range(10**12)|list }}", "Range too big"),
    "huge power": ("{{ (9**9)**(9**9) > messages|length }}", ""),
    "macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deep"),
    "deep expression": ("{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}", "too deep"),
    "deep blocks": ("{% if 1 %}" * 9999 + "{% endif %}" * 9999, ""),
    "deep JSON": ("{{ ('[' * 999999)|from_json }}", "too deep"),
    "list in itself": ("{% set l = [] %}{% set _ = l.append(l) %}{{ l|tojson }}", "Circular"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_stopped_within_seconds_and_bounds(name, monkeypatch):
    source, words = BOMBS[name]
    if name != "endless loop":
        monkeypatch.setattr(chat, "_START", QUICK)
    start = os.times()
    message = refusal(source)
    spent = os.times()
    assert words in message
    # Of processor time, since the machine may be busy: the limit is 2 s, and 4 s for a dead end.
    assert (
        spent.children_user + spent.children_system - (start.children_user + start.children_system)
        < 6
    )
    assert spent.user - start.user < 1


def test_memory_of_the_process_is_bounded():
    from mtpstats.chat_process import MAX_MEMORY

    # In a process of its own: the peak of children is that of the largest there ever was.
    code = """
import resource
from mtpstats.chat import ChatTemplate, Renderer
from mtpstats.errors import InputError
doubling = (
    "{% set ns = namespace(s='x' * 999) %}{% for a in range(99) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
)
with Renderer(ChatTemplate(doubling)) as renderer:
    try:
        renderer.render(TALK)
    except InputError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"from test_chat import TALK\n{code}"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said, peak = done.stdout.splitlines()
    assert re.search("512 MiB of memory|within 2 s", said)
    assert 32 << 20 < int(peak) <= MAX_MEMORY == 512 << 20


def test_a_process_that_dies_or_is_silent_is_one_line(monkeypatch):
    with Renderer(ChatTemplate("x")) as renderer:
        assert renderer.render(TALK) == "x"
        (process,) = renderer._processes.values()
        process._process.kill()
        with pytest.raises(InputError, match="killed"):
            renderer.render(TALK)
    monkeypatch.setattr(chat, "_START", "import sys; sys.stdin.readline(); sys.exit(7)")
    assert "died (code 7)" in refusal("x")
    monkeypatch.setattr(chat, "_START", "import time; time.sleep(60)")
    monkeypatch.setattr(chat, "PATIENCE_S", 0.2)
    assert "did not end within 0.2 s" in refusal("x")
    monkeypatch.setattr(chat, "PATIENCE_S", 30)
    monkeypatch.setattr(chat, "MAX_ANSWER", 1000)
    monkeypatch.setattr(chat, "_START", "print('x' * 9999)")
    assert "too much text" in refusal("x")


def test_no_process_stays(monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert render("x") == "x"
    refusal("{{ raise_exception('no') }}")
    assert [process.poll() is None for process in started] == [False, False]


def test_without_jinja2_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MtpStatsError, match="pip install jinja2"):
        render("x")
