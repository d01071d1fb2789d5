"""How many stages a pipeline has, and which workers compute each, where several pipelines stand side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.logs.suggestions import listed
from autodist.options.fields import OptionError, check_options
from autodist.proto import strategy_pb2
from autodist.resources import Worker


@dataclass(frozen=True)
class PipelineMesh:
    """How many workers stand one behind the other, and how many pipelines of these side by side.

    Attributes:
        stage: pipeline stages; None: as many as `stages` says, or as there are workers for.
        data: pipelines, each of which gets its part of the batch.
    """

    stage: Annotated[int, Field(ge=1)] | None = None
    data: Annotated[int, Field(ge=1)] = 1

    def __post_init__(self) -> None:
        check_options(self)


def count_stages(given: int | None, mesh: PipelineMesh | None, workers: Sequence[Worker]) -> int:
    """How many stages a pipeline has on these workers, each of which computes one.

    Args:
        given: how many the option `stages` says; None: none.
        mesh: the option `mesh`.
        workers: all of them.

    Raises:
        StrategyError: there are more, or fewer, workers, or the options say different numbers.
    """
    wanted, pipelines = (None, 1) if mesh is None else (mesh.stage, mesh.data)
    if given is not None and wanted is not None and given != wanted:
        raise OptionError(
            "mesh", f"the mesh has {wanted} stages, and `stages` says {given}. Leave `stage` out of the mesh."
        )
    count = given or wanted or max(len(workers) // pipelines, 1)
    if count * pipelines == len(workers):
        return count
    which = "more" if count * pipelines > len(workers) else "fewer"
    are = f"{which} than the {len(workers)} workers that there are ({listed(worker.name for worker in workers)})"
    if mesh is None:
        raise OptionError(
            "stages",
            f"Pipeline has {count} stages, {are}, and each worker computes one. Give as many stages as workers, other "
            "`nodes` (`workers` gives a node several), or `mesh`, for several workers a stage.",
        )
    raise OptionError(
        "mesh",
        f"Pipeline has {count} stages in each of {pipelines} pipelines, which are {count * pipelines} workers, {are}. "
        "Let stage times data be as many as there are workers, or give other `nodes` (`workers` gives a node several).",
    )


def dealt_out(workers: Sequence[Worker], pipelines: int) -> list[strategy_pb2.PipelineStage]:
    """By stage the workers that compute it, those of one stage after the other: they exchange most."""
    seats = [strategy_pb2.PipelineStage(worker=worker.index, device=worker.devices[0]) for worker in workers]
    stages = seats[::pipelines]
    for position, stage in enumerate(stages):
        stage.beside.extend(seats[position * pipelines + 1 : (position + 1) * pipelines])
    return stages
