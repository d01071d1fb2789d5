"""Logins to one machine: uses as few as possible, and retries while it boots or its SSH server is busy."""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import paramiko

from autodist.cluster.ssh_connection import connect, quote
from autodist.cluster.ssh_errors import has_hung_up, is_silent
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

_T = TypeVar("_T")

_CHUNK = 1 << 16

_LONGEST_PAUSE = 2.0

_chance = random.Random()
"""A separate generator: the script may have seeded `random` equally on all workers."""


class Logins:
    """Starts commands on one machine, as many over one login as its server allows.

    OpenSSH's server allows ten sessions per login (`MaxSessions`), and drops connections if ten logins, of any client,
    are in progress (`MaxStartups`).

    Args:
        settings: SSH settings of the machine.
        wait_while_needed: waits so many seconds; returns False if the login is no longer needed.
    """

    def __init__(self, settings: SSHSettings, wait_while_needed: Callable[[float], bool]) -> None:
        self._settings, self._wait_while_needed = settings, wait_while_needed
        self._clients: list[paramiko.SSHClient] = []

    def __enter__(self) -> Logins:
        return self

    def __exit__(self, *about: object) -> None:
        for client in self._clients:
            client.close()

    def start(self, command: Sequence[str], stdin: bytes) -> ParamikoCommand:
        """Starts a command; see `Machine.start`."""
        try:
            session = self._open_session()
            session.exec_command(quote(command))
            session.sendall(stdin)
        except (paramiko.SSHException, OSError) as error:
            raise ClusterError(f"{self._settings.host}: the SSH server starts no command: {error}") from error
        return ParamikoCommand(self._settings.host, session)

    def open_sftp(self) -> paramiko.SFTPClient:
        """Opens an SFTP session over a new login; see `Machine.open_sftp`."""
        self._clients.append(self._log_in())
        return self._clients[-1].open_sftp()

    def ask(self, command: Sequence[str], limit: float) -> bytes:
        """Returns the output of a command; see `Machine.ask`."""
        return self._clients[-1].exec_command(quote(command), timeout=limit)[1].read()

    def _open_session(self) -> paramiko.Channel:
        if self._clients:
            try:
                return self._session()
            except paramiko.ChannelException:  # the login has as many sessions as the server allows
                pass
        self._clients.append(self._log_in())
        return self._session()

    def _session(self) -> paramiko.Channel:
        transport = self._clients[-1].get_transport()
        assert transport is not None, "the client is connected"
        return transport.open_session(timeout=self._settings.connect_timeout)

    def _log_in(self) -> paramiko.SSHClient:
        return retry_login(lambda: connect(self._settings), self._settings.patience, self._wait_while_needed)


class ParamikoCommand:
    """A command that was started over a connection of paramiko."""

    def __init__(self, host: str, channel: paramiko.Channel) -> None:
        self._host, self._channel = host, channel

    def send(self, content: bytes) -> None:
        """See `RemoteCommand.send`."""
        self._channel.sendall(content)

    def receive(self) -> bytes:
        """See `RemoteCommand.receive`."""
        return self._channel.recv(_CHUNK)

    def receive_errors(self) -> bytes:
        """See `RemoteCommand.receive_errors`."""
        return self._channel.recv_stderr(_CHUNK)

    def why_ended(self) -> str | None:
        """See `RemoteCommand.why_ended`."""
        return None if self._channel.get_transport().is_active() else f"the SSH connection to {self._host} broke"

    def close(self) -> None:
        """See `RemoteCommand.close`."""
        self._channel.close()


def retry_login(log_in: Callable[[], _T], patience: float, wait_while_needed: Callable[[float], bool]) -> _T:
    """Logs in, and retries after transient errors.

    Args:
        log_in: function that logs in or raises a ClusterError; the cause of the error shows if it may be transient.
        patience: seconds after which it is not retried.
        wait_while_needed: waits so many seconds; returns False if the login is no longer needed.

    Raises:
        ClusterError: the error of the last attempt.
    """
    began = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return log_in()
        except ClusterError as error:
            if not _is_transient(error):
                raise
            # The random factor spreads the logins to several machines through one jump host.
            pause = min(_LONGEST_PAUSE, 0.1 * 2**attempt) * _chance.uniform(0.5, 1)
            elapsed = time.monotonic() - began
            if elapsed + pause > patience or not wait_while_needed(pause):
                raise type(error)(f"{error}{_attempts_text(error, attempt, elapsed)}") from error
    raise AssertionError("counting does not end")


def _attempts_text(error: ClusterError, attempts: int, seconds: float) -> str:
    """Returns the text to append to an error after several attempts."""
    if attempts == 1:
        return ""
    times = f"{attempts} times in {seconds:.0f} s"
    if has_hung_up(error.__cause__):
        return f" It hung up {times}: if it admits too few logins at once, raise `MaxStartups` in its sshd_config."
    return f" It was tried {times}; if machines take longer to boot, raise `connect_timeout`."


def _is_transient(error: ClusterError) -> bool:
    """Returns True if the machine may still be booting, or its server may be busy."""
    cause = error.__cause__
    if isinstance(cause, paramiko.ChannelException):
        return True
    # A late banner has been waited for long enough, and an unknown name will not resolve soon.
    is_permanent = isinstance(cause, paramiko.SSHException | socket.gaierror)
    return has_hung_up(cause) or (is_silent(cause) and not is_permanent)
