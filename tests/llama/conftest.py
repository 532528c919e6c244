"""Fixtures on a real libllama. Without one every test here fails, none is skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions import BUILTIN

from mtpstats.errors import LibraryNotFound
from mtpstats.llama import Library, Model, load

sys.path.insert(0, str(Path(__file__).parents[1]))
# OpenMP's threads wait for each other in a loop; on a busy machine that takes several times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tinymodels


@pytest.fixture(scope="session")
def lib() -> Library:
    try:
        return load()
    except LibraryNotFound as error:
        pytest.fail(f"these tests need libllama: run ./build_llama.sh --tools ({error})")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The built-in model, or the one ``MTPSTATS_TEST_MODEL`` names."""
    path = Path(os.environ.get("MTPSTATS_TEST_MODEL") or BUILTIN)
    assert path.is_file(), f"{path} is missing"
    return path


@pytest.fixture(scope="session")
def model(lib: Library, model_path: Path) -> Iterator[Model]:
    with Model(lib, model_path) as model:
        yield model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(arch, **options)``: the path of a tiny model, made at most once per session."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(arch: str, **options: Any) -> Path:
        key = repr((arch, sorted(options.items())))
        if key not in made:
            made[key] = tinymodels.make(root / f"{len(made)}-{arch}.gguf", arch, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def hybrid(lib: Library, tiny: Callable[..., Path]) -> Iterator[Model]:
    """Recurrent and attention layers, F32."""
    with Model(lib, tiny("qwen35", f32=True)) as model:
        yield model


@pytest.fixture(scope="session")
def attention(lib: Library, tiny: Callable[..., Path]) -> Iterator[Model]:
    """Attention layers only, F32."""
    with Model(lib, tiny("glm4moe", f32=True)) as model:
        yield model


@pytest.fixture(params=["hybrid", "attention"])
def either(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)
