"""A command's look at the script that this process runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from autodist.asked import Asked
from autodist.graph.item import GraphItem
from autodist.resources import ResourceSpec
from autodist.strategies import BuildsStrategy


class Look(Protocol):
    """What is told where the script makes its AutoDist, and where that comes to a step.

    Attributes:
        asked: what the command was told.
        spec: the machines of which the script is told.
    """

    @property
    def asked(self) -> Asked: ...

    @property
    def spec(self) -> ResourceSpec: ...

    def choose(self, spec: ResourceSpec, builder: BuildsStrategy) -> ResourceSpec:
        """Called where the script makes its AutoDist; gives the machines on which it runs in place of those."""

    def comes_to_step(
        self, item: GraphItem, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]], rehearses: bool
    ) -> None:
        """Called where the script comes to a step that trains; arguments as of `Run.plan`."""


_looks: list[Look] = []


def look() -> Look | None:
    """Who looks at the script that this process runs; None: nobody."""
    return _looks[-1] if _looks else None


@contextmanager
def looking(one: Look) -> Iterator[None]:
    """Lets one look while the context is open."""
    _looks.append(one)
    try:
        yield
    finally:
        _looks.remove(one)
