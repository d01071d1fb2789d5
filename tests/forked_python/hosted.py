"""A Python for test hosts, whose processes are forked from one that has imported TensorFlow.

sshd, or another starter, starts a process that hands over its descriptors and environment, waits for the fork, and ends
with the same status. So the fork has another parent, and survives a kill of the process that sshd has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
from pathlib import Path

from tests.forked_python.start import ForkedProcess, ForkedPython, of_all

# Only the fork holds the streams: their reader sees the end of file when it ends.
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect("\\0{name}")
told = {{"line": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}}
socket.send_fds(asked, [json.dumps(told).encode()], [0, 1, 2])
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nowhere, stream)
status = int(asked.recv(16))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""

_MOST = 1 << 18

_by_environment: dict[frozenset[tuple[str, str]], ForkedPython] = {}
_starting = threading.Lock()


class HostedPython:
    """A folder with `bin/python`, from `__enter__` to `__exit__`.

    Args:
        folder: to be made.
        of: the processes that it starts in turn, which are forked, too: a key of `becoming.CHAINS`.
    """

    def __init__(self, folder: Path, of: str = "agent") -> None:
        self.folder, self._of = folder, of
        self._name = f"autodist-{secrets.token_hex(8)}"
        self._listens = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> HostedPython:
        program = self.folder / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text(_PROGRAM.format(python=sys.executable, name=self._name))
        program.chmod(0o755)
        self._listens.bind(f"\0{self._name}")
        self._listens.listen()
        self._serves = threading.Thread(target=self._serve)
        self._serves.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._listens.shutdown(socket.SHUT_RDWR)
        self._serves.join()
        self._listens.close()

    def _serve(self) -> None:
        """Serves until no client is left."""
        while True:
            try:
                asked, _ = self._listens.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(asked,), daemon=True).start()

    def _answer(self, asked: socket.socket) -> None:
        with asked:
            told, streams, _, _ = socket.recv_fds(asked, _MOST, 3)
            try:
                process = self._start(streams, **json.loads(told))
            finally:
                for stream in streams:
                    os.close(stream)
            with contextlib.suppress(OSError):  # the client has been killed
                asked.send(b"%d" % process.wait())

    def _start(self, streams: list[int], line: list[str], environment: dict[str, str], directory: str) -> ForkedProcess:
        with _starting:
            known = frozenset(of_all(environment).items())
            python = _by_environment.setdefault(known, ForkedPython(environment=dict(known)))
            process = python.start(line, streams, environment, Path(directory), 1, self._of)
        assert process is not None, f"it cannot be forked: {line}"
        return process
