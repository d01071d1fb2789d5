"""AllReduce: sums the gradient over all replicas; every worker holds the variable and applies the same update.

With local steps, each worker applies its own gradient, and the changes of the variable are averaged at times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from autodist.compressors import NO_COMPRESSOR, Compressor, Dense
from autodist.errors import StrategyError
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError
from autodist.placement.group import Group
from autodist.placement.synchrony import Synchrony, SyncMode
from autodist.proto import strategy_pb2
from autodist.synchronizers.base import Synchronizer
from autodist.synchronizers.local_steps import LocalSteps
from autodist.synchronizers.traffic import INDEX_BYTES, Piece, Sent

Spec = strategy_pb2.AllReduce.Spec

HIERARCHICAL = "HIERARCHICAL"
"""First within subgroups of workers, then between subgroups."""

COLLECTIVES = ("RING", "NCCL")
"""TensorFlow's own algorithms, which use no subgroups and send everything to the next worker."""


@dataclass(frozen=True)
class AllReduce(Synchronizer):
    """All-reduce of a gradient, as in the strategy message.

    Attributes:
        spec: the algorithm.
        group: gradients of equal group are fused into buckets together.
        compressor: encodes dense gradients, or the changes of local steps.
        local: the local steps that each worker makes on its own copy; None: gradients are summed in each step.
    """

    spec: str = "AUTO"
    group: int = 0
    compressor: Compressor = NO_COMPRESSOR
    local: LocalSteps | None = None

    message: ClassVar[type] = strategy_pb2.AllReduce

    @classmethod
    def from_message(cls, message: strategy_pb2.AllReduce) -> AllReduce:
        if message.spec not in Spec.values():
            raise OptionError(
                "all_reduce_spec",
                f"has the all-reduce spec {message.spec}, which does not exist; use one of {listed(Spec.keys())}.",
            )
        try:
            compressor = Compressor.from_message(message.compressor)
        except StrategyError as error:
            raise OptionError("compressor", f"cannot be compressed: {error.problem}") from None
        local = LocalSteps.from_message(message.local) if message.HasField("local") else None
        return cls(Spec.Name(message.spec), message.group, compressor, local)

    def to_message(self) -> strategy_pb2.AllReduce:
        lossy = None if self.compressor == NO_COMPRESSOR else self.compressor.to_message()
        local = None if self.local is None else self.local.to_message()
        return strategy_pb2.AllReduce(spec=self.spec, group=self.group, compressor=lossy, local=local)

    @property
    def synchrony(self) -> Synchrony | None:
        return None if self.local is None else Synchrony(SyncMode.LOCAL)

    def misfit(self, piece: Piece) -> str | None:
        if self.compressor == NO_COMPRESSOR:
            return None
        is_sparse = piece.is_sparse and self.local is None  # the change of a table is dense
        return self.compressor.misfit(piece.name, is_sparse, piece.dtype, piece.is_floating)

    @property
    def inexact(self) -> str | None:
        if self.local is not None:
            return f"is {self.local.text}"
        return None if self.compressor == NO_COMPRESSOR else "has a compressor, which rounds"

    @property
    def way(self) -> str:
        return self.spec

    @property
    def uses_subgroups(self) -> bool:
        return self.spec == HIERARCHICAL and self.compressor.uses_subgroups

    @property
    def goes_to_all(self) -> bool:
        return self.compressor.goes_to_all

    @property
    def text(self) -> str:
        lossy = "" if self.compressor == NO_COMPRESSOR else f" {self.compressor.text}"
        local = "" if self.local is None else f", {self.local.text}"
        return f"AllReduce {self.spec}{lossy}{local}"

    def dense_bytes(self, piece: Piece) -> int:
        """Returns the bytes of an encoded dense gradient."""
        return self.compressor.encoded_bytes(Dense(piece.shape, piece.element_bytes))

    def without_group(self) -> AllReduce:
        return replace(self, group=0) if self.group else self

    def add_traffic(self, piece: Piece, group: Group, share: int, step: Sent, row: Sent) -> None:
        workers = len(group.workers)
        if self.local is not None:
            sent = self.compressor.bytes_sent(Dense(piece.shape, piece.element_bytes), workers)
            step.add(group, Fraction(sent) / self.local.steps)
        elif piece.is_sparse:
            row.add(group, share * (piece.row_bytes + INDEX_BYTES) * (workers - 1))
        else:
            step.add(group, self.compressor.bytes_sent(Dense(piece.shape, piece.element_bytes), workers))

    def targets(self, worker: int, group: Group) -> list[int]:
        workers = group.workers
        if worker in group and self.spec in COLLECTIVES:
            following = workers[(workers.index(worker) + 1) % len(workers)]
            return [following] if following != worker else []
        return [other for other in workers if other != worker]
