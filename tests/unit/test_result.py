import copy
import json
import os
import stat
from pathlib import Path

import pytest
from inputs import refusal

from mtpstats import result as results
from mtpstats.errors import MtpStatsError
from mtpstats.stats import Collector

MODEL = {
    "file": "m.gguf",
    "size": 7,
    "sha256": None,
    "architecture": "qwen35",
    "parameters": 3_400_000,
    "vocabulary": 4096,
    "nextn_blocks": 1,
    "quantisation": "F16",
}
SETTINGS = {
    "n_prompts": 2, "n_predict": 8, "n_max": 2, "n_max_asked": 2, "n_min": 0, "p_min": 0.0,
    "temp": 0.0, "temp_source": "default", "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0,
    "n_ctx": 256, "n_threads": 1,
}  # fmt: skip


def collected(n_accepted: int) -> dict:
    """Counters of one verification of a draft of 2, as the collector counts them."""
    collector = Collector(2)
    collector.begin(0)
    collector.draft(0, 10, 1)
    logits = [float(i) for i in range(20)]
    for position in range(2):
        collector.candidates(0, position, memoryview(bytearray(as_floats(logits))).cast("f"))
    collector.verify(0, [19, 19])
    collector.finish(0, 10 + n_accepted + 1, 5)
    return collector.snapshot().to_dict()


def as_floats(values: list[float]) -> bytes:
    import array

    return array.array("f", values).tobytes()


def prompt(name: str, accepted: int, target: float) -> dict:
    return {
        "id": name,
        "category": None,
        "prompt_sha256": "0" * 64,
        "n_prompt": 11,
        "tokens": accepted + 1,
        "text": "é\x1b",
        "verifications": 1,
        "drafted": 2,
        "accepted": accepted,
        "near_ties": 1,
        "repeated_4grams": None,
        "stop": "n_predict",
        "seconds": {"prompt": 0.5, "target": target, "head": 0.25, "other": 0.125},
        "positions": collected(accepted),
        "baseline": None,
    }


@pytest.fixture
def result() -> dict:
    environment = results.environment(None, [], ["mtpstats", "bench"])
    return results.make(environment, MODEL, SETTINGS, [prompt("a", 2, 1.0), prompt("b", 0, 0.5)])


def test_total_adds_up(result):
    total = result["total"]
    assert total["tokens"] == 3 + 1
    assert total["verifications"] == 2
    assert total["drafted"] == 4
    assert total["accepted"] == 2
    assert total["near_ties"] == 2
    assert total["n_prompt"] == 22
    assert total["seconds"] == {"prompt": 1.0, "target": 1.5, "head": 0.5, "other": 0.25}
    # DESIGN: the prompt's reading is no part of the speed, head and other are.
    assert total["tokens_per_second"] == 4 / 2.25
    assert total["baseline_tokens_per_second"] is None
    assert total["positions"]["drafted"][:3] == [2, 2, 0]
    assert total["positions"]["accepted"][:3] == [1, 1, 0]
    assert total["positions"]["verifications"] == 2


def test_baseline_speed_comes_from_the_plain_runs(result):
    first, second = copy.deepcopy(result["prompts"])
    seconds = {"prompt": 9.0, "target": 2.0, "head": 0.0, "other": 0.5}
    first["baseline"] = {"tokens": 5, "same_text": True, "seconds": seconds}
    second["baseline"] = {"tokens": 4, "same_text": False, "seconds": seconds}
    total = results.with_prompts(result, [first, second])["total"]
    assert total["baseline_tokens_per_second"] == 9 / 5.0
    timing = results.timing({"total": total})
    assert timing.speedup == pytest.approx((4 / 2.25) / (9 / 5))


def test_timing_shares_are_of_the_generation(result):
    timing = results.timing(result)
    assert timing.prompt_seconds == 1.0
    assert timing.shares == {
        "target": pytest.approx(1.5 / 2.25),
        "head": pytest.approx(0.5 / 2.25),
        "other": pytest.approx(0.25 / 2.25),
    }
    assert timing.speedup is None


def test_nothing_run_is_null_not_zero_and_not_one():
    result = results.make({}, MODEL, SETTINGS, [])
    assert result["total"]["tokens_per_second"] is None
    assert result["total"]["positions"] is None
    timing = results.timing(result)
    assert timing.shares == {"target": None, "head": None, "other": None}


def test_without_statistics_positions_are_null(result):
    bare = [{**p, "positions": None} for p in result["prompts"]]
    assert results.with_prompts(result, bare)["total"]["positions"] is None


# ---- files


