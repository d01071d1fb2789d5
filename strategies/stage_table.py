"""The stages of a pipeline as tables for people: what each holds and computes, and what it hands on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import counted, listed, readable_bytes, readable_flops

STAGE_HEADS = ("stage", "worker", "variables", "bytes", "holds", "FLOPs forward", "FLOPs back")
CUT_HEADS = ("from stage to stage", "each micro-batch", "once a step")


@dataclass(frozen=True)
class StageFigures:
    """What one stage does.

    Attributes:
        workers: that compute it, each in one of the pipelines.
        variables: that it holds and trains.
        bytes: of these.
        held: bytes of all variables, the optimizer's slots included, of a worker; None: not known.
        forward: FLOPs for the largest micro-batch.
        backward: likewise.
    """

    workers: tuple[str, ...]
    variables: int
    bytes: int
    held: int | None
    forward: PartialCount
    backward: PartialCount

    def flops(self, micro_batches: int) -> int | None:
        """Those of so many micro-batches, forward and back, as if all were as large; None: they are not all known."""
        both = (self.forward + self.backward) * micro_batches
        return None if both.is_least else both.count


@dataclass(frozen=True)
class CutFigures:
    """What one worker of a stage sends to one of another, or of its own: to that to which it sends most.

    Attributes:
        source: the stage that sends.
        target: the stage that receives.
        each: bytes of the largest micro-batch.
        once: bytes that go once a step: labels, values of variables, sums of gradients, what a step returns.
    """

    source: int
    target: int
    each: PartialCount
    once: PartialCount


@dataclass(frozen=True)
class PipelineFigures:
    """What the stages of a pipeline do.

    Attributes:
        schedule: in whose order micro-batches are taken up.
        micro_batches: of each pipeline.
        pipelines: that stand side by side.
        waits: the share of a step in which a worker waits, if all stages take equally long.
        waits_by_flops: the same, if each takes as long as its FLOPs are many; None: these are not known.
        examples: of the largest micro-batch.
        is_fed: whether that is the first batch's, and not one example, for want of a batch.
        stages: one behind the other.
        cuts: those that something crosses.
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
        """How many stages and micro-batches there are, and what a worker waits."""
        beside = f"{self.pipelines} pipelines of " if self.pipelines > 1 else ""
        return (
            f"{beside}{counted(len(self.stages), 'stage')}, {counted(self.micro_batches, 'micro-batch')} by "
            f"{self.schedule}; a worker waits {round(100 * self.waits)} % of a step, if stages take equally long"
        )

    @property
    def caption(self) -> str:
        """For what FLOPs and bytes are told, and what they say of the time."""
        examples = counted(self.examples, "example")
        of = f"a micro-batch of {examples}" if self.is_fed else "a micro-batch of one example, as no batch is known"
        waits = self.waits_by_flops
        told = "" if waits is None else f"; by FLOPs a worker waits {round(100 * waits)} % of a step"
        return f"FLOPs and bytes of {of}{told}"


def stage_tables(pipeline: PipelineFigures) -> Iterator[Table]:
    """A row for each stage, and one for each way from stage to stage."""
    yield _table("stages", STAGE_HEADS, 2, stage_rows(pipeline), pipeline.caption)
    if pipeline.cuts:
        yield _table("what crosses", CUT_HEADS, 1, cut_rows(pipeline), "")


def stage_rows(pipeline: PipelineFigures) -> list[list[str]]:
    """What stands under `STAGE_HEADS`."""
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
    """What stands under `CUT_HEADS`."""
    return [
        [
            f"{cut.source} → {cut.target}" if cut.source != cut.target else f"{cut.source}, between mates",
            bytes_text(cut.each),
            bytes_text(cut.once),
        ]
        for cut in pipeline.cuts
    ]


def flops_text(flops: PartialCount) -> str:
    """FLOPs, or at least how many; "not known", where nothing is."""
    return _least(flops, readable_flops(flops.known))


def bytes_text(size: PartialCount) -> str:
    """Bytes, or at least how many; "not known", where nothing is."""
    return _least(size, "not known" if size.known is None else readable_bytes(size.known))


def _least(tally: PartialCount, text: str) -> str:
    return f"at least {text}" if tally.is_least and tally.known is not None else text


def _table(title: str, heads: Sequence[str], numbers_from: int, rows: Sequence[Sequence[str]], caption: str) -> Table:
    table = Table(title=Text(title), title_justify="left", caption=Text(caption) if caption else None)
    for position, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if position >= numbers_from else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
