"""Dry run: hooks of a command that inspects a script without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from autodist.graph.step import CapturedStep
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides
from autodist.strategies import BuildsStrategy


class DryRun(Protocol):
    """Hooks called when the script makes its AutoDist and when it reaches a step.

    No training step is executed. It returns the values of `answers` instead, so that the script can continue.

    Attributes:
        overrides: the command's options.
        spec: the machines that the script sees.
    """

    @property
    def overrides(self) -> CliOverrides: ...

    @property
    def spec(self) -> ResourceSpec: ...

    def choose(self, spec: ResourceSpec, builder: BuildsStrategy) -> ResourceSpec:
        """Called when the script makes its AutoDist; returns the machines to use in place of the arguments."""

    def on_step_defined(self, function: Callable[..., Any]) -> None:
        """Called when the script decorates a function with `@ad.function`."""

    def on_nested_call(self, name: str) -> None:
        """Called when a step that is being traced calls a decorated function as a part of itself."""

    def on_step(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
        rehearses: bool,
        name: str,
    ) -> None:
        """Called when the script reaches a training step; the arguments are those of `Run.plan`."""

    def answers(self, step: CapturedStep, values: Sequence[Any]) -> list[np.ndarray]:
        """Called for each call of a training step; returns values for its outputs."""


_active: list[DryRun] = []


def active_dry_run() -> DryRun | None:
    """Returns the dry run that inspects this process's script; None if there is none."""
    return _active[-1] if _active else None


@contextmanager
def dry_running(one: DryRun) -> Iterator[None]:
    """Context in which a dry run is active."""
    _active.append(one)
    try:
        yield
    finally:
        _active.remove(one)
