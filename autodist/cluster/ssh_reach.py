"""One interface for the two implementations of SSH: paramiko and the `ssh` program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import paramiko

from autodist.cluster.ssh_logins import Logins
from autodist.cluster.ssh_program_logins import ProgramLogins
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.stream_relay import RemoteCommand


class Machine(Protocol):
    """A machine reached over SSH with as many logins as its server requires; retries while it boots or is busy."""

    def start(self, command: Sequence[str], stdin: bytes) -> RemoteCommand:
        """Starts a command.

        Args:
            command: the program and its arguments.
            stdin: first bytes of its standard input.

        Raises:
            ClusterError: names the host, the cause and the fix.
        """
        ...

    def open_sftp(self) -> paramiko.SFTPClient:
        """Opens an SFTP session.

        Raises:
            ClusterError: names the host, the cause and the fix.
            paramiko.SSHException, OSError, EOFError: the server offers no SFTP.
        """
        ...

    def ask(self, command: Sequence[str], limit: float) -> bytes:
        """Returns the output of a command; requires an earlier call of another method.

        Args:
            command: the program and its arguments.
            limit: timeout in seconds.

        Raises:
            ClusterError, paramiko.SSHException, OSError, EOFError: there is no answer.
        """
        ...


def reach(
    settings: SSHSettings, timeout: float, wait_while_needed: Callable[[float], bool]
) -> AbstractContextManager[Machine]:
    """Returns a context manager for a machine, which closes the connections at its exit.

    Args:
        settings: SSH settings of the machine.
        timeout: seconds without a response that are allowed.
        wait_while_needed: waits so many seconds; returns False if the machine is no longer needed.
    """
    if settings.transport == "openssh":
        return ProgramLogins(settings, timeout, wait_while_needed)
    return Logins(settings, wait_while_needed)
