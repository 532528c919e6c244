"""What a real llama-server logs and counts, imported: equal to its own totals."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from oracle import tool
from sessions import Tiny

from mtpstats.imports import from_files
from mtpstats.llama import Library

PROMPTS = ["Once upon a time", "def add(a, b):", "The quick brown fox"]


class Server:
    """A ``llama-server`` that drafts, with two slots and everything switched on."""

    def __init__(self, prefix: Path, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [
            *(str(tool(prefix, "llama-server")), "-m", str(model), "-t", "1", "-c", "1024"),
            *("-np", "2", "--spec-type", "draft-mtp", "--spec-draft-n-max", "4", "--metrics"),
            *("--no-webui", "-lv", "4", "--host", "127.0.0.1", "--port", self.url[17:]),
        ]
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LLAMA_TRACE": "1"},
            )
        for _ in range(300):
            try:
                self.get("/health")
                return
            except OSError:
                assert self.process.poll() is None, log.read_text(errors="replace")[-2000:]
                time.sleep(0.2)
        pytest.fail("llama-server does not answer")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def complete(self, prompt: str, n_predict: int) -> None:
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0.7, "seed": 1}
        request = urllib.request.Request(self.url + "/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def counter(page: str, name: str, labels: str = "") -> int:
    found = re.search(rf"^llamacpp:{name}{re.escape(labels)} (\d+)$", page, re.MULTILINE)
    assert found, name
    return int(found[1])


@pytest.mark.parametrize("restores", [False, True], ids=["built-in", "checkpoints"])
def test_counts_are_the_servers_own(
    lib: Library, model_path: Path, tiny: Tiny, tmp_path: Path, restores: bool
) -> None:
    assert lib.prefix is not None
    log = tmp_path / "server.log"
    # memory without rollback: the server restores a checkpoint and sends what was accepted again
    path = tiny("qwen3next") if restores else model_path
    server = Server(lib.prefix, path, log)
    try:
        server.complete(PROMPTS[0], 40)
        before = server.get("/metrics")
        together = [
            threading.Thread(target=server.complete, args=(prompt, 48)) for prompt in PROMPTS[1:]
        ]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        after = server.get("/metrics")
    finally:
        server.stop()

    names = ("tokens_predicted_total", "spec_decode_num_draft_tokens_total",
             "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")  # fmt: skip
    tokens, drafted, accepted, drafts = (counter(after, name) for name in names)
    by_position = [
        counter(after, "spec_decode_num_accepted_tokens_per_pos_total", f'{{position="{i}"}}')
        for i in range(4)
    ]
    assert drafts > 30
    assert sum(by_position) == accepted

    lines = log.read_text(errors="replace").splitlines(keepends=True)
    untraced = [line for line in lines if "draft tokens" not in line]
    plain = [line for line in untraced if "acc per pos" not in line]
    for kept, known in ((lines, 4), (untraced, 4), (plain, 0)):
        (tmp_path / "part.log").write_text("".join(kept))
        result = from_files([tmp_path / "part.log"])
        total, notes = result["total"], result["environment"]["source"]["notes"]
        assert len(result["prompts"]) == 3
        assert not any("left out" in note or "rounds" in note for note in notes)
        assert (total["tokens"], total["drafted"]) == (tokens, drafted)
        assert (total["accepted"], total["verifications"]) == (accepted, drafts)
        if known:
            assert total["positions"]["accepted"][:5] == [*by_position, 0]
            assert total["positions"]["reached"][0] == drafts
    traced = from_files([log])
    assert sum(traced["total"]["positions"]["drafted"]) == drafted
    assert traced["model"]["file"] == path.name
    assert traced["model"]["architecture"] == ("qwen3next" if restores else "qwen35")
    assert traced["model"]["nextn_blocks"] == 1
    assert any("restore checkpoint" in line for line in lines) == restores

    for name, page in (("before.txt", before), ("after.txt", after)):
        (tmp_path / name).write_text(page)
    whole = from_files([tmp_path / "after.txt"])["total"]
    assert (whole["tokens"], whole["drafted"], whole["accepted"]) == (tokens, drafted, accepted)
    assert whole["positions"]["accepted"][:5] == [*by_position, 0]
    later = from_files([tmp_path / "before.txt", tmp_path / "after.txt"])["total"]
    assert later["tokens"] == 96
    assert later["drafted"] == sum(p["drafted"] for p in traced["prompts"][1:])
    assert later["accepted"] == sum(p["accepted"] for p in traced["prompts"][1:])
