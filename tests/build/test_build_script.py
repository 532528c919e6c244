"""build_llama.sh, on the small stand-in of ``fake_llama``; CI builds the real llama.cpp.

Where the source comes from is in ``test_build_source``, what ends a build in
``test_build_interrupted``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_llama import FILES, Batch, ContextParams, KvOverride, Sandbox, stub

# ---- usage


@pytest.mark.parametrize(
    "args",
    [
        ["--nonsense"],
        ["stray"],
        ["--backend", "abacus"],
        ["--backend"],
        ["--source="],
        ["-j", "0"],
        ["-j", "two"],
        ["-j-1"],
        ["--ref", "--tools"],
        ["--ref", "b1;rm"],
        ["--source", "x", "--ref", "b1"],
    ],
)
def test_bad_usage_is_one_line_with_a_hint(box: Sandbox, args: list[str]) -> None:
    done = box.run(*args)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--help" in done.stderr
    assert not box.builds.exists()


def test_help_names_every_option(box: Sandbox) -> None:
    done = box.run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    options = "backend rpc tools portable source ref prefix jobs cmake-arg dry-run help"
    for option in options.split():
        assert re.search(rf"^  .*--{option}\b", done.stdout, re.M), option
    assert "examples:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_dry_run_prints_the_plan_and_touches_nothing(box: Sandbox, tree: Path) -> None:
    before = sorted(box.top.rglob("*"))
    done = box.run(
        "--dry-run", "--source", str(tree), "--backend=cpu", "--rpc", "--portable", "-j3",
        "--cmake-arg", "-DGGML_LTO=ON", "--cmake-arg=-DA=b c",
    )  # fmt: skip
    assert done.returncode == 0
    line = next(line for line in done.stdout.splitlines() if line.startswith("cmake "))
    for word in ("GGML_CUDA=OFF", "GGML_RPC=ON", "GGML_NATIVE=OFF", "LLAMA_BUILD_COMMON=OFF"):
        assert f" -D{word} " in line
    assert line.rstrip().endswith("-DGGML_LTO=ON -DA=b\\ c")
    assert re.search(r"^jobs +3$", done.stdout, re.M)
    assert re.search(r"^backend +cpu \(asked for\)$", done.stdout, re.M)
    assert sorted(box.top.rglob("*")) == before


# ---- backends


@pytest.mark.parametrize(
    ("backend", "tool"), [("cuda", "nvcc"), ("hip", "hipcc"), ("sycl", "icpx"), ("vulkan", "glslc")]
)
def test_a_missing_toolkit_is_one_line_before_any_work(
    box: Sandbox, tree: Path, backend: str, tool: str
) -> None:
    # A PATH without the tool: links to all other programs of this machine's PATH.
    bare = box.top / "bare"
    bare.mkdir()
    for directory in os.environ["PATH"].split(":"):
        for program in Path(directory).glob("*"):
            if program.name != tool and not (bare / program.name).is_symlink():
                (bare / program.name).symlink_to(program)
    elsewhere = {"CUDA_HOME": str(box.top), "ROCM_PATH": str(box.top), "PATH": str(bare)}
    done = box.run("--backend", backend, "--source", str(tree), **elsewhere)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert f"--backend {backend}: no {tool}" in lines[-1]
    assert not box.builds.exists()


def test_metal_is_refused_off_macos(box: Sandbox, tree: Path) -> None:
    box.linux()
    done = box.run("--backend", "metal", "--source", str(tree))
    assert done.returncode == 2
    assert "macOS" in done.stderr


def vulkan_sdk(box: Sandbox, version: int) -> str:
    stub(box.stubs, "glslc")
    sdk = box.top / "an sdk"
    for name, text in {
        "vulkan/vulkan_core.h": f"#define VK_HEADER_VERSION {version}\n",
        "spirv/unified1/spirv.h": "#define SPV_VERSION 0x10600\n",
    }.items():
        (sdk / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (sdk / "include" / name).write_text(text)
    return str(sdk)


def test_old_vulkan_headers_are_named_with_the_version_needed(box: Sandbox, tree: Path) -> None:
    args = ("--dry-run", "--backend", "vulkan", "--source", str(tree))
    old = box.run(*args, VULKAN_SDK=vulkan_sdk(box, 239))
    assert old.returncode == 2
    assert "1.3.239" in old.stderr
    assert "1.3.275" in old.stderr
    new = box.run(*args, VULKAN_SDK=vulkan_sdk(box, 275))
    assert new.returncode == 0, new.stderr
    assert "-DGGML_VULKAN=ON" in new.stdout


def test_auto_wants_the_gpu_and_not_only_its_compiler(box: Sandbox, tree: Path) -> None:
    box.linux()
    driver = box.nvidia_driver()
    stub(box.stubs, "nvcc")
    stub(box.stubs, "nvidia-smi", "exit 9")
    plan = box.plan("--source", str(tree))
    assert not plan["backend"].startswith("cuda")
    assert "no NVIDIA GPU" in plan["backend"]
    driver.touch()  # without nvidia-smi, as in containers
    assert box.plan("--source", str(tree))["backend"].startswith("cuda (auto: ")
    driver.unlink()
    stub(box.stubs, "nvidia-smi", "exit 0")
    plan = box.plan("--source", str(tree))
    assert plan["backend"].startswith("cuda (auto: ")
    assert "-DGGML_CUDA=ON" in plan["cmake"]
    assert "ARCHITECTURES" not in plan["cmake"]  # native: the GPU is here


def test_cuda_without_a_gpu_is_built_for_all_or_for_the_one_named(box: Sandbox, tree: Path) -> None:
    box.nvidia_driver()
    stub(box.stubs, "nvcc")
    stub(box.stubs, "nvidia-smi", "exit 9")
    args = ("--backend", "cuda", "--source", str(tree))
    assert "-DCMAKE_CUDA_ARCHITECTURES=all-major " in box.plan(*args)["cmake"]
    named = box.plan(*args, "--cmake-arg", "-DCMAKE_CUDA_ARCHITECTURES=90")["cmake"]
    assert named.count("ARCHITECTURES") == 1


# ---- keys


def test_the_key_follows_contents_and_flags_and_nothing_else(box: Sandbox, tree: Path) -> None:
    def key(*args: str, **env: str) -> str:
        return box.plan("--backend", "cpu", "--source", str(tree), *args, **env)["prefix"]

    first = key()
    others = [
        key("--rpc"),
        key("--portable"),
        key("--cmake-arg", "-DGGML_LTO=ON"),
        key(CFLAGS="-O1"),
        key("--tools"),
    ]
    assert len({first, *others}) == 6
    os.utime(tree / "CMakeLists.txt", (1, 1))
    assert key() == first == key("-j", "7")
    (tree / "build").mkdir()
    (tree / "build" / "junk").write_text("a build of the user's own")
    assert key() == first
    (tree / "src" / "llama.c").write_text(FILES["src/llama.c"] + "int more;\n")
    assert key() != first


# ---- a whole build


def test_a_build_from_archive_to_manifest(box: Sandbox, tree: Path) -> None:
    archive = box.top / "fork-7.tar.gz"
    subprocess.run(["tar", "-C", box.top, "-czf", archive, "my fork"], check=True)
    args = ("--backend", "cpu", "--tools", "--rpc", "--source", "fork-7.tar.gz")
    done = box.run(*args)
    assert done.returncode == 0, done.stderr
    assert re.findall("has no (.*): mtpstats cannot drive", done.stderr) == [
        "llama_model_n_layer_nextn", "load_mtp",
    ]  # fmt: skip
    prefix = Path(done.stdout.strip())
    assert box.installed() == [prefix]
    assert box.leftovers() == []
    assert prefix.name.startswith("fork-7-cpu-rpc-")

    manifest = json.loads((prefix / "abi.json").read_text())
    assert manifest["schema"] == "mtpstats.abi/1"
    assert manifest["key"] == prefix.name
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert manifest["source"] == {
        "name": "fork-7", "kind": "archive", "sha256": digest, "commit": None,
        "version": "1.2.3-fake",
    }  # fmt: skip
    assert (manifest["backend"], manifest["tools"], manifest["rpc"], manifest["portable"]) == (
        "cpu", True, True, False,
    )  # fmt: skip
    assert "-DGGML_RPC=ON" in manifest["cmake_args"]

    for name, mirror in {
        "llama_batch": Batch,
        "llama_model_kv_override": KvOverride,
        "llama_context_params": ContextParams,
    }.items():
        fields = [f for f, *_ in mirror._fields_ if f != "value"]
        fields += ["val_i64", "val_bool", "val_str"] if mirror is KvOverride else []
        expected = {f: [getattr(mirror, f).offset, getattr(mirror, f).size] for f in fields}
        assert manifest["structs"][name] == {"size": ctypes.sizeof(mirror), "fields": expected}
    assert len(manifest["structs"]) == 3
    assert manifest["enums"] == {
        "GGML_TYPE_F32": 0, "GGML_TYPE_Q8_0": 8, "GGML_TYPE_NEXT": 9,
        "GGML_LOG_LEVEL_NONE": 0, "GGML_LOG_LEVEL_CONT": 5,
        "GGML_BACKEND_DEVICE_TYPE_CPU": 0, "GGML_BACKEND_DEVICE_TYPE_GPU": 1,
        "LLAMA_TOKEN_NULL": -1, "LLAMA_STATE_SEQ_FLAGS_NONE": 0,
        "LLAMA_STATE_SEQ_FLAGS_FUTURE": 64,
        "LLAMA_CONTEXT_TYPE_DEFAULT": 0, "LLAMA_CONTEXT_TYPE_MTP": 4,
    }  # fmt: skip
    assert manifest["symbols"] == {
        "llama_get_embeddings_nextn": "_Z26llama_get_embeddings_nextnP13llama_context",
        "llama_set_embeddings_nextn": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    }
    assert manifest["functions"] == ["ggml_backend_base", "llama_decode", "llama_of_this_tree"]
    real = {p for p in (prefix / "lib").iterdir() if not p.is_symlink()}
    assert manifest["files"] == {
        f"lib/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in real
    }
    assert manifest["library"].startswith("lib/libllama.")

    # llama.cpp's chat templates come along, also to a build of before they did.
    templates = prefix / "share" / "templates"
    assert [p.name for p in templates.iterdir()] == ["a.jinja"]
    shutil.rmtree(prefix / "share")
    added = box.run(*args)
    assert (added.returncode, added.stdout) == (0, f"{prefix}\n"), added.stderr
    assert "adding" in added.stderr
    assert "compiling" not in added.stderr
    assert (templates / "a.jinja").read_text() == "{{ messages }}"
    assert json.loads((prefix / "abi.json").read_text()) == manifest
    assert box.leftovers() == []

    # Moved elsewhere, tools still find the libraries, and these each other.
    moved = box.top / "elsewhere"
    shutil.copytree(prefix, moved, symlinks=True)
    prefix.rename(box.top / "away")
    for tool in ("llama-server", "llama-speculative-simple", "llama-quantize", "rpc-server"):
        ran = subprocess.run([moved / "bin" / tool], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, "42\n"), tool
    library = ctypes.CDLL(str(moved / manifest["library"]))
    assert all(hasattr(library, name) for name in manifest["symbols"].values())
    (box.top / "away").rename(prefix)

    # Installed already: nothing runs, and the same without tools is served by it too.
    stub(box.stubs, "cmake", "exit 1")
    for again in (args, ("--backend", "cpu", "--rpc", "--source", str(archive))):
        second = box.run(*again)
        assert (second.returncode, second.stdout) == (0, f"{prefix}\n"), second.stderr
        assert "installed already" in second.stderr


def test_prefix_is_filled_once_and_nothing_else_is_overwritten(box: Sandbox, tree: Path) -> None:
    box.stub_cmake()
    args = ("--backend", "cpu", "--source", str(tree), "--prefix", "some/where/")
    target = box.top / "some" / "where"
    target.mkdir(parents=True)
    done = box.run(*args)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == target
    assert sorted(p.name for p in target.iterdir()) == ["abi.json", "build.log", "lib"]
    assert [p.name for p in target.parent.iterdir()] == ["where"]
    assert box.run(*args).returncode == 0
    other = box.run(*args, "--portable")
    assert other.returncode == 2
    assert "not empty" in other.stderr
    (target / "abi.json").unlink()
    assert box.run(*args).returncode == 2


def test_a_damaged_build_is_not_taken_for_installed(box: Sandbox, tree: Path) -> None:
    record = box.stub_cmake()
    args = ("--backend", "cpu", "--source", str(tree))
    prefix = Path(box.run(*args).stdout.strip())
    library = prefix / "lib" / "libllama.so"
    whole = library.read_bytes()
    for damage in (whole[:-1], b""):
        library.write_bytes(damage)
        done = box.run(*args)
        assert (done.returncode, done.stdout) == (0, f"{prefix}\n")
        assert f"damaged, not used: {prefix}" in done.stderr
        assert library.read_bytes() == whole
    library.unlink()
    assert box.run(*args).returncode == 0
    assert record.read_text() == "configure\nbuild\n" * 4
    assert box.installed() == [prefix]
    assert box.leftovers() == []


def test_a_failing_step_shows_the_end_of_its_log_and_keeps_it(box: Sandbox, tree: Path) -> None:
    box.stub_cmake("echo 'llama.cpp:7: error: flux capacitor'; exit 1")
    done = box.run("--backend", "cpu", "--source", str(tree))
    assert done.returncode == 1
    assert "flux capacitor" in done.stderr
    log = Path(done.stderr.splitlines()[-1].split("full log: ")[1])
    assert "flux capacitor" in log.read_text()
    assert box.installed() == []
    assert box.leftovers() == []