def test_what_is_written_is_read_back(result, tmp_path):
    path = tmp_path / "r.json"
    results.write(path, result)
    assert results.read(path) == result
    assert path.read_bytes().isascii()
    assert os.listdir(tmp_path) == ["r.json"]


def test_each_key_and_each_prompt_has_its_line(result):
    lines = results.dumps(result).splitlines()
    assert json.loads("\n".join(lines)) == result
    assert lines[1] == f' "schema": "{results.SCHEMA}",'
    assert [json.loads(line.strip().rstrip(","))["id"] for line in lines if line[:2] == "  "] == [
        "a",
        "b",
    ]
    assert len(lines) == 6 + 2 + 3  # keys, prompts, brackets
    empty = {**result, "prompts": []}
    assert json.loads(results.dumps(empty)) == empty


def test_a_number_that_is_not_json_is_not_written(result):
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.dumps({**result, "total": float("nan")})


def test_mode_of_a_new_file_follows_the_umask_and_of_an_old_one_stays(result, tmp_path):
    path = tmp_path / "r.json"
    before = os.umask(0o027)
    try:
        results.write(path, result)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        results.write(path, result)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_a_link_stays_a_link(result, tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    results.write(tmp_path / "link.json", result)
    assert (tmp_path / "link.json").is_symlink()
    assert results.read(tmp_path / "real.json") == result


def test_failed_write_leaves_the_old_file_and_no_other(result, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MtpStatsError, match=r"r\.json: not written: No space left") as caught:
        results.write(path, result)
    assert caught.value.exit_code == 1
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_device_is_written_to_not_replaced(result):
    results.write(Path("/dev/null"), result)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(MtpStatsError, match="/dev/full"):
        results.write(Path("/dev/full"), result)


def test_writability_is_checked_without_leaving_a_trace(tmp_path):
    results.check_writable(tmp_path / "r.json")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old.json").write_text("old")
    results.check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"
    results.check_writable(Path("/dev/null"))


def test_places_that_cannot_be_written_are_refused(tmp_path):
    assert "is a directory" in refusal(results.check_writable, tmp_path)
    assert "No such file" in refusal(results.check_writable, tmp_path / "none" / "r.json")
    assert "r.json" in refusal(results.check_writable, Path("/proc/r.json"))


# ---- reading what others wrote


def damaged(result: dict, key: str, value: object) -> dict:
    """Return a copy with one value replaced; ``value`` ... takes the key away."""
    changed = json.loads(json.dumps(result))
    *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    place = changed
    for part in path:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return changed


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("schema", "mtpstats.result/2", ["schema 'mtpstats.result/2' is unknown"]),
        ("schema", 1, ["schema 1 is unknown"]),
        ("schema", ..., ['no "schema"']),
        ("model", ..., ["model is missing"]),
        ("model.size", "7", ["model.size is '7', expected a count"]),
        ("model.size", -1, ["model.size is -1, expected a count"]),
        ("model.size", True, ["model.size is True"]),
        ("model.size", 2**64, ["model.size"]),
        ("environment.devices", None, ["environment.devices is null"]),
        ("environment.source", {"kind": "x", "files": []}, ["environment.source.notes is missing"]),
        ("total.tokens", None, ["total.tokens is null"]),
        ("model.draft_model", {**MODEL, "size": "7"}, ["model.draft_model.size is '7'"]),
        ("model.draft_model", None, ["model.draft_model is null, expected an object"]),
        ("settings.n_parallel", "4", ["settings.n_parallel is '4', expected a count"]),
        ("settings", [], ["settings is a list, expected an object"]),
        ("settings.top_k", ..., ["settings.top_k is missing"]),
        ("settings.n_predict", "all", ["settings.n_predict is 'all', expected an integer"]),
        ("prompts", {}, ["prompts is an object, expected a list"]),
        ("prompts.1.accepted", 1.5, ["prompts[1].accepted is 1.5, expected a count"]),
        ("prompts.0.id", 3, ["prompts[0].id is 3, expected a string"]),
        ("prompts.0.seconds.head", ..., ["prompts[0].seconds.head is missing"]),
        ("prompts.0.seconds.head", "fast", ["prompts[0].seconds.head"]),
        ("prompts.0.baseline", {"tokens": 1}, ["prompts[0].baseline.same_text is missing"]),
        ("total.tokens_per_second", [], ["total.tokens_per_second is a list"]),
        ("prompts.0.id", ["x" * 1000], ["prompts[0].id is a list"]),
        ("prompts.0.drafted", "\x1b[2J" + "x" * 1000, ["prompts[0].drafted", "..."]),
    ],
)
def test_damage_is_named_by_key(result, tmp_path, key, value, words):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(damaged(result, key, value)))
    message = refusal(results.read, path)
    for word in [*words, "r.json"]:
        assert word in message
    assert "\x1b" not in message
    assert len(message) < len(str(path)) + 200


