"""Network namespaces as machines, joined by a bridge in one more namespace. Needs root."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from typing import Self


class Namespaces(contextlib.ExitStack):
    """Machines 0, 1, … with one interface each, from their creation to the end of the stack.

    Args:
        count: number of machines.
        network: first three numbers of their addresses.
    """

    def __init__(self, count: int, network: str = "10.200.0") -> None:
        super().__init__()
        self._count, self._network, self._tag = count, network, "ad" + secrets.token_hex(3)
        self._switch = self._tag + "-switch"

    def __enter__(self) -> Self:
        try:
            self._add_namespace(self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for number in range(self._count):
                self._plug_in(number)
        except BaseException:
            self.close()
            raise
        return self

    def address(self, number: int) -> str:
        """Returns the address of a machine."""
        return f"{self._network}.{number + 1}"

    def command_on(self, number: int, command: list[str]) -> list[str]:
        """Returns the command that runs `command` on a machine; the process keeps its id."""
        return ["ip", "netns", "exec", f"{self._tag}-{number}", *command]

    def command_on_switch(self, command: list[str]) -> list[str]:
        """Returns the command that runs `command` where all packets between the machines pass."""
        return ["ip", "netns", "exec", self._switch, *command]

    def set_link(self, number: int, state: str) -> None:
        """Sets the link of a machine "up" or "down"; packets are dropped without notice while it is down."""
        _ip("-n", self._switch, "link", "set", f"port{number}", state)

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self.callback(_ip, "netns", "delete", name)

    def _plug_in(self, number: int) -> None:
        """Makes one namespace with an interface whose other end is `port<number>` of the bridge."""
        name = f"{self._tag}-{number}"
        self._add_namespace(name)
        end = ("peer", "name", "net0", "netns", name)
        _ip("-n", self._switch, "link", "add", f"port{number}", "type", "veth", *end)
        _ip("-n", self._switch, "link", "set", f"port{number}", "master", "switch", "up")
        _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "net0")
        _ip("-n", name, "link", "set", "net0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)
