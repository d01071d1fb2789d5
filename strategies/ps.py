"""PS: places every variable on one worker; and the options that all builders with parameter servers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist import synchronizers
from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.nodes import node_of, whole_node
from autodist.strategies.partitioning import PartitionOptions, even_partitioning
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

Staleness = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of all builders that use parameter servers.

    | sync | staleness | effect |
    |---|---|---|
    | true | 0 | one update a step, with the sum of all workers' gradients; each worker waits for it |
    | true | s > 0 | also one update a step, but a worker may be s steps ahead of the slowest, and then reads values that are up to s steps old |
    | false | 0 | each worker's gradient is applied on arrival, and no worker waits for another |
    | false | s > 0 | the same, but no worker is ever more than s steps ahead of the slowest |

    Only true with 0 yields the training result of one device.

    Sources: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
    NeurIPS 2013, for the bound; J. Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, for
    asynchronous updates.

    Attributes:
        sync: True if an update waits for all workers' gradients of a step.
        staleness: the number of steps that a worker may be ahead of the slowest.
        local_proxy_variable: True if every worker caches a copy for its replicas to read, refreshed once a step: the
            owner sends the value with the signal that it has applied the update. False if replicas read the owner's
            value, which takes a round trip, and keep nothing after the step. Default: True for dense variables
            and small tables, and False for large tables, of which a replica reads only the rows that it needs.
        value_compressor: encodes the values for these copies. All replicas then compute with rounded values, and the
            owner's update with the exact one. Rows that replicas read are sent as they are.
    """  # noqa: E501 (a row of a table is one line)

    sync: bool = True
    staleness: Staleness = 0
    local_proxy_variable: bool | None = None
    value_compressor: Compressor = NO_COMPRESSOR

    def parameter_server(self, owner: int, is_sent_whole: bool = False) -> strategy_pb2.ParameterServer:
        """Returns the synchronizer of a variable, or a shard, that worker `owner` holds.

        Args:
            owner: index of the worker.
            is_sent_whole: True if the variable is dense, or a small table (see `SyncedVariable`).
        """
        proxy = self.local_proxy_variable
        has_proxy = is_sent_whole if proxy is None else proxy
        is_by_rows = proxy is None and not is_sent_whole
        return synchronizers.ParameterServer(
            owner=owner,
            asynchronous=not self.sync,
            staleness=self.staleness,
            local_proxy=has_proxy,
            value_compressor=NO_COMPRESSOR if is_by_rows else self.value_compressor,
        ).to_message()


SYNCHRONOUS = ServerOptions()
"""Every worker waits for every update, as in training on one device."""

Owner = Annotated[int, Field(ge=0)] | str

PIECES = 16
"""Number of shards of equal size that have all bytes of a model. An owner sends no values while it receives its first
shard, and receives none while it sends the values of the last."""


@register
@dataclass(frozen=True)
class PS(ServerOptions, PartitionOptions, StrategyBuilder):
    """Places all variables on one worker, which sums the workers' gradients and applies the update once.

    For models whose optimizer state should reside on one machine, one with much memory or the fastest link, and as
    a baseline for other parameter servers.

    With `max_shards` above 1, large dense variables are partitioned into shards of this one worker, if every worker
    waits for each update. It then sends the new values of the first shards while it receives the gradients of the next
    ones, so both directions of a slow link are used at once.

    Cost: with W workers and b bytes of dense gradients, the owner sends (W-1)·b bytes a step and receives as many.
    Every other worker sends b and receives b. Of a sparse variable only the rows that a worker touches are sent; with a
    proxy, all of its b bytes to each worker.

    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    Attributes:
        owner: the worker that holds the variables, by index (0 is the chief) or by name.
        max_shards: the maximum number of shards of one variable; None: shards of a sixteenth of all bytes.
        min_partition_bytes: the minimum size of a shard.
        sync, staleness, local_proxy_variable, value_compressor: see ServerOptions.
    """

    owner: Owner = 0
    max_shards: Annotated[int, Field(ge=1)] | None = 1

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        owner = owner_index(self.owner, resource_spec)
        is_overlapped = self.sync and not self.staleness and len(resource_spec.workers) > 1
        piece = max(self.min_partition_bytes, sum(v.byte_size for v in variables) // PIECES, 1)
        nodes = []
        for variable in variables:
            partitioning = self._partitioning(variable, piece) if is_overlapped else None
            shards = len(partitioning.sizes) if partitioning else 1
            nodes.append(
                node_of(variable.name, partitioning, [self.parameter_server(owner, variable.is_sent_whole)] * shards)
            )
        return make_strategy("PS", resource_spec, variables, nodes)

    def _partitioning(self, variable: SyncedVariable, piece: int) -> Partitioning | None:
        """Returns a partitioning into shards of about `piece` bytes, and not less; None for one that stays whole."""
        shards = 1 if variable.is_sparse else variable.byte_size // piece
        return even_partitioning(variable, 0, min(shards, self.max_shards or shards), self.min_partition_bytes)


def parameter_server_node(
    variable: str, owner: int, options: ServerOptions = SYNCHRONOUS, is_sent_whole: bool = False
) -> strategy_pb2.VariableNode:
    """Returns the node of a variable that one worker holds; `is_sent_whole` as in `ServerOptions.parameter_server`."""
    return whole_node(variable, options.parameter_server(owner, is_sent_whole))


def owner_index(owner: Owner, resource_spec: ResourceSpec) -> int:
    """Returns the index of the worker that an option names.

    Raises:
        StrategyError: no worker has that index or name.
    """
    for worker in resource_spec.workers:
        if owner in (worker.index, worker.name):
            return worker.index
    raise OptionError(
        "owner", f"owner is {owner!r}, but there is no such worker; the workers are {known_workers(resource_spec)}."
    )


def known_workers(resource_spec: ResourceSpec) -> str:
    """Returns all workers as text: "0 (10.0.0.1), 1 (10.0.0.2)"."""
    return listed(f"{worker.index} ({worker.name})" for worker in resource_spec.workers)