@pytest.mark.parametrize(
    "key",
    [
        *("prompts.0.repeated_4grams", "prompts.0.baseline"),
        *("prompts.0.category", "prompts.0.verifications", "prompts.0.seconds.head"),
        *("model.architecture", "model.vocabulary", "environment.time", "settings.n_max"),
    ],
)
def test_null_is_fine_where_a_number_may_be_missing(result, key):
    results.validate(damaged(result, key, None), "r.json")


def test_counters_are_of_every_prompt_or_of_none(result):
    with pytest.raises(MtpStatsError, match=r"json: prompts\[0\]\.positions and total\.positions"):
        results.validate(damaged(result, "prompts.0.positions", None), "r.json")
    bare = results.with_prompts(result, [{**p, "positions": None} for p in result["prompts"]])
    results.validate(bare, "r.json")
    bare["prompts"][1]["positions"] = result["prompts"][1]["positions"]
    with pytest.raises(MtpStatsError, match=r"json: prompts\[1\]\.positions and total\.positions"):
        results.validate(bare, "r.json")


def test_what_one_prompt_does_not_know_the_total_does_not(result):
    first, second = copy.deepcopy(result["prompts"])
    second["verifications"] = second["positions"]["rank"] = None
    second["seconds"] = {**dict.fromkeys(results.SECONDS), "generation": 1.25}
    changed = results.with_prompts(result, [first, second])
    results.validate(changed, "r.json")
    total = changed["total"]
    assert total["verifications"] is None
    assert total["drafted"] == 4
    assert total["positions"]["rank"] is None
    assert total["positions"]["accepted"][:3] == [1, 1, 0]
    assert total["seconds"] == {**dict.fromkeys(results.SECONDS), "generation": 1.375 + 1.25}
    assert total["tokens_per_second"] == 4 / 2.625
    timing = results.timing(changed)
    assert timing.generation_seconds == 2.625
    assert timing.prompt_seconds is None
    assert timing.shares == {"target": None, "head": None, "other": None}


@pytest.mark.parametrize(
    ("key", "value"), [("settings.n_parallel", 4), ("model.draft_model", MODEL)]
)
def test_what_may_be_missing_may_be_there(result, key, value):
    results.validate(damaged(result, key, value), "r.json")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "not a result"),
        (b"\xff\xfe", "not a result of mtpstats: this is UTF-16"),
        (b"[1]", "schema"),
        (b"null", "schema"),
        (b'{"schema": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not a result"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, data, word):
    path = tmp_path / "r.json"
    path.write_bytes(data)
    assert word in refusal(results.read, path)


@pytest.mark.parametrize(
    ("here", "there", "shown"),
    [
        (1, None, ("1", "null")),
        ({"a": 1}, {"a": 1, "b": 2}, ('{"a": 1}', '{"a": 1, "b": 2}')),
        (
            ["x" * 90],
            ["x" * 80 + "\x1b"],
            ("..." + "x" * 30 + '"]', "..." + "x" * 20 + '\\u001b"]'),
        ),
        ("x" * 99 + "yz", "x" * 99 + "z", ("..." + "x" * 20 + 'yz"', "..." + "x" * 20 + 'z"')),
    ],
)
def test_values_that_differ_look_different(here, there, shown):
    assert results.told_apart(here, there) == shown


def test_infinite_number_is_refused(result, tmp_path):
    path = tmp_path / "r.json"
    text = json.dumps(damaged(result, "settings.temp", 1234.5)).replace("1234.5", "1e999")
    path.write_text(text)
    assert "1e999 is too large" in refusal(results.read, path)


def test_missing_file_is_refused(tmp_path):
    assert "No such file" in refusal(results.read, tmp_path / "none.json")
    assert "is a directory" in refusal(results.read, tmp_path)


# ---- hashes


def test_hash_of_parts_is_the_hash_of_the_whole(tmp_path):
    import hashlib

    data = os.urandom(5 << 20)
    (tmp_path / "1").write_bytes(data[: 4 << 20])
    (tmp_path / "2").write_bytes(data[4 << 20 :])
    heard: list[int] = []
    digest = results.sha256([tmp_path / "1", tmp_path / "2"], heard.append)
    assert digest == hashlib.sha256(data).hexdigest()
    assert heard[-1] == len(data)
