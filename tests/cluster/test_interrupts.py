"""Signals while the main thread is inside C code that no signal wakes, as TensorFlow's is."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from autodist.cluster.interrupts import Interrupts

pytestmark = pytest.mark.processes

# A mutex that is locked twice blocks without being interruptible; the callback unlocks it.
BLOCKED = """
import ctypes, signal, sys
from autodist.cluster.interrupts import Interrupts
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)

def free(number):
    print("noticed", signal.Signals(number).name, flush=True)
    libc.pthread_mutex_unlock(mutex)

watching = Interrupts(free) if {watched} else None
if watching: watching.__enter__()
try:
    print("blocked", flush=True)
    libc.pthread_mutex_lock(mutex)
    for _ in range(1000): pass
finally:
    print("unwound", sys.exc_info()[0].__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("number", "raised", "status"),
    [(signal.SIGINT, "KeyboardInterrupt", -signal.SIGINT), (signal.SIGTERM, "SystemExit", 128 + signal.SIGTERM)],
)
def test_signal_reaches_a_blocked_process_and_unwinds_it(number: signal.Signals, raised: str, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED.format(watched=True)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"blocked\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=10)
    assert rest.decode() == f"noticed {number.name}\nunwound {raised}\n"
    assert process.returncode == status


def test_without_it_the_process_stays_blocked() -> None:
    """What the class is for: if this fails, the test above proves nothing."""
    with subprocess.Popen([sys.executable, "-c", BLOCKED.format(watched=False)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"blocked\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()


def test_what_was_there_before_is_put_back_and_is_still_told() -> None:
    script = """
import os, signal, socket
from autodist.cluster.interrupts import Interrupts
reading, writing = socket.socketpair()
writing.setblocking(False)
signal.set_wakeup_fd(writing.fileno())
def own(number, frame): os.write(1, b"own handler\\n")
signal.signal(signal.SIGTERM, own)
with Interrupts(lambda number: os.write(1, b"noticed\\n")):
    os.kill(os.getpid(), signal.SIGTERM)
    assert reading.recv(1) == bytes([signal.SIGTERM])
assert signal.getsignal(signal.SIGTERM) is own
assert signal.set_wakeup_fd(-1) == writing.fileno()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with Interrupts(print): assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["noticed", "own handler"]


def test_other_threads_change_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with Interrupts(print):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
