"""Results of a server's log and metrics: lines written from known verifications."""

import json
import random
import re

import pytest
from serverlogs import RATES, TOTALS, TRACE, Served, loading, statistics

from mtpstats import cli
from mtpstats import result as results
from mtpstats.compare import compare
from mtpstats.errors import InputError
from mtpstats.imports import from_files, from_log
from mtpstats.merge import merge
from mtpstats.report import text

# 4 verifications: 2, 0, 4 and 1 accepted of 4, 4, 4 and 2
A = Served(0, 7, [(4, 2), (4, 0), (4, 4), (2, 1)])
# 3 verifications and 2 plain steps
B = Served(1, 9, [(4, 3), (4, 1), (1, 1)], plain=2, n_prompt=5, prompt_ms=30.0, ms=750.0)


def imported(lines: list[str]) -> dict:
    result = from_log(lines, "server.log")
    results.validate(result, "imported")
    json.dumps(result, allow_nan=False)
    return result


def counts(result: dict, name: str = "accepted", of: int | None = None) -> list[int]:
    """A counter at the first five positions, of a prompt or in all."""
    record = result["total"] if of is None else result["prompts"][of]
    return record["positions"][name][:5]


def test_every_verification_of_a_traced_log():
    result = imported([loading(), *A.alone(TRACE), *B.alone(TRACE)])
    first, second = result["prompts"]
    assert (first["tokens"], first["n_prompt"], first["verifications"]) == (12, 11, 4)
    assert (first["drafted"], first["accepted"]) == (14, 7)
    assert first["seconds"]["prompt"] == 0.02
    assert first["seconds"]["generation"] == 0.25
    assert counts(result, "drafted", 0) == [4, 4, 3, 3, 0]
    assert counts(result, "reached", 0) == [4, 3, 2, 1, 0]
    assert counts(result, "accepted", 0) == [3, 2, 1, 1, 0]
    assert (second["tokens"], second["verifications"]) == (11, 3)
    assert counts(result, "reached", 1) == [3, 2, 1, 1, 0]
    assert result["total"]["positions"]["verifications"] == 7
    assert result["total"]["tokens_per_second"] == 23.0
    assert result["total"]["seconds"]["target"] is None
    # what no server knows
    for name in ("rank", "miss", "sum_p", "calib_p1", "stopped", "censored", "nan_rows"):
        assert result["total"]["positions"][name] is None
    assert first["text"] is first["prompt_sha256"] is first["repeated_4grams"] is None
    assert result["model"]["file"] == "m.gguf"
    assert result["environment"]["source"] == {
        "kind": "llama-server log", "files": ["server.log"], "notes": [],
    }  # fmt: skip


def test_rates_by_position_become_counts_and_conditional_rates():
    result = imported([loading(), *A.alone(RATES), *B.alone(RATES)])
    assert counts(result, "accepted", 0) == [3, 2, 1, 1, 0]
    # as if all drafts were of full length: what was accepted before
    assert counts(result, "reached", 0) == [4, 3, 2, 1, 0]
    assert counts(result, "accepted", 1) == [3, 1, 1, 0, 0]
    assert counts(result, "reached", 1) == [3, 3, 1, 1, 0]
    assert result["total"]["positions"]["drafted"] is None
    assert result["total"]["drafted"] == 14 + 9
    assert result["settings"]["n_max"] == 4
    (note,) = result["environment"]["source"]["notes"]
    assert "over all verifications" in note


def test_unconditional_rates_of_practice():
    # CASES 11: .805 .632 .483 of 87 drafts of 3
    verified = [(3, 3)] * 42 + [(3, 2)] * 13 + [(3, 1)] * 15 + [(3, 0)] * 17
    lines = Served(0, 1, verified).alone(RATES, n_max=3)
    assert any("acc per pos = (0.805, 0.632, 0.483)" in line for line in lines)
    result = imported(lines)
    assert result["total"]["accepted"] == 167
    assert counts(result)[:3] == [70, 55, 42]
    report = text.render(result)
    for position, rate in ((1, "80.5"), (2, "78.6"), (3, "76.4")):
        assert re.search(rf"^  {position} .* {rate} \(", report, re.MULTILINE)


def test_a_plain_log_knows_totals_only():
    result = imported([loading(), *A.alone(), *B.alone()])
    assert [p["verifications"] for p in result["prompts"]] == [4, 3]
    assert result["total"]["positions"]["accepted"] is None
    assert result["total"]["positions"]["verifications"] == 7
    report = text.render(result)
    assert "accepted of drafted       12 of 23 tokens, 52.2 %" in report
    assert "mean acceptance length    2.71 (" in report
    assert "-lv 4" in report
    assert "rank of" not in report
    assert "None" not in report
    assert "nan" not in report


