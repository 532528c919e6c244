"""Merging results of shards."""

import copy
import itertools
import json

import pytest
from test_report_text import counters, made, prompt

from mtpstats import cli
from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.merge import merge


def shards() -> list[dict]:
    """Three shards with one prompt, two and one."""
    one = made(prompt("p-10", counters(3, [3], [3], [2], [[2, 1]], [0], [1.5], [0.25])))
    two = made(prompt("p-2"), prompt("p-1"), n_ctx=512)
    three = made(prompt("p-3"))
    for i, shard in enumerate((one, two, three)):
        shard.update(copy.deepcopy(shard))
        shard["environment"] |= {
            "time": f"2026-01-02T03:04:0{3 - i}+00:00",
            "command": ["mtpstats", "bench", f"--prompts=shard{i}.txt"],
        }
        shard["environment"]["devices"][1]["memory_free"] = i
        shard["environment"]["library"]["built"] = f"2026-01-0{i + 1}"
    return [one, two, three]


def merged(*parts: dict) -> dict:
    result = merge([(f"r{i}.json", part) for i, part in enumerate(parts)])
    results.validate(result, "merged")
    return result


def test_counts_add_up_and_the_rest_is_kept():
    result = merged(*shards())
    assert [p["id"] for p in result["prompts"]] == ["p-1", "p-2", "p-3", "p-10"]
    # three prompts of test_report_text.by_hand and one of the counters above
    assert result["total"]["positions"]["accepted"][:3] == [3 * 3 + 2, 3 * 1, 0]
    assert result["total"]["positions"]["rank"][0][:3] == [3 * 3 + 2, 3 + 1, 0]
    assert result["total"]["positions"]["sum_p"][0][0] == 3 * 2.5 + 1.5
    assert result["total"]["positions"]["verifications"] == 3 * 4 + 3
    assert result["total"]["tokens"] == 32
    assert result["total"]["tokens_per_second"] == 32 / 8
    assert result["settings"]["n_prompts"] == 4
    assert result["settings"]["n_ctx"] is None  # 256 and 512
    assert result["settings"]["n_max"] == 2
    environment = result["environment"]
    assert environment["time"] == "2026-01-02T03:04:01+00:00"
    assert environment["library"] == {"version": "0.5.0", "backend": "cpu"}
    assert [d["description"] for d in environment["devices"]] == ["EPYC", "H200"]
    assert sorted(shard["prompts"] for shard in environment["merged"]) == [1, 1, 2]
    assert "command" not in environment


def test_order_and_grouping_do_not_matter():
    parts = shards()
    before = copy.deepcopy(parts)
    expected = results.dumps(merged(*parts))
    for order in itertools.permutations(parts):
        assert results.dumps(merged(*order)) == expected
        assert results.dumps(merged(merged(*order[:2]), order[2])) == expected
    assert parts == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.sha256", "ab"),
        ("model.file", "other.gguf"),
        ("model.quantisation", "Q4_0"),
        ("model.draft_model.sha256", "ab"),
        ("settings.n_max", 3),
        ("settings.temp", 0.7),
        ("settings.seed", 1),
        ("settings.type_k", "q8_0"),
        ("environment.library.version", "0.5.1"),
        ("environment.cpu", "Xeon"),
        ("environment.devices", []),
        ("environment.source.kind", "log"),
    ],
)
def test_unlike_runs_are_refused_by_the_fields_name(field, value):
    one, two, _ = shards()
    place = two
    *path, last = field.split(".")
    for key in path:
        place = place.setdefault(key, {})
    place[last] = value
    with pytest.raises(InputError) as caught:
        merged(one, two)
    assert f"r0.json and r1.json are not of one run: {field} is " in str(caught.value)


def test_the_hash_says_more_than_the_files_name():
    one, two, _ = shards()
    one["model"] |= {"sha256": "ab", "file": "b.gguf"}
    two["model"] |= {"sha256": "ab", "file": "a.gguf"}
    assert merged(one, two)["model"]["file"] == merged(two, one)["model"]["file"] == "a.gguf"


