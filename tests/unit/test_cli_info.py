"""``mtpstats info`` without libllama."""

import json

import pytest

from mtpstats import cli


@pytest.fixture
def no_build(monkeypatch, tmp_path):
    monkeypatch.delenv("MTPSTATS_LIBLLAMA", raising=False)
    monkeypatch.setenv("MTPSTATS_BUILDS", str(tmp_path / "builds"))
    return tmp_path / "builds"


def test_info_without_a_build_says_how_to_make_one(no_build, capsys):
    assert cli.main(["info"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"builds in {no_build}" in captured.out
    assert "./build_llama.sh" in captured.out
    assert cli.main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["library"] is None
    assert record["builds"] == record["devices"] == []


def test_info_text_names_what_is_used_and_why():
    from mtpstats.cli.info import render

    build = {
        "key": "k1", "source": "llama-x", "source_version": "1", "backend": "cuda",
        "flags": ["rpc", "-DX=1"], "built": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    record = {
        "mtpstats": "9.9", "python": "3.12.0", "numpy": "2.0", "kernel": "avx2",
        "builds_directory": "/b", "problem": None,
        "library": {"version": "0.5", "path": "/b/k1/lib/libllama.so", "why": "the only build"},
        "builds": [
            {**build, "prefix": "/b/k1", "used": True},
            {**build, "key": "k2\x1b", "prefix": "/b/k2", "used": False, "flags": []},
        ],
        "devices": [
            {"name": "CUDA0", "description": "H200", "type": "gpu", "backend": "CUDA",
             "memory_free": 3 << 30, "memory_total": 4 << 30},
            {"name": "CPU", "description": "EPYC", "type": "cpu", "backend": "CPU",
             "memory_free": 0, "memory_total": 0},
        ],
        "model": {
            "file": "m.gguf", "size": 7_014_368, "sha256": None, "architecture": "qwen35",
            "parameters": 3_428_496, "vocabulary": 4096, "nextn_blocks": 1, "quantisation": "F16",
            "layers": 4, "context": 512, "embedding": 192, "description": "", "memory": "hybrid",
            "drive": {"possible": True, "heads": "single", "rollback": "any", "reason": None},
        },
    }  # fmt: skip
    expected = """\
mtpstats     9.9
Python       3.12.0, NumPy 2.0
kernel       avx2
libllama     0.5 (the only build)
             /b/k1/lib/libllama.so

builds in /b (* = used)
  * k1: llama-x, cuda, rpc -DX=1, built 2026-01-02T03:04:05Z
    k2\\x1b: llama-x, cuda, built 2026-01-02T03:04:05Z

devices
    CUDA0 (CUDA): H200, 3.0 of 4.0 GiB free
    CPU (CPU): EPYC

model        m.gguf
size         7.0 MB
architecture qwen35
parameters   3,428,496
quantisation F16
layers       4 and 1 NextN (MTP)
vocabulary   4,096
context      512
memory       hybrid
MTP          can be driven: one head, which drafts deeper from its own hidden state;
             rejected tokens are simply removed
"""
    assert render(record) == expected
    record["model"]["drive"] = {
        "possible": False, "heads": None, "rollback": None, "reason": "it has no NextN block"
    }  # fmt: skip
    assert "MTP          cannot be driven: it has no NextN block\n" in render(record)
