"""Every chat template that llama.cpp ships: does ``llama-server --jinja`` make the same prompt?"""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from oracle import server

from mtpstats import describe
from mtpstats.chat import ChatTemplate, Renderer
from mtpstats.chat_process import Template
from mtpstats.conversation import Conversation, from_openai
from mtpstats.llama import Library, Model
from mtpstats.prepare import Selection, prepare
from mtpstats.prompts import Prompt, suite

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello, who are you?"}
MODEL = {"role": "assistant", "content": "A model."}
LAST = {"role": "user", "content": ' What is 2 < 3 & "é"?\n'}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdef123",  # Mistral's templates want nine characters
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zoë", "days": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": "rain"}
RAINS = {"role": "assistant", "content": "It rains."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Say the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Which city."},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
CASES: dict[str, dict[str, Any]] = {
    "several turns": {"messages": [SYSTEM, HELLO, MODEL, LAST]},
    "no system": {"messages": [HELLO, MODEL, LAST]},
    "no thinking": {
        "messages": [HELLO, MODEL, LAST],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "thoughts": {"messages": [HELLO, {**MODEL, "reasoning_content": "Think."}, LAST]},
    "two parts": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        ]
    },
    "tools": {"messages": [SYSTEM, HELLO, MODEL, LAST], "tools": TOOLS},
    "tool call": {"messages": [SYSTEM, HELLO, CALL, RESULT, RAINS, LAST], "tools": TOOLS},
    "tool answer": {"messages": [HELLO, CALL, RESULT], "tools": TOOLS},
}

# Where llama-server rebuilds a conversation for one template by hand, mtpstats does not follow:
# thoughts and lists of texts to two models, tool calls under Gemma 4's first template, which its
# makers have replaced.
APART = {
    ("LFM2.5-8B-A1B.jinja", "two parts"),
    ("LFM2.5-8B-A1B.jinja", "thoughts"),
    ("mistralai-Ministral-3-14B-Reasoning-2512.jinja", "two parts"),
    ("mistralai-Ministral-3-14B-Reasoning-2512.jinja", "thoughts"),
    ("unsloth-mistral-Devstral-Small-2507.jinja", "thoughts"),
    ("google-gemma-4-31B-it-interleaved.jinja", "tool call"),
    ("google-gemma-4-31B-it-interleaved.jinja", "tool answer"),
}


@pytest.fixture(scope="module")
def templates(lib: Library) -> list[Path]:
    """The templates that the build's source came with; ``build_llama.sh --tools`` keeps them."""
    folder = lib.prefix / "share" / "templates"
    assert folder.is_dir(), f"{folder} is missing: run ./build_llama.sh --tools, which adds it"
    found = sorted(folder.glob("*.jinja"))
    # Another llama.cpp may ship none.
    assert found or lib.build.source != "llama-cpp-python-0.3.36"
    return found


def conversation(case: dict[str, Any]) -> Conversation:
    return from_openai(case, case["messages"], "case")


def rendered(template: Template, case: dict[str, Any]) -> str | None:
    """What mtpstats makes of a case, None where the template refuses it."""
    talk = copy.deepcopy(conversation(case))
    try:
        return template.render(list(talk.messages), list(talk.tools), dict(talk.kwargs or {}))
    except Exception:
        return None


def test_prompts_equal_llama_servers(
    lib: Library, model: Model, model_path: Path, templates: list[Path]
) -> None:
    own = describe.chat_template(model)
    assert not own.add_bos
    different = set()
    compared = 0
    for path in templates:
        source = path.read_text(encoding="utf-8")
        template = Template({"source": source, "bos": own.bos, "eos": own.eos, "kwargs": {}})
        with server(lib.prefix, model_path, "--chat-template-file", str(path)) as post:
            for name, case in CASES.items():
                answer = post("/apply-template", case)
                expected = answer["prompt"] if isinstance(answer, dict) else None
                found = rendered(template, case)
                if name == "several turns":
                    assert found is not None, path.name
                    assert MODEL["content"] in found
                    assert LAST["content"].strip() in found
                compared += expected is not None
                if found != expected:
                    different.add((path.name, name))
    assert compared >= 0.95 * len(CASES) * len(templates)
    assert different == APART


