"""Steps and machines to plan for, without graphs and without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from autodist.resources import ResourceSpec


@dataclass(frozen=True)
class PlannedType:
    """A type of 4 bytes an element."""

    name: str = "float32"

    @property
    def is_floating(self) -> bool:
        return self.name.startswith("float")


@dataclass(frozen=True)
class PlannedVariable:
    """A variable of 4 bytes an element."""

    name: str
    shape: tuple[int, ...]
    dtype: PlannedType = PlannedType()
    stage: int | None = None

    @property
    def byte_size(self) -> int:
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class PlannedGradient:
    variable: str
    is_sparse: bool


@dataclass(frozen=True)
class PlannedStep:
    """The parts of a Step that strategies read."""

    variables: tuple[PlannedVariable, ...]
    gradients: tuple[PlannedGradient, ...]


def make_step(
    shapes: Mapping[str, tuple[int, ...]],
    sparse: Iterable[str] = (),
    without_gradient: Iterable[str] = (),
    integers: Iterable[str] = (),
    stages: Mapping[str, int] | None = None,
) -> PlannedStep:
    """A step with these variables, their gradients in the same order."""
    types = {name: PlannedType("int32" if name in integers else "float32") for name in shapes}
    return PlannedStep(
        tuple(PlannedVariable(name, shape, types[name], (stages or {}).get(name)) for name, shape in shapes.items()),
        tuple(PlannedGradient(name, name in sparse) for name in shapes if name not in without_gradient),
    )


def make_cluster(
    workers: int = 2,
    devices: int = 1,
    kind: str = "cpus",
    bandwidths: Sequence[float] | None = None,
    servers: int = 0,
) -> ResourceSpec:
    """One node for each worker with `devices` devices, the last `servers` of them with none; bandwidths in Gbit/s."""
    nodes: list[dict[str, Any]] = [
        {"address": f"10.0.0.{index + 1}", kind: list(range(devices)), "chief": index == 0} for index in range(workers)
    ]
    for node, bandwidth in zip(nodes, bandwidths or (), strict=bool(bandwidths)):
        node["network_bandwidth"] = bandwidth
    for node in nodes[workers - servers :]:
        node[kind], node["cpus"] = [], []
    return ResourceSpec.from_dict({"nodes": nodes})


# They keep nothing, so one of each serves all examples of a property test.
@pytest.fixture(scope="session")
def step() -> Callable[..., PlannedStep]:
    return make_step


@pytest.fixture(scope="session")
def cluster() -> Callable[..., ResourceSpec]:
    return make_cluster


@pytest.fixture(scope="session")
def language_model() -> PlannedStep:
    """An embedding with a sparse gradient, two dense variables, and a counter without a gradient."""
    shapes = {"embedding": (1000, 8), "dense/kernel": (8, 100), "dense/bias": (100,), "iteration": ()}
    return make_step(shapes, sparse=["embedding"], without_gradient=["iteration"])
