"""ShardTensors: turns a step into the program that each place of a mesh runs on its parts of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import tensorflow as tf

from autodist.graph.flows import flows_of
from autodist.graph.names import as_input, data_inputs, is_control, node_of, tensor
from autodist.graph.node_rules import ROW, NodeRule, Rules, Side
from autodist.graph.ops import Factor, ReducedBy, Trait, having
from autodist.graph.parts import GradientCall, Variable
from autodist.graph.step import PlacedStep
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.divisible import require_lengths, without_batch_axis
from autodist.kernels.shard.holders import holder_of_part
from autodist.kernels.shard.lengths import Lengths
from autodist.kernels.shard.manual import ManualRegions
from autodist.kernels.shard.own_rows import OwnRows
from autodist.kernels.shard.part_shapes import OF_DIAGONALS, divide_shape, ensure_shape, list_squeezed
from autodist.kernels.shard.partials import Operand, Passed, passed_on
from autodist.kernels.shard.program import Program
from autodist.kernels.shard.propagate import Axes, Shardings, dividing, members_of, unused
from autodist.kernels.shard.resharded_flows import ReshardedFlows
from autodist.kernels.shard.softmaxes import split_softmaxes
from autodist.kernels.shard.transfers import State, transfers
from autodist.kernels.shard.whole_copies import WholeCopies
from autodist.sharding import Mesh

_LENGTHS = having(Trait.LENGTHS)

_HOW = {ReducedBy.SUM: "sum", ReducedBy.MEAN: "mean", ReducedBy.MAX: "max", ReducedBy.MIN: "min"}
"""Reductions that a transfer completes. An operand of another reduction is gathered first."""


@dataclass(frozen=True)
class ShardTensors(Kernel[PlacedStep, PlacedStep]):
    """Computes each node on parts of its operands, as the shardings of its result divide them.

    Each place of the mesh runs the same program. Reshard nodes stand where parts have to be exchanged: `LowerReshards`
    replaces them. A reduced factor that is divided leaves partial values. These pass ops that are linear in them, and
    are reduced where another op reads them. An op without a factor rule gets its operands whole.

        MatMul(x, w)    becomes, for w divided along its rows,    all_reduce(MatMul(slice(x), w))

    Source: GSPMD (Xu et al., 2021) and Shardy (OpenXLA).
    """

    name: ClassVar[str] = "shard-tensors"
    after: ClassVar[Mapping[str, str]] = {
        "assign-owners": "the slots of a divided variable are known",
        "unite-groups": "the annotations of the script and of the strategy are in normal form",
    }

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        if context.mesh is None:
            return step
        mesh = context.mesh
        step = without_batch_axis(step, context.strategy.mesh.data)
        rules = Rules(step)
        if step.annotations is not None:
            require_lengths(step.annotations.constraints, mesh, rules)
        shardings = _propagated(step, mesh, rules)
        arithmetic = split_softmaxes(step, rules, shardings)
        if arithmetic is not step:
            step, rules = arithmetic, Rules(arithmetic)
            shardings = _propagated(step, mesh, rules)
        return _ShardingTensors(step, mesh, rules, shardings).run()


def _propagated(step: PlacedStep, mesh: Mesh, rules: Rules) -> Shardings:
    shardings = Shardings(step, mesh, rules)
    shardings.propagate()
    return shardings


class _ShardingTensors:
    """The work of one `ShardTensors.apply`."""

    def __init__(self, step: PlacedStep, mesh: Mesh, rules: Rules, shardings: Shardings) -> None:
        self.step, self.mesh, self.rules, self.shardings = step, mesh, rules, shardings
        self.program = Program(step, mesh, rules, shardings)
        self.editor = self.program.editor
        self.manual = ManualRegions(step, mesh, rules)
        self._outputs = frozenset(map(tensor, step.outputs))
        self._own_rows, self._lengths = OwnRows(self.program), Lengths(self.program)
        self._copies = WholeCopies(step, self.editor, self.program.gathered, self.program.own_part)

    def run(self) -> PlacedStep:
        flows = self.step.flows or flows_of(self.step)
        for name in self.step.graph_index.order:
            self._shard(name)
        self._copies.order()
        self.editor.set_outputs([self.program.whole(name) for name in self.step.outputs])
        shardings = {v.name: self.shardings.of(v.handle, len(v.shape)) for v in self.step.variables}
        divided = {name: one for name, one in shardings.items() if one.divides}
        return self.editor.to_step(
            variables=(*map(self._variable, self.step.variables), *self._copies.variables),
            shardings=divided,
            holders={
                name: holder_of_part(one, self._variable(self.step.by_name[name]))
                for name, one in self.step.holders.items()
            },
            gradients=tuple(
                replace(gradient, tensors=tuple(map(self.program.current, gradient.tensors)))
                for gradient in self.step.gradients
            ),
            gradient_calls=tuple(self._call(c) for c in self.step.gradient_calls),
            flows=ReshardedFlows(flows, self.program.source_of, frozenset(self.program.added)),
        )

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _shard(self, name: str) -> None:
        node, rule = self.step.graph_index.nodes[name], self.rules.of(name)
        if node.op in _LENGTHS:
            self._lengths.measure(node)
            return
        is_exact = self.manual.is_exact(name)
        axes = self._exact(rule) if is_exact else self._choose(rule)
        others = self._in_other_axes(rule, axes)
        passed = None if is_exact else self._passed_on(rule, axes)
        inputs = self._inputs(rule, axes, passed)
        if node.op in OF_DIAGONALS and (side := rule.operands[0]) is not None:
            inputs[0] = self._of_known_shape(name, inputs[0], side, _of_side(side, axes))
        self.editor.set_inputs(name, [*map(as_input, inputs), *filter(is_control, node.input)])
        if node.op == "EnsureShape" and (result := rule.results[0]) is not None:
            divide_shape(self.editor[name], self.mesh, _of_side(result, axes))
        if node.op == "Squeeze":
            list_squeezed(self.editor[name], rule)
        for variable in others:
            self._copies.use(name, variable)
        reduced, how = self._reduced(rule, axes)
        for k, side in enumerate(rule.results):
            if side is not None or reduced or passed:
                state = State(() if side is None else _of_side(side, axes), reduced, how)
                self.program.made(
                    f"{name}:{k}", State(state.axes, self.mesh.ordered(passed.partial), passed.how) if passed else state
                )
                if axes.get(ROW):
                    self._own_rows.mask(name, state)

    def _inputs(self, rule: NodeRule, axes: Mapping[Factor, Axes], passed: Passed | None) -> list[str]:
        """Returns the data inputs of a node, divided by `axes`; partial values of the operands `passed` stay so."""
        stay, first = (passed.positions, passed.first) if passed else ((), {})
        inputs = data_inputs(rule.node)
        for position, side in enumerate(rule.operands):
            if side is None or self._is_variable(side) or position in stay:
                inputs[position] = self.program.current(inputs[position])
            else:
                wanted = _of_side(side, axes)
                state = self.program.state(inputs[position]) or State(((),) * len(wanted))
                self.manual.check(rule.node.name, inputs[position], transfers(state, wanted))
                inputs[position] = self.program.in_state(inputs[position], wanted)
            if position in first:
                inputs[position] = self.program.on_first(inputs[position], first[position])
        for position in rule.rule.lengths if rule.rule else ():
            result = rule.results[0]
            if result is not None:
                inputs[position] = self._lengths.divided(
                    inputs[position], f"{rule.node.name}:0", _of_side(result, axes)
                )
        return self._own_rows.select(rule, axes[ROW], inputs) if axes.get(ROW) else inputs

    def _choose(self, rule: NodeRule) -> dict[Factor, Axes]:
        """Returns the axes along which each factor of a node is divided."""
        factors = members_of(rule)
        results = {f for side in rule.results if side is not None for f in side.factors}
        # Factors of a variable first, then those of the results, then reduced ones; the larger tensors first.
        chosen: dict[Factor, Axes] = {}
        used: set[str] = set()
        order = sorted(
            factors,
            key=lambda f: (
                not any(self._is_variable(m.side) for m in factors[f]),
                f not in results,
                -max(prod(n or 1 for n in m.side.lengths) for m in factors[f]),
            ),
        )
        for factor in order:
            members = factors[factor]
            if factor not in results and rule.results and not self._is_completed(rule):
                chosen[factor] = ()
                continue
            variables = [m for m in members if self._is_variable(m.side)]
            if len({self._axes(m.side)[m.dimension] for m in variables}) > 1:  # an update of one, and of its slots
                chosen[factor] = ()
                continue
            wanted = [m for m in members if m.side in rule.results] if factor in results else []
            wanted += sorted(members, key=lambda m: -prod(n or 1 for n in m.side.lengths))
            found = next((a for m in variables or wanted if (a := self._axes(m.side)[m.dimension])), ())
            lengths = [m.side.lengths[m.dimension] for m in members]
            chosen[factor] = dividing(self.mesh, unused(found, used), lengths)
            used.update(chosen[factor])
        return chosen

    def _exact(self, rule: NodeRule) -> dict[Factor, Axes]:
        """Returns the axes of a node whose result has the requested sharding: an end or a collective of a region."""
        (result,) = rule.results
        assert result is not None, "its rank is known"
        return {f: axes for f, axes in zip(result.factors, self._axes(result), strict=True) if f is not None}

    def _is_completed(self, rule: NodeRule) -> bool:
        """Returns True if a transfer completes the reduction of a node's parts; a mean of integers is rounded."""
        if rule.rule is None:
            return True
        is_rounded = self.step.spec_of(f"{rule.node.name}:0").dtype.is_integer
        return rule.rule.reduced in _HOW and not (is_rounded and rule.rule.reduced is ReducedBy.MEAN)

    def _axes(self, side: Side) -> tuple[Axes, ...]:
        return self.shardings.of(side.key, len(side.lengths)).axes

    def _is_variable(self, side: Side) -> bool:
        return side.key in self.step.by_handle

    def _in_other_axes(self, rule: NodeRule, axes: Mapping[Factor, Axes]) -> list[Variable]:
        """Returns the divided variables that a node needs in another way than they are divided."""
        return [
            self.step.by_handle[side.key]
            for side in dict.fromkeys(rule.operands)
            if side is not None and self._is_variable(side) and self._axes(side) != _of_side(side, axes)
        ]

    def _reduced(self, rule: NodeRule, axes: Mapping[Factor, Axes]) -> tuple[Axes, str]:
        """Returns the axes over which the results of a node are partial, and the reduction that completes them."""
        kept = {f for side in rule.results if side is not None for f in side.factors}
        kept |= {f for r in (rule.rule.results if rule.rule else ()) for f in r if f is not None}
        over = tuple(a for factor, found in axes.items() if factor not in kept for a in found)
        if not over or not rule.results or rule.rule is None or rule.rule.reduced is None:
            return (), "sum"
        return self.mesh.ordered(over), _HOW[rule.rule.reduced]

    def _passed_on(self, rule: NodeRule, axes: Mapping[Factor, Axes]) -> Passed | None:
        """Returns the partial operands that a node passes on; None if it passes none on."""
        name, result = rule.node.name, rule.results[0] if rule.results else None
        # A list of tensors, or a tensor of unknown rank, cannot be reduced later.
        if len(rule.results) != 1 or result is None or None in rule.operands or self._reduced(rule, axes)[0]:
            return None
        inputs = data_inputs(rule.node)
        operands = [self._operand(name, i, side, axes) for i, side in zip(inputs, rule.operands, strict=True)]
        dtype = self.step.spec_of(f"{name}:0").dtype
        if dtype == tf.variant or not any(operand.partial for operand in operands):
            return None
        elements = self._elements(f"{name}:0", _of_side(result, axes))
        passed = passed_on(rule.node.op, operands, elements, dtype.size, dtype.is_integer)
        if passed is not None and any(axis in passed.partial for found in axes.values() for axis in found):
            return None
        return passed

    def _operand(self, reader: str, name: str, side: Side | None, axes: Mapping[Factor, Axes]) -> Operand:
        state = self.program.state(name)
        if side is None or state is None:
            return Operand(None, False, 0)
        can_stay = state.axes == _of_side(side, axes) and not self._has_other_readers(name, reader)
        return Operand(state, can_stay, self._elements(side.key, state.axes))

    def _elements(self, name: str, axes: Sequence[Axes]) -> int:
        """Returns the number of elements of a place's part of a captured tensor."""
        lengths = self.rules.static.shape(name).as_list()
        return prod(length or 1 for length in lengths) // prod(self.mesh.count(own) for own in axes)

    def _has_other_readers(self, name: str, reader: str) -> bool:
        """Returns True if a tensor is an output, or is read by another node."""
        consumers = self.step.graph_index.consumers[node_of(name)]
        reading = [c for c in consumers if tensor(name) in self.step.graph_index.inputs(c)]
        return tensor(name) in self._outputs or set(reading) != {reader}

    def _of_known_shape(self, reader: str, name: str, side: Side, axes: Sequence[Axes]) -> str:
        source = self.program.source(name)
        made = ensure_shape(self.editor, reader, name, self.program.dtype(source), side, self.mesh, axes)
        self.program.source_of[made] = source
        return made

    # -- fields of the step ----------------------------------------------------------------------------------------

    def _variable(self, variable: Variable) -> Variable:
        axes = self.program.axes_of(variable)
        if not any(axes):
            return variable
        shape = tuple(n // self.mesh.count(a) for n, a in zip(variable.shape, axes, strict=True))
        self.editor[variable.handle].attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        return replace(variable, shape=shape)

    def _call(self, call: GradientCall) -> GradientCall:
        terms = tuple(replace(term, tensor=self.program.current(term.tensor)) for term in call.terms)
        return replace(call, targets=tuple(map(self.program.current, call.targets)), terms=terms)


def _of_side(side: Side, axes: Mapping[Factor, Axes]) -> tuple[Axes, ...]:
    return tuple(() if factor is None else axes.get(factor, ()) for factor in side.factors)
