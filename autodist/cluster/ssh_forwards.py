"""The part of the relay process that forwards ports: the `ssh` program carries the traffic between workers' servers.

The forwards have a connection of their own, by the `ssh` program with both transports: a program in C passes the bytes,
and tensors do not delay the heartbeats of the agents, which use another connection.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from typing import BinaryIO

from autodist.cluster.protocol import Lost
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_keys import read_key
from autodist.cluster.ssh_machine import ONE_TRY, retry_login
from autodist.cluster.ssh_program import fastest_cipher, forwarding, require_program
from autodist.cluster.ssh_program_machine import ProgramMachine
from autodist.cluster.ssh_program_output import text_of_output
from autodist.cluster.ssh_route import find_route
from autodist.cluster.ssh_settings import Forwarded, ForwardOrder
from autodist.cluster.stream_relay import Relays
from autodist.errors import ClusterError

_POLL_INTERVAL = 0.5

# Seconds for the requests of all forwards, of which there may be some thousands, one after another.
_REQUEST_LIMIT = 60.0

_TAKEN = re.compile(r"cannot listen to port: (\d+)")

# Starts of the lines about single connections, such as those to a server that does not listen yet.
_OF_CHANNELS = ("channel ",)

_PROHIBITED = "administratively prohibited"


class ForwardingMachine(ProgramMachine):
    """A machine to and from which ports are forwarded."""

    def forward(self, to_machine: Sequence[tuple[int, int]], from_machine: Sequence[int]) -> tuple[int, ...]:
        """Logs in and forwards ports; see `ForwardOrder`. Returns the ports on the other machine.

        Raises:
            ClusterError: names the host, the cause and the fix.
        """
        require_program(self._settings.host, "encrypt: ssh")
        self._hops = find_route(self._settings, read_key)
        login = retry_login(self._log_in, self._settings.retry_limit, self._wait_while_needed)
        self._logins.append(login)
        program = self._child_processes.start(
            forwarding(login.socket, to_machine, from_machine),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            output, errors = program.communicate(timeout=_REQUEST_LIMIT)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{self._settings.host}: `ssh` forwards no ports within {_REQUEST_LIMIT:g} s") from None
        if program.returncode != 0:
            raise self._no_forward(login.output, errors.decode(errors="replace"))
        return tuple(map(int, output.split()))

    def why_ended(self) -> str | None:
        """Returns the reason that the forwards do not work any more; None if they do."""
        login = self._logins[-1]
        if login.has_ended():
            words = text_of_output(login.output, _OF_CHANNELS)
            return f"the SSH connection that carries its traffic broke{f' ({words})' if words else ''}"
        if _PROHIBITED in login.output:
            return str(self._no_forward(login.output, ""))
        return None

    def _line(self, connect_timeout: float = ONE_TRY) -> list[str]:
        return [*super()._line(connect_timeout), *fastest_cipher(self._hops[0].options.ciphers)]

    def _no_forward(self, output: str, errors: str) -> ClusterError:
        taken = _TAKEN.search(output)
        if taken:
            return ClusterError(
                f"{self._settings.host}: port {taken[1]} of this machine, which would lead there, was taken by another "
                "process in the meantime; run again"
            )
        words = text_of_output(errors) or _PROHIBITED
        return ClusterError(
            f"{self._settings.host}: its SSH server forwards no ports ({words}), which `encrypt: ssh` needs; set "
            "`AllowTcpForwarding yes` in its sshd_config (and no `DisableForwarding`, `PermitOpen` or `PermitListen` "
            "for this user and key), or remove `encrypt`"
        )


def relay(order: ForwardOrder, relays: Relays, output: BinaryIO) -> None:
    """Forwards ports until the chief closes its stream; `output` is not used."""
    with ForwardingMachine(
        order.settings, lambda seconds: not relays.wait_for_chief_end(seconds), order.silence_timeout
    ) as machine:
        try:
            relays.send(0, Forwarded(machine.forward(order.to_machine, order.from_machine)))
        except ClusterError as error:
            relays.fail(0, Lost(str(error), isinstance(error, UnreachableError)))
            return
        problem = None
        while problem is None and not relays.wait_for_chief_end(_POLL_INTERVAL):
            problem = machine.why_ended()
        if problem is not None:
            relays.fail(0, Lost(problem, is_away=True))
