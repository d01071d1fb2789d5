"""Channels from the chief to the agents of all other workers, started by AutoDist or by a scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from autodist.cluster.environments.start_rendezvous import channels_of_followers
from autodist.cluster.transport import Channel, transport_to
from autodist.resources import ResourceSpec, Worker


def channels_to_agents(
    spec: ResourceSpec, environment: Mapping[str, str] | None
) -> Iterator[tuple[Sequence[Worker], Sequence[Channel]]]:
    """Yields, node by node, the workers except the chief, and a channel to each worker's agent.

    The agents of a node are started when the iterator reaches it.

    Args:
        spec: the machines; if `is_given`, a scheduler has started the agents.
        environment: environment variables of programs started on this machine; None for those of this process.
    """
    others = spec.workers[1:]
    if spec.is_given:
        yield others, channels_of_followers()
        return
    for node, group in itertools.groupby(others, key=lambda worker: worker.node):
        workers = list(group)
        options = ["--stop", str(spec.stop_timeout)]
        if spec.ssh_group(node) is not None:
            options += ["--silence", str(spec.silence_timeout)]
        yield workers, transport_to(spec, node, environment).open(len(workers), "autodist.cluster.agent", *options)
