"""Pipeline: the model lies in stages on several workers, which work at different micro-batches side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from autodist.graph.pipeline_schedule import GPIPE, SCHEDULES, keeps_several
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError, check_options
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec, Worker
from autodist.strategies.base import BuildsStrategy, StrategyBuilder, make_strategy
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.pipeline_stages import Stages, flops_in, stages_of_variables
from autodist.strategies.placed import PlacedBuilder
from autodist.strategies.ps import parameter_server_node
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables

MOST_MICRO_BATCHES = 1024


@register
@dataclass(frozen=True)
class Pipeline(StrategyBuilder):
    """Each worker holds one stage of the model, and the batch goes from stage to stage in micro-batches.

    For models that one device cannot hold, or whose gradients would be dear to send: a worker keeps the variables and
    slots of its stage, and sends activations and their gradients to its neighbours. The first stage is the chief's,
    which is sent what the other workers feed. What is trained is, bit for bit, what as many replicas as there are
    micro-batches train on one worker.

    Cost: no gradient and no variable travels, but where several stages use one variable. With S stages and M
    micro-batches, a worker waits (S - 1) / (M + S - 1) of a step, if all stages take equally long. Of D pipelines side
    by side, a worker sends the gradients of its stage, added up over its micro-batches, to the D - 1 others of that.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021 (1F1B).

    Attributes:
        stages: for each stage patterns (regular expressions) that match the whole names of its variables, of which the
            first match in their order counts; or how many stages there are, which then share the FLOPs of all layers,
            forward and back, in the order in which their variables were made; bytes, where FLOPs are not known. None:
            as many as there are workers for. There is a worker for each, or several (`mesh`). Variables that the script
            makes in `ad.stage` are there, and no pattern may say otherwise.
        micro_batches: into how many parts the batch of a pipeline goes.
        schedule: GPipe goes forward with all micro-batches before it goes back; 1F1B goes back as soon as it can, so
            that a stage keeps the activations of as many as there are stages from it on, and not of all.
        recompute: whether a stage keeps of each micro-batch on its way only what came into it, and goes forward with it
            once more before it goes back: less memory, for one more way forward. A stage that has no two micro-batches
            on their way at once, as the last by 1F1B, keeps all.
        mesh: how many pipelines stand side by side, each over its part of the batch; None: one. The workers of a stage
            follow one another.
    """

    stages: Annotated[int, Field(ge=1)] | Stages | None = None
    micro_batches: Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)] = 4
    schedule: Literal["GPipe", "1F1B"] = "GPipe"
    recompute: bool = False
    mesh: PipelineMesh | None = None

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        count = self.require_workers(resource_spec)
        made = {variable.name: position for position, variable in enumerate(graph_item.variables)}
        ordered = sorted(variables, key=lambda variable: made[variable.name])
        patterns = self.stages if isinstance(self.stages, tuple) else None
        stage_of = stages_of_variables(ordered, patterns, count, flops_in(graph_item))
        nodes = [parameter_server_node(name, stage * self.pipelines) for name, stage in stage_of.items()]
        strategy = make_strategy("Pipeline", self.arranged(resource_spec), variables, nodes)
        strategy.pipeline.CopyFrom(
            strategy_pb2.Pipeline(
                schedule=strategy_pb2.Pipeline.Schedule.keys()[SCHEDULES.index(self.schedule)],
                stages=dealt_out(resource_spec.workers, self.pipelines),
                recompute=self.recompute,
            )
        )
        return strategy

    @property
    def pipelines(self) -> int:
        """How many stand side by side."""
        return 1 if self.mesh is None else self.mesh.data

    def require_workers(self, resource_spec: ResourceSpec) -> int:
        """How many stages there are: a worker of one device for each, in each pipeline.

        Raises:
            StrategyError: there are more, or fewer, workers, or one has more devices, or none; or no stage has anything
                to compute anew.
        """
        workers = resource_spec.workers
        given = len(self.stages) if isinstance(self.stages, tuple) else self.stages
        count = count_stages(given, self.mesh, workers)
        for worker in workers:
            if len(worker.devices) != 1:
                raise OptionError(
                    "stages",
                    f"Pipeline puts one stage on each worker, and {worker.name} has {len(worker.devices)} devices. "
                    "Give each worker one (`workers` of a node shares its `cpus` or `gpus` out).",
                )
        self._require_that_recompute_saves(count)
        return count

    def _require_that_recompute_saves(self, stages: int) -> None:
        if self.recompute and not keeps_several(stages, self.micro_batches, self.schedule):
            mend = (
                "take schedule: GPipe"
                if self.schedule != GPIPE and self.micro_batches > 1
                else "give more micro_batches"
            )
            raise OptionError(
                "recompute",
                f"with {stages} stage{'s' * (stages > 1)} and micro_batches: {self.micro_batches} by {self.schedule} a "
                "stage goes back with each micro-batch before the next one comes: it would compute anew what it has "
                f"just computed, and keep no less. Leave recompute out, or {mend}.",
            )

    def arranged(self, resource_spec: ResourceSpec) -> ResourceSpec:
        """The machines, whose replicas are the micro-batches of all pipelines, of the chief's device."""
        return resource_spec.with_micro_batches(self.micro_batches * self.pipelines)


def arranged(builder: BuildsStrategy, resource_spec: ResourceSpec) -> ResourceSpec:
    """The machines as a run is to see them by which a builder's strategies are carried out.

    Raises:
        StrategyError: the builder needs others.
    """
    if isinstance(builder, PlacedBuilder):
        return builder.placed(lambda: arranged(builder.builder, resource_spec))
    pipeline = find_pipeline(builder)
    if pipeline is None:
        return resource_spec
    pipeline.require_workers(resource_spec)
    return pipeline.arranged(resource_spec)


def find_pipeline(builder: BuildsStrategy) -> Pipeline | None:
    """The builder of pipeline stages that decides first; None: there are no stages."""
    while isinstance(builder, PlacedBuilder | OverrideVariables):
        builder = builder.builder
    return builder if isinstance(builder, Pipeline) else None


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
