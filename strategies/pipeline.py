"""Pipeline: splits the model into stages on several workers, which process different micro-batches in parallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from autodist.errors import StrategyError
from autodist.graph.pipeline_schedule import GPIPE, SCHEDULES, keeps_several
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError, check_options
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec, Worker
from autodist.sharding import Dim
from autodist.strategies.base import BuildsStrategy, StrategyBuilder, make_strategy
from autodist.strategies.fsdp import FSDP
from autodist.strategies.mesh import Mesh
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.pipeline_stages import Stages, flops_in, stages_of_variables
from autodist.strategies.placed import PlacedBuilder
from autodist.strategies.ps import parameter_server_node
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables

MOST_MICRO_BATCHES = 1024

MODEL = "model"
"""The axis of the mesh that divides the tensors of a stage."""


@register
@dataclass(frozen=True)
class Pipeline(StrategyBuilder):
    """Places one stage of the model on each worker; the batch passes through the stages in micro-batches.

    For models that do not fit on one device, or whose gradients are expensive to send. A worker holds the variables and
    slots of its stage, and sends activations and their gradients to its neighbours. The chief computes the first stage
    and receives the inputs that other workers feed. The result equals, bit for bit, training with as many replicas as
    micro-batches on one worker.

    Cost: gradients and variables are only sent if several stages use a variable. With S stages and M micro-batches, a
    worker waits (S - 1) / (M + S - 1) of a step, if all stages take equally long. With D parallel pipelines, a worker
    sends the gradients of its stage, summed over its micro-batches, to the D - 1 other workers of that stage.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021 (1F1B).

    Attributes:
        stages: for each stage, patterns (regular expressions) that match whole names of variables; the first match
            counts. Or the number of stages, which then share the forward and backward FLOPs of all layers in the order
            in which their variables were created; bytes, if FLOPs are not known. None: as many stages as the workers
            allow. Each stage has one worker, or several (`mesh`). Variables that the script creates in `ad.stage`
            belong to that stage, and patterns must agree.
        micro_batches: number of parts of a pipeline's batch.
        schedule: GPipe runs all forward passes before the backward passes. 1F1B runs each backward pass as early as
            possible: a stage keeps the activations of as many micro-batches as there are stages from it to the last.
        recompute: True if a stage only keeps the inputs of each micro-batch in flight, and repeats its forward pass
            before the backward pass: less memory for another forward pass. Or patterns of names of layers, to repeat
            only these. A stage that never has two micro-batches in flight, such as the last by 1F1B, keeps everything.
        mesh: the number of parallel pipelines, each with its part of the batch; None: one. The workers of a stage have
            consecutive indices. It may also have the number of workers that divide the tensors of a stage (`model`).
        layouts: for each pattern, the layout of the variables whose whole names it matches, as those of the builder
            Mesh; in YAML, `sharding:` of a pattern under `variables:`. They may name the axis "model".
    """

    stages: Annotated[int, Field(ge=1)] | Stages | None = None
    micro_batches: Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)] = 4
    schedule: Literal["GPipe", "1F1B"] = "GPipe"
    mesh: PipelineMesh | None = None
    layouts: dict[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern, layout in self.layouts.items():
            axes = [axis for dim in map(Dim.of, layout) for axis in dim.axes]
            other = next((axis for axis in axes if axis != MODEL), None)
            if other is not None:
                raise StrategyError(
                    f"the layout of {pattern!r} names the axis {other!r}, but a stage of a pipeline divides variables "
                    f"along {MODEL!r} alone: use {MODEL!r} or null. `stages` says which stage holds a variable, and "
                    "parallel pipelines hold the same parts."
                )
        if self.layouts and not self.divides_tensors:
            raise StrategyError(
                f"the layout of {next(iter(self.layouts))!r} divides variables, but the mesh has no axis {MODEL!r}: "
                f"set its size, as in `mesh: {{stage: 2, {MODEL}: 2}}`, or leave the layouts out."
            )

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        count = self.require_workers(resource_spec)
        position = {variable.name: index for index, variable in enumerate(graph_item.variables)}
        ordered = sorted(variables, key=lambda variable: position[variable.name])
        patterns = self.stages if isinstance(self.stages, tuple) else None
        stage_of = stages_of_variables(ordered, patterns, count, flops_in(graph_item))
        nodes = [parameter_server_node(name, stage * self.pipelines) for name, stage in stage_of.items()]
        strategy = make_strategy("Pipeline", self.arranged(resource_spec), variables, nodes)
        strategy.pipeline.CopyFrom(
            strategy_pb2.Pipeline(
                schedule=strategy_pb2.Pipeline.Schedule.keys()[SCHEDULES.index(self.schedule)],
                stages=assigned_stages(resource_spec.workers[:: self.parts], self.pipelines),
                recompute=bool(self.recompute),
            )
        )
        if self.divides_tensors:
            strategy.mesh.CopyFrom(self._tensors(count).message_for(graph_item, resource_spec))
        return strategy

    @property
    def pipelines(self) -> int:
        """The number of parallel pipelines."""
        return 1 if self.mesh is None else self.mesh.data

    @property
    def parts(self) -> int:
        """The number of workers that divide the tensors of a stage of one pipeline."""
        return 1 if self.mesh is None else self.mesh.model

    @property
    def divides_tensors(self) -> bool:
        """True if several workers divide the tensors of a stage."""
        return self.parts > 1

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Returns the patterns of layouts that match no variable of these names."""
        return Mesh(layouts=self.layouts, mesh={MODEL: self.parts}).unmatched(names)

    def _tensors(self, stages: int) -> Mesh:
        """Returns the builder that divides the tensors of the stages."""
        return Mesh(mesh={"stage": stages, "data": self.pipelines, MODEL: self.parts}, layouts=self.layouts)

    def require_workers(self, resource_spec: ResourceSpec) -> int:
        """Returns the number of stages: a worker with one device for each, in each pipeline, and for each part.

        Raises:
            StrategyError: the number of workers differs, a worker does not have exactly one device, or no stage has
                anything to recompute.
        """
        workers = resource_spec.workers
        wanted = len(self.stages) if isinstance(self.stages, tuple) else self.stages
        count = count_stages(wanted, self.mesh, workers)
        for worker in workers:
            if len(worker.devices) != 1:
                raise OptionError(
                    "stages",
                    f"Pipeline puts one stage on each worker, but {worker.name} has {len(worker.devices)} devices. "
                    "Use one device per worker (`workers` of a node splits its `cpus` or `gpus`).",
                )
        self._require_that_recompute_saves(count)
        return count

    def _require_that_recompute_saves(self, stages: int) -> None:
        if self.recompute and not keeps_several(stages, self.micro_batches, self.schedule):
            fix = (
                "use schedule: GPipe" if self.schedule != GPIPE and self.micro_batches > 1 else "set more micro_batches"
            )
            raise OptionError(
                "recompute",
                f"with {stages} stage{'s' * (stages > 1)} and micro_batches: {self.micro_batches} by {self.schedule}, "
                "a stage runs the backward pass of each micro-batch before the next one arrives: recomputation would "
                f"save no memory. Leave recompute out, or {fix}.",
            )

    def arranged(self, resource_spec: ResourceSpec) -> ResourceSpec:
        """Returns the machines with the micro-batches of all pipelines as replicas on the chief's device."""
        arranged = resource_spec.with_micro_batches(self.micro_batches * self.pipelines)
        if not self.divides_tensors:
            return arranged
        places = len(resource_spec.workers)
        return arranged.with_mesh_rows([range(part, places, self.parts) for part in range(self.parts)])


