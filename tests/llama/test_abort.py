"""llama.cpp aborts the process: who is told why, once, and what then becomes of it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


def run(code: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_an_abort_seen_by_several_threads_is_told_once():
    code = """
import os, threading, time
from mtpstats import llama
library = llama.load()
def listener(text):
    os.write(2, text.encode())
    time.sleep(0.3)
    os._exit(1)
library.on_abort(listener)
def fail():
    library._last_words.callback(b"no.")
    os.abort()
for _ in range(4):
    threading.Thread(target=fail).start()
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (1, b"no.")


def test_an_assertion_is_told_once_and_not_again_as_the_abort_it_ends_in():
    code = """
import os
from mtpstats import llama
library = llama.load()
library.on_abort(lambda text: os.write(2, text.encode()))
library._last_words.callback(b"no\\x1b.\\n")
os.abort()
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, b"no\\x1b.")


@pytest.mark.parametrize("ends", [True, False])
def test_an_abort_of_another_kind_is_told_as_well(ends):
    code = f"""
import os
from mtpstats import llama
library = llama.load()
def listener(text):
    os.write(2, text.encode())
    if {ends}:
        os._exit(1)
library.on_abort(listener)
os.abort()
"""
    done = run(code)
    assert done.stderr == b"SIGABRT"
    # A listener that comes back leaves the process to its fate.
    assert done.returncode == (1 if ends else -signal.SIGABRT)


@pytest.mark.parametrize("before", ["pass", "faulthandler.enable()"])
def test_without_a_listener_an_abort_is_what_it_was(before):
    code = f"""
import faulthandler, os
from mtpstats import llama
{before}
library = llama.load()
library.on_abort(print)
library.on_abort(print)
library.on_abort(None)
os.abort()
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, b"")
    assert done.stderr.startswith(b"Fatal Python error: Aborted") == (before != "pass")
    assert done.stderr.startswith(b"Fatal") or done.stderr == b""
