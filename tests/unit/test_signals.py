"""Signals that end a run: heard inside C, raised outside, and the second Ctrl-C."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from mtpstats import _core
from mtpstats.cli.signals import Watch
from mtpstats.llama import log
from mtpstats.llama.interrupt import DeferredInterrupt


def wait_for_stop():
    deadline = time.monotonic() + 10
    while not _core.stop_asked() and time.monotonic() < deadline:
        time.sleep(0.001)
    return _core.stop_asked()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_and_asks_the_core_to_stop(number):
    before = signal.getsignal(number)
    signal.signal(number, signal.default_int_handler)
    try:
        with Watch():
            assert not _core.stop_asked()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            assert wait_for_stop()
        assert not _core.stop_asked()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_handlers_and_wakeup_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    with Watch():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        # Nobody asked Python to handle this one.
        assert signal.getsignal(signal.SIGTERM) is before[1]
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_one_that_came_while_llama_cpp_logged_is_delivered_after_the_call(monkeypatch):
    monkeypatch.setattr(log.Log, "_receive", lambda: signal.raise_signal(signal.SIGINT))
    with Watch(), pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        log.Log._receive()


def test_what_c_held_back_is_handled_after_it_and_heard_again():
    seen = []

    def mine(number, _frame):
        seen.append(number)

    wanted = {signal.SIGINT: mine, signal.SIGTERM: mine, signal.SIGHUP: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        with DeferredInterrupt() as held:
            signal.raise_signal(signal.SIGHUP)  # as under nohup
            assert not held.pending
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert (held.pending, seen) == (True, [])
        assert seen == [signal.SIGTERM]
        assert {number: signal.getsignal(number) for number in wanted} == wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_main_thread_nothing_is_done():
    threads = []

    def watch():
        with Watch():
            threads.append(threading.active_count())

    before = threading.active_count()
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert threads == [before + 1]
    assert signal.set_wakeup_fd(-1) == -1


SCRIPT = """
import ctypes, os, signal, sys, threading, time
from mtpstats import _core
from mtpstats.cli.signals import Watch
from mtpstats.llama import log
from mtpstats.llama.interrupt import DeferredInterrupt
from mtpstats.llama.log import Log

for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)

def get_stuck_in_c():
    libc.pthread_mutex_lock(mutex)  # no signal ends it

def meanwhile(work):
    threading.Thread(target=work, daemon=True).start()

def send(*numbers):
    for number in numbers:
        time.sleep(0.2)
        os.kill(os.getpid(), number)

def work():
    {work}

try:
    with Watch():
        {body}
except KeyboardInterrupt:
    print("interrupted")
"""


def run(body, work="pass"):
    """Return exit code and output of a process that runs ``body`` under a Watch."""
    command = [sys.executable, "-c", SCRIPT.format(body=body, work=work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_c_hears_of_the_signal_before_python_does():
    work = "send(2)\n    while not _core.stop_asked(): time.sleep(0.001)\n"
    work += "    print('heard', flush=True); libc.pthread_mutex_unlock(mutex)"
    assert run("meanwhile(work); get_stuck_in_c()", work) == (0, "heard\ninterrupted\n")


def test_a_second_ctrl_c_ends_the_process_at_once():
    assert run("meanwhile(work); get_stuck_in_c()", "send(2, 2)") == (130, "")
    assert run("meanwhile(work); get_stuck_in_c()", "send(15, 2)") == (130, "")


def test_requests_of_another_kind_may_come_twice():
    work = "send(1, 1, 15)\n    time.sleep(0.2)\n    libc.pthread_mutex_unlock(mutex)"
    assert run("meanwhile(work); get_stuck_in_c()", work) == (0, "interrupted\n")


def test_a_signal_in_the_log_callback_is_not_raised_there():
    body = "log = Log(); log.listener = lambda *line: signal.raise_signal(2)\n"
    body += "        log.callback(2, b'x\\n', None); time.sleep(0.2); print(_core.stop_asked())"
    assert run(body) == (0, "True\n")
