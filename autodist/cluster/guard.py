"""The guard: starts a script and ends it, with everything that it started, as soon as whoever asked for it is gone.

`python -m autodist.cluster.guard REPORT_FD INHERITED_FDS SECONDS python [arguments]`. Standard input is a lifeline:
nothing is said on it, and its end, which comes however the process at the other end dies, is the sign to end the
script. The guard writes two lines to the file descriptor REPORT_FD: the script's process group when it has started, and
its exit status when nothing of it is left. INHERITED_FDS (with commas) are handed on to the script. SECONDS is how long
it has to end by itself (SIGTERM) before it is ended (SIGKILL), counted as a `Stopwatch` does.

Only a process that does nothing else can promise this: the agent may be killed with SIGKILL, and the script may sit
inside TensorFlow, where no Python code of ours runs.
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

from autodist.cluster.load_adjusted_clock import Stopwatch

_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.02
_KILL_LIMIT = 5.0  # a process of another user (started through sudo) cannot be killed, and must not hold up the report


def main() -> int:
    report_fd, inherited = int(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]
    stop_timeout, command = float(sys.argv[3]), sys.argv[4:]
    os.set_inheritable(report_fd, False)
    # The guard outlives the signals that end others: it ends when there is nothing left to guard.
    for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ending, _stay)
    # Where whoever asked for the script ignores the ends of its children, this is inherited, and no child has a status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _adopt_orphans()
    script = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True)
    _report(report_fd, script.pid)
    for number in inherited:
        os.close(number)
    _forget_outputs()
    _wait_for_end(script)
    status = _end_group(script, stop_timeout)
    _report(report_fd, status)
    return 0


def _stay(number: int, frame: object) -> None:
    """Handles a signal by doing nothing; unlike SIG_IGN, it is not inherited by the script."""


def _adopt_orphans() -> None:
    """Makes the guard the parent of whatever the script's processes leave behind, so that it can end that too."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _report(report_fd: int, number: int) -> None:
    try:
        os.write(report_fd, b"%d\n" % number)
    except BrokenPipeError:
        return  # the agent is gone: nobody wants to know, and the script is about to be ended


def _forget_outputs() -> None:
    """Leaves the script's outputs to the script: whoever reads them sees their end when it ends."""
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
    """Ends all processes of the script, and gives the exit status of the first."""
    _signal_group(script.pid, signal.SIGTERM)
    _signal_group(script.pid, signal.SIGCONT)  # what was suspended hears of nothing else
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
    """Collects what has ended, and says whether something of the script still runs."""
    if script.poll() is None:
        return True
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return _signal_group(script.pid, 0)
    return True


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal to all processes of a group (0: to see whether there are any), and says whether there are any."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_adopted() -> None:
    """Kills processes that left the script's group and whose parents have ended."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


if __name__ == "__main__":
    sys.exit(main())
