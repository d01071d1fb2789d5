"""The plan of a training step: the data that the commands show, write and compare."""

from __future__ import annotations

from pathlib import Path

import pydantic

from autodist.cli.command_errors import UsageError
from autodist.cli.recomputed_blocks import RecomputedBlockPlan
from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import counted
from autodist.strategies.choice_table import ChoiceFigures
from autodist.strategies.mesh_table import MeshFigures
from autodist.strategies.stage_table import PipelineFigures


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class SlotPlan(_Part):
    """A slot of an optimizer for one variable.

    Attributes:
        name: the name of the slot.
        bytes: its size.
    """

    name: str
    bytes: int


class ShardPlan(_Part):
    """A shard of a variable, or a complete variable.

    Attributes:
        owner: name of the worker that holds it; None: all workers hold it.
        mates: names of the workers that hold the same shard in other pipelines, or the other parts of it on a mesh.
        shape: the shape of the shard.
    """

    owner: str | None
    mates: tuple[str, ...] = ()
    shape: tuple[int, ...]


class VariablePlan(_Part):
    """A variable that has a gradient.

    Attributes:
        name: the name of the variable.
        shape: the length of each axis.
        dtype: the dtype of its elements.
        bytes: its size.
        gradient: "dense" or "sparse".
        rows: number of rows of a sparse gradient for a worker's part of the first batch; None: not known.
        synchronizer: its description.
        axis: the axis along which it is partitioned; None: not partitioned.
        sharding: its division over a mesh, and the origin of this; empty without a mesh. The mesh has the details.
        shards: its shards.
        slots: the optimizer's slots for it.
        sent: bytes that each worker sends for it in a step, by the worker's index.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    gradient: str
    rows: int | None = None
    synchronizer: str
    axis: int | None = None
    sharding: str = ""
    shards: tuple[ShardPlan, ...]
    slots: tuple[SlotPlan, ...] = ()
    sent: tuple[int, ...]

    @property
    def rows_are_missing(self) -> bool:
        """True if the cost excludes rows, because their number is not known."""
        return self.gradient == "sparse" and self.rows is None


class WorkerPlan(_Part):
    """The work of one worker.

    Attributes:
        name: the name of the worker.
        replicas: the number of its replicas, or of micro-batches in a pipeline.
        sent: the bytes that it sends in a step.
        received: the bytes that it receives in a step.
        is_least: True if `sent` and `received` are lower bounds.
        held: the bytes of the variables that it holds, with their slots.
        flops: TensorFlow's count for a step on the worker's part of the first batch; None: not known.
        activations: bytes of the forward pass that the worker keeps for the backward pass; None: not known.
    """

    name: str
    replicas: int
    sent: int
    received: int
    is_least: bool = False
    held: int
    flops: int | None = None
    activations: PartialCount | None = None


class LinkPlan(_Part):
    """The traffic from one worker to another.

    Attributes:
        source: name of the worker that sends.
        target: name of the worker that receives.
        bytes: the bytes sent in a step.
        is_least: True if `bytes` is a lower bound.
    """

    source: str
    target: str
    bytes: int
    is_least: bool = False


class PlannedStrategy(_Part):
    """A strategy for one step.

    Attributes:
        strategy: the name that the user passed.
        builder: the name of its builder.
        step: the name of the step; a number follows if several steps have the same name.
        variables: the plans of the variables, in the order of their gradients.
        workers: the plans of the workers, by index.
        links: the links with traffic.
        sums: the algorithm of the sums and their estimated time, in a sentence; empty: none, or not known.
        pipeline: its stages; None: not a pipeline.
        recomputed: the blocks that the backward pass recomputes.
        mesh: the parts of variables and the collectives; None: no mesh.
        choice: the plans that `Auto` has compared; None: another builder.
        strategy_file: the strategy as YAML with a pattern for each variable; "" if YAML cannot express it.
    """

    strategy: str
    builder: str
    step: str = ""
    variables: tuple[VariablePlan, ...]
    workers: tuple[WorkerPlan, ...]
    links: tuple[LinkPlan, ...]
    sums: str = ""
    pipeline: PipelineFigures | None = None
    recomputed: tuple[RecomputedBlockPlan, ...] = ()
    mesh: MeshFigures | None = None
    choice: ChoiceFigures | None = None
    strategy_file: str = ""

    @property
    def title(self) -> str:
        """The step, the strategy, and the number of replicas and workers."""
        if self.mesh is not None:
            return f"{self._of_step}{self.strategy}: {self.mesh.title}"
        if self.pipeline is not None:
            return f"{self._of_step}{self.strategy}: {self.pipeline.title}"
        replicas = sum(worker.replicas for worker in self.workers)
        on = counted(len(self.workers), "worker")
        return f"{self._of_step}{self.strategy}: {counted(replicas, 'replica')} on {on}"

    @property
    def _of_step(self) -> str:
        return f"{self.step}, " if self.step else ""

    @property
    def rows_are_missing(self) -> bool:
        return any(variable.rows_are_missing for variable in self.variables)


class Plans(_Part):
    """The content of the file that `autodist plan --json` writes.

    Attributes:
        script: the script whose steps were captured.
        plans: for each step, in order, a plan for each strategy.
        note: the planned steps and the reason why there are no more, in one or more sentences.
    """

    script: str
    plans: tuple[PlannedStrategy, ...]
    note: str = ""

    @property
    def by_step(self) -> dict[str, tuple[PlannedStrategy, ...]]:
        """The plans of each step, by its name."""
        steps = dict.fromkeys(plan.step for plan in self.plans)
        return {step: tuple(plan for plan in self.plans if plan.step == step) for step in steps}


def read_plan(path: Path) -> dict[str, PlannedStrategy]:
    """Reads a file written by `autodist plan --json`, and returns the plan of each step by the step's name.

    Raises:
        UsageError: the file cannot be read, or does not hold exactly one plan per step.
    """
    try:
        found = Plans.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except pydantic.ValidationError as error:
        raise UsageError(f"{path} is not a plan; write one with `autodist plan --json SCRIPT > plan.json`.") from error
    steps = found.by_step
    if any(len(plans) != 1 for plans in steps.values()):
        raise UsageError(
            f"{path} holds {len(found.plans)} plans; write each into its own file, with one --strategy at a time."
        )
    return {step: plans[0] for step, plans in steps.items()}
