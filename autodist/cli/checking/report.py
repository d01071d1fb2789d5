"""What `autodist check` has to tell, as a value that becomes tables or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pydantic

from autodist.cli.checking.exposure import Exposure, exposure_of
from autodist.cli.checking.links import Measured, MeasuredLink
from autodist.cli.checking.looking import FoundMachine
from autodist.cli.checking.protocol import Hardware
from autodist.cluster.addresses import check_reach, is_loopback
from autodist.cluster.preflight import faults
from autodist.cluster.ssh_config import read_options
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transport import ssh_settings
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec


class MachineReport(pydantic.BaseModel):
    """One machine.

    Attributes:
        address: in the YAML.
        is_chief: whether the script is started there.
        way: how it is reached.
        host_key: "known" or "not checked"; None: it is not reached over SSH.
        is_reached: whether it was, and let the user in.
        python, tensorflow, keras, autodist: versions; None: not known, or not installed.
        script: "same", "another" or "not there"; None: no script was given.
        ports: of the workers' servers; None: it cannot be had.
        clock_ahead: seconds by which its clock is ahead of the chief's; None: not known.
        clock_uncertainty: of that, in seconds.
        hardware: None: not known.
        faults: what keeps it from taking part, each with its mend.
        notes: what does not.
    """

    address: str
    is_chief: bool
    way: str
    host_key: str | None = None
    is_reached: bool
    python: str | None = None
    tensorflow: str | None = None
    keras: str | None = None
    autodist: str | None = None
    script: str | None = None
    ports: tuple[int | None, ...] = ()
    clock_ahead: float | None = None
    clock_uncertainty: float | None = None
    hardware: Hardware | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Report(pydantic.BaseModel):
    """All that `autodist check` has found.

    Attributes:
        cluster: the YAML file.
        machines: the chief's first.
        links: between them, that were measured.
        left_out: what was not measured, and why.
        exposure: what is open to whom while a run trains.
    """

    cluster: str
    machines: tuple[MachineReport, ...]
    links: tuple[MeasuredLink, ...] = ()
    left_out: tuple[str, ...] = ()
    exposure: tuple[Exposure, ...] = ()

    @property
    def has_faults(self) -> bool:
        return any(machine.faults for machine in self.machines) or any(link.problem for link in self.links)


def usable(everywhere: Sequence[FoundMachine], script: str | None) -> list[FoundMachine]:
    """Machines without a fault; none if the chief's has one, since all begins there."""
    found = [one for one in everywhere if not faults_of(one, everywhere, script)]
    return found if found and found[0] is everywhere[0] else []


def report_of(spec: ResourceSpec, everywhere: Sequence[FoundMachine], script: str | None, measured: Measured) -> Report:
    """Makes the report.

    Args:
        spec: the machines.
        everywhere: what was found of them, the chief's first.
        script: its path, if one was given.
        measured: their links.
    """
    exposure = (exposure_of(one, [other for other in everywhere if other is not one]) for one in everywhere)
    return Report(
        cluster=spec.file or "",
        machines=tuple(_machine(spec, one, everywhere, script) for one in everywhere),
        links=measured.links,
        left_out=measured.left_out,
        exposure=tuple(filter(None, exposure)),
    )


def _machine(
    spec: ResourceSpec, found: FoundMachine, everywhere: Sequence[FoundMachine], script: str | None
) -> MachineReport:
    settings = ssh_settings(spec, found.node)
    host_key = None if settings is None else "known" if settings.host_key_checking else "not checked"
    told = MachineReport(
        address=found.name,
        is_chief=found.node.chief,
        way=_way(settings),
        host_key=host_key,
        is_reached=found.machine is not None,
        faults=tuple(faults_of(found, everywhere, script)),
        notes=tuple(notes_of(found, host_key == "not checked")),
    )
    if found.machine is None:
        return told
    facts, clock = found.machine.facts, found.clock
    return told.model_copy(
        update={
            "python": facts.python,
            "tensorflow": facts.tensorflow,
            "keras": facts.packages.get("keras"),
            "autodist": facts.autodist,
            "script": _script(found, everywhere, script),
            "ports": found.machine.ports,
            "clock_ahead": clock and clock.ahead,
            "clock_uncertainty": clock and clock.uncertainty,
            "hardware": found.machine.hardware,
        }
    )


def _script(found: FoundMachine, everywhere: Sequence[FoundMachine], script: str | None) -> str | None:
    chief = everywhere[0].machine
    if script is None or found.machine is None or chief is None:
        return None
    digest = found.machine.facts.digest
    return "not there" if digest is None else "same" if digest == chief.facts.digest else "another"


def _way(settings: SSHSettings | None) -> str:
    """How the machine is reached, as a user would do it by hand."""
    if settings is None:
        return "this machine"
    try:
        options = read_options(settings.host, settings.username, settings.port, ())
    except ClusterError:
        return f"ssh {settings.host}"
    port = "" if options.port == 22 else f" -p {options.port}"
    return f"ssh{port} {options.user}@{options.hostname}"


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
