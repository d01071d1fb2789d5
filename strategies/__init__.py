"""Strategies: for each variable of a captured step, who holds it and how its gradient is combined.

A builder decides (AllReduce, PS, PSLoadBalancing, Parallax, or a user's own), the protobuf Strategy says what was
decided, and the kernels carry it out.
"""

from autodist.strategies.all_reduce import AllReduce, all_reduce_node
from autodist.strategies.base import BuildsStrategy, StrategyBuilder, graph_config, make_strategy
from autodist.strategies.check import check_strategy
from autodist.strategies.cost import Traffic, dense_bytes_sent, traffic
from autodist.strategies.loads import GreedyLoads, worker_bandwidths
from autodist.strategies.override import Override, OverrideVariables, UseAllReduce, UseParameterServer
from autodist.strategies.parallax import Parallax
from autodist.strategies.ps import PS, owner_index, parameter_server_node
from autodist.strategies.ps_load_balancing import PSLoadBalancing
from autodist.strategies.reader import builder_from_section
from autodist.strategies.registry import find_builder, register, registered_names
from autodist.strategies.specs import resolve_specs
from autodist.strategies.table import strategy_table
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

__all__ = [
    "PS",
    "AllReduce",
    "BuildsStrategy",
    "GraphLike",
    "GreedyLoads",
    "Override",
    "OverrideVariables",
    "PSLoadBalancing",
    "Parallax",
    "StrategyBuilder",
    "SyncedVariable",
    "Traffic",
    "UseAllReduce",
    "UseParameterServer",
    "all_reduce_node",
    "builder_from_section",
    "check_strategy",
    "dense_bytes_sent",
    "find_builder",
    "graph_config",
    "make_strategy",
    "owner_index",
    "parameter_server_node",
    "register",
    "registered_names",
    "resolve_specs",
    "strategy_table",
    "synced_variables",
    "traffic",
    "worker_bandwidths",
]
