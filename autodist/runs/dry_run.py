"""A command's look at the script that this process runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from autodist.graph.step import Step
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides
from autodist.strategies import BuildsStrategy


class DryRun(Protocol):
    """What is told where the script makes its AutoDist, and where that comes to a step.

    No step that trains is made. Such a step returns what `answers` makes up, so that the script can go on.

    Attributes:
        asked: what the command was told.
        spec: the machines of which the script is told.
    """

    @property
    def asked(self) -> CliOverrides: ...

    @property
    def spec(self) -> ResourceSpec: ...

    def choose(self, spec: ResourceSpec, builder: BuildsStrategy) -> ResourceSpec:
        """Called where the script makes its AutoDist; gives the machines on which it runs in place of those."""

    def defines_step(self, function: Callable[..., Any]) -> None:
        """Called where the script puts a function under `@ad.function`."""

    def calls_within_step(self, name: str) -> None:
        """Called where another step, which is being traced, calls such a function as a part of itself."""

    def comes_to_step(
        self,
        item: Step,
        names: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
        rehearses: bool,
        name: str,
    ) -> None:
        """Called where the script comes to a step that trains; arguments as of `Run.plan`."""

    def answers(self, item: Step, values: Sequence[Any]) -> list[np.ndarray]:
        """Called for each call of a step that trains; returns values for its outputs.

        Args:
            item: the step.
            values: of its inputs.
        """


_looks: list[DryRun] = []


def look() -> DryRun | None:
    """Who looks at the script that this process runs; None: nobody."""
    return _looks[-1] if _looks else None


@contextmanager
def looking(one: DryRun) -> Iterator[None]:
    """Lets one look while the context is open."""
    _looks.append(one)
    try:
        yield
    finally:
        _looks.remove(one)
