"""Files that are not what they should be: every command says so in one line, and at once."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import pytest

from mtpstats import cli, imports, policy, prompts, reading
from mtpstats import result as results
from mtpstats import trace as traces
from mtpstats.errors import InputError
from mtpstats.record import recorded_seed
from mtpstats.stats import Snapshot
from mtpstats.trace import Trace, trace_header
from mtpstats.tracefile import TraceWriter

COSTS = {
    "schema": "mtpstats.cost/1", "n_past": 10, "other_token": 0.001,
    "verify": {"1": 0.03, "4": {"median": 0.04, "low": 0.03, "high": 0.05, "samples": 9}},
    "draft": {"1": 0.002}, "environment": {"cpu": "a"}, "model": {"sha256": "00"},
    "settings": {"n_threads": 2}, "check": {"2": dict.fromkeys(
        ("measured", "by_medians", "by_means"), 0.5)},
}  # fmt: skip
FIGURE = {"value": 20.0, "lo": 19.0, "hi": 21.0}
PLAN = {
    "schema": "mtpstats.plan/1",
    "policies": [
        {"policy": name, "kind": kind, "n_max": n, "p_min": 0.0, "n_nodes": None,
         "tokens_per_second": FIGURE}
        for name, kind, n in (("none", "none", None), ("chain:n_max=2", "chain", 2))
    ],
}  # fmt: skip
HEADER = {
    "sampling": {"temp": 0.0, "seed": 1}, "settings": {"n_threads": 1, "rpc": []},
    "model": {"file": "a.gguf"}, "environment": {"cpu": "a"},
}  # fmt: skip


def one_result() -> dict[str, Any]:
    counters = Snapshot()
    counters.verifications = 10
    counters.drafted[:2], counters.reached[:2], counters.accepted[:2] = 10, (10, 6), (6, 3)
    counters.rank[:2, 0], counters.rank[:2, 1], counters.miss[:2] = (6, 3), (2, 1), (2, 2)
    prompt = {
        "id": "a", "category": "code", "prompt_sha256": "00", "n_prompt": 3, "tokens": 19,
        "verifications": 10, "drafted": 20, "accepted": 9, "near_ties": 0, "text": "é\x1b[31m",
        "repeated_4grams": 0.1, "stop": "eog", "baseline": None,
        "seconds": dict.fromkeys(results.SECONDS, 0.5), "positions": counters.to_dict(),
    }  # fmt: skip
    model = dict.fromkeys(results._MODEL) | {"file": "a.gguf", "size": 10}
    settings = {key: None for key in results._RESULT["settings"] if not key.endswith("?")} | {
        "n_prompts": 2, "temp": 0.0, "n_max": 2, "chat_template": "model",
        "chat_template_kwargs": {"a": 1}, "chat_prompts": 1,
    }  # fmt: skip
    library, devices = {"version": "1", "backend": "cpu"}, [{"description": "d"}]
    environment = results.environment(library, devices, ["mtpstats"])
    return results.make(environment, model, settings, [prompt, {**prompt, "id": "b"}])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file of each kind."""
    place = tmp_path_factory.mktemp("good")
    with TraceWriter(place / "run.trace", trace_header(depth=3, n_predict=10, **HEADER)) as writer:
        for seed in range(2):
            writer.append(made.by_chance(seed, depth=3, n_generated=12, name=f"p{seed}"))
    for name, content in (("result", one_result()), ("cost", COSTS), ("plan", PLAN)):
        (place / f"{name}.json").write_text(json.dumps(content))
    return place


def commands(good: Path, foreign: Path, out: Path) -> Iterator[list[object]]:
    """Every command with every input it reads."""
    run, result, plan = good / "run.trace", good / "result.json", good / "plan.json"
    yield ["report", foreign]
    yield ["report", result, "--plan", foreign, "--html", out]
    yield ["report", result, "--plan", plan, "--validation", foreign, "--html", out]
    yield ["compare", result, foreign]
    yield ["merge", foreign, result, "-o", out]
    yield ["import", foreign, "-o", out]
    yield ["import", foreign, foreign, "-o", out]
    yield ["replay", foreign]
    yield ["replay", run, "--policy", f"tree:{foreign}"]
    yield ["plan", foreign, "-o", out]
    yield ["plan", run, "--cost", foreign, "-o", out]
    yield ["validate", foreign, "-o", out]
    yield ["bench", "-f", foreign, "-o", out]
    yield ["bench", "--prompts", foreign, "-o", out]
    yield ["bench", "--chat-template-file", foreign, "-o", out]
    yield ["record", "-f", foreign, "-o", out]
    yield ["record", "-p", "a", "-o", foreign]
    yield ["record", "-p", "a", "-o", foreign, "--resume"]
    yield ["info", "-m", foreign]


