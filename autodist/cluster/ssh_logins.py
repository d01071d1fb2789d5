"""Logins to one machine: as few as its SSH server allows, and tried again while it boots or admits no more at once."""

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

_Made = TypeVar("_Made")

_CHUNK = 1 << 16

_LONGEST_PAUSE = 2.0

_chance = random.Random()
"""Draws beside the script, whose workers draw alike from `random`."""


class Logins:
    """Starts commands on one machine, as many over one login as its server allows.

    OpenSSH's allows ten sessions a login (`MaxSessions`), and where ten logins are under way drops others
    (`MaxStartups`), those of strangers counted.

    Args:
        settings: how the machine is reached.
        stays_for: waits so many seconds and says whether whoever wants the commands is still there.
    """

    def __init__(self, settings: SSHSettings, stays_for: Callable[[float], bool]) -> None:
        self._settings, self._stays_for = settings, stays_for
        self._clients: list[paramiko.SSHClient] = []

    def __enter__(self) -> Logins:
        return self

    def __exit__(self, *about: object) -> None:
        for client in self._clients:
            client.close()

    def start(self, command: Sequence[str], told: bytes) -> OverSSH:
        """Starts a command; see `Machine.start`."""
        try:
            session = self._open_session()
            session.exec_command(quote(command))
            session.sendall(told)
        except (paramiko.SSHException, OSError) as error:
            raise ClusterError(f"{self._settings.host}: the SSH server starts no command: {error}") from error
        return OverSSH(self._settings.host, session)

    def open_sftp(self) -> paramiko.SFTPClient:
        """Files there, over a login of their own; see `Machine.open_sftp`."""
        self._clients.append(self._log_in())
        return self._clients[-1].open_sftp()

    def ask(self, command: Sequence[str], limit: float) -> bytes:
        """What a command prints; see `Machine.ask`."""
        return self._clients[-1].exec_command(quote(command), timeout=limit)[1].read()

    def _open_session(self) -> paramiko.Channel:
        if self._clients:
            try:
                return self._session()
            except paramiko.ChannelException:  # it has as many as one login may have
                pass
        self._clients.append(self._log_in())
        return self._session()

    def _session(self) -> paramiko.Channel:
        transport = self._clients[-1].get_transport()
        assert transport is not None, "the client is connected"
        return transport.open_session(timeout=self._settings.connect_timeout)

    def _log_in(self) -> paramiko.SSHClient:
        return patiently(lambda: connect(self._settings), self._settings.patience, self._stays_for)


class OverSSH:
    """A command that was started over a connection of paramiko's."""

    def __init__(self, host: str, channel: paramiko.Channel) -> None:
        self._host, self._channel = host, channel

    def send(self, content: bytes) -> None:
        """As `Far.send`."""
        self._channel.sendall(content)

    def receive(self) -> bytes:
        """As `Far.receive`."""
        return self._channel.recv(_CHUNK)

    def receive_errors(self) -> bytes:
        """As `Far.receive_errors`."""
        return self._channel.recv_stderr(_CHUNK)

    def why_ended(self) -> str | None:
        """As `Far.why_ended`."""
        return None if self._channel.get_transport().is_active() else f"the SSH connection to {self._host} broke"

    def close(self) -> None:
        """As `Far.close`."""
        self._channel.close()


def patiently(log_in: Callable[[], _Made], patience: float, stays_for: Callable[[float], bool]) -> _Made:
    """Logs in, and tries again what may pass.

    Args:
        log_in: raises a ClusterError whose cause says whether it may.
        patience: seconds for which it is tried again.
        stays_for: waits so many seconds and says whether whoever wants the login is still there.

    Raises:
        ClusterError: the last of all tries.
    """
    began = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return log_in()
        except ClusterError as error:
            if not _may_pass(error):
                raise
            # Of several machines that log in through one, each waits for a time of its own.
            pause = min(_LONGEST_PAUSE, 0.1 * 2**attempt) * _chance.uniform(0.5, 1)
            passed = time.monotonic() - began
            if passed + pause > patience or not stays_for(pause):
                raise type(error)(f"{error}{_tried(error, attempt, passed)}") from error
    raise AssertionError("counting does not end")


def _tried(error: ClusterError, attempts: int, seconds: float) -> str:
    """What is to be said besides, where it was tried several times."""
    if attempts == 1:
        return ""
    times = f"{attempts} times in {seconds:.0f} s"
    if has_hung_up(error.__cause__):
        return f" It hung up {times}: if it admits too few logins at once, raise `MaxStartups` in its sshd_config."
    return f" It was tried {times}; where machines take longer to boot, raise `connect_timeout`."


def _may_pass(error: ClusterError) -> bool:
    """Whether it may be that the machine is still booting, or its server busy."""
    cause = error.__cause__
    if isinstance(cause, paramiko.ChannelException):
        return True
    # What was said too late was waited for long enough, and a name that is not there will not be soon.
    is_for_long = isinstance(cause, paramiko.SSHException | socket.gaierror)
    return has_hung_up(cause) or (is_silent(cause) and not is_for_long)
