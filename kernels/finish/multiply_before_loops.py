"""MultiplyBeforeLoops: computes a loop's products of its inputs with a matrix in one product before the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.loop_editor import LoopEditor
from autodist.graph.names import node_of, tensor
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.finish.loop_constants import LoopConstant, add_before, find_constant
from autodist.kernels.finish.loop_kernel import LoopKernel


@dataclass(frozen=True)
class MultiplyBeforeLoops(LoopKernel):
    """Computes products of the elements of a list with a matrix, one in each iteration, in one product before the loop.

    A recurrent layer multiplies the input of each time step with its kernel. The list of inputs and the kernel do not
    change in the loop:

        for t: … x[t] · k …       becomes       z = rows(x) · k;  for t: … z[t] …

    A row of the product has the same factors in the same order.
    """

    name: ClassVar[str] = "multiply-before-loops"
    after: ClassVar[Mapping[str, str]] = {
        "place-on-devices": "the new nodes get the device of their loop",
        "compile-step": "XLA would need the number of elements before the loop",
    }

    def change(self, editor: StepEditor[Step], loop: LoopEditor) -> bool:
        products = [found for node in loop.of_op("MatMul") if (found := _find_product(editor, loop, node)) is not None]
        if not products:
            return False
        with editor.subgraph(f"before/{loop.node.name}") as f:
            lists = [f.name(_product_of_all(f, product)) for product in products]
        add_before(editor, loop, f.made, [product.matrix for product in products])
        for product, before in zip(products, lists, strict=True):
            _read_product(loop, product, before)
        loop.finish()
        return True


@dataclass(frozen=True)
class _Product:
    """A product in the body of a loop.

    Attributes:
        node: of the product.
        index: the tensor of the body that selects an element of the list.
        elements: the tensor of the graph with all elements of the list: [elements, rows, columns].
        matrix: the second factor.
    """

    node: NodeDef
    index: str
    elements: str
    matrix: LoopConstant


def _find_product(editor: StepEditor[Step], loop: LoopEditor, node: NodeDef) -> _Product | None:
    element = loop.producer(loop.source(node.input[0]))
    if node.attr["transpose_a"].b or element is None or element.op != "TensorListGetItem":
        return None
    matrix, elements = find_constant(editor, loop, node.input[1]), loop.constants.get(loop.source(element.input[0]))
    made = editor[node_of(elements)] if elements is not None else None
    if matrix is None or made is None or made.op != "TensorListFromTensor":
        return None
    return _Product(node, element.input[1], tensor(made.input[0]), matrix)


def _product_of_all(f: SubgraphBuilder, product: _Product) -> tf.Tensor:
    """Returns the list of the products of all elements of a list."""
    matrix = product.matrix.build(f)
    elements = f.input(product.elements, matrix.dtype, [None, None, None])
    shape = tf.shape(elements)
    rows = tf.reshape(elements, tf.concat([[-1], shape[2:]], 0))
    made = tf.linalg.matmul(rows, matrix, transpose_b=product.node.attr["transpose_b"].b)
    all_products = tf.reshape(made, tf.concat([shape[:2], tf.shape(made)[1:]], 0))
    return tf.raw_ops.TensorListFromTensor(tensor=all_products, element_shape=[-1, -1])


def _read_product(loop: LoopEditor, product: _Product, before: str) -> None:
    """Makes the body of a loop read a product from the list `before` of the graph."""
    products = loop.inside(loop.add_variable(before, tf.variant, tf.TensorShape([])))
    shape = tf.compat.v1.NodeDef(name=f"{products}/element_shape", op="Const")
    shape.attr["dtype"].type = tf.int32.as_datatype_enum
    shape.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([-1, -1], tf.int32))
    read = tf.compat.v1.NodeDef(name=f"{products}/read", op="TensorListGetItem")
    read.input[:] = [products, product.index, f"{loop.add(shape).name}:output:0"]
    read.attr["element_dtype"].type = product.node.attr["T"].type
    loop.replace(product.node.name, f"{loop.add(read).name}:item:0")