def test_a_prompt_that_occurs_twice_is_refused():
    one, two, three = shards()
    three["prompts"][0]["id"] = "p-2"
    with pytest.raises(InputError, match=r"p-2 is in r1\.json and in r2\.json, it would count"):
        merged(one, two, three)
    three["prompts"][0]["prompt_sha256"] = "1" * 64
    with pytest.raises(InputError, match=r"with another text: give the prompts of each shard"):
        merged(one, two, three)
    two["prompts"][0] |= {"id": "p-2", "prompt_sha256": None}
    three["prompts"][0] = {**two["prompts"][0], "tokens": 99}
    with pytest.raises(InputError, match=r"p-2 is in .*, of sources with one name: rename one"):
        merged(one, two, three)
    three["prompts"][0] = copy.deepcopy(two["prompts"][0])
    with pytest.raises(InputError, match=r"p-2 is in .*, it would count twice"):
        merged(one, two, three)
    with pytest.raises(InputError, match="at least two"):
        merged(one)


def test_conversations_add_up_like_prompts():
    one, two, three = shards()
    one["settings"]["chat_prompts"], two["settings"]["chat_prompts"] = 1, 2
    assert merged(one, two)["settings"]["chat_prompts"] == 3
    assert merged(one, three)["settings"]["chat_prompts"] is None
    assert "chat_prompts" not in merged(three, shards()[0])["settings"]


def test_what_one_shard_does_not_know_the_whole_does_not():
    one, two, _ = shards()
    one["prompts"][0]["positions"]["rank"] = None
    one["settings"]["n_prompts"] = None
    result = merged(one, two)
    assert result["total"]["positions"]["rank"] is None
    assert result["total"]["positions"]["miss"][:3] == [0, 2, 0]
    assert result["settings"]["n_prompts"] is None


def test_what_shards_know_of_their_workers_and_dead():
    one, two, three = shards()
    dead = [{"id": name, "why": "SIGSEGV"} for name in ("q", "r")]
    one["environment"] |= {"set_aside": [dead[1]], "workers": {"number": 2}}
    two["environment"] |= {"set_aside": [dead[0]], "workers": {"number": 2}}
    environment = merged(one, two)["environment"]
    assert environment["set_aside"] == dead
    assert "workers" not in environment
    three["environment"]["set_aside"] = [dead[0]]
    assert merged(three, one, two)["environment"]["set_aside"] == [dead[0], *dead]
    two["environment"]["set_aside"] = [5]
    with pytest.raises(InputError, match=r"environment.set_aside\[0\] is 5"):
        results.validate(two, "two")


def test_a_library_that_only_one_shard_knows():
    one, two, _ = shards()
    one["environment"]["library"], two["environment"]["library"] = {"built": "x"}, None
    assert merged(one, two)["environment"]["library"] is None
    assert merged(two, one)["environment"]["library"] is None


def test_shards_of_different_runs_are_refused():
    one, two, _ = shards()
    one["settings"]["shard"] = {"numbers": [1], "of": 2, "prompts": 4}
    for key, value in (("of", 3), ("prompts", 5)):
        two["settings"]["shard"] = {"numbers": [2], "of": 2, "prompts": 4, key: value}
        with pytest.raises(InputError, match=f"settings.shard.{key} is "):
            merged(one, two)


def test_ids_with_numbers_are_in_the_order_of_the_numbers():
    parts = shards()
    for part, name in zip(parts, ("p-010", "p-9", "p-08"), strict=True):
        part["prompts"] = [{**part["prompts"][0], "id": name}]
    assert [p["id"] for p in merged(*parts)["prompts"]] == ["p-08", "p-9", "p-010"]


def test_ids_with_huge_numbers_have_an_order():
    one, two, _ = shards()
    one["prompts"][0]["id"] = "p-" + "9" * 10_000
    assert merged(one, two)["prompts"][-1]["id"] == one["prompts"][0]["id"]


def test_the_command_writes_and_shows_the_whole(tmp_path, capsys):
    for i, shard in enumerate(shards()):
        results.write(tmp_path / f"s{i}.json", shard)
    names = [str(tmp_path / f"s{i}.json") for i in range(3)]
    path = tmp_path / "all.json"
    assert cli.main(["merge", *names, "-o", str(path)]) == 0
    assert "run      4 prompts, 32 tokens, n_max 2\n" in capsys.readouterr().out
    assert cli.main(["merge", *reversed(names), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == results.read(path)
    assert cli.main(["merge", names[0], names[0]]) == 2
    line = capsys.readouterr().err
    assert line.count("s0.json") == 2
    assert line.endswith("it would count twice\n")
    assert cli.main(["merge"]) == 2
