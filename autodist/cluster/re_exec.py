"""Re-exec: restarts this process's script from the beginning, when the script has ended, in the same process.

The process keeps its id, parent, terminal and outputs. It restarts with the same interpreter and arguments, and with
its initial environment and directory.
"""

from __future__ import annotations

import functools
import gc
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from autodist.cluster.script_end import watch_script_end
from autodist.cluster.start import noted_start


class _AtModuleTeardown:
    """Calls `act` when Python destroys its modules, after all exit handlers have run.

    An exit handler would be too early: handlers registered before it, which may end the script's own processes, run
    after it. Names of modules may be deleted by then, so `act` has to hold references to everything that it needs.
    """

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None

    def __del__(self) -> None:
        self.act()


_end = _AtModuleTeardown()


def re_exec_at_the_end(environment: Mapping[str, str]) -> None:
    """Restarts this process's script after it has ended and its exit handlers have run.

    A signal during the exit handlers still ends the process.

    Args:
        environment: environment variables to add to the initial ones of the process.

    Raises:
        OSError: the directory in which the process was started no longer exists.
    """
    directory = noted_start().directory
    assert directory is not None, "a script of several workers has a directory"
    os.chdir(directory)
    if _stdin_offset is not None and _find_stdin_offset() is not None:  # the script may have closed it
        os.lseek(0, _stdin_offset, os.SEEK_SET)
    added = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    command, script_end, now = [sys.executable, *sys.orig_argv[1:]], watch_script_end(), time.monotonic()
    re_exec = functools.partial(os.execve, command[0], command, _initial_environment() | added)
    gc.freeze()  # a last collection of TensorFlow's objects, whose memory goes with the process, takes half a second
    _end.act = lambda: script_end.was_signalled_since(now) or re_exec()


def cannot_re_exec() -> str | None:
    """Returns the reason that this process's script cannot be restarted, with the fix; None if it can."""
    if sys.flags.interactive or os.environ.get("PYTHONINSPECT"):
        return "Python shows a prompt when the script has ended (-i, PYTHONINSPECT); start it without"
    return None


def has_lost_input() -> bool:
    """Returns True if the script cannot read its standard input again (a pipe or a socket)."""
    kind = _kind_of_stdin()
    return kind is not None and (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind))


def _initial_environment() -> dict[bytes, bytes]:
    """Returns the environment with which the process was started, without the script's changes."""
    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environb)
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _kind_of_stdin() -> int | None:
    try:
        return os.fstat(0).st_mode
    except OSError:
        return None  # closed


def _find_stdin_offset() -> int | None:
    """Returns the current offset of standard input; None if it is not a regular file."""
    kind = _kind_of_stdin()
    return os.lseek(0, 0, os.SEEK_CUR) if kind is not None and stat.S_ISREG(kind) else None


_stdin_offset = _find_stdin_offset()  # at import, before the script reads
