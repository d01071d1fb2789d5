"""What `autodist check` has to tell, as a value that becomes tables or JSON."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic

from autodist.cli.checking.exposure import Exposure, exposure_of
from autodist.cli.checking.faults import faults_of, notes_of
from autodist.cli.checking.links import Measured, MeasuredLink
from autodist.cli.checking.looking import FoundMachine
from autodist.cli.checking.protocol import Hardware
from autodist.cluster.ssh_config import read_options
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transports import ssh_settings
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
