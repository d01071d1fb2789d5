"""Program: the tensors of the program that each place of a mesh runs, and the parts that places hold of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from autodist.graph.names import node_of, tensor
from autodist.graph.node_rules import Rules
from autodist.graph.parts import Variable
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.shard.propagate import Axes, Shardings
from autodist.kernels.shard.reshards import add_index, add_reshard
from autodist.kernels.shard.transfers import State, after, transfers
from autodist.sharding import Mesh


class Program:
    """The program of each place, while it is made from a captured step.

    Attributes:
        step: the captured step.
        editor: the editor of its graph.
        source_of: for each tensor that the program adds, the captured one that it is made from.
        added: the specs of the whole tensors that the program adds.
    """

    def __init__(self, step: PlacedStep, mesh: Mesh, rules: Rules, shardings: Shardings) -> None:
        self.step, self.mesh, self.rules, self.shardings = step, mesh, rules, shardings
        self.editor = StepEditor(step)
        self.source_of: dict[str, str] = {}
        self.added: dict[str, tf.TensorSpec] = {}
        self._states: dict[str, State] = {}
        self._now: dict[str, str] = {}
        self._resharded: dict[tuple[str, tuple[Axes, ...]], str] = {}
        self._of_first: dict[tuple[str, Axes], str] = {}
        self._index: dict[Axes, str] = {}
        self._fixed = dict(self._fixed_states())

    def axes_of(self, variable: Variable) -> tuple[Axes, ...]:
        """Returns the axes that divide each dimension of a variable."""
        return self.shardings.of(variable.handle, len(variable.shape)).axes

    def current(self, name: str) -> str:
        """Returns the tensor that stands for a captured one in the program."""
        return self._now.get(tensor(name), tensor(name))

    def state(self, name: str) -> State | None:
        """Returns the state of the tensor that stands for a captured one; None if it has no parts."""
        return self._states.get(self.current(name))

    def source(self, name: str) -> str:
        """Returns the captured tensor that a tensor of the program is made from."""
        return self.source_of.get(tensor(name), tensor(name))

    def dtype(self, source: str) -> tf.DType:
        return (self.added.get(source) or self.step.spec_of(source)).dtype

    def input(self, f: SubgraphBuilder, name: str) -> tf.Tensor:
        """Returns a tensor of the program for new arithmetic, with its known rank."""
        source = self.source(name)
        if node_of(source) in self.step.graph_index.nodes:
            spec = self.step.spec_of(source)
            return f.input(name, spec.dtype, [None] * (self.rules.shape(source).rank or 0))
        return f.input(name)

    def made(self, name: str, state: State) -> None:
        """Notes the state of a tensor that the program makes; brings it into the state that the step needs, if any."""
        self._states[name] = state
        if any(state.axes):
            self._note(name, name, state.axes)
        if name in self._fixed and (state.axes, state.partial) != (self._fixed[name], ()):
            self._now[name] = self.in_state(name, self._fixed[name])

    def stands_for(self, name: str, made: str, state: State | None = None) -> None:
        """Makes a tensor of the program stand for a captured one, with this state of its parts."""
        self._now[name], self.source_of[made] = made, name
        if state is not None:
            self._states[made] = state
            self._note(made, name, state.axes)

    def gathered(self, read: str, variable: Variable) -> str:
        """Returns the whole value of a variable, from a read of a place's part that has been added."""
        axes = self.axes_of(variable)
        self.added[read] = tf.TensorSpec(variable.shape, variable.dtype)
        self.made(read, State(axes))
        return self.in_state(read, ((),) * len(axes))

    def own_part(self, read: str, variable: Variable) -> str:
        """Returns a place's part of a variable, from a read of its whole value that has been added."""
        self.added[read] = tf.TensorSpec(variable.shape, variable.dtype)
        self.editor.note({read: self.added[read]})
        return self.in_state(read, self.axes_of(variable))

    def whole(self, name: str) -> str:
        """Returns a tensor that is not divided; one of unknown rank never is."""
        rank = self.rules.shape(name).rank
        return self.in_state(name, ((),) * rank) if rank is not None else name

    def in_state(self, name: str, axes: tuple[Axes, ...]) -> str:
        """Returns a tensor whose parts are those of `name`, divided by `axes` and reduced."""
        name = self.current(name)
        if self.state(name) is None and not any(axes):
            return name
        if (name, axes) not in self._resharded:
            self._resharded[name, axes] = self._reshard(name, axes)
        return self._resharded[name, axes]

    def on_first(self, name: str, axes: Axes) -> str:
        """Returns a tensor on the first place along some axes, and zeros on the others."""
        if (name, axes) not in self._of_first:
            index = self._index.get(axes) or add_index(self.editor, f"autodist/first/index_{len(self._index)}", axes)
            self._index[axes] = index
            with self.editor.subgraph(f"first/{len(self._of_first)}") as f:
                x = self.input(f, name)
                is_first = tf.equal(f.input(index, tf.int64, []), 0)
                made = f.name(tf.where(is_first, x, tf.zeros_like(x)))
            self.source_of[made] = self.source(name)
            self._of_first[name, axes] = made
        return self._of_first[name, axes]

    def _fixed_states(self) -> Iterator[tuple[str, tuple[Axes, ...]]]:
        """The tensors that the fields of the step name, with their states: gradients like variables, losses whole."""
        for gradient in self.step.gradients:
            axes = self.axes_of(self.step.by_name[gradient.variable])
            values = gradient.tensors[-1]
            rank = self.rules.shape(values).rank or 0
            rows = rank - len(axes) + 1
            yield tensor(values), ((),) * rows + axes[1:] if gradient.is_sparse else axes
        for call in self.step.gradient_calls:
            for name in (*call.targets, *(term.tensor for term in call.terms)):
                yield tensor(name), ((),) * (self.rules.shape(name).rank or 0)

    def _note(self, name: str, source: str, axes: Sequence[Axes]) -> None:
        whole = self.added[source].shape.as_list() if source in self.added else self.rules.static.lengths(source)
        assert whole is not None, "a tensor of unknown rank is not divided"
        lengths = [n if n is None else n // self.mesh.count(a) for n, a in zip(whole, axes, strict=True)]
        self.editor.note({name: tf.TensorSpec(lengths, self.dtype(source))})

    def _reshard(self, name: str, axes: tuple[Axes, ...]) -> str:
        state = self._states.get(name) or State(((),) * len(axes))
        for reshard in transfers(state, axes):
            parts = self.mesh.count(reshard.axes)
            source = self.source_of.get(name, name)
            spec = tf.TensorSpec([None] * len(axes), self.dtype(source))
            node = f"autodist/reshard/{len(self.source_of)}"
            made = add_reshard(self.editor, node, name, spec, reshard, parts)
            state = after(state, reshard)
            self.source_of[made] = source
            self._states[made] = state
            self._note(made, source, state.axes)
            name = made
        return name
