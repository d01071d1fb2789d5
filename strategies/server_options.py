"""ServerOptions: the treatment of slow workers by parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.proto import strategy_pb2

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
        local_proxy_variable: True if every worker caches a copy for its replicas to read, refreshed once a step.
            Useful if a step reads a variable often or in full.
    """  # noqa: E501 (a row of a table is one line)

    sync: bool = True
    staleness: Staleness = 0
    local_proxy_variable: bool = False

    def parameter_server(self, owner: int) -> strategy_pb2.ParameterServer:
        """Returns the synchronizer of a variable, or a shard, that worker `owner` holds."""
        return strategy_pb2.ParameterServer(
            owner=owner,
            asynchronous=not self.sync,
            staleness=self.staleness,
            local_proxy=self.local_proxy_variable,
        )


SYNCHRONOUS = ServerOptions()
"""Every worker waits for every update, as in training on one device."""
