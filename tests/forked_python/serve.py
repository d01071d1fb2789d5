"""The forked process with TensorFlow imported: `exec(serve(…))` serves forever; in a fork it runs the script."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from types import CodeType

from becoming import become, fork_chains, prepare_main, receive, write_mark
from ending import leave_what_is_imported
from imported import Kept

_ACTED_ON_BY_THE_IMPORT = ("AUTODIST_EARLY_LAUNCH",)
"""Variables at which the import of AutoDist starts processes, which is left to the script's own import."""


def serve(descriptor: int) -> CodeType:
    """Returns the code to run in each forked process; the serving process ends with its client.

    Args:
        descriptor: of the socket that receives starts, each with its streams and a pipe for the process's number and
            exit status.
    """
    asked = socket.socket(fileno=descriptor)
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    _import_what_scripts_import()
    del sys.path[0]  # the folder of this file
    tell: dict[int, int] = {}
    while True:
        _wait(asked, woken)
        _tell_of_ended(tell)
        try:
            asked_for = receive(asked)
        except BlockingIOError:
            continue
        if asked_for is None:
            os._exit(0)
        start, (*streams, told_at) = asked_for
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            asked.detach()
            write_mark(start.mark)
            code = become(start, streams)
            theirs = fork_chains(start.chains, start.of)
            _forget_ourselves()
            return code if theirs is None else theirs
        for stream in streams:
            os.close(stream)
        os.write(told_at, b"%d\n" % pid)
        tell[pid] = told_at


def begin_anew(chains: int, of: str, above: int) -> CodeType:
    """Returns the code of a forked process that re-executes its script, and of the processes that it then forks.

    Args:
        chains, of, above: of its own forks, as for `fork_chains`.
    """
    line = tuple(sys.argv[1:])
    kept = {name: os.environ.pop(name) for name in _ACTED_ON_BY_THE_IMPORT if name in os.environ}
    _import_what_scripts_import()
    os.environ.update(kept)
    del sys.path[0]
    theirs = fork_chains(chains, of, above)
    code = prepare_main(line) if theirs is None else theirs
    _forget_ourselves()
    return code


def _forget_ourselves() -> None:
    for name in ("serve", "becoming", "ending", "imported"):
        del sys.modules[name]


def _import_what_scripts_import() -> None:
    gc.disable()
    import annotated_types  # noqa: F401
    import keras  # noqa: F401
    import numpy as np  # noqa: F401
    import pydantic  # noqa: F401
    import tensorflow as tf  # noqa: F401
    import yaml  # noqa: F401

    before = len(os.listdir("/proc/self/task"))
    Kept().take()
    assert len(os.listdir("/proc/self/task")) == before, "a process that is forked would lack a thread that began"
    leave_what_is_imported()
    gc.freeze()
    gc.enable()


def _wait(asked: socket.socket, woken: int) -> None:
    asked.setblocking(False)
    select.select([asked, woken], [], [])
    try:
        os.read(woken, 1 << 10)
    except BlockingIOError:
        return


def _tell_of_ended(tell: dict[int, int]) -> None:
    while tell:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(OSError):  # no client is left
            os.write(tell[pid], b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(tell.pop(pid))
