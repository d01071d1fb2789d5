"""What is wrong with machines, each fault with its mend, and what is worth knowing besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autodist.cli.checking.looking import FoundMachine
from autodist.cluster.addresses import check_reach, is_loopback
from autodist.cluster.preflight import faults
from autodist.errors import ClusterError

CLOCK_LIMIT = 1.0
"""Seconds that clocks may differ without a word."""

_LITTLE_DISK = 1 << 30


def faults_of(found: FoundMachine, everywhere: Sequence[FoundMachine], script: str | None) -> list[str]:
    """What keeps a machine from taking part in a run.

    Args:
        found: of the machine.
        everywhere: of all machines, the chief's first.
        script: its path, if it is known.
    """
    told = [] if found.problem is None else [found.problem]
    if found.machine is None:
        return told
    chief = everywhere[0].machine
    if chief is not None:
        told += faults(found.machine.facts, chief.facts, script)
    else:
        told += found.machine.facts.problems
    told += _gpu_faults(found)
    try:
        check_reach([found.node.address, *(other.node.address for other in everywhere)])
    except ClusterError as error:
        if is_loopback(found.node.address):
            told.append(str(error))
    else:
        told += _ports_unreached(found, {a: other for other in everywhere for a in other.addresses})
    return told


def notes_of(found: FoundMachine, takes_any_key: bool = False) -> Iterator[str]:
    """What does not keep a machine from taking part.

    Args:
        found: of the machine.
        takes_any_key: whether its host key is not checked.
    """
    if takes_any_key:
        yield (
            "its host key is not checked (`host_key_checking: false`), so that somebody else could answer in its "
            "place; add it to known_hosts by `ssh-keyscan`, and compare it with the machine's own"
        )
    if found.clock is not None and abs(found.clock.ahead) - found.clock.uncertainty > CLOCK_LIMIT:
        side = "ahead of" if found.clock.ahead > 0 else "behind"
        yield (
            f"its clock is {abs(found.clock.ahead):.1f} s {side} the chief's; training does not depend on it, dates "
            "of files and logs do: run an NTP service (chrony, systemd-timesyncd) there"
        )
    if found.machine is not None and 0 < found.machine.hardware.disk_free < _LITTLE_DISK:
        yield "less than 1 GiB is free on the disk where the script runs"


def _gpu_faults(found: FoundMachine) -> Iterator[str]:
    assert found.machine is not None, "it was reached"
    seen = found.machine.seen_gpus
    if seen is None:
        return
    absent = [gpu for gpu in found.node.gpus if gpu >= seen.count]
    if absent:
        reason = f": {seen.reason}" if seen.reason else ""
        allowed = f"name {', '.join(map(str, range(seen.count)))}" if seen.count else "name `cpus` in place of `gpus`"
        yield (
            f"there is no GPU {', '.join(map(str, absent))}: TensorFlow sees {seen.count or 'none'} there{reason}; "
            f"mend that, or {allowed}"
        )


def _ports_unreached(found: FoundMachine, machines: Mapping[str, FoundMachine]) -> Iterator[str]:
    """By the machine that cannot be reached from here, in one fault for all of its ports."""
    by_machine: dict[str, dict[str, list[str]]] = {}
    for address, problem in found.unreachable.items():
        by_machine.setdefault(machines[address].name, {}).setdefault(problem, []).append(address)
    for name, problems in by_machine.items():
        for problem, addresses in problems.items():
            yield f"it cannot connect to {', '.join(addresses)}: {problem}; {_port_mend(found, name, problem)}"


def _port_mend(found: FoundMachine, other: str, problem: str) -> str:
    if other == found.name:
        return f"give the node the address that the machine has on the network in place of {other}"
    if "resolved" in problem:
        return f"add the name to the DNS or to /etc/hosts there, or give the node {other} its IP address"
    return f"let the firewall of {other}, or of the network between, admit {found.name} to these ports"
