"""``mtpstats bench`` as a process that ends early, however it ends, and one that goes on."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpstats import result as results
from mtpstats.prompts import builtin

TEXTS = [prompt.text for prompt in builtin()][:6]
ARGS = ("-n", "96", "-t", "1", "--baseline")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "mtpstats", "bench", *map(str, args)]


def bench(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=300, **options,
    )  # fmt: skip


def started(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def error_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def kept(path: Path) -> int:
    """Finished prompts that are on disk."""
    lines = part(path).read_bytes().count(b"\n") if part(path).exists() else 0
    return max(lines - 1, 0)


def until_kept(path: Path, process: subprocess.Popen[str], n: int = 1) -> None:
    while kept(path) < n:
        assert process.poll() is None, process.stderr
        time.sleep(0.005)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "six.jsonl"
    lines = [
        json.dumps({"id": f"p{i}", "category": "code" if i % 2 else None, "prompt": text})
        for i, text in enumerate(TEXTS)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(prompts: Path) -> tuple[Path, float]:
    """The result of an undisturbed run, and how long it took."""
    path = prompts.with_name("whole.json")
    began = time.monotonic()
    done = bench(*ARGS, "--prompts", prompts, "-o", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not part(path).exists()
    return path, time.monotonic() - began


def facts(value: Any) -> Any:
    """What of a result is not time, nor when and how it was asked for."""
    timed = {"seconds", "tokens_per_second", "baseline_tokens_per_second", "time", "command"}
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items() if key not in timed | {"devices"}}
    return [facts(item) for item in value] if isinstance(value, list) else value


def same(path: Path, whole: Path) -> None:
    one, other = results.read(path), results.read(whole)
    assert list(one) == list(other)
    assert facts(one) == facts(other)
    assert not part(path).exists()


def test_kill_at_any_moment_then_resume(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "killed.json"
    rng = random.Random(2)
    seen = [0]
    for n in (1, 0, 2, 0):
        process = started(*ARGS, "--prompts", prompts, "-o", path, "--resume")
        if n:
            until_kept(path, process, n)
        # Wherever that is: in the start, in a prompt, in a write.
        time.sleep(whole[1] * rng.uniform(0.0, 0.25))
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        seen.append(kept(path))
    assert seen[1] > 0
    assert seen == sorted(seen)
    # And one that is cut off inside its last line.
    if part(path).exists():
        with part(path).open("r+b") as file:
            file.truncate(part(path).stat().st_size - 100)
    else:
        path.unlink()
    done = bench(*ARGS, "--prompts", prompts, "-o", path, "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    same(path, whole[0])


def test_several_at_a_time(prompts: Path, tmp_path: Path) -> None:
    args = ("-n", "128", "-t", "1", "-np", "3", "--prompts", prompts, "-o")
    undisturbed, path = tmp_path / "whole.json", tmp_path / "killed.json"
    assert bench(*args, undisturbed).returncode == 0
    process = started(*args, path)
    until_kept(path, process, 2)
    process.kill()
    process.communicate()
    n = kept(path)
    assert 2 <= n < 6
    assert bench(*args, path, "--resume").returncode == 0
    one, other = results.read(path), results.read(undisturbed)
    for a, b in zip(one["prompts"], other["prompts"], strict=True):
        if not a["near_ties"] + b["near_ties"]:
            assert facts(a) == facts(b)
    assert facts(one["settings"]) == facts(other["settings"])


def test_ctrl_c_delivers_what_is_finished_and_says_how_to_go_on(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    process = started(*ARGS, "--prompts", prompts, "-o", path, "--json")
    until_kept(path, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    n = kept(path)
    assert 1 <= n < 6
    assert err == (
        f"mtpstats: error: interrupted: {n} of 6 prompts were finished; the same command with "
        "--resume goes on\n"
    )
    partial = results.read(path)
    assert json.loads(out) == partial
    assert [prompt["id"] for prompt in partial["prompts"]] == [f"p{i}" for i in range(n)]
    # What is finished is not overwritten by forgetting to say so.
    held = part(path).read_bytes()
    said = error_line(bench(*ARGS, "--prompts", prompts, "-o", path), 2)
    assert f"a run that was cut off finished {n} of 6 prompts; go on with it (--resume)" in said
    assert part(path).read_bytes() == held
    done = bench(*ARGS, "--prompts", prompts, "-o", path, "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    same(path, whole[0])
    held = path.read_bytes()
    again = bench(*ARGS, "--prompts", prompts, "-o", path, "--resume")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert again.stderr == f"mtpstats: {path} is complete: nothing is left to run\n"
    assert path.read_bytes() == held  # when and by which command it was made, too


@pytest.fixture(scope="module")
def cut(prompts: Path) -> Path:
    """Where a run left a journal."""
    path = prompts.with_name("cut.json")
    process = started(*ARGS, "--prompts", prompts, "-o", path)
    until_kept(path, process)
    process.kill()
    process.communicate()
    return path


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-n", "97"), "begun with settings.n_predict 96, not 97: it cannot be resumed so"),
        (("--temp", "0"), "begun with settings.temp 0.7, not 0.0"),
        (("-t", "2"), "begun with settings.n_threads 1, not 2"),
        (("-np", "2"), "begun with settings.n_parallel 1, not 2"),
        (("-s", "1"), "begun with settings.seed 0, not 1"),
        (("--spec-draft-n-max", "3"), "begun with settings.n_max 8, not 3"),
        (("-p", "one more"), "begun with settings.n_prompts 6, not 7"),
        (("--shuffle",), "begun with settings.shuffle False, not True"),
    ],
)
def test_another_run_is_not_resumed(
    cut: Path, prompts: Path, args: tuple[str, ...], words: str
) -> None:
    held = part(cut).read_bytes()
    done = bench(*ARGS, "--prompts", prompts, "-o", cut, "--resume", *args)
    assert words in error_line(done, 2)
    assert done.stdout == ""
    assert part(cut).read_bytes() == held


def test_another_model_is_not_resumed(cut: Path, prompts: Path, tiny: Callable[..., Path]) -> None:
    model = tiny("qwen35", f32=True)
    done = bench(*ARGS, "--prompts", prompts, "-o", cut, "--resume", "-m", model, "--temp", "0.7")
    assert "was begun with model.sha256 " in error_line(done, 2)


def test_a_random_seed_is_drawn_once_and_orders_the_prompts_again(
    prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    args = (*ARGS, "--prompts", prompts, "-o", path, "-s", "-1", "--shuffle")
    process = started(*args)
    until_kept(path, process)
    process.kill()
    process.communicate()
    header, first = [json.loads(line) for line in part(path).read_bytes().split(b"\n")[:2]]
    assert bench(*args, "--resume").returncode == 0
    result = results.read(path)
    assert result["settings"]["seed"] == header["settings"]["seed"]
    assert result["prompts"][0] == first["record"]


def test_a_time_limit_ends_in_good_order(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    args = (*ARGS, "--prompts", prompts, "-o", path, "--json")
    # Where this machine is at half of it is for it to say; never is nothing lost.
    limit = whole[1] / 2
    done = bench(*args, "--time-limit", f"{limit:.2f}s")
    while not path.exists():
        assert "0 of 6 prompts were finished within the time limit; nothing" in error_line(done, 1)
        assert not part(path).exists()
        limit *= 1.5
        done = bench(*args, "--time-limit", f"{limit:.2f}s")
    assert done.returncode == 0
    n = len(results.read(path)["prompts"])
    assert json.loads(done.stdout) == results.read(path)
    if n < 6:
        assert done.stderr == (
            f"mtpstats: {n} of 6 prompts were finished within the time limit; the same command "
            "with --resume goes on\n"
        )
        assert kept(path) == n
        assert bench(*args, "--resume", "--time-limit", "1h").returncode == 0
    same(path, whole[0])


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_what_was_there(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    size = len("".join(json.dumps(p) for p in results.read(whole[0])["prompts"][:3]))

    def small() -> None:
        """No file may grow larger than three prompts, which the system says in an error."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = bench(*ARGS, "--prompts", prompts, "-o", path, preexec_fn=small)
    said = error_line(done, 1)
    n = kept(path)
    assert 1 <= n <= 3
    assert said.startswith(
        f"mtpstats: error: {part(path)}: not written: File too large: {n + 1} of 6 prompts"
    )
    assert said.endswith("; the same command with --resume goes on\n")
    assert f"run      {n + 1} of 6 prompts" in done.stdout
    # With room again:
    done = bench(*ARGS, "--prompts", prompts, "-o", path, "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    same(path, whole[0])


def test_a_journal_removed_in_the_middle_is_put_back(
    whole: tuple[Path, float], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    process = started(*ARGS, "--prompts", prompts, "-o", path)
    until_kept(path, process)
    part(path).unlink()
    until_kept(path, process, 3)
    process.kill()
    _, err = process.communicate()
    assert err == f"mtpstats: {part(path)}: was removed by somebody; it is there again\n"
    assert bench(*ARGS, "--prompts", prompts, "-o", path, "--resume").returncode == 0
    same(path, whole[0])


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def refused(*args: object) -> str:
        done = bench("-p", "x", "-n", "4", "-m", tmp_path / "never read.gguf", *args)
        assert done.stdout == ""
        return error_line(done, 2)

    assert "name it with -o FILE" in refused("--resume")
    assert "name it with -o FILE" in refused("--resume", "-o", "/dev/null")
    assert "cannot be written: Not a directory" in refused("-o", __file__ + "/r.json")
    for wrong in ("0", "-1", "soon", "1d", "nan", "inf", "1 h"):
        assert "is no time such as" in refused("--time-limit", wrong)
    part(tmp_path / "r.json").write_text("hello\n")
    for args in ((), ("--resume",)):
        assert "not a journal of mtpstats" in refused("-o", tmp_path / "r.json", *args)


def test_nothing_is_left_where_no_file_is_written(tmp_path: Path) -> None:
    done = bench("-p", "import", "-n", "4", "-t", "1", "-o", "/dev/null", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = bench("-p", "import", "-n", "4", "-t", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []
    assert not os.path.exists("/dev/null.part")
