"""Subgraphs: new arithmetic, built with TensorFlow's public API in a scratch graph and spliced into an editor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.names import as_input, is_control, node_of, output_index, tensor

SpecOf = Callable[[str], tf.TensorSpec]
"""Returns shape and dtype of a tensor by its name; raises KeyError if they are unknown."""


def unknown_spec(tensor: str) -> tf.TensorSpec:
    """Raises KeyError: the specs of a graph that was not captured."""
    raise KeyError(f"shape and dtype of {tensor} are unknown: it was not captured from a graph")


class SubgraphBuilder:
    """A scratch graph whose inputs are tensors of the edited graph.

    Created by `subgraph`; inside its `with` block TensorFlow's API builds in the scratch graph.

    Args:
        prefix: prefix of the new nodes in the edited graph.
        graph: the scratch graph.
        spec_of: returns the specs of the edited graph's tensors.

    Attributes:
        made: names of the nodes added to the edited graph; empty until the `with` block has ended.
    """

    def __init__(self, prefix: str, graph: tf.Graph, spec_of: SpecOf = unknown_spec) -> None:
        self.prefix, self.graph, self._spec_of = prefix, graph, spec_of
        self._inputs: dict[str, tf.Tensor] = {}
        self._added: list[tuple[int, tf.compat.v1.NodeDef]] = []
        self._bound: dict[str, tuple[str, ...]] = {}
        self._orders: dict[str, tuple[str, ...]] = {}
        self.made: tuple[str, ...] = ()

    def input(self, name: str, dtype: tf.DType | None = None, shape: object = None) -> tf.Tensor:
        """Returns a scratch tensor that stands for the tensor `name` of the edited graph.

        Args:
            name: of the tensor.
            dtype: of its elements; None: dtype and shape are those known of the tensor.
            shape: the static shape to assume; None: unknown.
        """
        name = tensor(name)
        if name not in self._inputs:
            if dtype is None:
                known = self._spec_of(name)
                dtype, shape = known.dtype, known.shape
            # No control inputs: TensorFlow would otherwise consider the consumers ordered already.
            with self.graph.as_default(), tf.control_dependencies(None):
                made = tf.raw_ops.Placeholder(dtype=dtype, shape=tf.TensorShape(shape))
            self._inputs[name] = made
            self._bound[made.op.name] = (name,)
        return self._inputs[name]

    def inputs(self, names: Iterable[str]) -> list[tf.Tensor]:
        """Returns scratch tensors for tensors of the edited graph, with their known dtypes and shapes."""
        requested = [tensor(name) for name in names]
        new = [name for name in dict.fromkeys(requested) if name not in self._inputs]
        self._inputs.update(zip(new, self.inputs_like(new, [self._spec_of(name) for name in new]), strict=True))
        return [self._inputs[name] for name in requested]

    def inputs_like(self, names: Sequence[str], like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """Returns scratch tensors for tensors of the edited graph, with the dtypes and shapes of `like`.

        This takes a tenth of the time of `input` for each: one operation stands for all tensors. A control dependency
        on one is a dependency on all; a consumer of one does not wait for the others.
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
        """Returns an operation that stands for the nodes `names` of the edited graph, for `tf.control_dependencies`."""
        with self.graph.as_default(), tf.control_dependencies(None):
            made = tf.no_op()
        self._orders[made.name] = tuple(names)
        return made

    def add(
        self, like: tf.compat.v1.NodeDef, name: str, inputs: Iterable[str], after: Iterable[tf.Operation] = ()
    ) -> tf.compat.v1.NodeDef:
        """Adds a copy of a node that TensorFlow has created before, in a tenth of the time of creating it again.

        Control dependencies and devices of the scratch graph do not apply: the copy keeps the device of `like`.

        Args:
            like: the node.
            name: of the copy in the scratch graph.
            inputs: names of tensors of the edited graph.
            after: operations of the scratch graph that the copy waits for.

        Returns:
            The copy, as in the edited graph; the caller may change its attributes and device.
        """
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(like)
        node.name = self.prefix + name
        control = (spelled for op in after for spelled in self._spliced_input(f"^{op.name}"))
        node.input[:] = [*map(as_input, inputs), *dict.fromkeys(control)]
        self._added.append((self.graph.version, node))  # position: the number of operations before it
        return node

    def reshape_each(self, values: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]) -> list[str]:
        """Reshapes tensors of one dtype; returns the names of the results in the edited graph.

        All but the first are copies of TensorFlow's nodes for the first, under the names that TensorFlow would choose.
        """
        first = tf.reshape(values[0], shapes[0]).op
        reshape, lengths = first.node_def, first.inputs[1].op.node_def
        names = [self.name(first.outputs[0])]
        for value, shape in zip(values[1:], shapes[1:], strict=True):
            name = self.graph.unique_name("Reshape")
            constant = self.add(lengths, f"{name}/shape", ())
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(shape.as_list(), tf.int32))
            names.append(tensor(self.add(reshape, name, [self.name(value), constant.name]).name))
        return names

    def flatten_each(self, values: Sequence[tf.Tensor]) -> list[str]:
        """Reshapes tensors of one dtype to vectors, as `reshape_each` does; they share the constant."""
        first = tf.raw_ops.Reshape(tensor=values[0], shape=tf.constant([-1])).op
        vector = self.name(first.inputs[1])
        copies = [
            self.add(first.node_def, self.graph.unique_name("Reshape"), [self.name(v), vector]) for v in values[1:]
        ]
        return [self.name(first.outputs[0]), *(tensor(copy.name) for copy in copies)]

    def name(self, made: tf.Tensor | tf.Operation) -> str:
        """Returns the name in the edited graph of a tensor or operation of the scratch graph."""
        if isinstance(made, tf.Operation):
            return self.prefix + made.name
        bound = self._bound.get(made.op.name)
        return bound[made.value_index] if bound is not None else f"{self.prefix}{made.op.name}:{made.value_index}"

    def specs(self) -> dict[str, tf.TensorSpec]:
        """Returns shape and dtype of the new tensors, by their names in the edited graph."""
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
        """Returns a copy of a scratch node as it will be in the edited graph."""
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
    """Arithmetic that is built once and spliced into a graph many times, each time on other tensors.

    TensorFlow takes about 0.1 ms to create an operation; a copy takes a tenth of that.

    Args:
        like: the dtype of each input, or its spec if the shape matters.
        build: computes the outputs from the inputs.
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
        """Adds the arithmetic on `inputs` under "autodist/" + `prefix`; returns the names of its outputs."""

        def here(name: str) -> str:
            position = self._inputs.get(node_of(name))
            return tensor(inputs[position]) if position is not None else f"autodist/{prefix}/{tensor(name)}"

        for node in self._nodes:
            editor.add_copy(node, f"autodist/{prefix}/{node.name}", [as_input(here(name)) for name in node.input])
        return [here(name) for name in self._outputs]


@contextmanager
def subgraph(editor: GraphEditor, prefix: str, spec_of: SpecOf = unknown_spec) -> Iterator[SubgraphBuilder]:
    """Builds with TensorFlow's API; on exit, adds the result to `editor` under "autodist/" + `prefix`.

    Args:
        editor: of the graph.
        prefix: of the new nodes.
        spec_of: returns the specs of the graph's tensors.

    ```python
    with subgraph(editor, "scale") as f:
        half = tf.raw_ops.Mul(x=f.input("g:0", tf.float32), y=0.5)
    editor.rewire("g:0", f.name(half), consumers)
    ```
    """
    graph = tf.Graph()
    made = SubgraphBuilder(f"autodist/{prefix}/", graph, spec_of)
    with graph.as_default():
        yield made
    made.splice_into(editor)
