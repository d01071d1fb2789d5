"""The way to each machine of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transport import LocalTransport, SSHTransport, Transport
from autodist.resources import Node, ResourceSpec


def transport_to(spec: ResourceSpec, node: Node, environment: Mapping[str, str] | None = None) -> Transport:
    """How commands are started on a node: here, or over SSH as its group says.

    Args:
        spec: the machines.
        node: one of them.
        environment: of what runs on this machine; None: this process's.
    """
    settings = ssh_settings(spec, node)
    if settings is None:
        return LocalTransport(environment)
    return SSHTransport(settings, spec.silence_timeout, spec.reach_timeout, environment)


def ssh_settings(spec: ResourceSpec, node: Node) -> SSHSettings | None:
    """The way in to a node; None where SSH is not used."""
    group = spec.ssh_group(node)
    if group is None:
        return None
    # A node may be the jump host on the way to another.
    reached = {other.address: spec.ssh[other.ssh_config] for other in spec.nodes if other.ssh_config}
    others = (SSHSettings.of_group(address, other, spec.connect_timeout) for address, other in reached.items())
    return SSHSettings.of_group(node.address, group, spec.connect_timeout).through(others)
