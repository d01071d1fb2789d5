"""The connection of the rendezvous server to a process that has joined."""

from __future__ import annotations

import contextlib
import socket

_CHUNK = 1 << 16


class FollowerConnection:
    """The connection to a process that has joined.

    Args:
        connection: socket of the connection.
        name: name of the process, for messages.
    """

    hint_of_silence = ""
    """It has sent a message before, as it joined."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection, self._name = connection, name
        self._problem: str | None = None

    def send(self, content: bytes) -> None:
        self._connection.sendall(content)

    def receive(self) -> bytes:
        try:
            return self._connection.recv(_CHUNK)
        except ConnectionResetError:  # the process has ended and had not read all messages
            return b""
        except ConnectionError as error:
            self._problem = f"the connection to {self._name} broke: {error.strerror}"
            return b""

    def receive_errors(self) -> bytes:
        return b""

    def why_ended(self) -> str | None:
        return self._problem

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
