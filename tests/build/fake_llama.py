"""A llama.cpp of a dozen lines, and a place to run build_llama.sh on it.

The tree has what the script relies on - the headers, the build directory's layout, the tools'
target names - so that a whole build takes a second or two.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "build_llama.sh"

FILES = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.14...3.28)
project(fake C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
include_directories(include ggml/include)
add_library(ggml-base ggml/base.c)
add_library(llama src/llama.c src/ext.cpp)
target_link_libraries(llama ggml-base)
set_target_properties(llama ggml-base PROPERTIES VERSION 1.2.3 SOVERSION 1)
file(WRITE ${CMAKE_BINARY_DIR}/llama.pc "Version: 1.2.3-fake\\n")
if (LLAMA_BUILD_COMMON)
    foreach(tool llama-server llama-speculative-simple llama-quantize ggml-rpc-server)
        add_executable(${tool} tool.c)
        target_link_libraries(${tool} llama)
    endforeach()
endif()
""",
    "tools/rpc/CMakeLists.txt": "set(TARGET ggml-rpc-server)\n",
    "models/templates/a.jinja": "{{ messages }}",
    "models/templates/README.md": "no template",
    "tool.c": '#include <stdio.h>\n#include "llama.h"\nint main(void)'
    ' { printf("%d\\n", llama_decode(42)); return 0; }\n',
    "ggml/base.c": "int ggml_backend_base(int x) { return x; }\n",
    "src/llama.c": '#include "llama.h"\nint ggml_backend_base(int);\n'
    "int llama_decode(int x) { return ggml_backend_base(x); }\n"
    "int llama_of_this_tree(void) { return 1; }\n",
    "src/llama-ext.h": """\
#pragma once
#include "llama.h"
// LLAMA_API int llama_not_declared(int x);
LLAMA_API void llama_set_embeddings_nextn(struct llama_context * ctx,
    bool value, bool masked);
LLAMA_API const float * llama_get_embeddings_nextn (struct llama_context * ctx);
""",
    "src/ext.cpp": """\
#include "llama-ext.h"
void llama_set_embeddings_nextn(struct llama_context *, bool, bool) {}
const float * llama_get_embeddings_nextn(struct llama_context *) { return nullptr; }
""",
    "ggml/include/ggml.h": """\
#pragma once
enum ggml_type { GGML_TYPE_F32 = 0, /* gone = 1, */ GGML_TYPE_Q8_0 = 8, GGML_TYPE_NEXT };
enum ggml_log_level { GGML_LOG_LEVEL_NONE = 0, GGML_LOG_LEVEL_CONT = 5 };
enum ggml_private { GGML_PRIVATE_ONE };
""",
    "ggml/include/ggml-backend.h": """\
#pragma once
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_GPU };
""",
    "include/llama.h": """\
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "ggml.h"
#include "ggml-backend.h"
#define LLAMA_API __attribute__((visibility("default")))
#define LLAMA_TOKEN_NULL -1
#define LLAMA_STATE_SEQ_FLAGS_NONE 0
#define LLAMA_STATE_SEQ_FLAGS_FUTURE 64 // one more than we know
#ifdef __cplusplus
extern "C" {
#endif
    struct llama_context;
    enum llama_context_type {
        LLAMA_CONTEXT_TYPE_DEFAULT = 0, // the usual one, see https://example.invalid/1
        LLAMA_CONTEXT_TYPE_MTP     = 1 << 2,
        // LLAMA_CONTEXT_TYPE_OLD = 9,
    };
    typedef struct llama_batch {
        int32_t n_tokens;
        int32_t ** seq_id, * logits;
    } llama_batch;
    struct llama_model_kv_override {
        enum llama_context_type tag;
        char key[100];
        union {
            int64_t val_i64;
            bool val_bool;
            char val_str[128];
        };
    };
    struct llama_context_params {
        uint32_t n_ctx; // text; (context
        bool (*cb_eval)(void * data, bool ask);
        /* two
           lines; of comment */
        float  future_field;
        enum ggml_type type_k;
        bool embeddings, offload;
        struct llama_context * ctx_other;
    };
    LLAMA_API int llama_decode(int x);
#ifdef __cplusplus
}
#endif
""",
}

