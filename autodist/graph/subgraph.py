"""Fragments: new arithmetic, written with TensorFlow's public API in a scratch graph and spliced into an editor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.names import as_input, is_control, node_of, output_index, tensor

SpecOf = Callable[[str], tf.TensorSpec]
"""Shape and dtype by the name of a tensor; KeyError where nothing is known."""


def nothing_known(tensor: str) -> tf.TensorSpec:
    """What is known of tensors that were not captured from a graph: it raises KeyError."""
    raise KeyError(f"nothing is known of {tensor}, which was not captured from a graph")


class SubgraphBuilder:
    """A scratch graph whose inputs are tensors of the graph that is edited.

    Made by `fragment`; inside its `with` block TensorFlow's API builds in the scratch graph.

    Args:
        prefix: of what is made, in the edited graph.
        graph: to build in.
        spec_of: what is known of the edited graph's tensors.

    Attributes:
        made: names of the nodes that it added to the edited graph; empty before it was left.
    """

    def __init__(self, prefix: str, graph: tf.Graph, spec_of: SpecOf = nothing_known) -> None:
        self.prefix, self.graph, self._spec_of = prefix, graph, spec_of
        self._inputs: dict[str, tf.Tensor] = {}
        self._added: list[tuple[int, tf.compat.v1.NodeDef]] = []
        self._bound: dict[str, tuple[str, ...]] = {}
        self._orders: dict[str, tuple[str, ...]] = {}
        self.made: tuple[str, ...] = ()

    def input(self, name: str, dtype: tf.DType | None = None, shape: object = None) -> tf.Tensor:
        """The tensor `name` of the edited graph, to compute with here.

        Args:
            name: of the tensor.
            dtype: of its elements; None: these and the shape are as they are known.
            shape: as far as it is to count; None: nothing of it.
        """
        name = tensor(name)
        if name not in self._inputs:
            if dtype is None:
                known = self._spec_of(name)
                dtype, shape = known.dtype, known.shape
            # Without control inputs, or TensorFlow would take what reads it for ordered already.
            with self.graph.as_default(), tf.control_dependencies(None):
                made = tf.raw_ops.Placeholder(dtype=dtype, shape=tf.TensorShape(shape))
            self._inputs[name] = made
            self._bound[made.op.name] = (name,)
        return self._inputs[name]

    def inputs(self, names: Iterable[str]) -> list[tf.Tensor]:
        """Tensors of the edited graph, as they are known."""
        asked = [tensor(name) for name in names]
        new = [name for name in dict.fromkeys(asked) if name not in self._inputs]
        self._inputs.update(zip(new, self.inputs_like(new, [self._spec_of(name) for name in new]), strict=True))
        return [self._inputs[name] for name in asked]

    def inputs_like(self, names: Sequence[str], like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """Tensors of the edited graph with dtypes and shapes as those of `like`.

        They cost a tenth of what `input` takes for each: one operation stands for all of them, so that to wait for one
        is to wait for all, and what reads one does not wait for others.
        """
        if len(names) < 2:
            return [self.input(name, t.dtype, t.shape) for name, t in zip(names, like, strict=True)]
        dtypes, shapes = [t.dtype for t in like], [t.shape for t in like]
        with self.graph.as_default(), tf.control_dependencies(None):
            source = tf.raw_ops.Placeholder(dtype=tf.resource)
            made = tf.raw_ops.IteratorGetNext(iterator=source, output_types=dtypes, output_shapes=shapes)
        self._bound[source.op.name] = ()
        self._bound[made[0].op.name] = tuple(map(tensor, names))
        return list(made)

    def after(self, names: Iterable[str]) -> tf.Operation:
        """An operation that stands for the nodes `names` of the edited graph, for `tf.control_dependencies`."""
        with self.graph.as_default(), tf.control_dependencies(None):
            made = tf.no_op()
        self._orders[made.name] = tuple(names)
        return made

    def add(
        self, like: tf.compat.v1.NodeDef, name: str, inputs: Iterable[str], after: Iterable[tf.Operation] = ()
    ) -> tf.compat.v1.NodeDef:
        """Adds a copy of a node that TensorFlow has made before, which takes a tenth of the time of making it again.

        Control dependencies and devices of the scratch graph do not count for it: the copy stands where `like` says.

        Args:
            like: the node.
            name: of the copy, here.
            inputs: names of tensors of the edited graph.
            after: operations made here, which it waits for.

        Returns:
            The copy, as it will stand in the edited graph; the caller may change its attributes and its device.
        """
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(like)
        node.name = self.prefix + name
        control = (spelled for op in after for spelled in self._spliced_input(f"^{op.name}"))
        node.input[:] = [*map(as_input, inputs), *dict.fromkeys(control)]
        self._added.append((self.graph.version, node))  # behind so many operations of the scratch graph
        return node

    def name(self, made: tf.Tensor | tf.Operation) -> str:
        """The name that a tensor or operation made here has in the edited graph."""
        if isinstance(made, tf.Operation):
            return self.prefix + made.name
        bound = self._bound.get(made.op.name)
        return bound[made.value_index] if bound is not None else f"{self.prefix}{made.op.name}:{made.value_index}"

    def specs(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of what was made here, by the names in the edited graph."""
        return {
            f"{self.prefix}{made.name}": tf.TensorSpec(made.shape, made.dtype)
            for operation in self.graph.get_operations() if operation.name not in self._bound
            for made in operation.outputs
        }  # fmt: skip

    def _spliced_input(self, spelling: str) -> list[str]:
        source = node_of(spelling)
        if is_control(spelling):
            if source in self._orders:
                return [f"^{n}" for n in self._orders[source]]
            return [f"^{node_of(n)}" for n in self._bound.get(source, (self.prefix + source,))]
        if source in self._bound:
            return [as_input(self._bound[source][output_index(spelling)])]
        return [as_input(f"{self.prefix}{source}:{output_index(spelling)}")]

    def splice_into(self, editor: GraphEditor) -> None:
        definition = self.graph.as_graph_def()
        out = tf.compat.v1.GraphDef(library=definition.library)
        added = deque(self._added)
        for count, node in enumerate(definition.node):
            while added and added[0][0] <= count:
                out.node.append(added.popleft()[1])
            if node.name not in self._bound and node.name not in self._orders:
                out.node.append(self._renamed(node))
        out.node.extend(node for _, node in added)
        editor.add_graph(out)
        self.made = tuple(node.name for node in out.node)

    def _renamed(self, node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
        """A node of the scratch graph as it is to stand in the edited one."""
        copy = tf.compat.v1.NodeDef()
        copy.CopyFrom(node)
        copy.name = self.prefix + node.name
        inputs = [spelled for i in node.input for spelled in self._spliced_input(i)]
        data = [i for i in inputs if not is_control(i)]
        copy.input[:] = [*data, *dict.fromkeys(i for i in inputs if is_control(i))]
        if "_class" in copy.attr:
            del copy.attr["_class"]
        return copy


class Template:
    """Arithmetic that is built once and spliced into a graph many times, on other tensors each time.

    TensorFlow takes some 0.1 ms to make an operation, a copy of one a tenth of that.

    Args:
        like: its inputs, each by its dtype, or with its shape where that is to count.
        build: makes its outputs from its inputs.
    """

    def __init__(self, like: Sequence[tf.DType | tf.TensorSpec], build: Callable[..., Sequence[tf.Tensor]]) -> None:
        with tf.Graph().as_default() as graph:
            inputs = [
                tf.raw_ops.Placeholder(dtype=of.dtype, shape=of.shape)
                if isinstance(of, tf.TensorSpec)
                else tf.raw_ops.Placeholder(dtype=of)
                for of in like
            ]
            outputs = build(*inputs)
        self._inputs = {made.op.name: position for position, made in enumerate(inputs)}
        self._outputs = [made.name for made in outputs]
        definition = graph.as_graph_def()
        assert not definition.library.function, "a template has no functions of its own"
        self._nodes = [node for node in definition.node if node.name not in self._inputs]

    def splice(self, editor: GraphEditor, prefix: str, inputs: Sequence[str]) -> list[str]:
        """Adds the arithmetic on the tensors `inputs` under "autodist/" + `prefix`; returns its outputs' names."""

        def here(name: str) -> str:
            position = self._inputs.get(node_of(name))
            return tensor(inputs[position]) if position is not None else f"autodist/{prefix}/{tensor(name)}"

        for node in self._nodes:
            editor.add_copy(node, f"autodist/{prefix}/{node.name}", [as_input(here(name)) for name in node.input])
        return [here(name) for name in self._outputs]


@contextmanager
def subgraph(editor: GraphEditor, prefix: str, spec_of: SpecOf = nothing_known) -> Iterator[SubgraphBuilder]:
    """Builds with TensorFlow's API; on leaving, what was built stands in `editor` under "autodist/" + `prefix`.

    Args:
        editor: of the graph.
        prefix: of what is made.
        spec_of: what is known of the graph's tensors.

    ```python
    with fragment(editor, "scale") as f:
        half = tf.raw_ops.Mul(x=f.input("g:0", tf.float32), y=0.5)
    editor.rewire("g:0", f.name(half), consumers)
    ```
    """
    graph = tf.Graph()
    made = SubgraphBuilder(f"autodist/{prefix}/", graph, spec_of)
    with graph.as_default():
        yield made
    made.splice_into(editor)
