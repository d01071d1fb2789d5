"""ConstrainTensors: the layouts that the strategy has for tensors become constraints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import tensor
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.annotated import put_identity
from autodist.proto import strategy_pb2
from autodist.sharding import Annotations, Constraint, Origin, Sharding

SUFFIX = "/constrained"
"""Suffix of the name of a constraint, after that of its tensor's node."""


@dataclass(frozen=True)
class ConstrainTensors(Kernel[CapturedStep, CapturedStep]):
    """Puts a constraint behind the first result of each node that a pattern of the strategy matches.

    Everything that reads the tensor then reads the constraint, as behind `ad.constrain` in the script.

        y = Relu(x), y·y    with the layout [–, b] for y    becomes    c = C[–, b](y), c·c
    """

    name: ClassVar[str] = "constrain-tensors"

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        found = dict(_matched(step, context.strategy.mesh.tensors))
        if not found:
            return step
        editor = StepEditor(step)
        for name in found:
            put_identity(editor, tensor(name), name + SUFFIX)
            editor[name + SUFFIX].device = editor[name].device
        constraints = {name + SUFFIX: one for name, one in found.items()}
        given = step.annotations or Annotations({})
        return editor.to_step(annotations=replace(given, constraints={**given.constraints, **constraints}))


def _matched(step: CapturedStep, layouts: Iterable[strategy_pb2.TensorSharding]) -> Iterator[tuple[str, Constraint]]:
    """Yields the nodes without a constraint yet that a pattern matches, each with its sharding.

    Raises:
        StrategyError: two patterns match a node and request different shardings.
    """
    by_node: dict[str, strategy_pb2.TensorSharding] = {}
    for one in layouts:
        for name in step.graph_index.nodes:
            if not re.fullmatch(one.pattern, name) or not _can_be_divided(step, name):
                continue
            other = by_node.setdefault(name, one)
            if other.sharding != one.sharding:
                raise StrategyError(
                    f"The patterns {other.pattern!r} and {one.pattern!r} of `tensors` match {name} and request "
                    f"{other.sharding} and {one.sharding}. Change them so that one of them matches it."
                )
    for name, one in by_node.items():
        yield name, Constraint(Sharding.parse(one.sharding), Origin(f"tensors: {one.pattern!r}"))


def _can_be_divided(step: CapturedStep, name: str) -> bool:
    """Returns True for a node whose first result is a tensor of values, and that has no constraint yet."""
    if name.endswith(SUFFIX) or name + SUFFIX in step.graph_index.nodes:
        return False
    try:
        dtype = step.spec_of(tensor(name)).dtype
    except KeyError:  # it has no result
        return False
    return dtype not in (tf.resource, tf.variant)
