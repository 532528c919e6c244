"""What the tests of build_llama.sh work in and on."""

from pathlib import Path

import pytest
from fake_llama import Sandbox, write_tree


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "my fork")
