"""Selects the implementation of SSH: paramiko or the `ssh` program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autodist.cluster.ssh_machine import SSHMachine
from autodist.cluster.ssh_paramiko import ParamikoMachine
from autodist.cluster.ssh_program_machine import ProgramMachine
from autodist.cluster.ssh_settings import SSHSettings


def reach(settings: SSHSettings, timeout: float, wait_while_needed: Callable[[float], bool]) -> SSHMachine[Any]:
    """Returns a machine; it is a context manager, which closes the connections at its exit.

    Args:
        settings: SSH settings of the machine.
        timeout: seconds without a response that are allowed.
        wait_while_needed: waits so many seconds; returns False if the machine is no longer needed.
    """
    if settings.transport == "openssh":
        return ProgramMachine(settings, wait_while_needed, timeout)
    return ParamikoMachine(settings, wait_while_needed)
