"""A command whose streams are the connection to an SSH server."""

from __future__ import annotations

import socket
import subprocess
import threading

# How long an ended connection's command has to say, by its exit status, that it is the cause.
_STATUS_LIMIT = 1.0


class ProxyCommand:
    """A started command; it ends when `socket` is closed.

    Args:
        command: for the shell, its tokens replaced.

    Attributes:
        command: the same.
        socket: what is sent to the command, and comes from it.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.socket, theirs = socket.socketpair()
        with theirs:
            # By a shell, as OpenSSH does it: it may hold variables, quotes and pipes.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"], stdin=theirs.fileno(), stdout=theirs.fileno()
            )
        threading.Thread(target=self._process.wait, name="autodist-proxy-command", daemon=True).start()

    def failure(self) -> str | None:
        """How it ended badly, after its connection broke; None if it did not."""
        try:
            status = self._process.wait(_STATUS_LIMIT)
        except subprocess.TimeoutExpired:
            return None
        return f"exit status {status}" if status else None