def foreign_files(place: Path) -> Iterator[Path]:
    for name in ("/dev/zero", "/dev/urandom"):
        yield Path(name)
    os.mkfifo(place / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "socket"))
    (place / "loop").symlink_to("loop")
    (place / "directory").mkdir()
    (place / "nul.jsonl").write_bytes(b'{"schema": \0}\n')
    (place / "utf16.json").write_bytes('{"schema": 1}'.encode("utf-16"))
    (place / "large.json").touch()
    os.truncate(place / "large.json", 5 << 30)
    yield from sorted(place.iterdir())


def test_no_command_waits_for_or_swallows_what_is_no_file(good, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(reading, "PIPE_PATIENCE_S", 0.01)
    out = tmp_path / "out"
    place = tmp_path / "foreign"
    place.mkdir()
    for foreign in foreign_files(place):
        for command in commands(good, foreign, out):
            assert cli.main([str(word) for word in command]) == 2, command
            told = capfd.readouterr()
            assert told.out == ""
            assert told.err.startswith("mtpstats: error: "), command
            assert told.err.count("\n") == 1, told.err
            assert not out.exists()


def test_what_grows_while_it_is_read_has_an_end(tmp_path, monkeypatch):
    path = tmp_path / "growing"
    path.write_text("x")
    read = os.read

    def grow(fd: int, n: int) -> bytes:
        with open(path, "a") as file:
            file.write("x" * 1000)
        return read(fd, n)

    monkeypatch.setattr(os, "read", grow)
    with pytest.raises(InputError, match="growing: larger than 5,000 bytes"):
        reading.read(path, 5000)
    monkeypatch.setattr(imports, "MAX_BYTES", 5000)
    monkeypatch.setattr(imports, "_PAGE", 2000)
    with pytest.raises(InputError, match="growing: larger than 5,000 bytes"):
        imports.from_files([path])
    monkeypatch.setattr(policy, "MAX_BYTES", 5000)
    with pytest.raises(InputError, match="growing: larger than 5,000 bytes"):
        policy.parse_policy(f"tree:{path}")


LONG = ("9" * 310, "-" + "9" * 5000, "9" * 400 + ".5", "9" * 250 + "e99", "9" * 215 + "E+94")


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999", "[" * 100_000, *LONG])
def test_what_python_reads_but_cannot_write_is_no_json(text):
    with pytest.raises(ValueError, match=r"not JSON|too large|too deep"):
        reading.loads(text)
    assert reading.loads("[1e300, 10, true]") == [1e300, 10, True]
    assert reading.loads(f'["{"9" * 999}", {"9" * 308}, 0.{"9" * 400}]') == [
        "9" * 999, 10**308 - 1, 1.0
    ]  # fmt: skip


@pytest.mark.parametrize("number", LONG)
def test_a_number_that_no_float_holds_is_refused_where_nobody_reads_it(
    good, tmp_path, capfd, number
):
    out, path, part = tmp_path / "out", tmp_path / "x.jsonl", tmp_path / "out.part"
    result = good / "result.json"

    def refused(place: Path, before: str, *command: object) -> None:
        text = before.replace("@", number)
        if '"schema": "mtpstats.journal' in text or '"arrays"' in text:
            text = f'{text[:-1]}, "check": {zlib.crc32(text[:-1].encode())}}}\n'
        place.write_text(text)
        assert cli.main([str(word) for word in command]) == 2
        told = capfd.readouterr()
        assert told.err.startswith(f"mtpstats: error: {place}"), told.err
        assert told.err.count("\n") == 1
        assert not out.exists()

    record = one_result()
    record["environment"]["python"] = "@"
    text = json.dumps(record).replace('"@"', "@")
    refused(path, text, "report", path)
    refused(path, text, "compare", result, path)
    refused(path, text, "merge", result, path, "-o", out)
    text = json.dumps({**COSTS, "environment": "@"}).replace('"@"', '{"a": @}')
    refused(path, text, "plan", good / "run.trace", "--cost", path, "-o", out)
    text = json.dumps({**trace_header(depth=3, **HEADER), "a": "@"}).replace('"@"', "@")
    refused(path, text, "plan", path, "-o", out)
    refused(part, '{"schema": "mtpstats.journal/1", "a": @}', "bench", "-o", out, "--resume")
    refused(path, '{"prompt": "x", "a": @}\n', "bench", "--prompts", path)
    talk = '{"messages": [{"role": "user", "content": "x"}], "tools": "[@]"}\n'
    refused(path, talk, "bench", "--prompts", path)


@pytest.mark.parametrize("number", ["NaN", "1e999", *LONG])
def test_what_no_result_can_hold_is_no_argument_of_a_template(capfd, number):
    assert cli.main(["bench", "--chat-template-kwargs", f'{{"a": {number}}}']) == 2
    assert "is not a JSON object such as" in capfd.readouterr().err


def test_words_that_are_no_json_may_stand_where_nobody_reads_them(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "x", "score": NaN}\n')
    assert [prompt.text for prompt in prompts.load(path)] == ["x"]


def test_no_file_is_written_over_one_that_is_read(good, tmp_path, capfd):
    run, result, plan = good / "run.trace", good / "result.json", good / "plan.json"
    link, new = tmp_path / "link", tmp_path / "new"
    link.symlink_to(run)
    before = {path: path.read_bytes() for path in (run, result, plan)}
    for command in (
        ["plan", run, "--cost", good / "cost.json", "-o", run],
        ["plan", run, "--cost", good / "cost.json", "-o", link],
        ["plan", run, "-o", new, "--save-cost", new],
        ["validate", run, "--save-cost", good / "x" / ".." / "run.trace"],
        ["report", result, "--html", result],
        ["report", result, "--plan", plan, "--plot", plan],
        ["merge", plan, result, "-o", result],
        ["import", run, "-o", run],
        ["bench", "-m", run, "-o", run],
        ["bench", "-f", run, "-o", run],
        ["record", "-p", "a", "-o", new, "--cost-out", new],
    ):
        assert cli.main([str(word) for word in command]) == 2
        told = capfd.readouterr()
        assert "this command uses that file already" in told.err, command
        assert told.out == ""
    assert before == {path: path.read_bytes() for path in before}
    assert not new.exists()
    assert cli.main(["plan", str(run), "--cost", str(good / "cost.json"), "-o", "/dev/null"]) == 0


def test_resuming_refuses_at_once_what_is_no_trace(tmp_path):
    path = tmp_path / "x.trace"
    assert recorded_seed(path, -1) == -1
    path.write_text("x" * 100)  # no line of it is whole
    with pytest.raises(InputError, match="not a trace"):
        recorded_seed(path, -1)
    path.write_text('{"schema": "mtpstats.trace/1", "arr')
    assert recorded_seed(path, -1) == -1


# ---- damage that leaves the form as it is


VALUES: list[Any] = [
    None, True, 0, 1, -1, 3, 0.5, -0.5, 1e308, -1e308, 5e-324, 10**400, -(10**30), 2**64, 2**63,
    2**53, 2**31, "", "x", "\x1b[31m\u202e\n", "\ud800", "x" * 10_000, [], {}, [None], {"a": 1},
    json.loads("[" * 200 + "]" * 200),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*path, key)
        if isinstance(item, (dict, list)) and key != "positions":
            yield from places(item, (*path, key))


def damaged(rng: random.Random, record: Any, paths: list[tuple[Any, ...]]) -> Any:
    """The record with one value replaced, left out, moved, or twice there."""
    record = copy.deepcopy(record)
    *way, key = rng.choice(paths)
    parent = record
    for step in way:
        parent = parent[step]
    value = parent[key]
    kind = rng.choice(("value", "value", "value", "other", "gone", "twice", "larger"))
    if kind == "gone":
        del parent[key]
    elif kind == "twice" and isinstance(value, list):
        parent[key] = value * 2
    elif kind == "larger" and type(value) in (int, float):
        parent[key] = value * rng.choice((-1, 2, 10**9, 10**19))
    elif kind == "other":
        *way, last = rng.choice(paths)
        found = record
        for step in way:
            found = found[step]
        parent[key] = copy.deepcopy(found.get(last) if isinstance(found, dict) else found)
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    return record


def check(
    command: list[object], out: Path, capfd: pytest.CaptureFixture[str], named: Path | None = None
) -> int:
    """Run a command, which does its work or refuses, naming a file, and return its exit code."""
    out.unlink(missing_ok=True)
    code = cli.main([str(word) for word in command])
    told = capfd.readouterr()
    assert "\x1b" not in told.out + told.err
    assert "\u202e" not in told.out + told.err
    assert code in (0, 2), (command, told.err)
    if code == 2:
        assert told.out == ""
        assert told.err.startswith("mtpstats: error: ")
        assert told.err.count("\n") == 1
        assert named is None or str(named) in told.err, (command, told.err)
        assert not out.exists()
    else:
        assert told.err == ""
    return code


def forms(kind: str, good: Path, path: Path, out: Path) -> list[list[object]]:
    result, plan = good / "result.json", good / "plan.json"
    if kind == "result":
        return [
            ["report", path], ["report", path, "--markdown"], ["report", path, "--csv"],
            ["report", path, "--json"], ["report", path, "--html", out],
            ["report", path, "--plot", out.with_suffix(".svg")], ["compare", path, result],
            ["merge", result, path, "-o", out],
        ]  # fmt: skip
    if kind == "plan":
        return [["report", result, "--plan", path, "--html", out]]
    if kind == "validation":
        return [["report", result, "--plan", plan, "--validation", path, "--html", out]]
    return [["plan", good / "run.trace", "--cost", path, "-o", out]]


@pytest.mark.parametrize(
    ("kind", "n"), [("result", 200), ("plan", 40), ("validation", 30), ("cost", 20)]
)
def test_damaged_json(good, tmp_path, capfd, kind, n):
    rng = random.Random(1)
    validation = {
        "schema": "mtpstats.validate/1",
        "policies": [{"policy": "chain:n_max=2", "measured_tokens_per_second": FIGURE}],
    }
    kinds = {"result": one_result(), "plan": PLAN, "validation": validation, "cost": COSTS}
    record = kinds[kind]
    paths = list(places(record))
    path, out = tmp_path / "damaged.json", tmp_path / "out"
    codes = set()
    for i in range(n):
        text = json.dumps(damaged(rng, record, paths), ensure_ascii=bool(i % 2))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        codes.add(check(rng.choice(forms(kind, good, path, out)), out, capfd, path))
    assert codes == {0, 2}


@pytest.mark.parametrize("of_total", [False, True])
def test_damaged_counters_are_refused_by_the_name_of_the_file(good, tmp_path, capfd, of_total):
    record = one_result()
    counted = record["total"] if of_total else record["prompts"][1]
    counted["positions"]["reached"][0] = 2**40
    path, out = tmp_path / "damaged.json", tmp_path / "out"
    path.write_text(json.dumps(record))
    for command in forms("result", good, path, out):
        refused = check(command, out, capfd, path) == 2
        assert refused or (of_total and command[0] in ("compare", "merge"))  # they add up anew


def sealed(record: dict[str, Any]) -> bytes:
    record.pop("check", None)
    body = json.dumps(record)[:-1].encode()
    return body + b', "check": %d}\n' % zlib.crc32(body)


def test_damaged_traces(good, tmp_path, capfd):
    """Headers and records with right checksums, so that the values themselves are read."""
    rng = random.Random(2)
    cost, path, out = good / "cost.json", tmp_path / "damaged.trace", tmp_path / "out"
    whole = (good / "run.trace").read_bytes()
    head, _, rest = whole.partition(b"\n")
    line, _, data = rest.partition(b"\n")
    header, record = {**json.loads(head), "cost": COSTS}, json.loads(line)
    codes = set()
    for i in range(90):
        if i % 3 == 0:
            first = damaged(rng, header, list(places(header)))
            content = sealed(first) + rest
        elif i % 3 == 1:
            second = damaged(rng, record, list(places(record)))
            content = head + b"\n" + sealed(second) + data
        else:
            content = whole[: rng.randrange(len(whole))]
        path.write_bytes(content)
        command = rng.choice(
            [["replay", path], ["replay", path, "--json"], ["plan", path, "-o", out],
             ["plan", path, "--cost", cost, "-o", out], ["validate", path, "-o", out]]
        )  # fmt: skip
        codes.add(check(command, out, capfd))
    assert codes == {0, 2}


@pytest.mark.parametrize(
    ("array", "value"), [("p", -0.5), ("p", 2), ("p_min_p", 1e30), ("overlap", float("inf"))]
)
def test_probabilities_that_are_none(array, value):
    prompt = made.by_chance(1)
    changed = getattr(prompt, array).copy()
    changed.flat[0] = value
    with pytest.raises(InputError, match=f"prompt chance: {array} holds a number that is no prob"):
        traces.TracedPrompt(**{**vars(prompt), array: changed})


def test_a_trace_that_is_being_written(tmp_path):
    """Whatever a reader finds is what was finished before."""
    path = tmp_path / "run.trace"
    with TraceWriter(path, trace_header(depth=4)) as writer:
        ends = [path.stat().st_size]
        for seed in range(2):
            writer.append(made.by_chance(seed, name=f"p{seed}"))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(ends[0], len(whole), 97):
        path.write_bytes(whole[:size])
        found = Trace.load(path)
        done = sum(end <= size for end in ends) - 1
        assert [prompt.id for prompt in found.prompts] == ["p0", "p1"][:done]
        assert (found.incomplete is None) == (size in ends)
