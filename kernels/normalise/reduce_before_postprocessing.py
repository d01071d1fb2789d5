"""Reduces gradients before nonlinear functions of the backward pass, which then run once, on the reduced gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import VariableGradient
from autodist.graph.seeds import reduced_calls
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.layout import Mean, PerExample, Propagation, Replicated, Sum, Unknown
from autodist.layout.linearity import Grade, Linearity, find_linearity, is_nonlinear
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

_HOLD_OTHERS = having(Trait.LOOP | Trait.BRANCH | Trait.CALL)
"""Ops whose linearity depends on their functions."""


@dataclass(frozen=True)
class ReduceBeforePostprocessing(Kernel[CapturedStep, CapturedStep]):
    """Moves nonlinear functions at the end of the backward pass, such as clipping, into the update.

    On each replica, the gradient of a weight is a part of a sum. The results of a nonlinear function on the parts do
    not add up to its result on the sum. The parts are therefore reduced before the function. If the function has other
    inputs that depend on the batch, the step is refused.

        loss → dy → clip → g → update      becomes      loss → dy → (reduced) → clip → update

    A cast from float16 is such a function, too: a sum that overflows float16 is infinite on one device, and loss
    scaling depends on that.
    """

    name: ClassVar[str] = "reduce-before-postprocessing"
    after: ClassVar[Mapping[str, str]] = {
        "settle-losses": "it removes the nodes that capture inserted into losses, before arithmetic is analysed",
        "settle-sums": "it decides which all-reduces remain",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if context.single_replica or not step.gradients:
            return step
        step = replace(step, gradients=tuple(_before_cast(step, gradient) for gradient in step.gradients))
        # The walk stops only at nodes that run once. The gradient of one weight may depend on that of another, as on
        # the gradient of the shift in batch normalisation.
        once = find_stages(step).once
        seen = find_linearity(step.graph_index, [call.seed for call in step.gradient_calls], without=once)
        if not _nonlinear(step, seen):
            return step
        flows = flows_of(step)
        seen = find_linearity(step.graph_index, _seeds_of_parts(step, flows), without=once)
        nonlinear = _nonlinear(step, seen)
        paths = _Paths(step, seen, flows)
        moved = {gradient: paths.whole(gradient) for gradient in nonlinear}
        paths.warn()
        return replace(step, gradients=tuple(moved.get(g, g) for g in step.gradients))


def _nonlinear(step: CapturedStep, seen: Linearity) -> list[VariableGradient]:
    return [gradient for gradient in step.gradients if seen.of(gradient.tensors[-1]) is Grade.NONLINEAR]


def _seeds_of_parts(step: CapturedStep, flows: Propagation) -> list[str]:
    """Returns the seeds of gradients that may be partial sums; gradients of replicated targets are complete."""
    reduced = reduced_calls(step)
    return [
        call.seed
        for k, call in enumerate(step.gradient_calls)
        if k in reduced or not all(isinstance(flows.kind(target), Replicated) for target in call.targets)
    ]


def _before_cast(step: CapturedStep, gradient: VariableGradient) -> VariableGradient:
    """Returns the gradient in float16, if the captured gradient is a cast of it."""
    node = step.graph_index.nodes[node_of(gradient.tensors[-1])]
    if gradient.is_sparse or node.op != "Cast" or node.attr["SrcT"].type != tf.float16.as_datatype_enum:
        return gradient
    original = tensor(node.input[0])
    has_one_reader = step.graph_index.consumers[node_of(original)] == [node.name] and original not in step.outputs
    return replace(gradient, tensors=(original,)) if has_one_reader else gradient


class _Paths:
    """The paths from the seeds to gradients that are not proportional to them."""

    def __init__(self, step: CapturedStep, seen: Linearity, flows: Propagation) -> None:
        self._step, self._seen, self._flows = step, seen, flows
        self._uncertain: dict[tuple[str, str], list[str]] = {}

    def warn(self) -> None:
        """Logs a warning for each node that may be a nonlinear function of partial sums."""
        for (name, read), variables in self._uncertain.items():
            kind = self._flows.kind(read)
            assert isinstance(kind, Unknown)
            more = f" (and of {len(variables) - 1} more)" if variables[1:] else ""
            log.warning(
                "the gradient of %s%s is computed by node %r (%s), which is not proportional to %s. It is unknown "
                "whether that tensor has a row for each example (%s); of a gradient that sums over examples, each "
                "replica has only a part.", variables[0], more, name,
                self._step.graph_index.nodes[name].op, read, kind.reason, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def whole(self, gradient: VariableGradient) -> VariableGradient:
        """Returns the gradient to reduce, from which the captured gradient is computed once.

        Raises:
            RewriteError: the tensor to reduce depends on more than the gradient of that variable.
        """
        kind = self._flows.kind(gradient.tensors[-1])
        if isinstance(kind, Sum) or (gradient.is_sparse and isinstance(kind, PerExample)):
            return gradient
        behind = reach([node_of(gradient.tensors[-1])], self._nonlinear_inputs)
        nonlinear = [name for name in self._step.graph_index.order if name in behind and self._is_nonlinear(name)]
        parts = {t: name for name in nonlinear for t in self._read(name, Sum, Mean)}
        if not parts:
            self._note_uncertain(gradient, nonlinear)
            return gradient
        whole = next((part for part in parts if self._depends_only_on(gradient, part, behind)), None)
        if whole is not None:
            return replace(gradient, tensors=(whole,))
        part = next(iter(parts))
        node = self._step.graph_index.nodes[parts[part]]
        raise RewriteError(
            f"the gradient of {gradient.variable} is computed by {node.name} ({node.op}) from {part}, and each "
            "replica has only the part of its own examples. The function is not linear, so its values on parts do not "
            "add up to its value on the sum. Apply it to the result of tape.gradient or tf.gradients (for example "
            "tf.clip_by_norm(gradient, …)), or to a tensor that has a row for each example."
        )

    def _is_nonlinear(self, name: str) -> bool:
        """Returns True if a node is a nonlinear function of partial sums."""
        node = self._step.graph_index.nodes[name]
        if node.op in _HOLD_OTHERS:
            return name in self._seen.nonlinear
        return node.op != "IdentityN" and is_nonlinear(
            node, [self._seen.of(i) for i in self._step.graph_index.inputs(name)]
        )

    def _nonlinear_inputs(self, name: str) -> Iterator[str]:
        """Returns the producers of a node's inputs that are not proportional to the seeds."""
        return (node_of(i) for i in self._step.graph_index.inputs(name) if self._seen.of(i) is Grade.NONLINEAR)

    def _read(self, name: str, *kinds: type) -> list[str]:
        """Returns a node's inputs of these kinds that depend on the seeds."""
        return [
            i
            for i in self._step.graph_index.inputs(name)
            if self._seen.depends(i) and isinstance(self._flows.kind(i), kinds)
        ]

    def _depends_only_on(self, gradient: VariableGradient, part: str, behind: set[str]) -> bool:
        """Returns True if a gradient depends only on one sum over examples, of its shape, and on replicated tensors."""
        spec_of, last = self._step.spec_of, node_of(gradient.tensors[-1])
        if gradient.is_sparse or not isinstance(self._flows.kind(part), Sum):
            return False
        variable = self._step.by_name[gradient.variable]
        if spec_of(part).shape.as_list() != list(variable.shape) or spec_of(part).dtype != variable.dtype:
            return False
        between = self._between(node_of(part), last)
        inner = between - {last}
        entering = {
            i
            for name in between
            for i in self._step.graph_index.inputs(name)
            if node_of(i) not in between and i != part
        }
        leads_elsewhere = any(not between.issuperset(self._step.graph_index.readers(name)) for name in inner)
        is_replicated = all(isinstance(self._flows.kind(i), Replicated) for i in entering)
        return (
            behind <= between
            and not leads_elsewhere
            and is_replicated
            and between.issuperset(self._step.graph_index.readers(node_of(part)))
        )

    def _between(self, first: str, last: str) -> set[str]:
        """Returns the nodes on data paths from one node to another, the latter included."""
        after = reach(
            self._step.graph_index.readers(first),
            lambda name: [] if name == last else self._step.graph_index.readers(name),
        )
        return reach([last], lambda name: [s for s in self._step.graph_index.data[name] if s in after])

    def _note_uncertain(self, gradient: VariableGradient, nonlinear: Sequence[str]) -> None:
        """Notes the first node on the way to a gradient that may be a function of partial sums."""
        found = ((name, read) for name in nonlinear for read in self._read(name, Unknown))
        first = next(found, None)
        if first is not None:
            self._uncertain.setdefault(first, []).append(gradient.variable)
