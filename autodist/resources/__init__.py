"""The YAML that describes the machines, as typed models: nodes, devices, bandwidths, SSH groups, the strategy section.

TensorFlow is not needed here, and neither is the network: reading a file resolves no host name.
"""

from autodist.resources._node import DEFAULT_NETWORK_BANDWIDTH, Node, SSHGroup, is_own_address
from autodist.resources._sections import CheckpointSection, StrategySection, Sync, Timeouts, VariableOverride
from autodist.resources._spec import MOST_RESTARTS, ResourceSpec
from autodist.resources._workers import Allotment, Replica, Worker

__all__ = [
    "DEFAULT_NETWORK_BANDWIDTH",
    "MOST_RESTARTS",
    "Allotment",
    "CheckpointSection",
    "Node",
    "Replica",
    "ResourceSpec",
    "SSHGroup",
    "StrategySection",
    "Sync",
    "Timeouts",
    "VariableOverride",
    "Worker",
    "is_own_address",
]