def test_requests_may_run_side_by_side():
    a, b = A.steps(), B.steps()
    mixed = [x for pair in zip(a, b, strict=False) for x in pair] + a[len(b) :]
    lines = [loading(), *A.start(), *B.start(), *mixed, *B.times(), *B.end(), *A.times(), *A.end()]
    result = imported(lines)
    assert [p["tokens"] for p in result["prompts"]] == [11, 12]
    assert counts(result, "drafted", 0) == [3, 2, 2, 2, 0]
    assert counts(result, "reached", 1) == [4, 3, 2, 1, 0]


def test_a_restored_checkpoint_counts_once():
    # after a partial acceptance the accepted part and the target's own token are sent again
    replayed = Served(0, 1, [(4, 2), (3, 0), (4, 4)], replayed=frozenset({0, 1}))
    lines = replayed.alone(TRACE)
    assert sum("draft tokens" in line for line in lines) == 5
    result = imported(lines)
    assert counts(result, "drafted") == [3, 3, 3, 2, 0]
    assert counts(result, "reached") == [3, 2, 2, 1, 0]
    assert counts(result) == [2, 2, 1, 1, 0]


def test_a_server_started_anew_numbers_from_the_beginning():
    again = Served(0, 7, [(4, 4)])
    lines = [loading(), *A.alone(TRACE), *B.start(), *B.steps()[:2]]
    result = imported([*lines, loading(), *again.alone(TRACE)])
    assert [p["id"] for p in result["prompts"]] == ["server.log:1", "server.log:2"]
    assert counts(result, "accepted", 1) == [1, 1, 1, 1, 0]
    assert "left out: 1 requests" in result["environment"]["source"]["notes"][-1]
    # and where the log does not tell of the start
    result = imported([*A.alone(TRACE), *again.alone(TRACE)])
    assert len(result["prompts"]) == 2


def test_another_model_is_refused():
    with pytest.raises(InputError, match=r"model\.file differs: the log is of a\.gguf, b\.gguf"):
        imported([loading("/x/a.gguf"), *A.alone(), loading("C:\\b.gguf"), *B.alone()])


def damaged(lines: list[str]):
    """The lines with one of them cut: at its end, over into the next, or the last of the file."""
    for number in range(1, len(lines)):
        for at in range(0, len(lines[number]), 7):
            before, cut, after = lines[:number], lines[number][:at], lines[number + 1 :]
            yield [*before, cut, *after]
            yield [*before, cut + "".join(after[:1]), *after[1:]]
            yield [*before, cut]


@pytest.mark.parametrize("level", [TOTALS, RATES, TRACE])
def test_a_line_cut_anywhere_never_makes_wrong_counts(level):
    whole = [loading(), *A.alone(level), *B.alone(level)]
    expected = {prompt["tokens"]: prompt for prompt in imported(whole)["prompts"]}
    seen = set()
    for lines in damaged(whole):
        try:
            prompts = imported(lines)["prompts"]
        except InputError:  # nothing is left
            prompts = []
        seen.add(len(prompts))
        for prompt in prompts:
            if level == TOTALS and not prompt["drafted"]:
                continue  # a request whose line on drafting is gone looks like one without drafts
            truth = expected[prompt["tokens"]]
            for key in ("drafted", "accepted", "verifications", "seconds", "n_prompt"):
                assert prompt[key] == truth[key]
            for key, counter in prompt["positions"].items():
                # of what is left, all may be known less well
                assert counter is None or counter == truth["positions"][key]
    assert seen == {0, 1, 2}


def test_colours_prefixes_and_json_lines_are_no_obstacle():
    plain = imported([loading(), *A.alone(TRACE)])
    blue, green, off = "\x1b[34m", "\x1b[32m", "\x1b[0m"
    coloured = [f"{blue}0.01.009.933{off} {green}I {off}{line[15:]}" for line in A.alone(TRACE)]
    journal = [f"Dec 02 09:00:01 host llama-server[12]: {line}" for line in A.alone(TRACE)]
    msgs = [json.dumps({"type": "log", "time": 1, "level": "info", "msg": line[15:] + "\n"},
                       separators=(",", ":")) for line in A.alone(TRACE)]  # fmt: skip
    for lines in (coloured, journal, [*msgs, '{"type":"log","msg":7}', '{"type":"log",']):
        result = imported([loading(), *lines])
        assert result["prompts"] == plain["prompts"]


def test_requests_without_drafts_count_their_tokens():
    plain = Served(0, 3, [], plain=20)
    result = imported([*A.alone(RATES), *plain.alone(RATES)])
    assert [p["drafted"] for p in result["prompts"]] == [14, 0]
    assert result["prompts"][1]["verifications"] == 0
    assert result["total"]["tokens"] == 12 + 21


