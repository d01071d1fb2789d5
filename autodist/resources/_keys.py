"""The keys of the YAML, and the rules for their combinations."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from autodist.resources._model import EMPTY_IF_NULL, Fault, Model, Source, to_spec_error, unknown_key
from autodist.resources._node import TRANSPORT, Node, SSHGroup, Transport
from autodist.resources._sections import (
    CHECKPOINT,
    LONGEST,
    METRICS,
    SYNC,
    CheckpointSection,
    MetricsSection,
    StrategySection,
    Sync,
    Timeouts,
)

_EXAMPLE = (
    "a list of at least one node, such as [{address: localhost, cpus: [0, 1]}], or given, if a scheduler starts the "
    "processes"
)
_HIDDEN = (
    "source", "is_given", "allotments", "listed", "mesh_rows", "micro_batches", "owned_bytes", "measurements",
)  # fmt: skip

MOST_RESTARTS = 1000

RESTARTS = f"a whole number from 0 to {MOST_RESTARTS}"

GIVEN = "given"
"""Value of `nodes` if a scheduler starts the processes."""


_NOT_GIVEN = {
    "sync": (
        "a folder is copied over SSH, which `nodes: given` does not use; allowed: no `sync`, let the scheduler copy "
        "the code, or use a folder that the machines share"
    ),
    "transport": ("it selects the SSH implementation, and `nodes: given` does not use SSH; allowed: no `transport`"),
    "encrypt": (
        "SSH carries the traffic between workers then, and `nodes: given` does not use SSH; allowed: no `encrypt`; use "
        "a private network between the machines, such as WireGuard"
    ),
}
"""The keys that a scheduler's processes cannot have, with the reason and the fix."""


