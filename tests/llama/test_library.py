"""Finding, checking and loading libllama; what its manifest may not say."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpstats.errors import AbiMismatch, LibraryNotFound
from mtpstats.llama import Library, Model, builds, installed, load, structs
from mtpstats.llama.log import CONT, ERROR, INFO, WARN, Log

STRUCTS = ("llama_model_params", "llama_context_params", "llama_batch")
Manifest = dict[str, Any]


@pytest.fixture
def altered(lib: Library, tmp_path: Path) -> Callable[[Callable[[Manifest], object]], Path]:
    """``altered(change)``: a prefix with the same library files and a changed manifest."""

    def make(change: Callable[[Manifest], object]) -> Path:
        manifest = copy.deepcopy(dict(lib.manifest))
        change(manifest)
        if not (tmp_path / "lib").exists():
            (tmp_path / "lib").symlink_to(lib.path.parent)
        (tmp_path / "abi.json").write_text(json.dumps(manifest))
        return tmp_path

    return make


def test_the_unaltered_copy_loads(lib: Library, altered: Callable[..., Path]) -> None:
    assert load(altered(lambda manifest: None)) is lib
    assert load(lib.path) is lib
    assert load(lib.prefix) is lib


@pytest.mark.parametrize("struct", STRUCTS)
@pytest.mark.parametrize("delta", [-8, -4, -1, 1, 4, 8])
def test_one_altered_offset_is_refused_by_name(
    lib: Library, altered: Callable[..., Path], struct: str, delta: int
) -> None:
    fields = lib.manifest["structs"][struct]["fields"]
    assert set(fields) >= structs.REQUIRED[struct]
    for field in fields:

        def change(manifest: Manifest, field: str = field) -> None:
            manifest["structs"][struct]["fields"][field][0] += delta

        with pytest.raises(AbiMismatch) as raised:
            load(altered(change))
        assert f"{struct}.{field} " in str(raised.value)
        assert "build_llama.sh" in str(raised.value)


@pytest.mark.parametrize("struct", STRUCTS)
def test_one_altered_size_or_missing_field_is_refused_by_name(
    lib: Library, altered: Callable[..., Path], struct: str
) -> None:
    for field in lib.manifest["structs"][struct]["fields"]:

        def resize(manifest: Manifest, field: str = field) -> None:
            manifest["structs"][struct]["fields"][field][1] *= 2

        with pytest.raises(AbiMismatch, match=rf"{struct}\.{field} "):
            load(altered(resize))
    for field in structs.REQUIRED[struct]:

        def drop(manifest: Manifest, field: str = field) -> None:
            del manifest["structs"][struct]["fields"][field]

        with pytest.raises(AbiMismatch, match=rf"{struct}\."):
            load(altered(drop))
    with pytest.raises(AbiMismatch, match=rf"{struct}\.\(size\)"):
        load(altered(lambda m: m["structs"][struct].update(size=m["structs"][struct]["size"] + 8)))


def relaid(fields: dict[str, list[int]]) -> Manifest:
    """The layout a C compiler gives these fields: consistent, but not the library's."""
    end, widest, placed = 0, 1, {}
    for name, (_, size) in fields.items():
        start = -(-end // size) * size
        placed[name] = [start, size]
        end, widest = start + size, max(widest, size)
    return {"size": -(-end // widest) * widest, "fields": placed}


def refused(lib: Library, struct: str, layout: Manifest) -> bool:
    """Whether the checks refuse a layout that is consistent in itself."""
    function = lib._cdll[f"{struct.removesuffix('_params')}_default_params"]
    try:
        made = structs.build(struct, layout, "here")
        structs.check_defaults(struct, made, layout, function, "here")
    except AbiMismatch:
        return True
    return False


@pytest.mark.parametrize("struct", STRUCTS[:2])
def test_a_consistent_layout_of_another_version_is_refused_by_its_defaults(
    lib: Library, struct: str
) -> None:
    fields = lib.manifest["structs"][struct]["fields"]
    assert relaid(fields) == lib.manifest["structs"][struct]
    assert not refused(lib, struct, relaid(fields))
    unseen = set()
    for name in fields:
        shorter = {key: place for key, place in fields.items() if key != name}
        if not refused(lib, struct, relaid(shorter)):
            unseen.add(f"without {name}")
        longer = {}
        for key, place in fields.items():
            longer[key] = place
            if key == name:
                longer["new"] = [0, place[1]]
        if not refused(lib, struct, relaid(longer)):
            unseen.add(f"new after {name}")
    assert unseen == UNSEEN[struct]


# What no look from outside can tell: a bool taken out among bools of one default, and a field
# whose place padding takes, so that no other moves. The hash ties the manifest to the library.
UNSEEN: dict[str, set[str]] = {
    "llama_model_params": {"without no_host", "without no_alloc"},
    "llama_context_params": {"without defrag_thold"},
}


@pytest.mark.parametrize("struct", STRUCTS)
def test_a_version_without_a_needed_field_is_told_to_be_of_no_use(
    lib: Library, struct: str
) -> None:
    fields = lib.manifest["structs"][struct]["fields"]
    for field in structs.REQUIRED[struct]:
        without = {name: place for name, place in fields.items() if name != field}
        with pytest.raises(AbiMismatch) as raised:
            structs.build(struct, relaid(without), "here")
        assert str(raised.value).startswith(f"here: {struct}.{field} is needed and missing; ")
        assert "cannot use this llama.cpp" in str(raised.value)


def test_constants_are_what_the_headers_say_or_the_library_is_refused(
    lib: Library, altered: Callable[..., Path]
) -> None:
    enums = lib.manifest["enums"]
    assert {name: enums[name] for name in structs.CONSTANTS} == structs.CONSTANTS
    for name in structs.CONSTANTS:

        def change(manifest: Manifest, name: str = name) -> None:
            manifest["enums"][name] += 1

        with pytest.raises(AbiMismatch, match=f"{name} is {enums[name] + 1}, not {enums[name]}; "):
            load(altered(change))
    structs.check_constants({}, "here")


@pytest.mark.parametrize("sees_writes", [True, False])
def test_a_swap_of_neighbours_is_refused_where_their_defaults_differ(
    lib: Library, monkeypatch: pytest.MonkeyPatch, sees_writes: bool
) -> None:
    if not sees_writes:  # as on AArch64, where only the values tell
        monkeypatch.setattr(structs, "_hidden_pointer_is_first_argument", lambda: False)
    swaps = {
        "llama_model_params": [("use_extra_bufts", "no_host"), ("n_gpu_layers", "split_mode")],
        "llama_context_params": [
            ("n_ctx", "n_batch"),
            ("n_batch", "n_ubatch"),
            ("n_ubatch", "n_seq_max"),
            ("n_seq_max", "n_rs_seq"),
            ("n_threads_batch", "ctx_type"),
            ("ctx_type", "rope_scaling_type"),
            ("yarn_orig_ctx", "defrag_thold"),
            ("embeddings", "offload_kqv"),
            ("swa_full", "kv_unified"),
        ],
    }
    for struct, pairs in swaps.items():
        assert not refused(lib, struct, lib.manifest["structs"][struct])
        fields = lib.manifest["structs"][struct]["fields"]
        for a, b in pairs:
            order = [b if n == a else a if n == b else n for n in fields]
            assert refused(lib, struct, relaid({n: fields[n] for n in order})), (a, b)


def test_unknown_fields_are_kept_as_bytes(lib: Library) -> None:
    fields = {"n_tokens": [0, 4], "extra": [4, 1], "wide": [8, 24]}
    fields |= {n: [0, s] for n, (_, s) in lib.manifest["structs"]["llama_batch"]["fields"].items()
               if n != "n_tokens"}  # fmt: skip
    end = 32
    for name in list(fields)[3:]:
        fields[name][0], end = end, end + 8
    made = structs.build("llama_batch", {"size": end, "fields": fields}, "here")
    assert (made.n_tokens.offset, made.extra.offset, made.wide.size, made.token.offset) == (
        0, 4, 24, 32,
    )  # fmt: skip


def test_a_missing_symbol_is_named(lib: Library, altered: Callable[..., Path]) -> None:
    def change(manifest: Manifest) -> None:
        manifest["symbols"]["llama_set_embeddings_nextn"] = "_Z9elsewherev"

    with pytest.raises(AbiMismatch, match="_Z9elsewherev"):
        load(altered(change))


def test_a_changed_library_file_is_named(lib: Library, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for file in lib.path.parent.iterdir():
        (tmp_path / "lib" / file.name).symlink_to(file)
    changed = next(
        name for name in lib.manifest["files"] if name.startswith("lib/libggml-base")
    )  # fmt: skip
    (tmp_path / changed).unlink()
    (tmp_path / changed).write_bytes((lib.prefix / changed).read_bytes() + b"\0")
    (tmp_path / "abi.json").write_text(json.dumps(lib.manifest))
    with pytest.raises(AbiMismatch, match=Path(changed).name):
        Library(installed.read(tmp_path))


def test_a_library_its_manifest_does_not_list_is_refused(
    lib: Library, altered: Callable[..., Path]
) -> None:
    def change(manifest: Manifest) -> None:
        for name in list(manifest["files"]):
            if name.startswith("lib/libllama."):
                del manifest["files"][name]

    with pytest.raises(AbiMismatch, match="not among the files"):
        load(altered(change))


def test_another_library_needs_another_process(lib: Library, tmp_path: Path) -> None:
    shutil.copytree(lib.path.parent, tmp_path / "lib", symlinks=True)
    (tmp_path / "abi.json").write_text(json.dumps(lib.manifest))
    with pytest.raises(AbiMismatch, match="process of its own"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not a JSON"),
        ("[]", "schema"),
        ('{"schema": "mtpstats.abi/2"}', "mtpstats.abi/2"),
        ('{"schema": "mtpstats.abi/1", "library": 1}', "'library'"),
        (
            '{"schema": "mtpstats.abi/1", "library": "x", "structs": {"a": {"size": 1}},'
            ' "symbols": {}, "files": {}}',
            "structs.a",
        ),
        (
            '{"schema": "mtpstats.abi/1", "library": "x", "symbols": {}, "files": {},'
            ' "structs": {"a": {"size": 1, "fields": {"b": [0]}}}}',
            "structs.a.b",
        ),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "abi.json").write_text(text)
    with pytest.raises(AbiMismatch, match=expected):
        load(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000])
def test_a_manifest_json_cannot_be_read_from_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "abi.json").write_text(text)
    with pytest.raises(AbiMismatch, match=r"abi\.json: not a JSON manifest"):
        load(tmp_path)


@pytest.mark.parametrize("value", [None, 5, True, 1.5, [["a"]], {"a": {}}, "text"])
@pytest.mark.parametrize(
    ("place", "right"),
    [
        ("source", dict), ("cmake_args", list), ("library", str), ("structs", None),
        ("enums", dict), ("symbols", None), ("files", None), ("symbols.x", str), ("files.x", str),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_in_the_manifest_is_refused(
    altered: Callable[..., Path], place: str, right: type | None, value: Any
) -> None:
    name, _, key = place.partition(".")

    def change(manifest: Manifest) -> None:
        (manifest[name] if key else manifest)[key or name] = value

    if type(value) is right:
        assert installed.read(altered(change)).flags
    else:
        with pytest.raises(AbiMismatch, match=name):
            load(altered(change))


@pytest.mark.parametrize("name", ["lib/a\0b", "lib/\ud800"])
def test_a_file_name_that_cannot_be_one_is_refused(altered: Callable[..., Path], name: str) -> None:
    for change in (
        lambda manifest: manifest["files"].update({name: "00"}),
        lambda manifest: manifest.update(library=name),
    ):
        with pytest.raises(AbiMismatch, match="a file's name"):
            load(altered(change))


@pytest.mark.parametrize("name", ["_fields_", "_pack_", "\ud800", "a b", "", "\x1b[31m"])
def test_a_field_that_no_c_compiler_could_have_is_refused(
    altered: Callable[..., Path], name: str
) -> None:
    def change(manifest: Manifest) -> None:
        layout = manifest["structs"]["llama_batch"]
        layout["fields"][name] = [layout["size"], 8]
        layout["size"] += 8

    with pytest.raises(AbiMismatch, match="is no field's name") as raised:
        load(altered(change))
    assert str(raised.value).isprintable()


def test_the_error_lists_every_place_tried(tmp_path: Path) -> None:
    environ = {"MTPSTATS_BUILDS": str(tmp_path / "nothing")}
    with pytest.raises(LibraryNotFound) as raised:
        installed.locate(None, environ)
    message = str(raised.value)
    for place in ("argument", "MTPSTATS_LIBLLAMA", str(tmp_path / "nothing"), "./build_llama.sh"):
        assert place in message
    assert "\n" not in message


def test_the_variable_wins_over_builds_and_is_not_passed_over(tmp_path: Path) -> None:
    environ = {"MTPSTATS_LIBLLAMA": str(tmp_path / "no.so"), "MTPSTATS_BUILDS": str(tmp_path)}
    with pytest.raises(LibraryNotFound, match=r"no\.so .from MTPSTATS_LIBLLAMA"):
        installed.locate(None, environ)
    (tmp_path / "no.so").touch()
    with pytest.raises(AbiMismatch, match="layout is unknown"):
        installed.locate(None, environ)


def test_the_newest_build_is_taken(lib: Library, tmp_path: Path) -> None:
    for key, built in (("old", "2026-01-01T00:00:00Z"), ("new", "2026-02-01T00:00:00Z"),
                       ("odd", "2025-01-01T00:00:00Z")):  # fmt: skip
        (tmp_path / key).mkdir()
        (tmp_path / key / "lib").symlink_to(lib.path.parent)
        manifest = {**lib.manifest, "key": key, "built": built}
        (tmp_path / key / "abi.json").write_text(json.dumps(manifest))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "abi.json").write_text("{")
    environ = {"MTPSTATS_BUILDS": str(tmp_path)}
    assert [build.key for build in builds(environ)] == ["new", "old", "odd"]
    assert installed.locate(None, environ).key == "new"


def test_builds_dir_follows_the_environment() -> None:
    assert installed.builds_dir({"MTPSTATS_BUILDS": "/b", "XDG_DATA_HOME": "/x"}) == Path("/b")
    assert installed.builds_dir({"XDG_DATA_HOME": "/x"}) == Path("/x/mtpstats/builds")
    home = Path.home() / ".local/share/mtpstats/builds"
    assert installed.builds_dir({}) == home


def test_a_user_without_a_home_has_no_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does then
    environ: dict[str, str] = {}
    assert builds(environ) == []
    with pytest.raises(LibraryNotFound, match=r"~/\.local/share/mtpstats/builds"):
        installed.locate(None, environ)


def test_importing_loads_nothing(lib: Library) -> None:
    code = (
        "import sys, mtpstats.llama; "
        "print('libllama' in open('/proc/self/maps').read() if sys.platform == 'linux' else False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS drops DYLD_ variables in children")
def test_another_ggml_on_the_search_path_is_not_picked_up(lib: Library, tmp_path: Path) -> None:
    for file in lib.path.parent.glob("libggml*.so.?"):
        (tmp_path / file.name).write_text("not a library")
    assert list(tmp_path.iterdir())
    code = f"from mtpstats.llama import load; print(load({str(lib.prefix)!r}).version)"
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{lib.version}\n", "")


def test_a_function_this_version_lacks_is_named(lib: Library) -> None:
    assert lib.fn.has("llama_decode")
    assert not lib.fn.has("llama_from_tomorrow")
    with pytest.raises(AbiMismatch, match="llama_from_tomorrow"):
        lib.fn.llama_from_tomorrow()


def test_devices_and_version(lib: Library) -> None:
    devices = lib.devices()
    assert any(device.type == "cpu" and device.backend == "CPU" for device in devices)
    assert all(device.memory_total >= device.memory_free >= 0 for device in devices)
    assert lib.version
    assert lib.supports_rpc is lib.build.rpc or lib.build.rpc is False
    assert lib.max_sequences >= 1


def test_leaving_everything_open_ends_cleanly(lib: Library, model_path: Path) -> None:
    code = (
        "from mtpstats.llama import *\n"
        "import weakref; weakref.finalize(load, int)  # others were there before, and end after\n"
        f"lib = load({str(lib.prefix)!r})\n"
        f"model = Model(lib, {str(model_path)!r})\n"
        "target = Context(model, n_ctx=256, n_threads=1)\n"
        "head = Context(model, n_ctx=256, n_threads=1, mtp=True, other=target)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verbose_sees_the_log_and_survives_a_bad_listener(lib: Library, model_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    lib.verbose(lambda level, line: seen.append((level, line)))
    try:
        Model(lib, model_path).close()
        assert any("qwen35" in line for _, line in seen)
        assert {level for level, _ in seen} <= {"debug", "info", "warning", "error", "none"}

        def bad(level: str, line: str) -> None:
            raise ValueError

        lib.verbose(bad)
        Model(lib, model_path).close()
        seen.clear()
        lib.verbose(lambda level, line: seen.append((level, line)))
        lib.verbose(None)
        Model(lib, model_path).close()
        assert seen == []
    finally:
        lib.verbose(None)


def test_log_joins_chunks_into_lines() -> None:
    log = Log()
    log.feed(INFO, "loading")
    log.feed(CONT, " .")
    log.feed(CONT, ".\nnext\n")
    log.feed(WARN, "half")
    log.feed(ERROR, "bad \x1b[31mthing\x07\n")
    assert list(log.lines) == [
        (INFO, "loading .."),
        (INFO, "next"),
        (WARN, "half"),
        (ERROR, "bad \\x1b[31mthing\\x07"),
    ]


def test_log_quotes_errors_before_warnings_and_only_new_ones() -> None:
    log = Log()
    log.feed(ERROR, "old\n")
    mark = log.count
    log.feed(WARN, "careful\n")
    assert log.since(mark) == "careful"
    for i in range(5):
        log.feed(ERROR, f"e{i}\n")
    assert log.since(mark) == "e2; e3; e4"
    assert log.since(log.count) == ""


def test_log_is_bounded() -> None:
    log = Log()
    for i in range(10_000):
        log.feed(INFO, f"{i}\n")
    log.feed(INFO, "x" * 1_000_000)
    log.feed(CONT, "x" * 1_000_000)
    log.feed(CONT, "\n")
    assert len(log.lines) <= 400
    assert max(len(line) for _, line in log.lines) <= 2000
    assert log.count == 10_001
