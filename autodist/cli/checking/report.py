"""The report of `autodist check`: data that is shown as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pydantic

from autodist.cli.checking.check_machines import FoundMachine
from autodist.cli.checking.exposure import Exposure, exposure_of
from autodist.cli.checking.links import Measured, MeasuredLink
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
        is_chief: True if the script is started there.
        way: the SSH command that reaches it, or "this machine".
        host_key: "known" or "not checked"; None: it is not reached over SSH.
        is_reached: True if it was reached and accepted the login.
        python, tensorflow, keras, autodist: versions; None: not known, or not installed.
        script: "same", "another" or "not there"; None: no script was named.
        ports: of the workers' servers; None: not available.
        clock_ahead: seconds by which its clock is ahead of the chief's; None: not known.
        clock_uncertainty: of `clock_ahead`, in seconds.
        hardware: None: not known.
        faults: problems that keep it from taking part, each with its fix.
        notes: other remarks.
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
    """The complete result of `autodist check`.

    Attributes:
        cluster: the YAML file.
        machines: the chief's first.
        links: the measured links between them.
        left_out: pairs that were not measured, with the reason.
        exposure: ports that are open while a run trains.
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
    """Returns the machines without a fault; none if the chief's has one, since it starts the others."""
    found = [one for one in everywhere if not faults_of(one, everywhere, script)]
    return found if found and found[0] is everywhere[0] else []


def report_of(spec: ResourceSpec, everywhere: Sequence[FoundMachine], script: str | None, measured: Measured) -> Report:
    """Creates the report.

    Args:
        spec: the machines.
        everywhere: the checks of all machines, the chief's first.
        script: path of the script, if one was named.
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
    report = MachineReport(
        address=found.name,
        is_chief=found.node.chief,
        way=_way(settings),
        host_key=host_key,
        is_reached=found.machine is not None,
        faults=tuple(faults_of(found, everywhere, script)),
        notes=tuple(notes_of(found, host_key == "not checked")),
    )
    if found.machine is None:
        return report
    facts, clock = found.machine.facts, found.clock
    return report.model_copy(
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
    """Returns the SSH command with which a user would reach the machine."""
    if settings is None:
        return "this machine"
    try:
        options = read_options(settings.host, settings.username, settings.port, ())
    except ClusterError:
        return f"ssh {settings.host}"
    port = "" if options.port == 22 else f" -p {options.port}"
    return f"ssh{port} {options.user}@{options.hostname}"


CLOCK_LIMIT = 1.0
"""Clock difference in seconds up to which there is no note."""

_LITTLE_DISK = 1 << 30


def faults_of(found: FoundMachine, everywhere: Sequence[FoundMachine], script: str | None) -> list[str]:
    """Returns the problems that keep a machine from taking part in a run.

    Args:
        found: the check of the machine.
        everywhere: the checks of all machines, the chief's first.
        script: path of the script, if it is known.
    """
    problems = [] if found.problem is None else [found.problem]
    if found.machine is None:
        return problems
    chief = everywhere[0].machine
    if chief is not None:
        problems += faults(found.machine.facts, chief.facts, script)
    else:
        problems += found.machine.facts.problems
    problems += _gpu_faults(found)
    try:
        check_reach([found.node.address, *(other.node.address for other in everywhere)])
    except ClusterError as error:
        if is_loopback(found.node.address):
            problems.append(str(error))
    else:
        problems += _ports_unreached(found, {a: other for other in everywhere for a in other.addresses})
    return problems


def notes_of(found: FoundMachine, takes_any_key: bool = False) -> Iterator[str]:
    """Yields remarks that do not keep a machine from taking part.

    Args:
        found: the check of the machine.
        takes_any_key: True if its host key is not checked.
    """
    if takes_any_key:
        yield (
            "its host key is not checked (`host_key_checking: false`), so another machine could answer in its "
            "place; add it to known_hosts with `ssh-keyscan`, and compare it with the machine's own"
        )
    if found.clock is not None and abs(found.clock.ahead) - found.clock.uncertainty > CLOCK_LIMIT:
        side = "ahead of" if found.clock.ahead > 0 else "behind"
        yield (
            f"its clock is {abs(found.clock.ahead):.1f} s {side} the chief's; training does not depend on it, but "
            "dates of files and logs do: run an NTP service (chrony, systemd-timesyncd) there"
        )
    if found.machine is not None and 0 < found.machine.hardware.disk_free < _LITTLE_DISK:
        yield "less than 1 GiB is free on the disk where the script runs"


def _gpu_faults(found: FoundMachine) -> Iterator[str]:
    assert found.machine is not None, "the machine was reached"
    seen = found.machine.seen_gpus
    if seen is None:
        return
    absent = [gpu for gpu in found.node.gpus if gpu >= seen.count]
    if absent:
        reason = f": {seen.reason}" if seen.reason else ""
        allowed = f"name {', '.join(map(str, range(seen.count)))}" if seen.count else "name `cpus` instead of `gpus`"
        yield (
            f"there is no GPU {', '.join(map(str, absent))}: TensorFlow sees {seen.count or 'none'} there{reason}; "
            f"fix that, or {allowed}"
        )


def _ports_unreached(found: FoundMachine, machines: Mapping[str, FoundMachine]) -> Iterator[str]:
    """Yields one fault for each unreachable machine and reason, with all of its ports."""
    by_machine: dict[str, dict[str, list[str]]] = {}
    for address, problem in found.unreachable.items():
        by_machine.setdefault(machines[address].name, {}).setdefault(problem, []).append(address)
    for name, problems in by_machine.items():
        for problem, addresses in problems.items():
            yield f"it cannot connect to {', '.join(addresses)}: {problem}; {_port_mend(found, name, problem)}"


def _port_mend(found: FoundMachine, other: str, problem: str) -> str:
    if other == found.name:
        return f"set the node's address to the one that the machine has on the network, instead of {other}"
    if "resolved" in problem:
        return f"add the name to the DNS or to /etc/hosts there, or use the IP address of the node {other}"
    return f"let the firewall of {other}, or of the network between, admit {found.name} to these ports"
