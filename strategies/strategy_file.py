"""A strategy as the `strategy` section of a YAML file, with a pattern for each variable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.synchronizers import AllReduce, ParameterServer, partitioning_of, synchronizers_of

_WIDTH = 100_000
"""Columns of a line, more than the longest name: keys in several lines are no YAML."""


def strategy_yaml(strategy: strategy_pb2.Strategy) -> str:
    """Returns YAML text that names the same node for each variable, and can be edited and used again.

    The reasons of `Auto` are comments above the variables. FSDP is written as the builder. All shards of an all-reduced
    variable get the group of the first one.

    Raises:
        StrategyError: the strategy has pipeline stages or a mesh, which only their builders can make.
    """
    if strategy.HasField("pipeline") or strategy.HasField("mesh"):
        raise StrategyError(
            f"A strategy of {strategy.builder} divides the model, which settings of variables cannot express; its "
            "section of the YAML file is its strategy file."
        )
    lines = [f"# {line}" for line in _head(strategy)]
    recomputes = {"recompute": True} if strategy.choice.recomputes else {}
    if any(one.gathered_with for node in strategy.nodes for one in synchronizers_of(node)):
        section: dict[str, Any] = {"builder": "FSDP", "prefetch": strategy.prefetch, **recomputes}
        return "\n".join([*lines, yaml.safe_dump({"strategy": section}, sort_keys=False)])
    reasons = {reason.variable: reason.text for reason in strategy.choice.reasons}
    lines += ["strategy:", "  builder: AllReduce", *(["  recompute: true"] if recomputes else [])]
    lines += ["  variables:" if strategy.nodes else "  variables: {}"]
    for node in strategy.nodes:
        if node.variable in reasons:
            lines.append(f"    # {reasons[node.variable]}")
        settings = yaml.safe_dump(_settings(node), default_flow_style=True, sort_keys=False, width=_WIDTH).strip()
        pattern = yaml.safe_dump(re.escape(node.variable), default_style='"', width=_WIDTH).strip()
        lines.append(f"    {pattern}: {settings}")
    return "\n".join([*lines, ""])


def _head(strategy: strategy_pb2.Strategy) -> Iterator[str]:
    choice = strategy.choice
    if choice.alternatives:
        best = choice.alternatives[0]
        basis = " ".join(choice.basis.split())  # on one line
        yield f"Chosen by Auto: {best.name}, predicted to take {best.seconds:.4g} s a step ({basis})."
    if strategy.recomputed_blocks and not choice.recomputes:
        yield "The option `recompute` is not in this file; copy it from the strategy that this one was made from."


def _settings(node: strategy_pb2.VariableNode) -> dict[str, Any]:
    """Returns the settings of a pattern that matches one variable."""
    partitioning, synchronizers = partitioning_of(node), synchronizers_of(node)
    first = synchronizers[0]
    settings = _of_all_reduce(first) if isinstance(first, AllReduce) else _of_servers(synchronizers)
    if partitioning is not None:
        settings["partition"] = {"axis": partitioning.axis, "sizes": list(partitioning.sizes)}
    return settings


def _of_all_reduce(first: AllReduce) -> dict[str, Any]:
    settings: dict[str, Any] = {"synchronizer": "AllReduce", "group": first.group}
    if first.spec != "AUTO":
        settings["all_reduce_spec"] = first.spec
    if first.compressor != NO_COMPRESSOR:
        settings["compressor"] = _compressor(first.compressor)
    if first.local is not None:
        settings["local_steps"] = first.local.steps
        settings["outer_learning_rate"] = first.local.outer_learning_rate
        settings["outer_momentum"] = first.local.outer_momentum
    return settings


def _compressor(used: Compressor) -> Any:
    options = dataclasses.asdict(used)
    return {"kind": used.kind, **options} if options else used.kind


def _of_servers(synchronizers: Sequence[Any]) -> dict[str, Any]:
    first = synchronizers[0]
    assert isinstance(first, ParameterServer), "there are two synchronizers, and all shards have the same"
    owners = [one.owner for one in synchronizers]
    settings: dict[str, Any] = {"synchronizer": "PS", "owner": owners[0] if len(owners) == 1 else owners}
    if first.asynchronous:
        settings["sync"] = False
    if first.staleness:
        settings["staleness"] = first.staleness
    settings["local_proxy_variable"] = first.local_proxy
    if first.value_compressor != NO_COMPRESSOR:
        settings["value_compressor"] = _compressor(first.value_compressor)
    return settings
