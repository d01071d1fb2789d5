"""Reads workers' traces from a folder, and aligns their times with the chief's clock."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from autodist.cli.command_errors import UsageError
from autodist.runtime.traced_times import operation_of, task_of

_FILE = re.compile(r"(?P<step>.+)\.worker_(?P<worker>\d+)\.json\Z")
_TRANSFER = re.compile(
    r"\[(?P<size>[\d.]+)(?P<unit>[KMGT]?)B\] .*?(?:edge_\d+_)?(?P<tensor>\S+) from (?P<source>\S+) to (?P<target>\S+)"
)
_UNITS = {unit: 1024**power for power, unit in enumerate(["", "K", "M", "G", "T"])}

MEND = (
    "Run the script with AUTODIST_TRACE=FOLDER in its environment: each worker writes the tenth run of each of its "
    "steps into that folder on its own machine; copy the files into one folder"
)


class _RawEvent(pydantic.BaseModel):
    ph: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    name: str
    args: dict[str, Any] = {}


class Predicted(pydantic.BaseModel):
    """The step time that `Auto` predicted.

    Attributes:
        seconds: of a step.
        terms: their parts, by name.
    """

    seconds: float
    terms: dict[str, float]


class _About(pydantic.BaseModel):
    machine: str = ""
    workers: int = 1
    clock_ahead: float | None = None
    clock_uncertainty: float = 0.0
    predicted: Predicted | None = None


class _RawTrace(pydantic.BaseModel):
    traceEvents: list[_RawEvent]
    otherData: _About = _About()


@dataclass(frozen=True)
class TracedTransfer:
    """The transfer of a tensor.

    Attributes:
        source: index of the worker that sends.
        target: index of the worker that receives.
        tensor: its name, without an output number.
        bytes: approximate size, as TensorFlow reports it.
    """

    source: int
    target: int
    tensor: str
    bytes: int


@dataclass(frozen=True)
class Event:
    """An operation or transfer during an interval. Times are in microseconds by the chief's clock.

    Attributes:
        task: index of the worker whose process ran it.
        device: the device in that process, such as "CPU:0".
        lane: the number of its lane; events of one lane do not overlap.
        name: the name of the operation.
        operation: its type; "" if it is not known.
        start: the start time.
        length: the duration.
        queue: name of the queue that it uses, equal on all workers; None: it uses none.
        transfer: None: it is not a transfer.
        label: TensorFlow's description of it.
    """

    task: int
    device: str
    lane: int
    name: str
    operation: str
    start: float
    length: float
    queue: str | None = None
    transfer: TracedTransfer | None = None
    label: str = ""

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Trace:
    """One run of a step, as one worker saw it.

    Attributes:
        step: its name.
        worker: the worker that ran it.
        machine: name of its machine.
        workers: number of workers.
        uncertainty: the uncertainty of its clock, in seconds; None: its clock was not compared with the chief's.
        events: ordered by start.
        predicted: the predicted time of the step; None: nothing was predicted.
    """

    step: str
    worker: int
    machine: str
    workers: int
    uncertainty: float | None
    events: tuple[Event, ...]
    predicted: Predicted | None = None

    @functools.cached_property
    def begin(self) -> float:
        return min(event.start for event in self.events)

    @functools.cached_property
    def end(self) -> float:
        return max(event.end for event in self.events)


def read_traces(folder: Path) -> dict[str, list[Trace]]:
    """Returns the traces of each step, in the order of the workers.

    Raises:
        UsageError: there are none, or one cannot be read.
    """
    found = sorted((file, match) for file in folder.iterdir() if (match := _FILE.match(file.name)))
    if not found:
        raise UsageError(f"{folder} has no traces (for example step_1.worker_0.json). {MEND}.")
    raw = {(match["step"], int(match["worker"])): _read(file) for file, match in found}
    ahead = {worker: trace.otherData.clock_ahead or 0.0 for (_, worker), trace in raw.items() if worker != 0}
    traces: dict[str, list[Trace]] = {}
    for step, worker in sorted(raw, key=lambda key: (_natural(key[0]), key[1])):
        events = _events(raw[step, worker].traceEvents, ahead)
        if not events:
            raise UsageError(f"{folder / f'{step}.worker_{worker}.json'} has no events. {MEND}.")
        about = raw[step, worker].otherData
        known = worker == 0 or about.clock_ahead is not None
        uncertainty = (0.0 if worker == 0 else about.clock_uncertainty) if known else None
        trace = Trace(step, worker, about.machine, about.workers, uncertainty, events, about.predicted)
        traces.setdefault(step, []).append(trace)
    return traces


def _read(file: Path) -> _RawTrace:
    try:
        return _RawTrace.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{file} is not a trace written by AutoDist ({where}: {first['msg']}). {MEND}.") from error


def _events(raw: Sequence[_RawEvent], ahead: Mapping[int, float]) -> tuple[Event, ...]:
    """Returns the events of one file; the time of each is corrected by the clock of the machine that ran it."""
    devices = {event.pid: str(event.args.get("name", "")) for event in raw if event.ph == "M"}
    events = [_event(event, devices.get(event.pid, ""), ahead) for event in raw if event.ph == "X"]
    return tuple(sorted(events, key=lambda event: event.start))


def _event(raw: _RawEvent, place: str, ahead: Mapping[int, float]) -> Event:
    task = task_of(place)
    label = str(raw.args.get("label", ""))
    moved = _TRANSFER.match(label)
    transfer = moved and TracedTransfer(
        task_of(moved["source"]), task_of(moved["target"]), moved["tensor"].partition(":")[0],
        int(float(moved["size"]) * _UNITS[moved["unit"]]),
    )  # fmt: skip
    return Event(
        task=task,
        device=place.partition("/device:")[2] or place,
        lane=raw.tid,
        name=raw.name,
        operation=operation_of(label),
        start=raw.ts - ahead.get(task, 0.0) * 1e6,
        length=raw.dur,
        queue=raw.args.get("queue"),
        transfer=transfer,
        label=label,
    )


def _natural(name: str) -> tuple[str | int, ...]:
    """Sort key that orders step_2 before step_10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
