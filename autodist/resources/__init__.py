"""Typed models of the YAML: nodes, devices, bandwidths, SSH groups, and the strategy section.

Reading a file needs neither TensorFlow nor the network: no host name is resolved.
"""

from autodist.resources._keys import MOST_RESTARTS
from autodist.resources._node import DEFAULT_NETWORK_BANDWIDTH, Node, SSHGroup, is_own_address
from autodist.resources._sections import (
    CheckpointSection,
    MetricsSection,
    StrategySection,
    Sync,
    Timeouts,
    VariableOverride,
)
from autodist.resources._spec import ResourceSpec
from autodist.resources._workers import Allotment, Replica, Worker
from autodist.resources.measurements import (
    MeasuredPair,
    Measurements,
    NetworkMeasurement,
    Recomputation,
    StepMeasurement,
)

__all__ = [
    "DEFAULT_NETWORK_BANDWIDTH",
    "MOST_RESTARTS",
    "Allotment",
    "CheckpointSection",
    "MeasuredPair",
    "Measurements",
    "MetricsSection",
    "NetworkMeasurement",
    "Node",
    "Recomputation",
    "Replica",
    "ResourceSpec",
    "SSHGroup",
    "StepMeasurement",
    "StrategySection",
    "Sync",
    "Timeouts",
    "VariableOverride",
    "Worker",
    "is_own_address",
]
