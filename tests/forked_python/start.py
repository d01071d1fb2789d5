"""Starts scripts in forks of a process that has imported TensorFlow, which takes three seconds of a core."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.forked_python import becoming
from tests.forked_python.becoming import MARK

ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
"""Variables, in addition to the environment of the tests, for the import of TensorFlow and the start of a script."""

_NO_MARK = "0" * 16
_READ_BY_NO_IMPORT = ("AUTODIST_", "IPYTHONDIR", "PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED", "SSH_", "TPU_ML_PLATFORM")
"""Prefixes of the variables that may differ from the environment in which TensorFlow was imported."""

_SET_BY_IMPORTS = {("TF2_BEHAVIOR", "1"), ("ENABLE_RUNTIME_UPTIME_TELEMETRY", "1"), ("HDF5_PLUGIN_PATH", "disable")}
"""By TensorFlow's, which a test may come to in the process of the tests itself."""

_BOOT = "import sys; sys.path[0] = {folder!r}; from serve import serve; exec(serve({descriptor}))"


class ForkedProcess:
    """A process, with as much of `subprocess.Popen` as tests need.

    Args:
        told_at: a pipe, on which its number and its exit status come.
    """

    def __init__(self, told_at: int) -> None:
        self._told = os.fdopen(told_at, "rb", buffering=0)
        self.returncode: int | None = None
        self.pid = self._read()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = self._read()
            self._told.close()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            select.select([self._told], [], [])
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read(self) -> int:
        line = self._told.readline()
        assert line, "the process that imports TensorFlow has ended"
        return int(line)


class ForkedPython:
    """A process that has imported TensorFlow, started when the first script is.

    Args:
        more: of its environment, with which scripts have to be started, too.
        environment: all of it; None: that of the tests, and `more`.
    """

    def __init__(self, more: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._more, self._all = dict(more or {}), environment
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def start(
        self,
        line: Sequence[str],
        streams: Sequence[int | IO[bytes]],
        environment: Mapping[str, str],
        directory: Path,
        chains: int,
        of: str = "worker",
    ) -> ForkedProcess | None:
        """Starts `python line`, in a session of its own; returns None if it cannot be forked.

        Args:
            line: a script, or `-m` and a module, with its arguments; `-P` may precede it.
            streams: standard input, output and error.
            environment: of the process.
            directory: its working directory.
            chains: number of times that it starts those of `of` on this machine, which are forked, too.
            of: a key of `becoming.CHAINS`: processes that a chief starts for a worker, or `autodist.launch` for a run.
        """
        if (line[0].startswith("-") and line[0] not in ("-m", "-P")) or len(environment[MARK]) != len(_NO_MARK):
            return None
        channel = self._running()
        if of_all(environment) != self._environment:
            return None
        start = becoming.of_this_process(
            line=tuple(line),
            environment={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            directory=str(directory),
            numbers=(0, 1, 2),
            new_session=True,
            mark=environment[MARK],
            chains=chains,
            of=of,
        )
        told_at, tells = os.pipe()
        try:
            numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            becoming.send(channel, start, [*numbers, tells])
        finally:
            os.close(tells)
        return ForkedProcess(told_at)

    def _running(self) -> socket.socket:
        if self._channel is None:
            self._environment = of_all(os.environ | ON_CPU | self._more if self._all is None else self._all)
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            boot = _BOOT.format(folder=str(Path(__file__).parent), descriptor=theirs.fileno())
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", boot],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment | {MARK: _NO_MARK},
                    start_new_session=True,
                )
            atexit.register(self._end)
        return self._channel

    def _end(self) -> None:
        assert self._channel is not None and self._process is not None
        self._channel.close()
        self._process.wait()


def of_all(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that must be equal for the TensorFlow import and for a script's start."""
    read = {pair for pair in environment.items() if not pair[0].startswith(_READ_BY_NO_IMPORT)}
    return dict(read - _SET_BY_IMPORTS)


forked_python = ForkedPython()
"""Of this process."""
