"""The ways from the chief to the agents of all other workers, whoever starts these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from autodist.cluster.environments.start_rendezvous import channels_of_followers
from autodist.cluster.transport import Channel, transport_to
from autodist.resources import ResourceSpec, Worker


def channels_to_agents(
    spec: ResourceSpec, environment: Mapping[str, str] | None
) -> Iterator[tuple[Sequence[Worker], Sequence[Channel]]]:
    """Workers with a channel to the agent of each, the chief left out; agents of a node are started when it is come to.

    Args:
        spec: the machines; where they are given, a scheduler has started the agents.
        environment: that programs are started in on this machine; None: that of this process at the time.
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
