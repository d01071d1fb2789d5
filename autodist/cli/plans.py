"""Plan: what a strategy makes of a training step on some machines, as the commands show, write and compare it."""

from __future__ import annotations

from pathlib import Path

import pydantic

from autodist.cli.telling import UsageError
from autodist.logs.formatting import counted
from autodist.strategies.stage_table import PipelineFigures


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class SlotPlan(_Part):
    """What an optimizer keeps for one variable.

    Attributes:
        name: of the slot.
        bytes: of all of it.
    """

    name: str
    bytes: int


class ShardPlan(_Part):
    """A piece of a variable; a variable that is not cut has one.

    Attributes:
        owner: name of the worker that holds it; None: all do.
        mates: names of those that hold the same, in other pipelines.
        shape: of the piece.
    """

    owner: str | None
    mates: tuple[str, ...] = ()
    shape: tuple[int, ...]


class VariablePlan(_Part):
    """A variable that has a gradient.

    Attributes:
        name: of the variable.
        shape: length of each axis.
        dtype: of its elements.
        bytes: of all of it.
        gradient: "dense" or "sparse".
        rows: of a sparse one, that a worker's part of the first batch touches; None: not known.
        synchronizer: in words.
        axis: along which it is cut; None: it is whole.
        shards: its pieces.
        slots: what the optimizer keeps for it.
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
    shards: tuple[ShardPlan, ...]
    slots: tuple[SlotPlan, ...] = ()
    sent: tuple[int, ...]

    @property
    def rows_are_missing(self) -> bool:
        """Whether what it costs is told without its rows, whose number is not known."""
        return self.gradient == "sparse" and self.rows is None


class WorkerPlan(_Part):
    """What one worker does.

    Attributes:
        name: of the worker.
        replicas: it runs; of a pipeline, the micro-batches.
        sent: bytes in a step.
        received: bytes in a step.
        held: bytes of variables, slots included.
        flops: that TensorFlow counts in a step on its part of the first batch; None: not known.
    """

    name: str
    replicas: int
    sent: int
    received: int
    held: int
    flops: int | None = None


class LinkPlan(_Part):
    """What goes from one worker to another.

    Attributes:
        source: name of the worker that sends.
        target: name of the worker that receives.
        bytes: in a step.
        is_least: whether there is more, of which it is not known how much.
    """

    source: str
    target: str
    bytes: int
    is_least: bool = False


class PlannedStrategy(_Part):
    """A strategy for one step.

    Attributes:
        strategy: as it was asked for.
        builder: that decided.
        step: its name; of several steps of one name, with a number.
        variables: in the order of their gradients.
        workers: by index.
        links: those on which something goes.
        sums: how they are made and what they take on paper, in a sentence; empty: there are none, or it is not known.
        pipeline: its stages, if it has some.
    """

    strategy: str
    builder: str
    step: str = ""
    variables: tuple[VariablePlan, ...]
    workers: tuple[WorkerPlan, ...]
    links: tuple[LinkPlan, ...]
    sums: str = ""
    pipeline: PipelineFigures | None = None

    @property
    def title(self) -> str:
        """What decided, and on how many machines it is carried out."""
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
    """What `autodist plan --json` writes.

    Attributes:
        script: that was captured.
        plans: of each step in their order, one for each strategy.
        note: the steps that are planned, and why no more of them, as a sentence or more.
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
    """The plan of each step in a file that `autodist plan --json` wrote, by the step's name.

    Raises:
        UsageError: it cannot be read, or holds none, or several.
    """
    try:
        found = Plans.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except pydantic.ValidationError as error:
        raise UsageError(f"{path} is no plan; write one by `autodist plan --json SCRIPT > plan.json`.") from error
    steps = found.by_step
    if any(len(plans) != 1 for plans in steps.values()):
        raise UsageError(
            f"{path} holds {len(found.plans)} plans; write each into a file of its own, by one --strategy at a time."
        )
    return {step: plans[0] for step, plans in steps.items()}
