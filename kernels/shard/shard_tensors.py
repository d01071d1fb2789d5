"""ShardTensors: turns a step into the program that each place of a mesh runs on its parts of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import tensorflow as tf

from autodist.graph.flows import flows_of
from autodist.graph.names import as_input, is_control, node_of, tensor
from autodist.graph.node_rules import ROW, NodeRule, Rules, Side
from autodist.graph.ops import Factor, ReducedBy, Trait, having
from autodist.graph.parts import GradientCall, Variable, VariableGradient
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.divisible import require_lengths, without_batch_axis
from autodist.kernels.shard.holders import holder_of_part
from autodist.kernels.shard.manual import ManualRegions
from autodist.kernels.shard.part_shapes import OF_DIAGONALS, divide_shape, ensure_shape, list_squeezed
from autodist.kernels.shard.partials import Operand, Passed, passed_on
from autodist.kernels.shard.propagate import Axes, Shardings, dividing, members_of, unused
from autodist.kernels.shard.resharded_flows import ReshardedFlows
from autodist.kernels.shard.reshards import add_index, add_reshard
from autodist.kernels.shard.softmaxes import split_softmaxes
from autodist.kernels.shard.transfers import State, after, transfers
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
        self.editor = StepEditor(step)
        self.manual = ManualRegions(step, mesh, rules)
        self.flows = step.flows or flows_of(step)
        self.states: dict[str, State] = {}
        self.source_of: dict[str, str] = {}
        self._now: dict[str, str] = {}
        self._resharded: dict[tuple[str, tuple[Axes, ...]], str] = {}
        self._own_rows: dict[str, str] = {}
        self._of_first: dict[tuple[str, Axes], str] = {}
        self._index: dict[Axes, str] = {}
        batches = [step.spec_of(name).shape[axis] for name, axis in step.inputs.items() if axis is not None]
        self._has_open_batch = all(length is None for length in batches)
        self._outputs = frozenset(map(tensor, step.outputs))
        self._fixed = dict(self._fixed_states())
        self._added: dict[str, tf.TensorSpec] = {}
        self._copies = WholeCopies(step, self.editor, self._gathered, self._own_part)

    def run(self) -> PlacedStep:
        for name in self.step.graph_index.order:
            self._shard(name)
        self._copies.order()
        outputs = [self._whole(name) for name in self.step.outputs]
        self.editor.set_outputs(outputs)
        shardings = {v.name: self.shardings.of(v.handle, len(v.shape)) for v in self.step.variables}
        divided = {name: one for name, one in shardings.items() if one.divides}
        return self.editor.to_step(
            variables=(*map(self._variable, self.step.variables), *self._copies.variables),
            shardings=divided,
            holders={
                name: holder_of_part(one, self._variable(self.step.by_name[name]))
                for name, one in self.step.holders.items()
            },
            gradients=tuple(self._gradient(g) for g in self.step.gradients),
            gradient_calls=tuple(self._call(c) for c in self.step.gradient_calls),
            flows=ReshardedFlows(self.flows, self.source_of, frozenset(self._added)),
        )

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _shard(self, name: str) -> None:
        node, rule = self.step.graph_index.nodes[name], self.rules.of(name)
        if node.op in _LENGTHS:
            self._measure(node)
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
                self._made(
                    f"{name}:{k}", State(state.axes, self.mesh.ordered(passed.partial), passed.how) if passed else state
                )
                if axes.get(ROW):
                    self._mask_rows(name, state)

    def _inputs(self, rule: NodeRule, axes: Mapping[Factor, Axes], passed: Passed | None) -> list[str]:
        """Returns the data inputs of a node, divided by `axes`; partial values of the operands `passed` stay so."""
        stay, first = (passed.positions, passed.first) if passed else ((), {})
        inputs = [i for i in rule.node.input if not is_control(i)]
        for position, side in enumerate(rule.operands):
            if side is None or self._is_variable(side) or position in stay:
                inputs[position] = self._current(inputs[position])
            else:
                wanted = _of_side(side, axes)
                state = self._state(inputs[position]) or State(((),) * len(wanted))
                self.manual.check(rule.node.name, inputs[position], transfers(state, wanted))
                inputs[position] = self._in_state(inputs[position], wanted)
            if position in first:
                inputs[position] = self._on_first(inputs[position], first[position])
        for position in rule.rule.lengths if rule.rule else ():
            result = rule.results[0]
            if result is not None:
                inputs[position] = self._divided(inputs[position], f"{rule.node.name}:0", _of_side(result, axes))
        return self._of_own_rows(rule, axes[ROW], inputs) if axes.get(ROW) else inputs

    # -- rows of a divided table -----------------------------------------------------------------------------------

    def _of_own_rows(self, rule: NodeRule, axes: Axes, inputs: list[str]) -> list[str]:
        """Makes a node look up, or add to, the rows of a place; returns its inputs.

        Rows of other places are looked up as zeros, so that the sum over the places is the row; added rows are zero.
        An index outside of the table is the error, or the zeros, that it is for the device without a mesh.
        Source: the vocabulary-parallel embedding of Megatron-LM (Shoeybi et al., 2019).
        """
        name, table = rule.node.name, rule.operands[0]
        assert table is not None and table.lengths[0] is not None, "a divided dimension has a known length"
        index = add_index(self.editor, f"autodist/rows/{name}/index", axes)
        length = table.lengths[0] // self.mesh.count(axes)
        with self.editor.subgraph(f"rows/{name}") as f:
            rows = self._input(f, inputs[1])
            own = rows - tf.cast(f.input(index, tf.int64, []) * length, rows.dtype)
            is_own = tf.logical_and(own >= 0, own < length)
            is_row = tf.logical_and(rows >= 0, rows < table.lengths[0])
            # An index outside of the table stays as it is: it is outside of each part, too.
            kept = tf.where(is_own, own, tf.where(is_row, tf.zeros_like(own), rows))
            values = None if rule.results else _rows_where(is_own, self._input(f, inputs[2]))
        self._own_rows[name] = f.name(is_own)
        return [
            inputs[0],
            f.name(kept),
            *([] if values is None else [f.name(values)]),
            *inputs[2 if values is None else 3 :],
        ]

    def _mask_rows(self, name: str, state: State) -> None:
        """Replaces the rows of other places that a lookup has returned by zeros."""
        found = f"{name}:0"
        with self.editor.subgraph(f"own_rows/{name}") as f:
            made = f.name(_rows_where(self._input(f, self._own_rows[name]), self._input(f, found)))
        self._now[found], self.states[made], self.source_of[made] = made, state, found
        self._note(made, found, state.axes)

    def _on_first(self, name: str, axes: Axes) -> str:
        """Returns a tensor on the first place along some axes, and zeros on the others."""
        if (name, axes) not in self._of_first:
            index = self._index.get(axes) or add_index(self.editor, f"autodist/first/index_{len(self._index)}", axes)
            self._index[axes] = index
            with self.editor.subgraph(f"first/{len(self._of_first)}") as f:
                x = self._input(f, name)
                is_first = tf.equal(f.input(index, tf.int64, []), 0)
                made = f.name(tf.where(is_first, x, tf.zeros_like(x)))
            self.source_of[made] = self.source_of.get(tensor(name), tensor(name))
            self._of_first[name, axes] = made
        return self._of_first[name, axes]

    def _input(self, f: SubgraphBuilder, name: str) -> tf.Tensor:
        """Returns a tensor of the program for new arithmetic, with its known rank."""
        source = self.source_of.get(tensor(name), tensor(name))
        if node_of(source) in self.step.graph_index.nodes:
            spec = self.step.spec_of(source)
            return f.input(name, spec.dtype, [None] * (self.rules.shape(source).rank or 0))
        return f.input(name)

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

    def _gathered(self, read: str, variable: Variable) -> str:
        """Returns the whole value of a variable, from a read of a place's part that has been added."""
        axes = self.shardings.of(variable.handle, len(variable.shape)).axes
        self._added[read] = tf.TensorSpec(variable.shape, variable.dtype)
        self._made(read, State(axes))
        return self._in_state(read, ((),) * len(axes))

    def _own_part(self, read: str, variable: Variable) -> str:
        """Returns a place's part of a variable, from a read of its whole value that has been added."""
        self._added[read] = tf.TensorSpec(variable.shape, variable.dtype)
        self.editor.note({read: self._added[read]})
        return self._in_state(read, self.shardings.of(variable.handle, len(variable.shape)).axes)

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
        inputs = [i for i in rule.node.input if not is_control(i)]
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
        state = self._state(name)
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
        reading = [c for c in consumers if tensor(name) in map(tensor, self.step.graph_index.nodes[c].input)]
        return tensor(name) in self._outputs or set(reading) != {reader}

    # -- states ----------------------------------------------------------------------------------------------------

    def _fixed_states(self) -> list[tuple[str, tuple[Axes, ...]]]:
        """The tensors that the fields of the step name, with their states: gradients like variables, losses whole."""
        found: list[tuple[str, tuple[Axes, ...]]] = []
        for gradient in self.step.gradients:
            variable = self.step.by_name[gradient.variable]
            axes = self.shardings.of(variable.handle, len(variable.shape)).axes
            values = gradient.tensors[-1]
            rank = self.rules.shape(values).rank or 0
            rows = rank - len(axes) + 1
            found.append((tensor(values), ((),) * rows + axes[1:] if gradient.is_sparse else axes))
        for call in self.step.gradient_calls:
            for name in (*call.targets, *(term.tensor for term in call.terms)):
                found.append((tensor(name), ((),) * (self.rules.shape(name).rank or 0)))
        return found

    def _current(self, name: str) -> str:
        """Returns the tensor that stands for a captured one in the program."""
        return self._now.get(tensor(name), tensor(name))

    def _state(self, name: str) -> State | None:
        return self.states.get(self._current(name))

    def _made(self, name: str, state: State) -> None:
        """Notes the state of a tensor that the program makes; brings it into the state that the step needs, if any."""
        self.states[name] = state
        if any(state.axes):
            self._note(name, name, state.axes)
        if name in self._fixed and (state.axes, state.partial) != (self._fixed[name], ()):
            self._now[name] = self._in_state(name, self._fixed[name])

    def _note(self, name: str, source: str, axes: Sequence[Axes]) -> None:
        whole = self._added[source].shape.as_list() if source in self._added else self.rules.static.lengths(source)
        assert whole is not None, "a tensor of unknown rank is not divided"
        lengths = [n if n is None else n // self.mesh.count(a) for n, a in zip(whole, axes, strict=True)]
        self.editor.note({name: tf.TensorSpec(lengths, self._dtype(source))})

    def _dtype(self, source: str) -> tf.DType:
        return (self._added.get(source) or self.step.spec_of(source)).dtype

    def _whole(self, name: str) -> str:
        rank = self.rules.shape(name).rank
        return self._in_state(name, ((),) * rank) if rank is not None else name

    def _in_state(self, name: str, axes: tuple[Axes, ...]) -> str:
        """Returns a tensor whose parts are those of `name`, divided by `axes` and reduced."""
        name = self._current(name)
        if self._state(name) is None and not any(axes):
            return name
        if (name, axes) not in self._resharded:
            self._resharded[name, axes] = self._reshard(name, axes)
        return self._resharded[name, axes]

    def _reshard(self, name: str, axes: tuple[Axes, ...]) -> str:
        state = self.states.get(name) or State(((),) * len(axes))
        for reshard in transfers(state, axes):
            parts = self.mesh.count(reshard.axes)
            source = self.source_of.get(name, name)
            spec = tf.TensorSpec([None] * len(axes), self._dtype(source))
            node = f"autodist/reshard/{len(self.source_of)}"
            made = add_reshard(self.editor, node, name, spec, reshard, parts)
            state = after(state, reshard)
            self.source_of[made] = source
            self.states[made] = state
            self._note(made, source, state.axes)
            name = made
        return name

    # -- lengths ---------------------------------------------------------------------------------------------------

    def _measure(self, node: tf.compat.v1.NodeDef) -> None:
        """Multiplies the lengths of a divided tensor, so that integers in the program are lengths of whole tensors."""
        for position, i in enumerate(i for i in node.input if not is_control(i)):
            state = self._state(i)
            now = self._current(i)
            if now != tensor(i):
                inputs = list(self.editor[node.name].input)
                inputs[position] = as_input(now)
                self.editor.set_inputs(node.name, inputs)
            if state is None or not any(state.axes):
                continue
            name = f"{node.name}:{position}"
            counts = [self.mesh.count(axes) for axes in state.axes]
            with self.editor.subgraph(f"lengths/{len(self.source_of)}") as f:
                own = f.input(name)
                known = self._lengths_of_all(i)
                whole = f.name(own * prod(counts) if node.op == "Size" else _filled(own, known, tf.multiply, counts))
            self._now[name] = whole
            self.source_of[whole] = name

    def _divided(self, lengths: str, result: str, axes: Sequence[Axes]) -> str:
        """Returns the lengths of a place's part of a result."""
        if not any(axes):
            return lengths
        counts = [self.mesh.count(own) for own in axes]
        known = [n if n is None else n // count for n, count in zip(self._lengths_of_all(result), counts, strict=True)]
        with self.editor.subgraph(f"lengths/{len(self.source_of)}") as f:
            own = f.name(_filled(f.input(lengths), known, tf.math.floordiv, counts))
        self.source_of[own] = tensor(lengths)
        return own

    def _lengths_of_all(self, name: str) -> list[int | None]:
        """Returns the lengths of a captured tensor that are the same for each part of the batch; None for others."""
        lengths = list(self.rules.static.lengths(name) or ())
        return lengths if self._has_open_batch else [None] * len(lengths)

    def _of_known_shape(self, reader: str, name: str, side: Side, axes: Sequence[Axes]) -> str:
        source = self.source_of.get(tensor(name), tensor(name))
        made = ensure_shape(self.editor, reader, name, self._dtype(source), side, self.mesh, axes)
        self.source_of[made] = source
        return made

    # -- fields of the step ----------------------------------------------------------------------------------------

    def _variable(self, variable: Variable) -> Variable:
        axes = self.shardings.of(variable.handle, len(variable.shape)).axes
        if not any(axes):
            return variable
        shape = tuple(n // self.mesh.count(a) for n, a in zip(variable.shape, axes, strict=True))
        self.editor[variable.handle].attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        return replace(variable, shape=shape)

    def _gradient(self, gradient: VariableGradient) -> VariableGradient:
        return replace(gradient, tensors=tuple(map(self._current, gradient.tensors)))

    def _call(self, call: GradientCall) -> GradientCall:
        def now(name: str) -> str:
            return self._now.get(tensor(name), name)

        terms = tuple(replace(term, tensor=now(term.tensor)) for term in call.terms)
        return replace(call, targets=tuple(map(now, call.targets)), terms=terms)


def _filled(
    lengths: tf.Tensor,
    known: Sequence[int | None],
    change: Callable[[tf.Tensor, int], tf.Tensor],
    counts: Sequence[int],
) -> tf.Tensor:
    """Returns known lengths as constants, from which TensorFlow infers shapes; changes the others by `counts`."""
    if None not in known:
        return tf.constant(known, lengths.dtype)
    found = [change(lengths[k], counts[k]) if n is None else n for k, n in enumerate(known)]
    return tf.stack([tf.cast(n, lengths.dtype) for n in found])


def _rows_where(is_kept: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows, with zeros for those that are not kept."""
    shape = tf.concat([tf.shape(is_kept), tf.ones([tf.rank(rows) - tf.rank(is_kept)], tf.int32)], 0)
    return tf.where(tf.reshape(is_kept, shape), rows, tf.zeros_like(rows))


def _of_side(side: Side, axes: Mapping[Factor, Axes]) -> tuple[Axes, ...]:
    return tuple(() if factor is None else axes.get(factor, ()) for factor in side.factors)
