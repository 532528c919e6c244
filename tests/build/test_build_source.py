"""What build_llama.sh builds: a checkout, an archive, a tag, or the pinned source through pip."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from fake_llama import Sandbox, stub, write_tree

PINNED = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


@pytest.mark.parametrize("source", ["missing", "empty"])
def test_a_source_that_is_none_is_refused_before_anything_else(box: Sandbox, source: str) -> None:
    (box.top / "empty").mkdir()
    done = box.run("--backend", "cpu", "--source", source)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert source in done.stderr
    assert not box.builds.exists()


def test_an_archive_that_is_none_is_bad_input(box: Sandbox) -> None:
    (box.top / "a.tar.gz").write_text("not an archive")
    done = box.run("--backend", "cpu", "--source", "a.tar.gz")
    assert done.returncode == 2
    assert "a.tar.gz is no archive" in done.stderr.splitlines()[-1]
    assert box.leftovers() == []


@pytest.mark.parametrize(
    "place", [".", "vendor/llama.cpp", "a", "a/vendor/llama.cpp", "a/llama.cpp"]
)
def test_llama_cpp_is_found_in_a_checkout_or_a_package(box: Sandbox, place: str) -> None:
    source = box.top / "source"
    tree = write_tree(source / place)
    assert box.plan("--backend", "cpu", "--source", "source")["source"] == str(tree.resolve())


def test_ref_builds_a_tag_of_the_repository_named(box: Sandbox, tree: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(tree)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "b42"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (tree / "src" / "llama.c").write_text("not in the tag")
    done = box.run("--backend", "cpu", "--ref", "b42", MTPSTATS_LLAMA_GIT=str(tree))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((Path(done.stdout.strip()) / "abi.json").read_text())
    assert manifest["source"] == {
        "name": "llama.cpp-b42", "kind": "git", "sha256": None, "commit": head.stdout.strip(),
        "version": "1.2.3-fake",
    }  # fmt: skip
    # A tag names one content for good, so the second time needs no repository.
    tree.rename(box.top / "gone")
    again = box.run("--backend", "cpu", "--ref", "b42", MTPSTATS_LLAMA_GIT=str(tree))
    assert (again.returncode, again.stdout) == (0, done.stdout)
    missing = box.run("--backend", "cpu", "--ref", "b43", MTPSTATS_LLAMA_GIT=str(tree))
    assert missing.returncode == 1
    assert "cloning b43" in missing.stderr.splitlines()[-1]


# ---- the pinned one


def test_the_default_source_is_the_pinned_one(box: Sandbox) -> None:
    plan = box.plan("--backend", "cpu")
    assert plan["sha256"] == PINNED
    assert Path(plan["prefix"]).name.startswith("llama-cpp-python-0.3.36-cpu-")


def stub_python(box: Sandbox, download: str) -> Path:
    """A Python whose pip runs ``download`` with the destination in $dest; returns its record."""
    record = box.top / "pip.calls"
    stub(
        box.stubs,
        "python-stub",
        f"""\
[ "$3" != --version ] || exit 0
echo "$@" >>"{record}"
for word; do [ "$word" != -r ] || pinned=yes; [ -z "$pinned" ] || requirements=$word; done
cat "$requirements" >>"{record}"
dest=$(echo "$@" | sed 's/.*--dest \\(.*\\) --require.*/\\1/')
mkdir -p "$dest"
{download}""",
    )
    return record


def test_the_pinned_source_comes_through_pip_and_its_checksum_is_checked(box: Sandbox) -> None:
    record = stub_python(box, 'echo junk >"$dest/llama_cpp_python-0.3.36.tar.gz"')
    cached = box.builds / ".cache" / "llama_cpp_python-0.3.36.tar.gz"
    cached.parent.mkdir(parents=True)
    cached.write_text("a damaged file")
    done = box.run("--backend", "cpu", PYTHON="python-stub")
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    junk = hashlib.sha256(b"junk\n").hexdigest()
    last = done.stderr.splitlines()[-1]
    assert "checksum mismatch" in last
    assert junk in last
    assert PINNED in last
    calls = record.read_text()
    assert "--no-deps" in calls
    assert f"llama-cpp-python==0.3.36 --hash=sha256:{PINNED}" in calls
    assert not cached.exists()
    assert box.leftovers() == []


def test_without_a_network_one_line_says_what_to_do(box: Sandbox) -> None:
    stub_python(box, "echo 'ERROR: No matching distribution found'; exit 1")
    done = box.run("--backend", "cpu", PYTHON="python-stub")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "No matching distribution" in last
    assert "--source" in last
    none = box.run("--backend", "cpu", PYTHON="no-such-python")
    assert none.returncode == 2
    assert "no-such-python" in none.stderr.splitlines()[-1]
