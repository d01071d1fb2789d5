"""Runs a script on one device and under a strategy, each in its own processes, and compares the records of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from autodist.cli.command_errors import ScriptFailedError, UsageError
from autodist.cli.script import Target
from autodist.logs.formatting import counted
from autodist.logs.tables import text_table
from autodist.runs.cli_overrides import CliOverrides, named_builder
from autodist.verify.records import (
    ALONE,
    ERROR,
    FLOAT64_LIMIT,
    FLOORS,
    LAST_BIT,
    NOTES,
    Compared,
    NoFloorError,
    Recording,
    Rounding,
    compare,
    limit_of,
    steps_of,
)

PERMUTATIONS = 2
"""Number of permutations of each batch by which the rounding floor is measured."""

_ONE_DEVICE = CliOverrides(workers=1, replicas=1)


NOT_PERMUTED = (
    "the examples of each batch cannot be permuted, since the step takes sparse or ragged examples, or none that can "
    "be split"
)


@dataclass(frozen=True)
class VerifyResult:
    """The result of a verification.

    Attributes:
        compared: the two runs.
        overrides: the machines and the strategy.
        limit: the largest relative difference allowed.
        precision: its description.
        notes: properties of the step.
        alone: values that differ only by rounding, by kind and name, with the difference of one device from itself.
        no_floor: the reason why rounding was not measured; "": it was measured, or was not needed.
        stages: number of pipeline stages; None: not a pipeline.
        micro_batches: the number of micro-batches of a pipeline.
        messages: of AutoDist on the first worker, in the run under the strategy, that may give the reason.
    """

    compared: Compared
    overrides: CliOverrides
    limit: float
    precision: str
    notes: Mapping[str, Any]
    alone: Mapping[str, float] = field(default_factory=dict)
    no_floor: str = ""
    stages: int | None = None
    micro_batches: int = 0
    messages: Sequence[str] = ()

    @property
    def differs(self) -> bool:
        return self.compared.first is not None

    def table(self) -> Table:
        """Returns the largest relative difference of each variable, slot and output."""
        figures = ["difference", "in step"]
        rows = []
        for difference in self.compared.differences:
            kind, _, name = difference.name.partition(" ")
            rows.append([kind, name, f"{difference.largest:.1e}", str(difference.at) if difference.largest else ""])
        return text_table("largest relative differences", ["kind", "name", *figures], rows, numbers=figures)

    def verdict(self) -> Iterator[str]:
        """Yields the lines of the verdict and its explanation."""
        workers, replicas = self.overrides.workers or 1, self.overrides.replicas or 1
        part = "replica" if self.stages is None else "micro-batch"
        where = f"{counted(workers, 'worker')} of {counted(replicas, 'replica')}"
        if self.stages is not None:
            where = f"{self.stages} pipeline stages with {self.micro_batches} micro-batches"
        text = f"{self.compared.steps} steps on {where} and on one device, {self.precision}"
        if self.compared.left_out:
            yield f"not compared, since only one worker has its part: {', '.join(self.compared.left_out)}"
        yield from self._rounding_lines()
        first = self.compared.first
        if first is None:
            yield f"alike: {text}; the limit is {self.limit:.1e}"
            return
        yield (
            f"DIFFERENT: {text}; the first past the limit ({self.limit:.1e}) is {first.name} in step {first.at}, by "
            f"{first.largest:.1e}"
        )
        if self.no_floor:
            yield f"It was not measured whether that is rounding alone: {self.no_floor}."
        if self.notes["draws"]:
            yield (
                f"The step draws random numbers ({', '.join(self.notes['draws'])}), and each {part} draws its own: "
                "for example with dropout, it cannot agree with one device. Verify without it."
            )
        if self.notes["normalises"]:
            yield (
                f"The step has batch normalisation, which sees only its {part}'s part of the batch: "
                f"{'use `batch_norm: whole` in the YAML, or ' if self.stages is None else ''}verify without it."
            )
        yield from (f"In this run, AutoDist has logged: {message}" for message in self.messages)
        yield (
            "If the script feeds a step itself, check that the parts of all workers make up the batch of one device: "
            "divide it by ad.num_workers, or use @ad.function(batch='global')."
        )

    def _rounding_lines(self) -> Iterator[str]:
        for difference in self.compared.differences:
            floor = self.alone.get(difference.name, 0.0)
            if self.limit < difference.largest <= FLOORS * floor:
                yield (
                    f"rounding alone: {difference.name}, by {difference.largest:.1e}; one device differs from itself "
                    f"by {floor:.1e} when the examples of each batch are permuted"
                )


def verify_script(
    target: Target, overrides: CliOverrides, steps: int, folder: Path, shows_output: bool
) -> VerifyResult:
    """Runs the script on one device and under a strategy, and compares the runs.

    Args:
        target: the script.
        overrides: the workers, replicas and strategy.
        steps: number of steps to compare.
        folder: the folder for the records.
        shows_output: True to show the script's output on standard error.

    Raises:
        UsageError: the script creates no AutoDist, or reaches no training step; or its precision cannot be judged.
        ScriptFailedError: the script failed.
    """
    if overrides.strategy is not None:
        with target.as_main():  # a custom builder may be defined next to the script
            named_builder(overrides.strategy)
    runs = _Runs(target, steps, folder, shows_output)
    reference = runs.alone_in_float64()
    in_float64 = reference is not None
    limit, precision = FLOAT64_LIMIT, "in float64"
    rounding: Rounding | None = None
    if reference is None:
        reference = runs.alone_as_written()
        rounding, floor = _rounding_as_written(runs, reference)
        limit = limit_of(floor)
        precision = f"in the script's own precision, whose rounding floor is {floor:.1e}"
    other = runs.run("many", overrides, in_float64=in_float64, is_reference=False)
    if steps_of(other) != steps_of(reference):
        raise UsageError(
            f"the script makes {steps_of(reference)} training steps on one device and {steps_of(other)} on "
            f"{overrides.workers} workers; both must make the same number."
        )
    compared, no_floor = compare(reference, other, limit), ""
    if compared.first is not None and rounding is None and not _notes(reference)["draws"]:
        floor = LAST_BIT if _notes(reference)["has_coarse_parts"] else 0.0
        try:
            rounding = runs.rounding_of(reference, in_float64=True)
            floor = max(floor, rounding.floor)
        except NoFloorError as error:
            no_floor = str(error)
        if FLOORS * floor > limit:
            limit = FLOORS * floor
            measured = rounding is not None and floor == rounding.floor
            precision = f"in float64 and parts in a lower precision, whose rounding floor is {floor:.1e}"
            precision += "" if measured else " at least"
            compared = compare(reference, other, limit)
    if rounding is not None and compared.first is not None:
        compared = compare(reference, other, limit, rounding.limits)
    of_other = _notes(other)
    return VerifyResult(
        compared,
        overrides,
        limit,
        precision,
        _notes(reference),
        {} if rounding is None else rounding.alone,
        no_floor,
        of_other["stages"],
        of_other["micro_batches"],
        of_other["messages"],
    )


def _rounding_as_written(runs: _Runs, reference: Path) -> tuple[Rounding, float]:
    """Returns the rounding of a run in the script's own precision, and the floor of values that are not only rounding.

    Raises:
        UsageError: it cannot be measured.
    """
    try:
        rounding = runs.rounding_of(reference, in_float64=False)
    except NoFloorError as error:
        raise UsageError(
            f"the variables are not in float64, and the size of rounding cannot be measured: {error}. Let the script "
            "create its variables in float64."
        ) from error
    return rounding, rounding.floor


@dataclass(frozen=True)
class _Runs:
    """Runs of one script.

    Attributes:
        target: the script.
        steps: number of recorded steps.
        folder: the folder for the records of all runs.
        shows_output: True to show the script's output.
    """

    target: Target
    steps: int
    folder: Path
    shows_output: bool

    def alone_in_float64(self) -> Path | None:
        """Returns the run on one device in float64; None if the script does not allow that."""
        try:
            folder = self.run("alone", _ONE_DEVICE, in_float64=True, is_reference=True)
        except ScriptFailedError:  # the run as written reports a failure that is not due to float64
            return None
        return folder if _notes(folder)["is_in_float64"] else None

    def alone_as_written(self) -> Path:
        """Returns the run on one device in the script's own precision."""
        return self.run("alone-as-written", _ONE_DEVICE, in_float64=False, is_reference=True)

    def rounding_of(self, reference: Path, in_float64: bool) -> Rounding:
        """Returns the change on one device caused by another order of the examples in each batch.

        Args:
            reference: the run in the script's own order.
            in_float64: True if that run is in float64, not in the script's own precision.

        Raises:
            NoFloorError: the examples cannot be reordered, the order matters, or the script then fails.
        """
        try:
            permuted = [
                self.run(f"permuted-{k}", _ONE_DEVICE, in_float64=in_float64, is_reference=True, permutation=k)
                for k in range(PERMUTATIONS)
            ]
        except ScriptFailedError as error:
            raise NoFloorError(f"with the examples of each batch permuted, {error}") from error
        if not all(_notes(run)["is_permuted"] for run in permuted):
            raise NoFloorError(NOT_PERMUTED)
        if in_float64 and not all(_notes(run)["has_permuted"] for run in permuted):
            raise NoFloorError("the step takes no batches that can be permuted")
        return Rounding.in_float64(reference, permuted) if in_float64 else Rounding.of(reference, permuted, ALONE)

    def run(
        self, name: str, overrides: CliOverrides, in_float64: bool, is_reference: bool, permutation: int | None = None
    ) -> Path:
        """Runs the script once; returns the folder of its records.

        Raises:
            ScriptFailedError, UsageError: it failed, or reached no step.
        """
        folder = self.folder / name
        folder.mkdir()
        recording = Recording(str(folder), self.steps, in_float64, is_reference, permutation)
        environment = os.environ | overrides.environment() | recording.environment()
        with open(folder / "output", "wb") as file:
            output = sys.stderr if self.shows_output else file
            done = subprocess.run(
                [sys.executable, *self.target.words], env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode:
            raise ScriptFailedError(
                f"{_description(overrides, in_float64)}, the script failed: {_failure_text(folder, done.returncode)}"
            )
        if steps_of(folder) == 0:
            raise UsageError(
                f"{self.target.name} ended before a training step of an AutoDist. Build the training in `with "
                "ad.scope():`, and also pass the arguments with which it trains."
            )
        return folder


def _description(overrides: CliOverrides, in_float64: bool) -> str:
    where = f"on {overrides.workers} workers" if (overrides.workers, overrides.replicas) != (1, 1) else "on one device"
    return f"{where}, in float64" if in_float64 else where


def _failure_text(folder: Path, status: int) -> str:
    """Returns the error of the script's process, or else its last line."""
    if (folder / ERROR).exists():
        return str(json.loads((folder / ERROR).read_text(encoding="utf-8")))
    lines = (folder / "output").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it printed nothing'} (exit status {status})"


def _notes(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / NOTES).read_text(encoding="utf-8")))
