"""Programs that end with this process, however it ends: they are one group, which another one ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence

# It holds the group's id while it lives, sees that this process has gone by the end of its input, and ends itself too.
_KEEPER = 'read -r it; rm -rf -- "$0"; kill -KILL 0'

# Unix knows no longer paths of sockets, and `ssh` makes one of a name with 17 letters more, within the folder.
_LONGEST_FOLDER = 108 - 1 - 17 - 16

# Seconds for the end of a program that was killed.
_END_LIMIT = 10.0


class ChildProcesses:
    """A group of programs with a private folder, from `__enter__` to `__exit__`.

    Attributes:
        folder: that nobody else may enter; its path is short enough for a socket in it.
    """

    folder: str

    def __enter__(self) -> ChildProcesses:
        near = len(os.fsencode(tempfile.gettempdir())) + len("/autodist-ssh-12345678") <= _LONGEST_FOLDER
        self.folder = tempfile.mkdtemp(prefix="autodist-ssh-", dir=None if near else "/tmp")
        self._programs: list[subprocess.Popen[bytes]] = []
        try:
            self._keeper = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, self.folder],
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
        """Ends them all; what they have said can be read to its end."""
        # The group's id is its own until it was waited for.
        if self._keeper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._keeper.pid, signal.SIGKILL)
        for program in (*self._programs, self._keeper):
            program.wait(_END_LIMIT)

    def __exit__(self, *about: object) -> None:
        self.end()
        for program in (*self._programs, self._keeper):
            for stream in (program.stdin, program.stderr):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command: Sequence[str], stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        """Starts a program.

        Args:
            command: its arguments, the program first.
            stdin: a descriptor, or one of the constants of `subprocess`.
            stdout: likewise.
            stderr: likewise.

        Raises:
            OSError: it cannot be started.
        """
        program = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, process_group=self._keeper.pid)
        self._programs.append(program)
        return program
