"""AllReduceOptions: how gradients are packed, summed and made smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.proto import strategy_pb2

SpecName = Literal["AUTO", "SHUFFLE", "HIERARCHICAL", "RING", "NCCL"]
ChunkSize = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class AllReduceOptions:
    """Options of all builders that use all-reduce.

    Attributes:
        chunk_size: how many variables (or shards), one after the other, form a group. Gradients of one group are
            packed into buckets together, so a smaller group starts to travel earlier and makes more messages.
        all_reduce_spec: how sums travel between workers: SHUFFLE (a piece to each worker, summed in their order),
            HIERARCHICAL (the same within teams of workers first, then between teams),
            RING or NCCL (TensorFlow's collectives; the whole model must then use the same one), or AUTO.
        compressor: what travels in place of the gradients. SHUFFLE alone carries it
            out, and the gradients must be dense and of a floating-point type.
    """

    chunk_size: ChunkSize = 128
    all_reduce_spec: SpecName = "AUTO"
    compressor: Compressor = NO_COMPRESSOR

    def all_reduce(self, position: int) -> strategy_pb2.AllReduce:
        """The synchronizer of the variable, or shard, at a position among those that are all-reduced."""
        return all_reduce_synchronizer(position // self.chunk_size, self.all_reduce_spec, self.compressor)


def all_reduce_synchronizer(
    group: int = 0, spec: SpecName = "AUTO", compressor: Compressor = NO_COMPRESSOR
) -> strategy_pb2.AllReduce:
    """All-reduce in a group; without a compressor the message has none."""
    lossy = None if compressor == NO_COMPRESSOR else compressor.to_message()
    return strategy_pb2.AllReduce(spec=spec, group=group, compressor=lossy)
