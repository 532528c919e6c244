"""Where a model's tensors go, and devices that are processes of their own."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from oracle import tool

from mtpstats import result as results
from mtpstats.errors import AbiMismatch, InputError, ModelError
from mtpstats.llama import Library, Model, Placement
from mtpstats.llama.placement import SPLIT_MODES
from mtpstats.run import builtin_model

COMMAND = [sys.executable, "-m", "mtpstats", "bench", "-t", "1"]


# ---- what there is not


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(devices=("CUDA7\x1b",)), r"no device CUDA7\\x1b to offload to; there is: none"),
        (Placement(devices=("CPU",)), "no device CPU to offload to"),
        (Placement(split_mode="row"), "split mode row: there is no device"),
        (Placement(split_mode="tensor"), "split mode tensor: there is no device"),
        (Placement(split_mode="diagonal"), "no split mode diagonal in this build; there is: none,"),
        (Placement(tensor_split=(3.0, 1.0)), "tensor split 3,1 is for 2 devices: there are none"),
        (Placement(tensor_split=(0.0, 0.0)), "tensor split 0,0: .* not all of them 0"),
        (Placement(tensor_split=(1.0, -1.0)), "0 or more"),
        (Placement(tensor_split=(float("nan"),)), "0 or more"),
        (Placement(main_gpu=1), "main GPU 1: there is no device"),
        (Placement(main_gpu=-1), "main GPU -1"),
        (Placement(override_tensor=(("a", "VRAM"),)), "no buffer type VRAM; there is: CPU"),
        (
            Placement(override_tensor=(("a", "CPU"), ("blk(", "CPU"))),
            r"blk\( is not a regular expression of tensor names: missing \)",
        ),
    ],
)
def test_what_is_not_there_is_named(
    lib: Library, monkeypatch: pytest.MonkeyPatch, placement: Placement, message: str
) -> None:
    monkeypatch.setattr(Library, "offload_devices", lambda _self: {})
    with pytest.raises(InputError, match=message):
        Model(lib, builtin_model(), placement=placement)


def test_what_only_libllama_can_refuse_is_told_in_its_words(lib: Library) -> None:
    # Python's expressions can name a group, those of C++ cannot.
    with pytest.raises(ModelError, match=r"cannot be loaded: .*error loading model"):
        Model(lib, builtin_model(), placement=Placement(override_tensor=(("(?P<a>x)", "CPU"),)))


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(devices=()),
        Placement(split_mode="none", main_gpu=0),
        Placement(split_mode="layer"),
        Placement(override_tensor=((r"blk\.1\.", "CPU"), ("token_embd", "CPU"))),
    ],
)
def test_what_a_machine_without_gpu_can_do_it_does(lib: Library, placement: Placement) -> None:
    with Model(lib, builtin_model(), placement=placement) as model:
        assert model.n_layer_nextn == 1


def test_overrides_reach_libllama_in_order(lib: Library) -> None:
    params = lib.fn.llama_model_default_params()
    pairs = (("first", "CPU"), ("second", "CPU"))
    keep = Placement(override_tensor=pairs, split_mode="none").apply(lib, params)
    (array, _), = keep  # fmt: skip
    assert [ctypes.string_at(item.pattern) for item in array[:2]] == [b"first", b"second"]
    assert {item.buft for item in array[:2]} == set(lib.buffer_types().values())
    assert array[2].pattern is None
    assert params.tensor_buft_overrides == ctypes.addressof(array)
    assert params.split_mode == lib.manifest["enums"]["LLAMA_SPLIT_MODE_NONE"] == 0


def test_a_manifest_without_the_fields_matters_only_to_who_needs_them(
    lib: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = copy.deepcopy(dict(lib.manifest))
    del manifest["structs"]["llama_model_tensor_buft_override"]
    for mode in SPLIT_MODES[1:]:
        del manifest["enums"][f"LLAMA_SPLIT_MODE_{mode.upper()}"]
    monkeypatch.setattr(lib, "manifest", manifest)
    lib.structs.pop("llama_model_tensor_buft_override", None)
    with Model(lib, builtin_model(), placement=Placement()):
        pass
    with pytest.raises(AbiMismatch, match="buft_override is missing; rebuild"):
        Placement(override_tensor=(("a", "CPU"),)).apply(lib, object())
    with pytest.raises(InputError, match=r"no split mode layer in this build; there is: none$"):
        Placement(split_mode="layer").apply(lib, object())
    with pytest.raises(AbiMismatch, match=r"no llama_model_params\.split_mode; rebuild"):
        Placement(split_mode="none").apply(lib, object())


def test_no_rpc_server_without_rpc(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "supports_rpc", False)
    with pytest.raises(InputError, match=r"built without RPC; run \./build_llama\.sh --rpc"):
        lib.add_rpc_server("127.0.0.1:50052")


# ---- two workers


@pytest.fixture(scope="module")
def rpc(lib: Library) -> Library:
    if not lib.supports_rpc:
        pytest.fail("this libllama was built without RPC: run ./build_llama.sh --tools --rpc")
    return lib


class Worker:
    """An ``rpc-server`` on a free port of the loopback interface."""

    def __init__(self, lib: Library) -> None:
        for _ in range(5):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.address = f"127.0.0.1:{port}"
            self.process = subprocess.Popen(
                [tool(lib.prefix, "rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._listens(port):
                return
            self.kill()
        pytest.fail("rpc-server does not listen")

    def _listens(self, port: int) -> bool:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            time.sleep(0.02)
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def workers(lib: Library, n: int = 2) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        started = []
        for _ in range(n):
            started.append(Worker(lib))
            stack.callback(started[-1].kill)
        yield started


def bench(*args: Any) -> dict[str, Any]:
    done = subprocess.run(
        [*COMMAND, "--json", *map(str, args)], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    results.validate(result, "standard output")
    return result


def refused(*args: Any, code: int = 2) -> str:
    done = subprocess.run(
        [*COMMAND, "-p", "x", *map(str, args)], capture_output=True, timeout=120, check=False
    )
    line = done.stderr.decode()
    assert done.returncode == code, line
    assert done.stdout == b""
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", line), line
    return line


SHORT = ("-n", "24", "--temp", "0", "-p", "import os", "-p", "def f(x):", "-p", "The first of")


def counted(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (p["text"], p["tokens"], p["drafted"], p["accepted"], p["positions"]["rank"])
        for p in result["prompts"]
    ]


def test_two_workers_give_the_text_and_the_counts_of_none(rpc: Library) -> None:
    local = counted(bench(*SHORT))
    with workers(rpc) as (one, two):
        both = f"{one.address},{two.address}"
        far = bench(*SHORT, "--rpc", both)
        assert counted(far) == local
        assert far["settings"]["rpc"] == [one.address, two.address]
        devices = far["environment"]["devices"]
        assert [d["description"] for d in devices if d["backend"] == "RPC"] == both.split(",")
        # Layers on the second alone, and the trunk's second block here.
        split = bench(
            *SHORT, "-np", "2", "--rpc", one.address, "--rpc", two.address, "-dev", "RPC1,RPC0",
            "-ts", "1,0", "-sm", "layer", "-mg", "1", "-ot", r"blk\.1\.=CPU",
        )  # fmt: skip
        assert counted(split) == local
        assert split["settings"]["devices"] == ["RPC1", "RPC0"]
        assert split["settings"]["tensor_split"] == [1.0, 0.0]

        rpc_both = ("--rpc", both)
        assert "no device RPC2 to offload to; there is: RPC0, RPC1" in refused(
            *rpc_both, "-dev", "RPC2"
        )
        assert "for 3 devices: there are 2" in refused(*rpc_both, "-ts", "1,1,1")
        assert "main GPU 2: devices are numbered 0 to 1" in refused(*rpc_both, "-mg", "2")
        line = refused(*rpc_both, "-ot", "blk=RPC")
        assert f"no buffer type RPC; there is: CPU, RPC0[{one.address}]" in line
        assert "does not support split buffers" in refused(*rpc_both, "-sm", "row")


def test_a_worker_is_asked_once_and_stays(rpc: Library) -> None:
    code = (
        "import os, socket, sys, time; from mtpstats import llama; lib = llama.load()\n"
        "lib.add_rpc_server(sys.argv[1]); lib.add_rpc_server(sys.argv[1])\n"
        "print(*lib.offload_devices(), sum(d.backend == 'RPC' for d in lib.devices()))\n"
        "os.kill(int(sys.argv[2]), 9)\n"
        "while not socket.socket().connect_ex(('127.0.0.1', int(sys.argv[3]))): time.sleep(0.01)\n"
        "lib.add_rpc_server(sys.argv[1])"
    )
    with workers(rpc, 1) as (one,):
        done = subprocess.run(
            [sys.executable, "-c", code, one.address, str(one.process.pid),
             one.address.rpartition(":")[2]],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "RPC0 1\n"), done.stderr


def test_a_worker_without_a_device(rpc: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpstats.llama.placement.check_server", lambda *_: None)
    monkeypatch.setattr("mtpstats.llama.library.ADD_SERVER", lambda _address: lambda _server: None)
    with pytest.raises(InputError, match="RPC server somewhere:1 has no device"):
        rpc.add_rpc_server("somewhere:1")


def test_a_worker_that_dies_takes_nothing_that_was_measured(rpc: Library, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with workers(rpc) as (one, two):
        process = subprocess.Popen(
            [*COMMAND, "-n", "200", "--stream", "-o", path, "--rpc",
             f"{one.address},{two.address}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        seen, deadline = b"", time.monotonic() + 120
        # The third prompt has begun: two are finished.
        while seen.count(b"--- ") < 3 and time.monotonic() < deadline:
            seen += os.read(process.stderr.fileno(), 1 << 16)
        two.kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    result = results.read(path)
    done = len(result["prompts"])
    assert done >= 2
    assert f"{done} of {result['settings']['n_prompts']} prompts, ".encode() in out
    assert b"miss" in out
    last = err.decode().splitlines()[-1]
    assert last.startswith("mtpstats: error: llama.cpp gave up (ggml-rpc.cpp")
    assert "a server of --rpc ended" in last
    said = f"{done} of {result['settings']['n_prompts']} prompts were finished and are in {path}"
    assert last.endswith(f"{said}; the same command with --resume goes on")


def test_a_worker_that_is_not_there(rpc: Library) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        line = refused("--rpc", address)
    assert f"RPC server {address} cannot be reached: Connection refused" in line
    assert "nowhere.invalid:1 cannot be reached" in refused("--rpc", "nowhere.invalid:1")


def test_something_else_behind_the_port(rpc: Library) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        line = refused("--rpc", f"127.0.0.1:{server.getsockname()[1]}", code=1)
    assert "a server of --rpc ended, broke off or speaks another version" in line


def test_a_port_that_says_nothing(rpc: Library) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = refused("--rpc", f"127.0.0.1:{server.getsockname()[1]}")
    assert "does not answer: it serves one client at a time" in line


def test_a_second_ctrl_c_leaves_a_worker_that_hangs(rpc: Library) -> None:
    with workers(rpc, 1) as (one,):
        process = subprocess.Popen(
            [*COMMAND, "-n", "200", "--stream", "--rpc", one.address],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        seen = b""
        while b"--- " not in seen:
            seen += os.read(process.stderr.fileno(), 1 << 16)
        one.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        process.communicate(timeout=60)
        one.process.send_signal(signal.SIGCONT)
    assert process.returncode == 130
