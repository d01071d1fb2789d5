"""Whole cotangents: what a script computes with the gradient of a weight it computes once, with the whole gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.linearity import Grade, Linearity, find_linearity, is_nonlinear
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import VariableGradient
from autodist.graph.propagation import Mean, PerExample, Propagation, Replicated, Sum, Unknown
from autodist.graph.seeds import joined_calls
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

_HOLD_OTHERS = having(Trait.LOOP | Trait.BRANCH | Trait.CALL)
"""Of these it depends on their functions what they make."""


@dataclass(frozen=True)
class WholeCotangents(Kernel):
    """A function that stands between the gradient of a weight and what the script is given for it becomes an update.

    The gradient of a weight is, on each replica, a part of the whole one, and a function of parts is no part of the
    function's value. So the parts are joined before it. Where the function takes more than that gradient the step is
    refused.

        loss → dy → clip → g → update      becomes      loss → dy → (joined) → clip → update

    A cast from float16 is such a function, too: a sum that is too large for float16 is infinite on one device, which
    scaling of the loss waits for.
    """

    name: ClassVar[str] = "whole-cotangents"

    def apply(self, item: Step, context: Context) -> Step:
        if context.is_alone or not item.gradients:
            return item
        item = replace(item, gradients=tuple(_before_cast(item, gradient) for gradient in item.gradients))
        # Up to what runs once, and no less: the gradient of one weight may lead on to that of another, as in batch
        # normalisation the shift's does.
        once = find_stages(item).once
        seen = find_linearity(item.graph_index, [call.seed for call in item.gradient_calls], without=once)
        if not _bent(item, seen):
            return item
        flows = flows_of(item)
        seen = find_linearity(item.graph_index, _seeds_of_parts(item, flows), without=once)
        bent = _bent(item, seen)
        paths = _Paths(item, seen, flows)
        moved = {gradient: paths.whole(gradient) for gradient in bent}
        return replace(item, gradients=tuple(moved.get(g, g) for g in item.gradients))


def _bent(item: Step, seen: Linearity) -> list[VariableGradient]:
    return [gradient for gradient in item.gradients if seen.of(gradient.tensors[-1]) is Grade.BENT]


def _seeds_of_parts(item: Step, flows: Propagation) -> list[str]:
    """The seeds of gradients that may be parts; what is made of targets that all replicas have whole is whole."""
    joined = joined_calls(item)
    return [
        call.seed
        for k, call in enumerate(item.gradient_calls)
        if k in joined or not all(isinstance(flows.kind(target), Replicated) for target in call.targets)
    ]


def _before_cast(item: Step, gradient: VariableGradient) -> VariableGradient:
    """The gradient in float16, where that is what it is cast from."""
    node = item.graph_index.nodes[node_of(gradient.tensors[-1])]
    if gradient.is_sparse or node.op != "Cast" or node.attr["SrcT"].type != tf.float16.as_datatype_enum:
        return gradient
    half = tensor(node.input[0])
    is_read_here_alone = item.graph_index.consumers[node_of(half)] == [node.name] and half not in item.outputs
    return replace(gradient, tensors=(half,)) if is_read_here_alone else gradient


class _Paths:
    """What leads from the seeds to gradients that are not proportional to them."""

    def __init__(self, item: Step, seen: Linearity, flows: Propagation) -> None:
        self._item, self._seen, self._flows = item, seen, flows

    def whole(self, gradient: VariableGradient) -> VariableGradient:
        """The gradient to join, from which the noted one is made once.

        Raises:
            RewriteError: what is to be joined is not the gradient of that variable alone.
        """
        kind = self._flows.kind(gradient.tensors[-1])
        if isinstance(kind, Sum) or (gradient.is_sparse and isinstance(kind, PerExample)):
            return gradient
        behind = reach([node_of(gradient.tensors[-1])], self._bent_before)
        bends = [name for name in self._item.graph_index.order if name in behind and self._bends(name)]
        parts = {t: name for name in bends for t in self._read(name, Sum, Mean)}
        if not parts:
            self._tell(gradient, bends)
            return gradient
        whole = next((part for part in parts if self._is_all(gradient, part, behind)), None)
        if whole is not None:
            return replace(gradient, tensors=(whole,))
        part = next(iter(parts))
        node = self._item.graph_index.nodes[parts[part]]
        raise RewriteError(
            f"the gradient of {gradient.variable} is made by {node.name} ({node.op}) of {part}, of which each replica "
            "has a part that its own examples make, and what that function makes of parts does not add up to what it "
            "makes of the whole. Apply it to what tape.gradient or tf.gradients returns (tf.clip_by_norm(gradient, …), "
            "say), or to what has a row for each example."
        )

    def _bends(self, name: str) -> bool:
        """Whether a node makes something else than a part of what it reads parts of."""
        node = self._item.graph_index.nodes[name]
        if node.op in _HOLD_OTHERS:
            return name in self._seen.bends
        return node.op != "IdentityN" and is_nonlinear(node, [self._seen.of(i) for i in self._inputs(name)])

    def _bent_before(self, name: str) -> Iterator[str]:
        """The nodes that give a node something that is not proportional to the seeds."""
        return (node_of(i) for i in self._inputs(name) if self._seen.of(i) is Grade.BENT)

    def _inputs(self, name: str) -> list[str]:
        return [tensor(i) for i in self._item.graph_index.nodes[name].input if not is_control(i)]

    def _read(self, name: str, *kinds: type) -> list[str]:
        """What a node reads, of these kinds, that depends on the seeds."""
        return [i for i in self._inputs(name) if self._seen.depends(i) and isinstance(self._flows.kind(i), kinds)]

    def _is_all(self, gradient: VariableGradient, part: str, behind: set[str]) -> bool:
        """Whether a gradient is made of one sum over the examples, of its shape, and of what all replicas share."""
        spec_of, last = self._item.spec_of, node_of(gradient.tensors[-1])
        if gradient.is_sparse or not isinstance(self._flows.kind(part), Sum):
            return False
        variable = self._item.by_name[gradient.variable]
        if spec_of(part).shape.as_list() != list(variable.shape) or spec_of(part).dtype != variable.dtype:
            return False
        between = self._between(node_of(part), last)
        inner = between - {last}
        given = {i for name in between for i in self._inputs(name) if node_of(i) not in between and i != part}
        leads_elsewhere = any(not between.issuperset(self._readers(name)) for name in inner)
        alike = all(isinstance(self._flows.kind(i), Replicated) for i in given)
        return behind <= between and not leads_elsewhere and alike and between.issuperset(self._readers(node_of(part)))

    def _between(self, first: str, last: str) -> set[str]:
        """The nodes by way of which data comes from one node to another; that one itself, too."""
        after = reach(self._readers(first), lambda name: [] if name == last else self._readers(name))
        return reach([last], lambda name: [s for s in self._item.graph_index.data[name] if s in after])

    def _readers(self, name: str) -> list[str]:
        graph_index = self._item.graph_index
        return [c for c in graph_index.consumers[name] if name in graph_index.data[c]]

    def _tell(self, gradient: VariableGradient, bends: Sequence[str]) -> None:
        """Names what may be a function of parts, where it is not known whether they are."""
        for name in bends:
            for read in self._read(name, Unknown):
                kind = self._flows.kind(read)
                assert isinstance(kind, Unknown)
                log.warning(
                    "the gradient of %s is made by node %r (%s), which is not proportional to %s, and it is not known "
                    "whether that belongs to examples (%s): of a gradient that adds up the examples each replica has a "
                    "part alone.", gradient.variable, name, self._item.graph_index.nodes[name].op, read, kind.reason,
                    extra=ALIKE_EVERYWHERE,
                )  # fmt: skip
                return
