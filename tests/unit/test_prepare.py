"""Which prompts run, and as what text, over a stand-in for a model."""

import hashlib
from dataclasses import replace

import pytest

from mtpstats.chat import ChatTemplate
from mtpstats.conversation import Conversation
from mtpstats.errors import InputError
from mtpstats.prepare import Selection, Shard, prepare, read_template
from mtpstats.prompts import Prompt

SOURCE = "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"
TALK = Conversation(({"role": "user", "content": "hello"},))


class Model:
    """One token a word."""

    template = ChatTemplate(SOURCE, bos="<s>", add_bos=True)

    def tokenize(self, text):
        return list(range(len(text.split())))

    def chat_template(self):
        return self.template


class WithoutTemplate(Model):
    template = ChatTemplate()


class Untouched(Model):
    def chat_template(self):
        raise AssertionError("nobody needs the template")


def words(*counts):
    return [Prompt(f"p{n}", None, " ".join(["w"] * n)) for n in counts]


def refusal(model, prompts, **selection):
    with pytest.raises(InputError) as caught:
        prepare(model, prompts, Selection(**selection))
    return str(caught.value)


def test_texts_stay_as_they_are_and_need_no_template():
    found = prepare(Untouched(), words(2, 3), Selection())
    assert found.prompts == words(2, 3)
    assert found.tokens == [[0, 1], [0, 1, 2]]
    assert found.settings["chat_prompts"] == 0
    assert found.settings["chat_template"] is None
    assert found.settings["chat_template_sha256"] is None


def test_a_conversation_becomes_text_by_the_models_template():
    found = prepare(Model(), [Prompt("a", "c", "", TALK), *words(1)], Selection())
    # Without the BOS of the template, for this tokenizer adds its own.
    assert found.prompts[0] == Prompt("a", "c", "[user] hello [assistant]")
    assert found.prompts[1].text == "w"
    assert [len(ids) for ids in found.tokens] == [3, 1]
    assert found.settings["chat_prompts"] == 1
    assert found.settings["chat_template"] == "model"
    assert found.settings["chat_template_sha256"] == hashlib.sha256(SOURCE.encode()).hexdigest()


def test_chat_makes_a_text_a_users_message_and_no_chat_needs_no_template():
    found = prepare(Model(), [Prompt("a", None, "hi")], Selection(chat=True))
    assert found.prompts[0].text == "[user] hi [assistant]"
    talk = Conversation((*TALK.messages, {"role": "tool", "content": "x"}))
    found = prepare(WithoutTemplate(), [Prompt("a", None, "", talk)], Selection(chat=False))
    assert found.prompts == [Prompt("a", None, "hello\n\nx")]
    assert found.settings["chat_prompts"] == 0


def test_another_template_and_its_variables_are_recorded():
    selection = Selection(
        template="{{ messages[0].content }}{{ mood }}{{ bos_token }}",
        template_name="some/where/my.jinja",
        template_kwargs={"mood": "!"},
    )
    model = Model()
    model.template = replace(model.template, tool_use="not this", add_bos=False)
    found = prepare(model, [Prompt("a", None, "", TALK)], selection)
    assert found.prompts[0].text == "hello!<s>"
    assert found.settings["chat_template"] == "my.jinja"
    assert found.settings["chat_template_kwargs"] == {"mood": "!"}


def test_lengths_and_limit_in_the_order_given():
    prompts = words(5, 1, 3, 9, 4, 2, 6)

    def lengths(**selection):
        return [len(ids) for ids in prepare(Model(), prompts, Selection(**selection)).tokens]

    assert lengths() == [5, 1, 3, 9, 4, 2, 6]
    assert lengths(min_tokens=3) == [5, 3, 9, 4, 6]
    assert lengths(max_tokens=4) == [1, 3, 4, 2]
    assert lengths(min_tokens=3, max_tokens=5) == [5, 3, 4]
    assert lengths(limit=2) == [5, 1]
    assert lengths(limit=2, max_tokens=4) == [1, 3]
    assert lengths(limit=99) == [5, 1, 3, 9, 4, 2, 6]
    settings = prepare(Model(), prompts, Selection(limit=2, max_tokens=4, shuffled=True)).settings
    assert (settings["limit"], settings["min_tokens"], settings["max_tokens"]) == (2, 0, 4)
    assert settings["shuffle"] is True


def test_what_comes_after_the_limit_is_not_even_looked_at():
    prompts = [*words(1), Prompt("bad", None, "  ")]
    assert len(prepare(Model(), prompts, Selection(limit=1)).prompts) == 1


def test_refusals_name_the_prompt_or_the_lengths_there_are():
    assert "they have 2 to 9 tokens" in refusal(Model(), words(2, 9), min_tokens=10)
    assert refusal(Model(), [Prompt("bad\x1b", None, " ")]) == (
        "prompt bad\\x1b: the model reads no token in it"
    )
    message = refusal(WithoutTemplate(), [Prompt("a", None, "", TALK)])
    assert message.startswith("prompt a: the model carries no chat template")
    assert "--chat-template" in message
    assert "--no-chat" in message
    failing = refusal(Model(), [Prompt("a", None, "", TALK)], template="\n{{ 1 + '' }}")
    assert failing.startswith("prompt a: the chat template, line 2: ")
    assert "prompt is empty" in refusal(Model(), [Prompt("a", None, "", TALK)], template="{{ x }}")
    assert "NUL" in refusal(Model(), [Prompt("a", None, "", TALK)], template="{{ '\\0' }}")


def test_a_template_file_is_checked_when_it_is_read(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(SOURCE)
    assert read_template(path) == (SOURCE, str(path))
    path.write_text("a\n{% if %}")
    with pytest.raises(InputError, match=r"t\.jinja, line 2: "):
        read_template(path)
    with pytest.raises(InputError, match="No such file"):
        read_template(tmp_path / "none")


def test_shards_take_turns_after_every_other_choice():
    prompts = [*words(9, 2, 3), Prompt("talk", None, "", TALK), *words(4, 5, 6, 8)]
    chosen = {"min_tokens": 3, "max_tokens": 8, "limit": 5}
    whole = prepare(Model(), prompts, Selection(**chosen))
    # 9 is too long, 2 too short, 8 beyond the limit; the conversation has the template's words.
    assert [p.id for p in whole.prompts] == ["p3", "talk", "p4", "p5", "p6"]
    assert whole.longest == 6
    assert "shard" not in whole.settings
    parts = [prepare(Model(), prompts, Selection(**chosen, shard=Shard(i, 2))) for i in (1, 2)]
    assert [[(p.id, p.index) for p in part.prompts] for part in parts] == [
        [("p3", 0), ("p4", 2), ("p6", 4)],
        [("talk", 1), ("p5", 3)],
    ]
    assert [[len(ids) for ids in part.tokens] for part in parts] == [[3, 4, 6], [3, 5]]
    assert [part.longest for part in parts] == [6, 6]
    assert [part.settings["chat_prompts"] for part in parts] == [0, 1]
    assert parts[1].settings["shard"] == {"numbers": [2], "of": 2, "prompts": 5}
    same = {key: parts[0].settings[key] for key in whole.settings if key != "chat_prompts"}
    assert same == {key: whole.settings[key] for key in same}


def test_a_shard_without_a_prompt_is_refused():
    assert refusal(Model(), words(1, 2), shard=Shard(3, 3)) == (
        "shard 3/3: of 2 prompts none is left for it; there can be 2 shards at most"
    )
