"""Override: replaces a builder's choice for the variables that a pattern matches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from autodist.compressors import Compressor
from autodist.errors import Place, StrategyError
from autodist.logs.formatting import listed
from autodist.options.fields import check_options
from autodist.strategies.all_reduce import SpecName
from autodist.strategies.diloco import LearningRate, Momentum
from autodist.strategies.partition import Partition
from autodist.strategies.ps import Owner, Staleness
from autodist.synchronizers import AllReduce, LocalSteps, ParameterServer


@dataclass(frozen=True)
class UseAllReduce:
    """Sums the variable's gradient over all replicas.

    Unset options keep the builder's choice if that is all-reduce too, and otherwise have the default.

    Attributes:
        group: variables of equal group are reduced together. Default: one group for all variables that were changed
            to all-reduce.
        all_reduce_spec: see AllReduceOptions. Default: AUTO.
        compressor: see AllReduceOptions; the kind NONE removes the builder's. Default: none.
        local_steps: see DiLoCo; 0: gradients are summed in each step. Default: 0.
        outer_learning_rate: see DiLoCo. Default: 1, which with no momentum averages the copies.
        outer_momentum: see DiLoCo. Default: 0.
        partition: the partitioning. Default: the builder's, for either synchronizer.
    """

    group: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    all_reduce_spec: SpecName | None = None
    compressor: Compressor | None = None
    local_steps: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    outer_learning_rate: LearningRate | None = None
    outer_momentum: Momentum | None = None
    partition: Partition | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.local_steps == 0:
            self._require_no_outer_step()

    def applied(self, synchronizer: AllReduce) -> AllReduce:
        """Returns a synchronizer with the options that are set."""
        options = {"group": self.group, "spec": self.all_reduce_spec, "compressor": self.compressor}
        return replace(synchronizer, **_set_options(options), local=self._local(synchronizer.local))

    def _local(self, before: LocalSteps | None) -> LocalSteps | None:
        """Returns the local steps with the options that are set; None if there are none."""
        steps = self.local_steps if self.local_steps is not None or before is None else before.steps
        if not steps:
            self._require_no_outer_step()
            return None
        return replace(before or LocalSteps(steps), steps=steps, **self._outer)

    @property
    def _outer(self) -> dict[str, Any]:
        return _set_options({"outer_learning_rate": self.outer_learning_rate, "outer_momentum": self.outer_momentum})

    def _require_no_outer_step(self) -> None:
        if self._outer:
            raise StrategyError(
                f"{listed(self._outer)} belong to the outer step after local steps, and local_steps is 0. Leave them "
                "out, or set local_steps to 1 or more."
            )


@dataclass(frozen=True)
class UseParameterServer:
    """Places the variable, or each of its shards, on one worker.

    Unset options keep the builder's choice if that is a parameter server too, and otherwise have the default.

    Attributes:
        owner: that worker's index or name, or one for each shard. Default: for each shard the worker that owns the
            fewest bytes relative to its bandwidth.
        sync: see ServerOptions. Default: true.
        staleness: see ServerOptions. Default: 0.
        local_proxy_variable: see ServerOptions.
        value_compressor: see ServerOptions; the kind NONE removes the builder's. Default: none.
        partition: the partitioning. Default: the builder's, for either synchronizer.
    """

    owner: Owner | tuple[Owner, ...] | None = None
    sync: bool | None = None
    staleness: Staleness | None = None
    local_proxy_variable: bool | None = None
    value_compressor: Compressor | None = None
    partition: Partition | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def applied(self, synchronizer: ParameterServer | None, is_sent_whole: bool) -> ParameterServer:
        """Returns a synchronizer with the options that are set, except for the owner.

        Args:
            synchronizer: the builder's; None if the builder chose no parameter server.
            is_sent_whole: see `ServerOptions.parameter_server`.
        """
        before = synchronizer or ParameterServer()
        asynchronous = None if self.sync is None else not self.sync
        options = {
            "asynchronous": asynchronous, "staleness": self.staleness, "value_compressor": self.value_compressor,
        }  # fmt: skip
        after = replace(before, **_set_options(options))
        proxy = self.local_proxy_variable
        if proxy is None:
            proxy = is_sent_whole if synchronizer is None else before.local_proxy
        return replace(after, local_proxy=proxy)


def _set_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value is not None}


@dataclass(frozen=True)
class Override:
    """The synchronizer of the variables that match a pattern.

    Attributes:
        pattern: a regular expression that matches the whole name of a variable.
        use: the synchronizer.
        place: its position, if it comes from a file.
    """

    pattern: str
    use: UseAllReduce | UseParameterServer
    place: Place | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise StrategyError(
                f"The pattern {self.pattern!r} is no regular expression: {error}.", self.place
            ) from error

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None
