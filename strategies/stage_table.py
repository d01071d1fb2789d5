"""Tables of the stages of a pipeline: variables, FLOPs, and transfers between stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import counted, listed, readable_bytes, readable_flops
from autodist.logs.tables import text_table

STAGE_HEADS = ("stage", "worker", "variables", "bytes", "holds", "FLOPs forward", "FLOPs back")
CUT_HEADS = ("from stage to stage", "each micro-batch", "once a step")


@dataclass(frozen=True)
class StageFigures:
    """The figures of one stage.

    Attributes:
        workers: the workers that compute it, one per pipeline.
        variables: number of trained variables that it holds.
        bytes: the bytes of these variables.
        held: bytes of all variables of a worker, including the optimizer's slots; None: not known.
        forward: FLOPs of the forward pass for the largest micro-batch.
        backward: FLOPs of the backward pass for the largest micro-batch.
    """

    workers: tuple[str, ...]
    variables: int
    bytes: int
    held: int | None
    forward: PartialCount
    backward: PartialCount

    def flops(self, micro_batches: int) -> int | None:
        """Returns the FLOPs of so many micro-batches, forward and backward, if all had the same size; None: unknown."""
        both = (self.forward + self.backward) * micro_batches
        return None if both.is_least else both.count


@dataclass(frozen=True)
class CutFigures:
    """The largest transfer from a worker of one stage to a worker of another, or of the same, stage.

    Attributes:
        source: the stage that sends.
        target: the stage that receives.
        each: bytes of the largest micro-batch.
        once: bytes sent once a step: labels, values of variables, sums of gradients, outputs.
    """

    source: int
    target: int
    each: PartialCount
    once: PartialCount


@dataclass(frozen=True)
class PipelineFigures:
    """The figures of a pipeline.

    Attributes:
        schedule: the execution order of micro-batches.
        micro_batches: the number of micro-batches of each pipeline.
        pipelines: number of parallel pipelines.
        waits: the fraction of a step that a worker waits, if all stages take equally long.
        waits_by_flops: the same, if stages take time proportional to FLOPs; None: FLOPs are not known.
        examples: the number of examples of the largest micro-batch.
        is_fed: True if `examples` comes from the first batch; False if it is 1, since no batch is known.
        stages: the figures of the stages, in order.
        cuts: pairs of stages with transfers.
    """

    schedule: str
    micro_batches: int
    pipelines: int
    waits: float
    waits_by_flops: float | None
    examples: int
    is_fed: bool
    stages: tuple[StageFigures, ...]
    cuts: tuple[CutFigures, ...] = ()

    @property
    def title(self) -> str:
        """The numbers of stages and micro-batches, and the fraction of a step that a worker waits."""
        parallel = f"{self.pipelines} pipelines of " if self.pipelines > 1 else ""
        return (
            f"{parallel}{counted(len(self.stages), 'stage')}, {counted(self.micro_batches, 'micro-batch')} by "
            f"{self.schedule}; a worker waits {round(100 * self.waits)} % of a step, if stages take equally long"
        )

    @property
    def caption(self) -> str:
        """The micro-batch that FLOPs and bytes refer to, and the waiting time that follows from FLOPs."""
        examples = counted(self.examples, "example")
        of = f"a micro-batch of {examples}" if self.is_fed else "a micro-batch of one example, as no batch is known"
        waits = self.waits_by_flops
        estimate = "" if waits is None else f"; by FLOPs a worker waits {round(100 * waits)} % of a step"
        return f"FLOPs and bytes of {of}{estimate}"


def stage_tables(pipeline: PipelineFigures) -> Iterator[Table]:
    """Yields a table with a row for each stage, and one with a row for each transfer between stages."""
    yield text_table("stages", STAGE_HEADS, stage_rows(pipeline), numbers=STAGE_HEADS[2:], caption=pipeline.caption)
    if pipeline.cuts:
        yield text_table("transfers", CUT_HEADS, cut_rows(pipeline), numbers=CUT_HEADS[1:])


def stage_rows(pipeline: PipelineFigures) -> list[list[str]]:
    """Returns the rows under `STAGE_HEADS`."""
    return [
        [
            str(k),
            listed(stage.workers),
            str(stage.variables),
            readable_bytes(stage.bytes),
            "not known" if stage.held is None else readable_bytes(stage.held),
            flops_text(stage.forward),
            flops_text(stage.backward),
        ]
        for k, stage in enumerate(pipeline.stages)
    ]


def cut_rows(pipeline: PipelineFigures) -> list[list[str]]:
    """Returns the rows under `CUT_HEADS`."""
    return [
        [
            f"{cut.source} → {cut.target}" if cut.source != cut.target else f"{cut.source}, within stage",
            bytes_text(cut.each),
            bytes_text(cut.once),
        ]
        for cut in pipeline.cuts
    ]


def flops_text(flops: PartialCount) -> str:
    """Formats FLOPs, or a lower bound; "not known" if nothing is known."""
    return _least(flops, readable_flops(flops.known))


def bytes_text(size: PartialCount) -> str:
    """Formats bytes, or a lower bound; "not known" if nothing is known."""
    return _least(size, "not known" if size.known is None else readable_bytes(size.known))


def _least(count: PartialCount, text: str) -> str:
    return f"at least {text}" if count.is_least and count.known is not None else text
