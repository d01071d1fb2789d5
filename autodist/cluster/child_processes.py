"""Child processes: programs in one process group, which ends when this process ends for any reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence

# Seconds for a killed program to end.
_LOCAL_LIMIT = 10.0

# The leader of the process group: reserves the group's id while it lives. Its input ends when this process is gone;
# then it kills the whole group.
_LEADER = 'read -r it; rm -rf -- "$0"; kill -KILL 0'

# Unix allows no longer paths of sockets; `ssh` first creates one in the folder with 17 more characters.
_MAX_FOLDER = 108 - 1 - 17 - 16


class ChildProcesses:
    """A process group of programs that ends when this process ends, for any reason; with a private folder.

    Use it as a context manager: `__exit__` kills the programs and removes the folder.

    Attributes:
        folder: path of the folder, accessible by this user only and short enough for a socket in it.
    """

    folder: str

    def __enter__(self) -> ChildProcesses:
        near = len(os.fsencode(tempfile.gettempdir())) + len("/autodist-ssh-12345678") <= _MAX_FOLDER
        self.folder = tempfile.mkdtemp(prefix="autodist-ssh-", dir=None if near else "/tmp")
        self._programs: list[subprocess.Popen[bytes]] = []
        try:
            self._leader = subprocess.Popen(
                ["/bin/sh", "-c", _LEADER, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def end(self) -> None:
        """Kills all programs; their remaining output can still be read."""
        # The group's id is not reused until its leader was waited for.
        if self._leader.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._leader.pid, signal.SIGKILL)
        for program in (*self._programs, self._leader):
            program.wait(_LOCAL_LIMIT)

    def __exit__(self, *about: object) -> None:
        self.end()
        for program in (*self._programs, self._leader):
            for stream in (program.stdin, program.stderr):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command: Sequence[str], stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        """Starts a program.

        Args:
            command: the program and its arguments.
            stdin: descriptor for the program's standard input, or a constant of `subprocess`.
            stdout: the same for its standard output.
            stderr: the same for its standard error.

        Raises:
            OSError: the program cannot be started.
        """
        program = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, process_group=self._leader.pid)
        self._programs.append(program)
        return program
