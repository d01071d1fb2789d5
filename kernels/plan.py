"""Plan: a strategy, resolved per variable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import cached_property

from autodist.compressors import NO_COMPRESSOR, Compressor
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.pipeline_schedule import SCHEDULES
from autodist.graph.recomputation import Block
from autodist.placement.holder import Copy
from autodist.placement.partitioning import part_name
from autodist.placement.synchrony import Synchrony, SyncMode
from autodist.proto import strategy_pb2
from autodist.synchronizers import (
    COLLECTIVES,
    HIERARCHICAL,
    AllReduce,
    LocalSteps,
    Synchronizer,
    named_synchronizers,
    placement_of,
)

CACHED_COPY = "/cached_copy"
"""Suffix of a cached copy's name in the session, after the name of its variable."""

LOCAL_COPY = "/local_copy"
"""Suffix of the name of the copy on which each worker makes its local steps."""


class Plan:
    """Answers queries about a strategy by variable, shard and pending reduction. Kernels read it, not the proto.

    Args:
        strategy: validated and without AUTO.

    Attributes:
        placement: the groups that hold the variables and compute the pipeline stages.
        schedule: the order in which a pipeline processes the micro-batches.
        recomputes: True if a pipeline stage recomputes its forward pass before the backward pass.
        prefetch: the number of layers that are gathered ahead of the layer that computes.
        recomputed_blocks: the blocks that the backward pass recomputes; in a pipeline, those that its stages recompute,
            where none means all layers.
    """

    def __init__(self, strategy: strategy_pb2.Strategy) -> None:
        self.placement = placement_of(strategy)
        coordinates = max(Counter(place.worker for place in strategy.mesh.places).values(), default=1)
        self._synchronizers = {
            name: one
            for k in range(coordinates)
            for node in strategy.nodes
            for name, one in named_synchronizers(node, part_name(node.variable, k))
        }
        self.schedule = SCHEDULES[strategy.pipeline.schedule]
        self.recomputes = strategy.pipeline.recompute
        self.prefetch = strategy.prefetch
        self.recomputed_blocks = tuple(Block(one.name, tuple(one.scopes)) for one in strategy.recomputed_blocks)

    @property
    def first_owner(self) -> int:
        """The owner of the first variable, or of its first shard; there is one if all variables are asynchronous."""
        owner = next(iter(self._synchronizers.values())).owner
        assert owner is not None, "an asynchronous variable has an owner"
        return owner

    @cached_property
    def collective(self) -> str | None:
        """The collective that all variables use, if any. No other transport may then be used at the same time."""
        return next((one.way for one in self._synchronizers.values() if one.way in COLLECTIVES), None)

    def owner(self, variable: str) -> int | None:
        """Returns the worker that owns a variable, or None if every worker has it."""
        return self._synchronizers[variable].owner if variable in self._synchronizers else None

    def synchrony(self, variable: str) -> Synchrony | None:
        """Returns the synchronization of a variable that one worker owns, or that has local steps."""
        return self._synchronizers[variable].synchrony if variable in self._synchronizers else None

    def has_cached_copy(self, variable: str) -> bool:
        """Returns True if every worker caches a copy of an owned variable for its replicas to read."""
        return variable in self.cached_copies

    @cached_property
    def cached_copies(self) -> dict[str, tuple[Copy, ...]]:
        """The cached copies of each owned variable or shard that has one, by name."""
        return {
            name: (Copy(CACHED_COPY, one.value_encoding, _differs(one)),)
            for name, one in self._synchronizers.items() if one.has_cached_copy
        }  # fmt: skip

    @cached_property
    def local_steps(self) -> dict[str, LocalSteps]:
        """The local steps of each variable or shard that has them, by name."""
        every = self._synchronizers.items()
        return {name: one.local for name, one in every if isinstance(one, AllReduce) and one.local is not None}

    @cached_property
    def copies(self) -> dict[str, tuple[Copy, ...]]:
        """All copies of each variable or shard that has any, by name."""
        return self.cached_copies | dict.fromkeys(self.local_steps, (Copy(LOCAL_COPY),))

    @property
    def is_asynchronous(self) -> bool:
        """True if every trained variable is updated with each worker's gradient separately."""
        return self._modes == {SyncMode.ASYNCHRONOUS}

    @property
    def updates_alone(self) -> bool:
        """True if each update of a trained variable has the gradient of one worker."""
        return bool(self._modes) and all(mode is not None and mode.is_alone for mode in self._modes)

    @cached_property
    def _modes(self) -> set[SyncMode | None]:
        """The sync modes of all variables; None: every worker makes the same updates."""
        synchronies = (one.synchrony for one in self._synchronizers.values())
        return {None if synchrony is None else synchrony.mode for synchrony in synchronies}

    def synchronizer(self, pending: PendingReduction) -> Synchronizer | None:
        """Returns the synchronizer of a gradient; None for other pending reductions."""
        is_gradient = pending.kind is PendingReductionKind.GRADIENT
        return self._synchronizers.get(pending.variable) if is_gradient and pending.variable else None

    def uses_shuffle(self, pending: PendingReduction) -> bool:
        synchronizer = self.synchronizer(pending)
        return self.collective is None and (synchronizer is None or synchronizer.owner is None)

    def uses_subgroups(self, pending: PendingReduction) -> bool:
        """Returns True if a value is reduced within subgroups first, if there are any; True without a variable."""
        synchronizer = self.synchronizer(pending)
        return not isinstance(synchronizer, AllReduce) or synchronizer.way == HIERARCHICAL

    def fusion_group(self, pending: PendingReduction) -> Hashable:
        """Returns the fusion group that the strategy sets for a pending reduction; only its members share buckets."""
        return None if pending.variable is None else self._synchronizers[pending.variable].group

    def compressor(self, pending: PendingReduction) -> Compressor:
        """Returns the compressor that is applied to a gradient before it is sent, if any."""
        synchronizer = self.synchronizer(pending)
        return synchronizer.compressor if isinstance(synchronizer, AllReduce) else NO_COMPRESSOR


def _differs(synchronizer: Synchronizer) -> bool:
    """Returns True if a cached copy may have another value than the owned variable: an older or rounded one."""
    synchrony = synchronizer.synchrony
    return bool(synchronizer.value_encoding) or (synchrony is not None and synchrony.runs_ahead)
