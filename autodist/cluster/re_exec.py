"""Beginning anew: this process runs its script once more, from the start, when the script has ended.

The process stays the same (its number, terminal, outputs, and whoever waits for it), and so do the interpreter, its
arguments, and the environment and directory that it was started with.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from autodist.cluster.script_end import watch_script_end
from autodist.cluster.start import noted_start


class _AtTheVeryEnd:
    """Calls `act` when Python takes its modules down, which is after all exit handlers have run.

    Not in an exit handler: those that were registered before it, which end the script's own processes, say, come later.
    By then a module's names may be gone, so that `act` holds what it needs.
    """

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None

    def __del__(self) -> None:
        self.act()


_end = _AtTheVeryEnd()


def re_exec_at_the_end(environment: Mapping[str, str]) -> None:
    """Lets this process's script run once more after all that it does at its end, its exit handlers included.

    A signal that ends the process, and comes in one of these, ends it.

    Args:
        environment: variables beside those with which the process was started.

    Raises:
        OSError: the directory in which it was started is gone.
    """
    directory = noted_start().directory
    assert directory is not None, "a script of several workers has one"
    os.chdir(directory)
    if _stdin_at is not None and _place_in_stdin() is not None:  # the script may have closed it
        os.lseek(0, _stdin_at, os.SEEK_SET)
    told = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    command, script_end, now = [sys.executable, *sys.orig_argv[1:]], watch_script_end(), time.monotonic()
    begin = functools.partial(os.execve, command[0], command, _first_environment() | told)
    _end.act = lambda: script_end.was_told_to_end_since(now) or begin()


def cannot_re_exec() -> str | None:
    """Why this process's script cannot run once more, with the mend; None: it can."""
    if sys.flags.interactive or os.environ.get("PYTHONINSPECT"):
        return "Python stays at a prompt when the script has ended (-i, PYTHONINSPECT); start it without"
    return None


def has_lost_input() -> bool:
    """Whether what the script has read of its standard input cannot be read again."""
    kind = _kind_of_stdin()
    return kind is not None and (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind))


def _first_environment() -> dict[bytes, bytes]:
    """What the process was started with, whatever the script has changed since."""
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
        return None  # it is closed


def _place_in_stdin() -> int | None:
    """Where the script begins to read a file that is its standard input; None: it is no file."""
    kind = _kind_of_stdin()
    return os.lseek(0, 0, os.SEEK_CUR) if kind is not None and stat.S_ISREG(kind) else None


_stdin_at = _place_in_stdin()  # now, before the script reads of it
