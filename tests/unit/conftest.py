"""Fixtures without libllama."""

import pytest
from commands import FAKE

from mtpstats import run


@pytest.fixture
def bench(monkeypatch):
    """Replace ``run.bench``; the returned list collects the calls' arguments."""
    calls = []

    def fake(settings, prompts, **hooks):
        calls.append((settings, prompts, hooks))
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    return calls