# What the manifest must say of those headers, by another compiler's front end: ctypes.


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


class KvValue(ctypes.Union):
    _fields_ = [
        ("val_i64", ctypes.c_int64),
        ("val_bool", ctypes.c_bool),
        ("val_str", ctypes.c_char * 128),
    ]


class KvOverride(ctypes.Structure):
    _anonymous_ = ("value",)
    _fields_ = [("tag", ctypes.c_int), ("key", ctypes.c_char * 100), ("value", KvValue)]


class ContextParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("cb_eval", ctypes.c_void_p),
        ("future_field", ctypes.c_float),
        ("type_k", ctypes.c_int),
        ("embeddings", ctypes.c_bool),
        ("offload", ctypes.c_bool),
        ("ctx_other", ctypes.c_void_p),
    ]


def write_tree(top: Path) -> Path:
    for name, text in FILES.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


def stub(directory: Path, name: str, body: str = "exit 0") -> Path:
    """Put a shell script called ``name`` into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Sandbox:
    """A place for builds, a PATH with stubs before everything else, and the script run in it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.script = SCRIPT
        self.builds = top / "the builds"
        self.stubs = top / "stubs"
        self.stubs.mkdir()
        self.env = {
            k: v
            for k, v in os.environ.items()
            if not re.match(r"MTPSTATS|CUDA|ROCM|VULKAN_SDK|CC$|CXX|CFLAGS|HIP|PYTHON$|GIT_", k)
        }
        self.env["MTPSTATS_BUILDS"] = str(self.builds)
        self.env["PATH"] = f"{self.stubs}:{self.env['PATH']}"

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.script), *args],
            cwd=self.top,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def plan(self, *args: str, **env: str) -> dict[str, str]:
        done = self.run("--dry-run", *args, **env)
        assert done.returncode == 0, done.stderr
        lines = [line.split(None, 1) for line in done.stdout.splitlines() if line]
        return {line[0]: line[1] for line in lines}

    def linux(self) -> None:
        """From now on the script takes this machine for one with Linux."""
        stub(self.stubs, "uname", "echo Linux")

    def nvidia_driver(self) -> Path:
        """The file by which the script sees an NVIDIA driver, here and not there yet.

        From now on it is a copy of the script that runs, with this path for the kernel's, so that
        it does not matter whether this machine has a driver.
        """
        here, there = self.top / "nvidia", "/proc/driver/nvidia/version"
        text = SCRIPT.read_text()
        assert text.count(there) == 1
        (self.top / "mtpstats").symlink_to(SCRIPT.parent / "mtpstats")
        self.script = self.top / SCRIPT.name
        self.script.write_text(text.replace(there, f"'{here}'"))
        return here

    def stub_cmake(self, build: str = "") -> Path:
        """A cmake that makes libraries of nothing; ``build`` runs first. Returns its record."""
        real, record = shutil.which("cmake"), self.top / "cmake.calls"
        stub(
            self.stubs,
            "cmake",
            f"""\
case $1 in
--version | -E) exec {real} "$@" ;;
-S)
    echo configure >>"{record}"
    mkdir -p "$4/bin"
    echo "CMAKE_C_COMPILER:FILEPATH=$(command -v cc)" >"$4/CMakeCache.txt"
    ;;
--build)
    echo build >>"{record}"
    {build or ":"}
    echo 'int llama_decode(int x) {{ return x; }}' >"$2/x.c"
    cc -shared -fPIC "$2/x.c" -o "$2/bin/libllama.so"
    ;;
esac""",
        )
        return record

    def installed(self) -> list[Path]:
        return sorted(p.parent for p in self.builds.glob("*/abi.json"))

    def leftovers(self) -> list[str]:
        """What a build must not leave behind: work directories and locks."""
        return [p.name for p in self.builds.glob(".*") if p.name not in (".cache", ".logs")]
