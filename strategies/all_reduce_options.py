"""AllReduceOptions: the bucketing, algorithm and compression of all-reduced gradients."""

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
        chunk_size: the number of consecutive variables (or shards) in a group. Gradients of one group are packed into
            buckets together; smaller groups are sent earlier, in more messages.
        all_reduce_spec: the algorithm: SHUFFLE (each worker sums one slice, in worker order), HIERARCHICAL (the same
            within subgroups of workers first, then between them), RING or NCCL (TensorFlow's collectives; the whole
            model must use the same one), or AUTO.
        compressor: compresses the gradients before they are sent. Only SHUFFLE supports it, for dense gradients of a
            floating-point dtype.
    """

    chunk_size: ChunkSize = 128
    all_reduce_spec: SpecName = "AUTO"
    compressor: Compressor = NO_COMPRESSOR

    def all_reduce(self, position: int) -> strategy_pb2.AllReduce:
        """Returns the synchronizer of a variable or shard; `position` is its index among those that are all-reduced."""
        return all_reduce_synchronizer(position // self.chunk_size, self.all_reduce_spec, self.compressor)


def all_reduce_synchronizer(
    group: int = 0, spec: SpecName = "AUTO", compressor: Compressor = NO_COMPRESSOR
) -> strategy_pb2.AllReduce:
    """Returns an all-reduce synchronizer in a group; the compressor field is unset without a compressor."""
    lossy = None if compressor == NO_COMPRESSOR else compressor.to_message()
    return strategy_pb2.AllReduce(spec=spec, group=group, compressor=lossy)
