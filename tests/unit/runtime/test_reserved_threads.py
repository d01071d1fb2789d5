"""Threads that are reserved for the end of a run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from autodist.runtime.reserved_threads import ReservedThreads


@pytest.mark.parametrize("needs_reserve", [True, False])
def test_each_function_runs_in_a_thread_of_its_own_reserved_or_not(needs_reserve: bool) -> None:
    threads, both = ReservedThreads(needs_reserve), threading.Barrier(2)
    threads.reserve()
    started = [threads.start(lambda: both.wait(60)) for _ in range(2)]
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)
    assert not both.broken


def test_threads_that_wait_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    threads = ReservedThreads(needs_reserve=True)
    threads.reserve()
    (waiting,) = set(threading.enumerate()) - before
    del threads
    gc.collect()
    waiting.join(60)
    assert not waiting.is_alive()


def test_an_exit_handler_starts_a_reserved_thread() -> None:
    lines = """
import atexit
from autodist.runtime.reserved_threads import ReservedThreads
threads = ReservedThreads()
threads.reserve()
atexit.register(lambda: threads.start(lambda: print("in a thread", flush=True)).join(60))
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("in a thread\n", 0), done.stderr
