"""``mtpstats plan`` and ``validate`` on the command line, without libllama."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from handmade import text, trace

from mtpstats import cli, origin, plan
from mtpstats import result as results
from mtpstats.cost import Costs
from mtpstats.errors import InputError
from mtpstats.run import builtin_model
from mtpstats.trace import Trace
from mtpstats.tracefile import TraceWriter

COST = {"schema": "mtpstats.cost/1", "verify": {"1": 10}, "draft": {"1": 1}}


def recorded(path: Path, **header: Any) -> Path:
    made = trace(*(text([[1, 1, 1, 0]] * 60, name) for name in "ab"), **header)
    with TraceWriter(path, made.header) as writer:
        for prompt in made.prompts:
            writer.append(prompt)
    return path


@pytest.fixture
def cost(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST))
    return path


def error_of(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert cli.main([str(arg) for arg in args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", captured.err), captured.err
    return captured.err


def test_a_plan_by_a_cost_file(
    tmp_path: Path, cost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path / "run.trace")
    out, saved = tmp_path / "plan.json", tmp_path / "used.json"
    args = ["plan", str(run), "--cost", str(cost), "-o", str(out), "--save-cost", str(saved)]
    assert cli.main(args) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Draft with llama.cpp's defaults, n_max 3, p_min 0" in captured.out
    record = json.loads(out.read_text())
    assert record["schema"] == plan.SCHEMA
    assert record["policies"][record["recommended"]]["policy"] == "chain:n_max=3"
    assert float(Costs.load(saved).verify(1)) == 10
    assert cli.main([*args[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record


def test_costs_of_the_trace_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run.trace", cost=COST, environment={"cpu": "Z80"})
    assert cli.main(["plan", str(run), "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["draft"]["1"]["median"] == 1
    assert costs["environment"] == {"cpu": "Z80"}  # where it was recorded
    bad = recorded(tmp_path / "bad.trace", cost={**COST, "draft": {}})
    assert "bad.trace: cost: draft is {}" in error_of(capsys, "plan", bad)


def test_what_is_refused(tmp_path: Path, cost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run.trace", model={"file": "mine.gguf", "sha256": "00"})
    for command in ("plan", "validate"):
        words = error_of(capsys, command, run)
        assert "the trace is of mine.gguf: say with -m where that file is" in words
        assert "absent: cannot be read" in error_of(capsys, command, tmp_path / "absent")
        both = error_of(capsys, command, run, "--cost", cost, "--measure")
        assert "--cost and --measure" in both
        assert "a file name is wanted" in error_of(capsys, command, run, "-o", "-")
        nowhere = tmp_path / "no" / "x.json"
        assert "x.json: cannot be written" in error_of(capsys, command, run, "--save-cost", nowhere)
    assert "this version reads mtpstats.trace/1" in error_of(capsys, "plan", cost)
    assert "run.trace: not a cost file" in error_of(capsys, "plan", run, "--cost", run)
    assert "0 is not in the range" in error_of(capsys, "validate", run, "--top", 0)


# ---- where a trace comes from


def test_the_built_in_model_is_found_by_its_hash(tmp_path: Path) -> None:
    sha = results.sha256([builtin_model()])
    ours = Trace.load(recorded(tmp_path / "a", model={"sha256": sha, "file": "t.gguf"}))
    assert origin.find_model(ours, None) == builtin_model()
    origin.check_model(ours, [builtin_model()])
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    assert origin.find_model(ours, other) == other
    with pytest.raises(InputError, match=r"other\.gguf is not the model .*, t\.gguf: its hash"):
        origin.check_model(ours, [other])


def test_settings_of_the_recording(tmp_path: Path) -> None:
    header = {
        "n_predict": 50,
        "sampling": {"temp": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5},
        "settings": {
            "n_batch": 64, "n_ubatch": 32, "n_threads": 3, "n_threads_batch": 2,
            "n_gpu_layers": 7, "flash_attn": "on", "type_k": "q8_0", "type_v": "f32",
            "devices": ["A", "B"], "split_mode": "row", "tensor_split": [3.0, 1.0], "main_gpu": 1,
            "override_tensor": ["a=b=CPU"], "rpc": ["h:1"], "draft_model": "d.gguf",
        },
    }  # fmt: skip
    run = Trace.load(recorded(tmp_path / "a", **header))
    with pytest.raises(InputError, match=r"head of d\.gguf: name its file with -md"):
        origin.settings_of(run, Path("m"))
    found = origin.settings_of(run, Path("m"), Path("x/d.gguf"))
    assert (found.model, found.draft_model, found.n_predict) == (Path("m"), Path("x/d.gguf"), 50)
    assert found.n_ctx == 1000
    assert vars(found.sampling) == header["sampling"]
    for name in ("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_gpu_layers",
                 "flash_attn", "type_k", "type_v"):  # fmt: skip
        assert getattr(found, name) == header["settings"][name]
    placed = found.placement
    assert (placed.devices, placed.split_mode, placed.main_gpu) == (("A", "B"), "row", 1)
    assert placed.tensor_split == (3, 1)
    assert placed.override_tensor == (("a=b", "CPU"),)
    assert found.rpc == ("h:1",)
    with pytest.raises(InputError, match="does not say how it was recorded"):
        origin.settings_of(Trace.load(recorded(tmp_path / "b")), Path("m"))
