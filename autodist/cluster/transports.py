"""The way to each machine of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transport import LocalTransport, SSHTransport, Transport
from autodist.resources import Node, ResourceSpec


def transport_to(
    spec: ResourceSpec, node: Node, environment: Mapping[str, str] | None = None, patience: float | None = None
) -> Transport:
    """How commands are started on a node: here, or over SSH as its group says.

    Args:
        spec: the machines.
        node: one of them.
        environment: of what runs on this machine; None: this process's.
        patience: seconds for which a machine that does not answer is tried again; None: as the spec says.
    """
    settings = ssh_settings(spec, node, patience)
    if settings is None:
        return LocalTransport(environment)
    return SSHTransport(settings, spec.silence_timeout, spec.reach_timeout, environment)


def ssh_settings(spec: ResourceSpec, node: Node, patience: float | None = None) -> SSHSettings | None:
    """The way in to a node, with the same patience; None where SSH is not used."""
    group = spec.ssh_group(node)
    if group is None:
        return None
    # A node may be the jump host on the way to another.
    reached = {other.address: spec.ssh[other.ssh_config] for other in spec.nodes if other.ssh_config}
    others = (SSHSettings.of_group(address, other, spec.connect_timeout) for address, other in reached.items())
    patience = spec.connect_timeout if patience is None else patience
    own = SSHSettings.of_group(node.address, group, spec.connect_timeout, patience, spec.transport or "paramiko")
    return own.through(others)
