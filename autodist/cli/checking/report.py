"""The report of `autodist check`: data that is shown as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pydantic

from autodist.cli.checking.check_machines import CheckedMachine
from autodist.cli.checking.exposure import Exposure, exposure_of
from autodist.cli.checking.links import Measured, MeasuredLink
from autodist.cli.checking.messages import Hardware
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
        address: its address in the YAML.
        is_chief: True if the script is started there.
        way: the SSH command that reaches it, or "this machine".
        host_key: "known" or "not checked"; None if the machine is not reached over SSH.
        is_reached: True if the machine was reached and accepted the login.
        python, tensorflow, keras, autodist: versions of packages; None if unknown or not installed.
        script: state of the script: "same", "another" or "not there"; None if no script was named.
        ports: the ports of the workers' servers; None: not available.
        clock_ahead: seconds by which its clock is ahead of the chief's; None if unknown.
        clock_uncertainty: the uncertainty of `clock_ahead`, in seconds.
        hardware: hardware of the machine; None if unknown.
        faults: problems that keep the machine from taking part, each with its fix.
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
        cluster: path of the YAML file.
        machines: reports of the machines, the chief's first.
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


def usable(machines: Sequence[CheckedMachine], script: str | None) -> list[CheckedMachine]:
    """Returns the machines without a fault; none if the chief's has one, since it starts the others."""
    checked = [one for one in machines if not faults_of(one, machines, script)]
    return checked if checked and checked[0] is machines[0] else []


def report_of(spec: ResourceSpec, machines: Sequence[CheckedMachine], script: str | None, measured: Measured) -> Report:
    """Creates the report.

    Args:
        spec: the machines.
        machines: the checks of all machines, the chief's first.
        script: path of the script, if one was named.
        measured: their links.
    """
    exposure = (exposure_of(one, [other for other in machines if other is not one], spec) for one in machines)
    return Report(
        cluster=spec.file or "",
        machines=tuple(_machine(spec, one, machines, script) for one in machines),
        links=measured.links,
        left_out=measured.left_out,
        exposure=tuple(filter(None, exposure)),
    )


def _machine(
    spec: ResourceSpec, checked: CheckedMachine, machines: Sequence[CheckedMachine], script: str | None
) -> MachineReport:
    settings = ssh_settings(spec, checked.node)
    host_key = None if settings is None else "known" if settings.host_key_checking else "not checked"
    report = MachineReport(
        address=checked.name,
        is_chief=checked.node.chief,
        way=_way(settings),
        host_key=host_key,
        is_reached=checked.machine is not None,
        faults=tuple(faults_of(checked, machines, script)),
        notes=tuple(notes_of(checked, host_key == "not checked")),
    )
    if checked.machine is None:
        return report
    facts, clock = checked.machine.facts, checked.clock
    return report.model_copy(
        update={
            "python": facts.python,
            "tensorflow": facts.tensorflow,
            "keras": facts.packages.get("keras"),
            "autodist": facts.autodist,
            "script": _script(checked, machines, script),
            "ports": checked.machine.ports,
            "clock_ahead": clock and clock.ahead,
            "clock_uncertainty": clock and clock.uncertainty,
            "hardware": checked.machine.hardware,
        }
    )


def _script(checked: CheckedMachine, machines: Sequence[CheckedMachine], script: str | None) -> str | None:
    chief = machines[0].machine
    if script is None or checked.machine is None or chief is None:
        return None
    digest = checked.machine.facts.digest
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


def faults_of(checked: CheckedMachine, machines: Sequence[CheckedMachine], script: str | None) -> list[str]:
    """Returns the problems that keep a machine from taking part in a run.

    Args:
        checked: the check of the machine.
        machines: the checks of all machines, the chief's first.
        script: path of the script, if it is known.
    """
    problems = [] if checked.problem is None else [checked.problem]
    if checked.machine is None:
        return problems
    chief = machines[0].machine
    if chief is not None:
        problems += faults(checked.machine.facts, chief.facts, f"the script {script}")
    else:
        problems += checked.machine.facts.problems
    problems += _gpu_faults(checked)
    try:
        check_reach([checked.node.address, *(other.node.address for other in machines)])
    except ClusterError as error:
        if is_loopback(checked.node.address):
            problems.append(str(error))
    else:
        problems += _ports_unreached(checked, {a: other for other in machines for a in other.addresses})
    return problems


def notes_of(checked: CheckedMachine, takes_any_key: bool = False) -> Iterator[str]:
    """Yields remarks that do not keep a machine from taking part.

    Args:
        checked: the check of the machine.
        takes_any_key: True if its host key is not checked.
    """
    if takes_any_key:
        yield (
            "its host key is not checked (`host_key_checking: false`), so another machine could answer in its "
            "place; add it to known_hosts with `ssh-keyscan`, and compare it with the machine's own"
        )
    if checked.clock is not None and abs(checked.clock.ahead) - checked.clock.uncertainty > CLOCK_LIMIT:
        side = "ahead of" if checked.clock.ahead > 0 else "behind"
        yield (
            f"its clock is {abs(checked.clock.ahead):.1f} s {side} the chief's; training does not depend on it, but "
            "dates of files and logs do: run an NTP service (chrony, systemd-timesyncd) there"
        )
    if checked.machine is not None and checked.machine.facts.no_firewall is not None:
        yield f"`firewall: auto` sets no firewall there: {checked.machine.facts.no_firewall}"
    if checked.machine is not None and 0 < checked.machine.hardware.disk_free < _LITTLE_DISK:
        yield "less than 1 GiB is free on the disk where the script runs"


def _gpu_faults(checked: CheckedMachine) -> Iterator[str]:
    assert checked.machine is not None, "the machine was reached"
    seen = checked.machine.seen_gpus
    if seen is None:
        return
    absent = [gpu for gpu in checked.node.gpus if gpu >= seen.count]
    if absent:
        reason = f": {seen.reason}" if seen.reason else ""
        allowed = f"name {', '.join(map(str, range(seen.count)))}" if seen.count else "name `cpus` instead of `gpus`"
        yield (
            f"there is no GPU {', '.join(map(str, absent))}: TensorFlow sees {seen.count or 'none'} there{reason}; "
            f"fix that, or {allowed}"
        )


def _ports_unreached(checked: CheckedMachine, machines: Mapping[str, CheckedMachine]) -> Iterator[str]:
    """Yields one fault for each unreachable machine and reason, with all of its ports."""
    by_machine: dict[str, dict[str, list[str]]] = {}
    for address, problem in checked.unreachable.items():
        by_machine.setdefault(machines[address].name, {}).setdefault(problem, []).append(address)
    for name, problems in by_machine.items():
        for problem, addresses in problems.items():
            yield f"it cannot connect to {', '.join(addresses)}: {problem}; {_port_fix(checked, name, problem)}"


def _port_fix(checked: CheckedMachine, other: str, problem: str) -> str:
    if other == checked.name:
        return f"set the node's address to the one that the machine has on the network, instead of {other}"
    if "resolved" in problem:
        return f"add the name to the DNS or to /etc/hosts there, or use the IP address of the node {other}"
    return f"let the firewall of {other}, or of the network between, admit {checked.name} to these ports"