def arranged(builder: BuildsStrategy, resource_spec: ResourceSpec) -> ResourceSpec:
    """Returns the machines as a run with this builder's strategies must see them.

    Raises:
        StrategyError: the builder needs other machines.
    """
    if isinstance(builder, PlacedBuilder):
        return builder.placed(lambda: arranged(builder.builder, resource_spec))
    if isinstance(builder, Mesh):
        return builder.arranged(resource_spec)
    pipeline = find_pipeline(builder)
    if pipeline is None:
        return resource_spec
    pipeline.require_workers(resource_spec)
    return pipeline.arranged(resource_spec)


def find_pipeline(builder: BuildsStrategy) -> Pipeline | None:
    """Returns the pipeline builder that decides first; None if there are no pipeline stages."""
    first = _first(builder)
    return first if isinstance(first, Pipeline) else None


def find_mesh(builder: BuildsStrategy) -> Mesh | None:
    """Returns the mesh builder that decides first; None if there is no mesh."""
    first = _first(builder)
    return first if isinstance(first, Mesh) else None


def divides_variables(builder: BuildsStrategy) -> bool:
    """Returns True if the purpose of a strategy is that no worker holds all variables."""
    return isinstance(_first(builder), Mesh | FSDP | Pipeline)


def _first(builder: BuildsStrategy) -> BuildsStrategy:
    while isinstance(builder, PlacedBuilder | OverrideVariables):
        builder = builder.builder
    return builder