def test_a_cancelled_request_is_not_counted():
    result = imported([*A.start(), *A.steps()[:2], *A.end(), *B.alone(TRACE)])
    assert len(result["prompts"]) == 1
    assert result["environment"]["source"]["notes"] == []


def long(seed: int, steps: int, n_max: int = 4) -> Served:
    rng = random.Random(seed)
    verified = []
    for _ in range(steps):
        taken = 0
        while taken < n_max and rng.random() < 0.6:
            taken += 1
        verified.append((n_max, taken))
    return Served(0, seed, verified)


def test_rounded_figures_give_exact_counts_as_long_as_they_can():
    for seed in range(40):
        request = long(seed, 20 + 7 * seed)
        result = imported(request.alone(RATES))
        (prompt,) = result["prompts"]
        rounded = "the log rounds" in " ".join(result["environment"]["source"]["notes"])
        truth = request.by_position(4)
        if not rounded:
            assert prompt["verifications"] == len(request.verified)
            assert counts(result)[:4] == truth
        assert prompt["verifications"] == pytest.approx(len(request.verified), rel=0.006)
        assert counts(result)[:4] == pytest.approx(truth, rel=0.01, abs=1)
        assert rounded <= (len(request.verified) > 100)


def test_the_servers_running_count_makes_long_requests_exact():
    first, second = long(1, 3000), long(2, 2500)
    lines = [loading(), *first.alone(RATES, calls=3000), *second.alone(RATES, calls=5500)]
    assert [p["verifications"] for p in imported(lines)["prompts"]] == [3000, 2500]
    # side by side it does not tell whose they are
    lines = [loading(), *first.start(), *second.start(), *first.times(RATES), statistics(1500)]
    second.slot = 1
    result = imported([*lines, *first.end()])
    assert "the log rounds: of 1 of 1 requests" in " ".join(
        result["environment"]["source"]["notes"]
    )


def test_nothing_accepted_is_not_unknown():
    request = Served(0, 1, [(4, 0)] * 9)
    (prompt,) = imported(request.alone(RATES))["prompts"]
    assert (prompt["verifications"], prompt["accepted"]) == (9, 0)


def test_another_drafter_is_remarked_on():
    result = imported([*A.alone(RATES), statistics(4, "ngram-simple")])
    assert "not only an MTP head drafted: ngram-simple" in result["environment"]["source"]["notes"]


def test_facts_of_the_model_come_from_a_verbose_log():
    facts = [
        "0.00.013.198 I cmn  common_param: common_params_print_info: build 1 (0c1e570) with GNU",
        "0.00.200.95 I llama_model_loader: - kv  25:   qwen35.nextn_predict_layers u32       = 1",
        "0.00.202.269 I print_info: file type   = Q4_K - Medium",
        "0.00.206.479 I print_info: arch                  = qwen35",
        "0.00.207.479 I print_info: n_vocab               = 4096",
        "0.00.262.285 I cmn          init: llama threadpool init, n_threads = 3",
        "0.00.350.657 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 512, kv",
    ]
    result = imported([loading(), *facts, *A.alone(RATES)])
    model = result["model"]
    assert (model["architecture"], model["quantisation"]) == ("qwen35", "Q4_K - Medium")
    assert (model["vocabulary"], model["nextn_blocks"]) == (4096, 1)
    assert (result["settings"]["n_ctx"], result["settings"]["n_threads"]) == (512, 3)
    assert result["environment"]["library"] == {"version": "build 1 (0c1e570)"}


# ---- metrics

