"""The firewall of a server's port: a table of nftables that exists as long as a process holds it.

The kernel removes a table with the flag `owner` when the program that has created it ends (Linux 5.12 and newer). That
program, `nft -i`, ends when its standard input closes. So the table is removed as soon as no process holds the other
end of that pipe, however these processes have ended.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import select
import shutil
import subprocess
import weakref
from collections.abc import Iterable

from autodist.cluster.timeouts import Stopwatch
from autodist.errors import ClusterError

_LIMIT = 10.0
"""Seconds until `nft` has created a table, or removed it."""

_POLL_INTERVAL = 0.02

# Starts `nft` as a process that nobody has to wait for: it outlives the process that holds the table. A shell connects
# the input of a command in the background to the null device unless it is redirected.
_IN_BACKGROUND = 'exec 3<&0; "$0" -i <&3 3<&- >/dev/null &'

NOT_PERMITTED = "the run may not change the firewall there, which needs root"


class FirewallError(ClusterError):
    """Raised if `nft` is missing or cannot create a table."""


class Firewall:
    """A table that drops packets to a port unless they come from some addresses or from this machine.

    It exists until `release` was called in all processes that hold it, or they have ended.

    Args:
        port: the port.
        admitted: IP addresses that may connect, in addition to this machine.

    Raises:
        FirewallError: names the reason and the fix.
    """

    def __init__(self, port: int, admitted: Iterable[str]) -> None:
        nft = _nft()
        if nft is None:
            raise FirewallError(
                "`firewall: auto` needs `nft`, which is not installed there; install it (`apt install nftables`), or "
                "remove `firewall`"
            )
        name = f"autodist_{port}_{secrets.token_hex(4)}"
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _IN_BACKGROUND, nft],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal does not reach it
        )
        assert shell.stdin and shell.stderr, "both are pipes"
        self._holding, self._errors = shell.stdin, shell.stderr
        shell.wait(_LIMIT)
        _held.add(self)
        try:
            with contextlib.suppress(BrokenPipeError):  # `nft` has ended, with a message
                self._holding.write(table_commands(name, port, admitted).encode() + b"\n")
                self._holding.flush()
            self._wait_for_table(nft, name)
        except BaseException:
            self.release()
            self._errors.close()
            raise

    def fileno(self) -> int:
        """Returns the descriptor by which a process holds the table."""
        return self._holding.fileno()

    def release(self) -> None:
        """Stops holding the table in this process."""
        with contextlib.suppress(BrokenPipeError):
            self._holding.close()

    def wait_until_removed(self) -> bool:
        """Waits until no process holds the table and it is removed; returns False if that takes longer than 10 s."""
        with self._errors:
            return bool(select.select([self._errors], [], [], _LIMIT)[0])

    def _wait_for_table(self, nft: str, name: str) -> None:
        stopwatch = Stopwatch()
        while stopwatch.read() < _LIMIT:
            if select.select([self._errors], [], [], _POLL_INTERVAL)[0]:
                words = os.read(self._errors.fileno(), 1 << 12).decode(errors="replace")
                raise FirewallError(_explained(words.strip().partition("\n")[0]))
            listing = [nft, "list", "table", "inet", name]
            if subprocess.run(listing, check=False, capture_output=True, timeout=_LIMIT).returncode == 0:
                return
        raise FirewallError(_explained(f"no answer within {_LIMIT:g} s"))


def _leave_to_parent() -> None:
    """Releases the tables in a process forked from this one, which may outlive it."""
    for firewall in list(_held):
        firewall.release()


_held: weakref.WeakSet[Firewall] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)


def why_not_permitted() -> str | None:
    """Returns the reason that this process may not set a firewall; None if it can. Creates a table and removes it.

    Raises:
        FirewallError: it may, but cannot: names the reason and the fix.
    """
    if _nft() is None and os.geteuid() != 0:
        return NOT_PERMITTED
    try:
        trial = Firewall(0, ())
    except FirewallError as error:
        if "not permitted" in str(error):
            return NOT_PERMITTED
        raise
    trial.release()
    trial.wait_until_removed()
    return None


def table_commands(name: str, port: int, admitted: Iterable[str]) -> str:
    """Returns the commands for `nft` that create a table, in one line: a line is one transaction."""
    commands = [
        f"table inet {name} {{ flags owner; }}",
        f"chain inet {name} input {{ type filter hook input priority -10; policy accept; }}",
        *(f"rule inet {name} input {rule}" for rule in drop_rules(str(port), admitted)),
    ]
    return "; ".join(f"add {command}" for command in commands)


def drop_rules(ports: str, admitted: Iterable[str]) -> list[str]:
    """Returns rules of nftables that drop packets to ports, except those of some addresses and of this machine.

    The machine's own workers connect to one another over `lo`, whatever address they use.

    Args:
        ports: a port, or a range such as "15000-15003".
        admitted: IP addresses. A name stays as it is, for the user to replace.
    """
    base = f'iifname != "lo" tcp dport {ports}'
    by_version: dict[int, set[str]] = {4: set(), 6: set()}
    for address in admitted:
        by_version[_version(address)].add(address)
    if not any(by_version.values()):
        return [f"{base} drop"]
    rules = []
    for family, selector, version in (("ipv4", "ip saddr", 4), ("ipv6", "ip6 saddr", 6)):
        allowed = ", ".join(sorted(by_version[version]))
        rules.append(f"{base} {f'{selector} != {{ {allowed} }}' if allowed else f'meta nfproto {family}'} drop")
    return rules


def commands_to_drop(ports: str, admitted: Iterable[str]) -> list[str]:
    """Returns the command lines that add the rules of `drop_rules` to nftables' usual chain."""
    return [f"nft add rule inet filter input {rule}" for rule in drop_rules(ports, admitted)]


def _version(address: str) -> int:
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return 4


def _nft() -> str | None:
    """Returns the path of `nft`, which is outside the usual path of a login; None if it is not installed."""
    return shutil.which("nft", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _explained(words: str) -> str:
    return (
        f"`firewall: auto`: `nft` creates no table there ({words}); use Linux 5.12 and nftables 0.9.9 or newer, or "
        "remove `firewall`"
    )
