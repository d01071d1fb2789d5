"""The SSH part of the relay process: reaches a machine by the selected implementation, paramiko or `ssh`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

from autodist.cluster.protocol import Lost
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_machine import SSHMachine
from autodist.cluster.ssh_paramiko import ParamikoMachine
from autodist.cluster.ssh_program_machine import ProgramMachine
from autodist.cluster.ssh_settings import SSHOrder, SSHSettings
from autodist.cluster.stream_relay import Relays
from autodist.cluster.timeouts import HeartbeatTimeout
from autodist.errors import ClusterError
from autodist.waits import Event, start_thread

_POLL_INTERVAL, _GRACE = 1.0, 1.0


def reach(settings: SSHSettings, timeout: float, wait_while_needed: Callable[[float], bool]) -> SSHMachine[Any]:
    """Returns a machine; it is a context manager, which closes the connections at its exit.

    Args:
        settings: SSH settings of the machine.
        timeout: seconds without a response after which a connection counts as lost.
        wait_while_needed: waits for a number of seconds; returns False if the machine is no longer needed.
    """
    if settings.transport == "openssh":
        return ProgramMachine(settings, wait_while_needed, timeout)
    return ParamikoMachine(settings, wait_while_needed)


def relay(order: SSHOrder, relays: Relays, output: BinaryIO) -> None:
    """Starts a command for each of the chief's streams; returns when all have ended. `output` is not used."""
    have_started = Event()
    start_thread("relay-chief", _end_with_the_chief, relays, have_started)
    # The first message of an agent may be late: it has to load Python first, maybe from a network drive.
    limit, grace = order.silence_timeout, max(0.0, order.reach_timeout - order.silence_timeout)
    settings = order.settings
    with reach(settings, limit, lambda seconds: not relays.wait_for_chief_end(seconds)) as machine:
        lost = None
        for index in range(relays.not_started):
            if lost is None:
                try:
                    remote = machine.start(settings.command(*order.module), settings.preamble)
                except ClusterError as error:
                    lost = Lost(str(error), isinstance(error, UnreachableError))
                else:
                    relays.start(index, settings.host, remote, HeartbeatTimeout(limit, grace))
                    continue
            relays.fail(index, lost)
        have_started.set()
        relays.join()


def _end_with_the_chief(relays: Relays, have_started: Event) -> None:
    """Kills this process if the chief ends during a login, which may block for long."""
    while not have_started.is_set():
        if relays.wait_for_chief_end(_POLL_INTERVAL) and not have_started.wait(_GRACE):
            os.kill(os.getpid(), signal.SIGKILL)
