"""The guard: starts a script, and ends it with all its child processes as soon as the guard's parent is gone.

`python -m autodist.cluster.guard REPORT_FD INHERITED_FDS SECONDS python [arguments]`. Standard input is a lifeline
that carries no data: it closes however the process at the other end dies, and then the guard ends the script. The guard
writes two lines to the file descriptor REPORT_FD: the script's process group after the start, and the exit status when
no process of the script is left. The script inherits the descriptors INHERITED_FDS (separated by commas). SECONDS is
the time between SIGTERM and SIGKILL, measured by a `Stopwatch`.

Only a process with no other task can guarantee this: the agent may be killed with SIGKILL, and the script may be
blocked inside TensorFlow, where no Python code runs.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from autodist.cluster.timeouts import Stopwatch

_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.02
_KILL_LIMIT = 5.0  # a process of another user (started through sudo) cannot be killed, and must not hold up the report


def main() -> int:
    report_fd, inherited = int(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]
    stop_timeout, command = float(sys.argv[3]), sys.argv[4:]
    os.set_inheritable(report_fd, False)
    # The guard ignores the signals that end other processes: it ends when no process of the script is left.
    for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ending, _ignore)
    # A parent that ignores SIGCHLD passes this on to the guard, whose children would then have no exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _adopt_orphans()
    script = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True)
    _report(report_fd, script.pid)
    for number in inherited:
        os.close(number)
    _close_outputs()
    _wait_for_end(script)
    status = _end_group(script, stop_timeout)
    _report(report_fd, status)
    return 0


def _ignore(number: int, frame: object) -> None:
    """Handles a signal by doing nothing; unlike SIG_IGN, it is not inherited by the script."""


def _adopt_orphans() -> None:
    """Makes the guard the parent of the script's orphaned processes, so that it can end them, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _report(report_fd: int, number: int) -> None:
    try:
        os.write(report_fd, b"%d\n" % number)
    except BrokenPipeError:
        return  # the agent is gone, and the script is about to be ended


def _close_outputs() -> None:
    """Closes the guard's copies of the script's outputs: their readers detect the end when the script ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _wait_for_end(script: subprocess.Popen[bytes]) -> None:
    """Returns when the script's first process or the lifeline has ended."""
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def watch_lifeline() -> None:
        while os.read(0, 4096):
            pass
        ended.put(None)

    def watch_script() -> None:
        script.wait()
        ended.put(None)

    for name, watch in {"lifeline": watch_lifeline, "script": watch_script}.items():
        threading.Thread(target=watch, name=f"autodist-{name}", daemon=True).start()
    ended.get()


def _end_group(script: subprocess.Popen[bytes], stop_timeout: float) -> int:
    """Ends all processes of the script; returns the exit status of the first."""
    _signal_group(script.pid, signal.SIGTERM)
    _signal_group(script.pid, signal.SIGCONT)  # a stopped process handles no other signal
    _wait_until_gone(script, stop_timeout)
    deadline = time.monotonic() + _KILL_LIMIT
    while _anything_left(script) and time.monotonic() < deadline:
        _signal_group(script.pid, signal.SIGKILL)
        _kill_adopted()
        time.sleep(_POLL)
    return script.wait()


def _wait_until_gone(script: subprocess.Popen[bytes], limit: float) -> None:
    stopwatch = Stopwatch()
    while _anything_left(script) and stopwatch.read() < limit:
        time.sleep(_POLL)


def _anything_left(script: subprocess.Popen[bytes]) -> bool:
    """Reaps the processes that have ended; returns True if a process of the script still runs."""
    if script.poll() is None:
        return True
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return _signal_group(script.pid, 0)
    return True


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal (0 for none) to all processes of a group; returns True if the group has any."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_adopted() -> None:
    """Kills the processes that left the script's group and whose parents have ended."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


if __name__ == "__main__":
    sys.exit(main())
