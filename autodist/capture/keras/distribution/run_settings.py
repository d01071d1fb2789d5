"""The settings of the script's run with which `keras.distribution` has to agree."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.sharding import Mesh


@dataclass(frozen=True)
class RunSettings:
    """The machines and the strategy of a run.

    Attributes:
        devices: the places of the run in their order, as Keras names devices: "cpu:0", "cpu:1".
        machines: for messages, the file that lists the machines.
        workers: number of workers.
        batch: "global" or "per_worker"; None: the default of the front end.
        strategy: for messages, the place that chooses a strategy; None: nothing chooses one.
        mesh: the mesh of the strategy; None: it has none.
        batch_axis: the axis of the mesh along which a batch is divided.
        is_chief: False on other workers, which do not have the strategy.
        divides_variables: True if the strategy divides variables among the workers.
        normalizes_whole_batches: True if batch normalization uses the examples of all replicas.
        is_reference: True for the run on one device with which another run is compared. It ignores distributions.
    """

    devices: tuple[str, ...]
    machines: str = "the resource spec of AutoDist(…)"
    workers: int = 1
    batch: str | None = None
    strategy: str | None = None
    mesh: Mesh | None = None
    batch_axis: str = ""
    is_chief: bool = True
    divides_variables: bool = False
    normalizes_whole_batches: bool = False
    is_reference: bool = False


_current: list[RunSettings] = []


def current_run() -> RunSettings | None:
    """Returns the settings of the AutoDist whose scope was opened or which was created last; None before the first."""
    return _current[-1] if _current else None


def set_run(run: RunSettings) -> None:
    """Sets the settings of the AutoDist that the script creates or whose scope it opens."""
    _current[:] = [run]
