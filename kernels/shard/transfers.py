"""The transfers that bring the parts of a tensor from one division into another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autodist.kernels.shard.propagate import Axes
from autodist.kernels.shard.reshards import Reshard, ReshardKind


@dataclass(frozen=True)
class State:
    """The parts of a tensor that the places hold.

    Attributes:
        axes: that divide each dimension.
        partial: the axes over which the parts are still to be reduced.
        how: the reduction.
    """

    axes: tuple[Axes, ...]
    partial: Axes = ()
    how: str = "sum"

    @property
    def is_whole(self) -> bool:
        return not self.partial and not any(self.axes)


def transfers(state: State, axes: tuple[Axes, ...]) -> list[Reshard]:
    """Returns the transfers that bring a tensor from one state into another, reduced one.

    A reduction along an axis that is to divide a dimension is a reduce-scatter. Slices come first, since they make the
    tensor smaller; gathers come last.
    """
    found: list[Reshard] = []
    for step in (_reductions, _slices, _moves, _gathers, _slices):
        for reshard in step(state, axes):
            found.append(reshard)
            state = after(state, reshard)
    return found


def _reductions(state: State, axes: tuple[Axes, ...]) -> Iterator[Reshard]:
    left = state.partial
    for at, (old, new) in enumerate(zip(state.axes, axes, strict=True)):
        more = new[len(old) :]
        if state.how == "sum" and more and new[: len(old)] == old and {*more} <= {*left}:
            left = tuple(axis for axis in left if axis not in more)
            yield Reshard(ReshardKind.REDUCE_SCATTER, more, at, at)
    if left:
        yield Reshard(ReshardKind.ALL_REDUCE, left, how=state.how)


def _slices(state: State, axes: tuple[Axes, ...]) -> Iterator[Reshard]:
    """Yields slices along axes that divide no dimension so far."""
    used = {axis for old in state.axes for axis in old}
    for at, (old, new) in enumerate(zip(state.axes, axes, strict=True)):
        more = new[len(old) :]
        if more and new[: len(old)] == old and used.isdisjoint(more):
            yield Reshard(ReshardKind.SLICE, more, at, at)


def _moves(state: State, axes: tuple[Axes, ...]) -> Iterator[Reshard]:
    """Yields transfers of the last axes of one dimension to the end of another one."""
    now = list(state.axes)
    for at, new in enumerate(axes):
        more = new[len(now[at]) :]
        if not more or new[: len(now[at])] != now[at]:
            continue
        source = next((k for k, other in enumerate(now) if k != at and other[_same(other, axes[k]) :] == more), None)
        if source is not None:
            now[source], now[at] = now[source][: -len(more)], new
            yield Reshard(ReshardKind.ALL_TO_ALL, more, source, at)


def _gathers(state: State, axes: tuple[Axes, ...]) -> Iterator[Reshard]:
    for at, (old, new) in enumerate(zip(state.axes, axes, strict=True)):
        if lost := old[_same(old, new) :]:
            yield Reshard(ReshardKind.ALL_GATHER, lost, at)


def after(state: State, reshard: Reshard) -> State:
    """Returns the state of a tensor after a transfer."""
    axes = list(state.axes)
    if reshard.kind is ReshardKind.ALL_REDUCE:
        return State(state.axes)
    if reshard.kind in (ReshardKind.ALL_GATHER, ReshardKind.ALL_TO_ALL):
        axes[reshard.dimension] = axes[reshard.dimension][: -len(reshard.axes)]
    if reshard.kind is not ReshardKind.ALL_GATHER:
        axes[reshard.split] = (*axes[reshard.split], *reshard.axes)
    partial = state.partial
    if reshard.kind is ReshardKind.REDUCE_SCATTER:
        partial = tuple(a for a in partial if a not in reshard.axes)
    return replace(state, axes=tuple(axes), partial=partial)


def _same(left: Axes, right: Axes) -> int:
    """Returns the length of the common prefix."""
    return next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
