"""Formats the report as tables and text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from autodist.cli.checking.exposure import ANY_FREE_PORT
from autodist.cli.checking.links import MeasuredLink
from autodist.cli.checking.messages import Hardware
from autodist.cli.checking.report import MachineReport, Report
from autodist.cluster.preflight import table as aligned
from autodist.logs.formatting import counted, readable_bytes, readable_seconds
from autodist.logs.tables import text_table

_NOT_KNOWN = "–"


def tables_of(report: Report) -> Iterator[Table | str]:
    """Yields machines, links, open ports, and faults. Faults come last, since the end of the output is read first."""
    yield _machines(report)
    if report.links:
        yield _links(report.links)
    yield from report.left_out
    if report.exposure:
        yield from _exposure(report)
    for head, rows in (
        ("Notes:", [(machine.address, note) for machine in report.machines for note in machine.notes]),
        ("Faults:", list(_faults(report))),
    ):
        if rows:
            yield f"{head}\n{aligned(rows)}"
    if not report.has_faults:
        yield f"No fault: {counted(len(report.machines), 'machine')}, ready to train."


def _faults(report: Report) -> Iterator[tuple[str, str]]:
    for machine in report.machines:
        yield from ((machine.address, fault) for fault in machine.faults)
    for link in report.links:
        if link.problem:
            yield f"{link.one} to {link.other}", link.problem


def _machines(report: Report) -> Table:
    heads = ["machine", "versions", "script, ports, clock", "has"]
    return text_table("machines", heads, [[_head(m), *_cells(m)] for m in report.machines], has_lines=True)


def _head(machine: MachineReport) -> str:
    state = counted(len(machine.faults), "fault") if machine.faults else "ok"
    reached = f"reached, host key {machine.host_key}, logged in" if machine.host_key else "reached"
    lines = [machine.address + (" (chief)" if machine.is_chief else ""), machine.way]
    return "\n".join([*lines, reached if machine.is_reached else "not reached", state])


def _cells(machine: MachineReport) -> list[str]:
    if not machine.is_reached:
        return [_NOT_KNOWN] * 3
    packages = {"Python": machine.python, "TensorFlow": machine.tensorflow, "Keras": machine.keras}
    versions = {**packages, "AutoDist": machine.autodist}
    return [
        "\n".join(f"{name} {version or 'missing'}" for name, version in versions.items()),
        "\n".join([_script(machine), _ports(machine), _clock(machine)]),
        "" if machine.hardware is None else "\n".join(_hardware(machine.hardware)),
    ]


def _script(machine: MachineReport) -> str:
    return "no script named" if machine.script is None else f"script: {machine.script}"


def _ports(machine: MachineReport) -> str:
    ports = [str(port) for port in machine.ports if port is not None]
    missing = len(machine.ports) - len(ports)
    return f"free: {', '.join(ports) or 'none'}" + (f", taken: {missing}" if missing else "")


def _clock(machine: MachineReport) -> str:
    """Formats the offset of a clock from the chief's.

    >>> _clock(MachineReport(address="a", is_chief=False, way="", is_reached=True, clock_ahead=-0.5,
    ...                      clock_uncertainty=0.0021))
    'clock -500 ms ± 2.1 ms'
    """
    if machine.clock_ahead is None or machine.clock_uncertainty is None:
        return ""
    if machine.is_chief:
        return "clock: the reference"
    ahead, off = machine.clock_ahead, machine.clock_uncertainty
    return f"clock {'+' if ahead >= 0 else '-'}{readable_seconds(abs(ahead))} ± {readable_seconds(off)}"


def _hardware(hardware: Hardware) -> Iterator[str]:
    yield counted(hardware.cores, "core")
    yield f"memory {readable_bytes(hardware.memory_free)} of {readable_bytes(hardware.memory)} free"
    yield f"disk {readable_bytes(hardware.disk_free)} of {readable_bytes(hardware.disk)} free"
    kinds = dict.fromkeys(hardware.gpus)
    yield from (
        (f"{hardware.gpus.count(gpu)} × {gpu.name}, {readable_bytes(gpu.memory)}" for gpu in kinds)
        if kinds
        else ["no GPU"]
    )


def _links(links: tuple[MeasuredLink, ...]) -> Table:
    figures = ["round trip", "there", "back"]
    rows = []
    for link in links:
        round_trip = _NOT_KNOWN if link.round_trip is None else readable_seconds(link.round_trip)
        rows.append([link.one, link.other, round_trip, _rate(link.there), _rate(link.back)])
    title = "links, through TensorFlow's transport"
    return text_table(title, ["between", "and", *figures], rows, numbers=figures, has_lines=True)


def _rate(bytes_a_second: float | None) -> str:
    return _NOT_KNOWN if bytes_a_second is None else f"{bytes_a_second * 8 / 1e9:.3g} Gbit/s"


def _exposure(report: Report) -> Iterator[str]:
    """Yields the open ports, and the commands that close them."""
    yield (
        "While a run trains, TensorFlow's servers listen on every interface without a password: anyone who connects "
        "can run code as you. This check cannot see if a firewall protects the machines."
    )
    rows = []
    for exposure in report.exposure:
        rows += [(exposure.machine, exposure.text()), *((exposure.machine, f"  {c}") for c in exposure.commands)]
    yield aligned(rows)
    if any(exposure.ports == ANY_FREE_PORT for exposure in report.exposure):
        yield "Set a `port` for each node; then only that port (and the next ones, for more workers) needs closing."
