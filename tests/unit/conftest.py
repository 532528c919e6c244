"""Fixtures without libllama."""

import pytest
from commands import FAKE

from mtpstats import run
from mtpstats.run import BenchSettings
from mtpstats.speculate import DraftSettings


@pytest.fixture
def bench(monkeypatch):
    """Replace ``run.bench``; the returned list collects the calls' arguments."""
    calls = []

    def fake(settings, prompts, **hooks):
        calls.append((settings, prompts, hooks))
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    return calls


@pytest.fixture
def settings(tmp_path) -> BenchSettings:
    """A run of a model that a stand-in engine takes for one."""
    model = tmp_path / "m.gguf"
    model.write_bytes(b"abc")
    return BenchSettings(model, n_predict=8, draft=DraftSettings(2))
