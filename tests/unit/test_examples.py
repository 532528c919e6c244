"""The examples run, and their engines' own books agree with the statistics."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from mtpstats import Snapshot

ROOT = Path(__file__).parents[2]


def test_attaching_to_a_foreign_loop(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "attach.py", "--jsonl", tmp_path / "stats.jsonl"],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
    counted = re.search(r"(\d+) verifications, (\d+) drafted, (\d+) accepted", done.stdout)
    own = re.search(r"itself counted (\d+) drafted, (\d+) accepted", done.stdout)
    assert counted.groups()[1:] == own.groups()
    assert int(own[2]) > 100
    lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    last = Snapshot.from_dict(json.loads(lines[-1])["counters"])
    assert len(lines) == last.verifications // 64 + 1
    assert (last.tokens_drafted, last.tokens_accepted) == tuple(map(int, own.groups()))
    # every way a draft may end is in it
    assert last.stopped.any()
    assert last.cut_tokens > 0
    assert last.censored.any()
    assert last.unresolved == last.discarded == 0