def test_every_template_renders_the_suite_in_its_process(templates: list[Path]) -> None:
    talks = [prompt.conversation for prompt in suite() if prompt.category == "dialogue"]
    for path in templates[:: max(1, len(templates) // 8)]:
        with Renderer(ChatTemplate(path.read_text(encoding="utf-8"), path.name)) as renderer:
            for talk in talks:
                assert talk is not None
                text = renderer.render(talk)
                for message in talk.messages:
                    assert message["content"][:20].strip() in text, path.name


OWN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}<assistant>"
)


@pytest.fixture(scope="module", params=[True, False], ids=["adds BOS", "adds none"])
def chat_model(
    request: pytest.FixtureRequest, tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    """A model with a chat template of its own, whose tokenizer adds BOS or does not."""
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    reader = gguf.GGUFReader(tiny("qwen35"))
    writer = gguf.GGUFWriter(path, "qwen35")
    kinds = gguf.GGUFValueType
    changed = {
        gguf.Keys.Tokenizer.CHAT_TEMPLATE: MetadataDetails(kinds.STRING, OWN),
        gguf.Keys.Tokenizer.BOS_ID: MetadataDetails(kinds.UINT32, 256),
        gguf.Keys.Tokenizer.ADD_BOS: MetadataDetails(kinds.BOOL, request.param),
    }
    copy_with_new_metadata(reader, writer, changed, [])
    return path, request.param


class Loaded:
    """A model as :func:`prepare` wants it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def tokenize(self, text: str) -> list[int]:
        return self.model.tokenize(text)

    def chat_template(self) -> ChatTemplate:
        return describe.chat_template(self.model)


def test_tokens_equal_llama_servers_with_one_bos(
    lib: Library, chat_model: tuple[Path, bool]
) -> None:
    path, _ = chat_model
    case = CASES["several turns"]
    with server(lib.prefix, path) as post:
        text = post("/apply-template", case)["prompt"]
        question = {"content": text, "add_special": True, "parse_special": True}
        expected = post("/tokenize", question)["tokens"]
    with Model(lib, path) as model:
        found = prepare(Loaded(model), [Prompt("a", None, "", conversation(case))], Selection())
    assert found.prompts[0].text == text
    assert found.tokens == [expected]
    # The template writes BOS and the tokenizer may add it: there is one. Each message ends in 256.
    assert expected[0] == 256
    assert expected.count(256) == 1 + len(case["messages"])


def test_bench_runs_conversations_through_the_models_template(
    lib: Library, chat_model: tuple[Path, bool], tmp_path: Path
) -> None:
    path, _ = chat_model
    case = {"messages": [SYSTEM, HELLO, MODEL], "category": "x"}
    chats = tmp_path / "c.jsonl"
    chats.write_text(json.dumps(case) + '\n{"prompt": "as it is"}\n')
    command = [sys.executable, "-m", "mtpstats", "bench", "-m", str(path), "-n", "4", "-t", "1"]
    done = subprocess.run(
        [*command, "--prompts", str(chats), "--json"],
        capture_output=True,
        check=True,
        timeout=120,
    )
    result = json.loads(done.stdout)
    with server(lib.prefix, path) as post:
        text = post("/apply-template", {"messages": [SYSTEM, HELLO]})["prompt"]
    assert [p["prompt_sha256"] for p in result["prompts"]] == [
        hashlib.sha256(t.encode()).hexdigest() for t in (text, "as it is")
    ]
    assert [p["category"] for p in result["prompts"]] == ["x", None]
    settings = result["settings"]
    assert (settings["chat_prompts"], settings["chat_template"]) == (1, "model")
    assert settings["chat_template_sha256"] == hashlib.sha256(OWN.encode()).hexdigest()
    assert result["model"]["chat_template"] is True