class YamlKeys(Timeouts):
    """The values of a YAML file, read and checked; `ResourceSpec` describes them."""

    nodes: Annotated[tuple[Node, ...], Field(strict=False)] = Field(description=_EXAMPLE)
    ssh: Annotated[dict[str, Annotated[SSHGroup, EMPTY_IF_NULL]], EMPTY_IF_NULL] = Field(
        default_factory=dict, description="a mapping of names to SSH groups, such as {lab: {username: ubuntu}}"
    )
    transport: Transport | None = Field(default=None, description=TRANSPORT)
    strategy: StrategySection | None = Field(default=None, description="a mapping, or a builder's name")
    batch: Literal["global", "per_worker"] | None = Field(default=None, description="global or per_worker")
    batch_norm: Literal["whole", "replica"] | None = Field(default=None, description="whole or replica")
    xla: Literal["auto", True, False] | None = Field(default=None, description="auto, true or false")
    shard: Literal["files"] | None = Field(default=None, description="files")
    encrypt: Literal["ssh"] | None = Field(default=None, description="ssh")
    firewall: Literal["auto", "none"] | None = Field(default=None, description="auto or none")
    max_restarts: int = Field(default=0, ge=0, le=MOST_RESTARTS, description=RESTARTS)
    min_nodes: int | None = Field(default=None, ge=1, description="a whole number from 1 to the number of nodes")
    rejoin_interval: float | None = Field(
        default=None,
        gt=0,
        le=LONGEST,
        allow_inf_nan=False,
        description=f"a number of seconds above 0, at most {LONGEST}",
    )
    sync: Sync | None = Field(default=None, description=SYNC)
    checkpoint: CheckpointSection | None = Field(default=None, description=CHECKPOINT)
    metrics: MetricsSection | None = Field(default=None, description=METRICS)
    source: Source = Field(default_factory=Source, repr=False)
    is_given: bool = Field(default=False, repr=False)

    @classmethod
    def _parse(cls, data: Any, source: Source) -> Self:
        """Checks plain data.

        Raises:
            ResourceSpecError: a value or a combination of values is not allowed; names the first fault in the file,
                then the others.
        """
        if data is None:
            raise source.error(("nodes",), f"missing, since the file is empty; allowed: {_EXAMPLE}")
        if not isinstance(data, dict):
            keys = ", ".join(sorted(cls._known_keys()))
            what = (
                "a list is not allowed" if isinstance(data, list) else "no keys here; is this the file of the machines"
            )
            raise source.error(("document",), f"{what}; allowed: a mapping with the keys {keys}")
        for key in _HIDDEN:
            if key in data:
                raise source.error((key,), unknown_key(key, cls._known_keys()))
        is_given = data.get("nodes") == GIVEN
        if is_given:
            data = {**data, "nodes": [{"address": "localhost"}]}
        try:
            strategy = data.get("strategy")
            section = None if strategy is None else StrategySection.from_plain(strategy, source)
            return cls.model_validate({**data, "strategy": section, "source": source, "is_given": is_given})
        except ValidationError as error:
            inner: dict[str, type[Model]] = {
                "nodes": Node, "ssh": SSHGroup, "sync": Sync,
                "checkpoint": CheckpointSection, "metrics": MetricsSection,
            }  # fmt: skip
            raise to_spec_error(error, source, cls, inner, _HIDDEN) from None

    @classmethod
    def _known_keys(cls) -> list[str]:
        return [name for name in cls.model_fields if name not in _HIDDEN]

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        if not nodes:
            raise Fault(f"there is no node; allowed: {_EXAMPLE}")
        if len(nodes) == 1:
            return (nodes[0].model_copy(update={"chief": True}),)
        seen: dict[str, int] = {}
        for index, node in enumerate(nodes):
            first = seen.setdefault(_comparable(node.address), index)
            if first != index:
                mend = "one node for each machine; `workers` sets its number of processes"
                raise Fault(f"{node.address} is also the address of nodes[{first}]; allowed: {mend}", index, "address")
        return nodes

    @model_validator(mode="after")
    def _check_chief(self) -> Self:
        chiefs = [index for index, node in enumerate(self.nodes) if node.chief]
        if not chiefs:
            problem = f"none of the {len(self.nodes)} nodes is the chief"
            raise Fault(f"{problem}; allowed: `chief: true` in exactly one, where the script is started", "nodes")
        if len(chiefs) > 1:
            problem = f"true is not allowed, since nodes[{chiefs[0]}] ({self.nodes[chiefs[0]].address}) is the chief"
            raise Fault(f"{problem}; allowed: `chief: true` in exactly one node", "nodes", chiefs[1], "chief")
        if not self.nodes[chiefs[0]].devices:
            problem = "the chief's node has no device, and the script needs one to compute the outputs of its steps"
            mend = "one device or more; `cpus: []` is for other nodes, which then only own variables"
            raise Fault(f"{problem}; allowed: {mend}", "nodes", chiefs[0], "cpus")
        return self

    @model_validator(mode="after")
    def _check_min_nodes(self) -> Self:
        if self.min_nodes is not None and not self.is_given and self.min_nodes > len(self.nodes):
            count = len(self.nodes)
            raise Fault(
                f"{self.min_nodes} is more than the number of nodes, {count}; allowed: 1 to {count}", "min_nodes"
            )
        return self

    @model_validator(mode="after")
    def _check_rejoin_interval(self) -> Self:
        is_fixed = self.min_nodes is None and not self.is_given  # `autodist run --nodes` sets it for given processes
        if self.rejoin_interval is not None and (is_fixed or self.checkpoint is None):
            lacking = "min_nodes" if is_fixed else "checkpoint"
            raise Fault(
                "a run takes a missing machine in by starting again from a checkpoint that it saves, which needs "
                f"`min_nodes` and `checkpoint`; allowed: no `rejoin_interval`, or `{lacking}`, too",
                "rejoin_interval",
            )
        return self

    @model_validator(mode="after")
    def _check_shard(self) -> Self:
        if self.shard is not None and self.batch == "per_worker":
            raise Fault(
                "sharding by files needs global data, and with `batch: per_worker` each worker already reads only its "
                "own data; allowed: one of the two",
                "shard",
            )
        return self

    @model_validator(mode="after")
    def _check_given(self) -> Self:
        for key, problem in _NOT_GIVEN.items():
            if self.is_given and getattr(self, key) is not None:
                raise Fault(problem, key)
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        for index, node in enumerate(self.nodes):
            if node.ssh_config is not None and node.ssh_config not in self.ssh:
                known = ", ".join(sorted(self.ssh)) or "none is defined, add it under `ssh`"
                problem = f"there is no SSH group {node.ssh_config!r}; allowed: {known}"
                raise Fault(problem, "nodes", index, "ssh_config")
        return self


def _comparable(address: str) -> str:
    """Normalizes an address for comparison, without a lookup: two names of one machine differ."""
    name = address.lower().rstrip(".")
    try:
        return str(ipaddress.ip_address("127.0.0.1" if name == "localhost" else name))
    except ValueError:
        return name