PAGE = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt}
llamacpp:prompt_seconds_total 0.5
llamacpp:tokens_predicted_total {tokens}
llamacpp:tokens_predicted_seconds_total {seconds}
llamacpp:n_decode_total 25
llamacpp:spec_decode_num_draft_tokens_total {drafted}
llamacpp:spec_decode_num_accepted_tokens_total {accepted}
llamacpp:spec_decode_num_drafts_total {drafts}
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 0
"""


def page(drafts, drafted, by_position, tokens=0, prompt=0, seconds=0.0, accepted=None) -> str:
    rates = "".join(
        f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}\n'
        for i, n in enumerate(by_position)
    )
    accepted = sum(by_position) if accepted is None else accepted
    return PAGE.format(prompt=prompt, tokens=tokens, seconds=seconds, drafted=drafted,
                       accepted=accepted, drafts=drafts) + rates  # fmt: skip


def read(tmp_path, *pages: str) -> dict:
    paths = []
    for i, content in enumerate(pages):
        paths.append(tmp_path / f"m{i}.txt")
        paths[-1].write_text(content)
    result = from_files(paths)
    results.validate(result, "metrics")
    return result


def test_a_page_of_metrics(tmp_path):
    result = read(tmp_path, page(41, 162, [21, 8, 5, 2], 80, 15, 0.5))
    (prompt,) = result["prompts"]
    assert (prompt["verifications"], prompt["drafted"], prompt["accepted"]) == (41, 162, 36)
    assert counts(result) == [21, 8, 5, 2, 0]
    assert counts(result, "reached") == [41, 21, 8, 5, 0]
    assert result["total"]["tokens_per_second"] == 160.0
    assert result["settings"]["n_max"] == 4
    report = text.render(result)
    assert "  2        -       21    38.1 (" in report  # 8 of 21
    assert "one sum over all requests" in report


def test_two_pages_give_what_lies_between(tmp_path):
    before = page(41, 162, [21, 8, 5, 2], 80, 15, 0.5)
    after = page(100, 400, [61, 28, 15, 3], 281, 30, 1.5)
    result = read(tmp_path, before, after)
    assert result["prompts"][0]["verifications"] == 59
    assert counts(result) == [40, 20, 10, 1, 0]
    assert result["total"]["tokens_per_second"] == 201.0
    with pytest.raises(InputError, match="went down: the pages are in the wrong order"):
        read(tmp_path, after, before)
    # before the first request there are no positions yet
    assert counts(read(tmp_path, page(0, 0, []), after)) == [61, 28, 15, 3, 0]


def test_six_digits_are_said_to_be(tmp_path):
    result = read(tmp_path, page("1.23457e+06", "4.8e+06", [700_000, 300_000, 1, 0],
                                 "3.1e+06", accepted="1e+06"))  # fmt: skip
    assert result["total"]["accepted"] == 1_000_001
    assert "six digits" in " ".join(result["environment"]["source"]["notes"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (page(3, 9, []).replace(":spec", ":no"), "spec_decode_num_draft_tokens_total is missing"),
        (page(3, 9, [1]).replace(" 3\n", " NaN\n"), "drafts_total is NaN, which is no count"),
        (page(3, 9, [1]).replace(" 3\n", " -3\n"), "drafts_total is -3"),
        (page(3, 9, [1, 2]), "contradict"),
        (page(3, 9, [4]), "contradict"),
        (page(3, 9, [1, 1]).replace('"1"', '"2"'), "lacks a position"),
    ],
)
def test_pages_that_cannot_be_are_refused(tmp_path, content, words):
    with pytest.raises(InputError, match=words):
        read(tmp_path, content)


# ---- files, and what other commands make of it


def test_what_is_neither_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfd nothing\n" * 1000)
    (tmp_path / "b.log").write_text("\n".join(A.alone()))
    with pytest.raises(InputError, match=r"a\.txt: no finished request"):
        from_files([tmp_path / "a.txt"])
    with pytest.raises(InputError, match="two pages of metrics"):
        from_files([tmp_path / "b.log", tmp_path / "b.log"])
    with pytest.raises(InputError, match="more than two"):
        from_files([tmp_path / "b.log"] * 3)
    (tmp_path / "a.txt").write_text("a log of PowerShell", encoding="utf-16")
    for name, words in (("none.log", "cannot"), (".", "directory"), ("a.txt", "is UTF-16")):
        with pytest.raises(InputError, match=words):
            from_files([tmp_path / name])


def test_long_logs_are_read_in_pieces(tmp_path):
    filler = "x" * 70_000 + "\n"
    lines = [*A.alone(TRACE), *[filler.strip()] * 20, *B.alone(TRACE)]
    (tmp_path / "a.log").write_text("\n".join(lines))
    assert len(from_files([tmp_path / "a.log"])["prompts"]) == 2


def test_imports_merge_and_compare():
    one, two = imported([*A.alone(RATES)]), from_log(B.alone(RATES), "other.log")
    whole = merge([("one", one), ("two", two)])
    assert [p["id"] for p in whole["prompts"]] == ["other.log:1", "server.log:1"]
    assert whole["total"]["positions"]["accepted"][:3] == [6, 3, 2]
    assert whole["total"]["positions"]["rank"] is None
    assert whole["environment"]["source"]["files"] == ["other.log", "server.log"]
    with pytest.raises(InputError, match="twice"):
        merge([("one", one), ("again", one)])
    found = compare(("one", one), ("two", two))
    assert not found.paired
    assert found.positions[0].b == 1.0
    assert any("taken to be alike" in remark for remark in found.remarks)


def test_the_command_writes_and_shows(tmp_path, capsys):
    (tmp_path / "server.log").write_text("\n".join(A.alone(TRACE)))
    path = tmp_path / "r.json"
    assert cli.main(["import", str(tmp_path / "server.log"), "-o", str(path)]) == 0
    assert "source   llama-server log, server.log\n" in capsys.readouterr().out
    assert results.read(path)["total"]["accepted"] == 7
    assert cli.main(["report", str(path)]) == 0
    assert cli.main(["import", str(path)]) == 2
    assert "no finished request" in capsys.readouterr().err
