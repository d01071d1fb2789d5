"""Reaching a machine over SSH: one interface, two ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import paramiko

from autodist.cluster.ssh_logins import Logins
from autodist.cluster.ssh_program_logins import ProgramLogins
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.stream_relay import Far


class Machine(Protocol):
    """A machine that is logged in to as often as its server wants; tried again while it boots or is busy."""

    def start(self, command: Sequence[str], told: bytes) -> Far:
        """Starts a command.

        Args:
            command: arguments, the program first.
            told: what comes first on its standard input.

        Raises:
            ClusterError: with the host, the cause and the mend.
        """
        ...

    def open_sftp(self) -> paramiko.SFTPClient:
        """Files there.

        Raises:
            ClusterError: with the host, the cause and the mend.
            paramiko.SSHException, OSError, EOFError: the server offers none.
        """
        ...

    def ask(self, command: Sequence[str], limit: float) -> bytes:
        """What a command prints, where the machine was reached before.

        Args:
            command: arguments, the program first.
            limit: seconds for it.

        Raises:
            ClusterError, paramiko.SSHException, OSError, EOFError: there is no answer.
        """
        ...


def reach(settings: SSHSettings, silence: float, stays_for: Callable[[float], bool]) -> AbstractContextManager[Machine]:
    """A machine, from `__enter__` to `__exit__`.

    Args:
        settings: how it is reached.
        silence: seconds without a word that are no harm.
        stays_for: waits so many seconds and says whether whoever wants the machine is still there.
    """
    if settings.transport == "openssh":
        return ProgramLogins(settings, silence, stays_for)
    return Logins(settings, stays_for)