@dataclass(frozen=True)
class PipelineMesh:
    """The numbers of consecutive stages, of parallel pipelines, and of workers that divide the tensors of a stage.

    Attributes:
        stage: number of pipeline stages; None: that of `stages`, or as many as the workers allow.
        data: number of pipelines, each of which gets its part of the batch.
        model: number of workers that divide the tensors of a stage of one pipeline.
    """

    stage: Annotated[int, Field(ge=1)] | None = None
    data: Annotated[int, Field(ge=1)] = 1
    model: Annotated[int, Field(ge=1)] = 1

    def __post_init__(self) -> None:
        check_options(self)


def count_stages(given: int | None, mesh: PipelineMesh | None, workers: Sequence[Worker]) -> int:
    """Returns the number of stages of a pipeline on these workers; each worker computes one stage.

    Args:
        given: the number of stages according to the option `stages`; None: unset.
        mesh: the option `mesh`.
        workers: all of them.

    Raises:
        StrategyError: the number of workers does not fit, or the options disagree.
    """
    wanted, pipelines, parts = (None, 1, 1) if mesh is None else (mesh.stage, mesh.data, mesh.model)
    if given is not None and wanted is not None and given != wanted:
        raise OptionError(
            "mesh", f"the mesh has {wanted} stages, but `stages` has {given}. Leave `stage` out of the mesh."
        )
    count = given or wanted or max(len(workers) // (pipelines * parts), 1)
    needed = count * pipelines * parts
    if needed == len(workers):
        return count
    which = "more" if needed > len(workers) else "fewer"
    are = f"{which} than the {len(workers)} workers ({listed(worker.name for worker in workers)})"
    if mesh is None:
        raise OptionError(
            "stages",
            f"Pipeline has {count} stages, {are}, and each worker computes one. Use as many stages as workers, other "
            "`nodes` (`workers` sets several per node), or `mesh`, for several workers per stage.",
        )
    raise OptionError(
        "mesh",
        f"Pipeline has {count} stages in each of {pipelines} pipelines"
        f"{f', with {parts} workers for each stage' if parts > 1 else ''}, which are {needed} workers, {are}. "
        f"Make stage times data{' times model' if parts > 1 else ''} equal the number of workers, or use other `nodes` "
        "(`workers` sets several per node).",
    )


def assigned_stages(workers: Sequence[Worker], pipelines: int) -> list[strategy_pb2.PipelineStage]:
    """Assigns consecutive workers to each stage, by their positions, since workers of one stage exchange most."""
    assigned = [strategy_pb2.PipelineStage(worker=k, device=worker.devices[0]) for k, worker in enumerate(workers)]
    stages = assigned[::pipelines]
    for position, stage in enumerate(stages):
        stage.stage_group.extend(assigned[position * pipelines + 1 : (position + 1) * pipelines])
    return stages
