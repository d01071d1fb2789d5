"""SumAfterLoops: computes the sums that a loop adds up in one op after the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.loop_editor import LoopEditor
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.finish.loop_kernel import LoopKernel


@dataclass(frozen=True)
class SumAfterLoops(LoopKernel):
    """Computes the sums over iterations that the body of a loop adds up in one op after the loop.

    The backward loop of a recurrent layer adds up the gradient of each matrix over the time steps. Its products of two
    matrices, and its additions of the size of the variable, become one product of the stacked operands:

        for t: dw ← dw + x[t]ᵀ · dz[t]       becomes       dw + rows(x)ᵀ · rows(dz)

    Only the order of the summation changes. The operands of all iterations stay in memory up to the end of the loop.
    """

    name: ClassVar[str] = "sum-after-loops"
    after: ClassVar[Mapping[str, str]] = {
        "place-on-devices": "the new nodes get the device of their loop",
        "compile-step": "XLA would need the number of iterations before the loop",
    }

    def change(self, editor: StepEditor[Step], loop: LoopEditor) -> bool:
        found = list(_find_sums(loop))
        matrices = {operand: spec for one in found for operand, spec in _matrices_of(editor, loop, one)}
        sums = [one for one in (_of_matrices(one, matrices) for one in found) if one.terms]
        if not sums:
            return False
        with editor.subgraph(f"before/{loop.node.name}") as f:
            empty = {operand: f.name(_empty_list(spec)) for operand, spec in matrices.items()}
        made = [*f.made]
        stacks = {operand: _stack(loop, operand, before, matrices[operand].dtype) for operand, before in empty.items()}
        for one in sums:
            _take_out(loop, one)
        loop.finish()
        with editor.subgraph(f"after/{loop.node.name}") as f:
            rows = {
                operand: _rows(f.input(loop.after(stack), tf.variant), matrices[operand])
                for operand, stack in stacks.items()
            }
            totals = {
                loop.after(one.variable): f.name(
                    tf.add_n([f.input(loop.after(one.variable)), *(_of_all(term, rows) for term in one.terms)])
                )
                for one in sums
            }
        made += f.made
        for node in made:
            editor[node].device = loop.node.device
        for own, total in totals.items():
            editor.rewire(own, total, editor.consumers(loop.node.name) - set(made))
            editor.replace_output(own, total)
        return True


@dataclass(frozen=True)
class _Sum:
    """An addition, in the body of a loop, to a variable that is read for nothing else.

    Attributes:
        variable: its number.
        addition: the node that adds.
        terms: the addends that can be computed for all iterations at once.
    """

    variable: int
    addition: NodeDef
    terms: tuple[NodeDef, ...]


_ADDITIONS = having(Trait.ADDITION) | {"AddN"}

Matrices = Mapping[str, tf.TensorSpec]
"""The operands of products in the body of a loop; they have a row for each example."""


def _find_sums(loop: LoopEditor) -> Iterator[_Sum]:
    """Yields the sums whose terms may be products of matrices, or sums of their rows."""
    for variable in range(len(loop)):
        result = loop.source(loop.result(variable), is_moved=True)
        addition = loop.producer(result)
        if addition is None or addition.op not in _ADDITIONS or not loop.is_read_once(result):
            continue
        own, addends = loop.inside(variable), [loop.source(spelled, is_moved=True) for spelled in addition.input]
        if own in addends and loop.is_read_once(own) and not loop.is_tested(variable):
            terms = (loop.producer(spelled) for spelled in addends if loop.is_read_once(spelled))
            yield _Sum(variable, addition, tuple(term for term in terms if term is not None and _sums_rows(term)))


def _sums_rows(node: NodeDef) -> bool:
    """Returns True for ops that are a sum over the rows of their operands, if these are matrices."""
    if node.op == "MatMul":
        return node.attr["transpose_a"].b and not node.attr["transpose_b"].b
    return node.op == "BiasAddGrad" and node.attr["data_format"].s in (b"", b"NHWC")


def _matrices_of(editor: StepEditor[Step], loop: LoopEditor, one: _Sum) -> Iterator[tuple[str, tf.TensorSpec]]:
    """Yields the operands of the products of a sum whose shape is known."""
    shape = editor.shape(loop.after(one.variable))
    for term in one.terms:
        if term.op == "MatMul" and shape.is_fully_defined():
            for operand, columns in zip(term.input, shape, strict=True):
                yield operand, tf.TensorSpec([None, columns], tf.as_dtype(term.attr["T"].type))


def _of_matrices(one: _Sum, matrices: Matrices) -> _Sum:
    """Returns a sum with the terms whose operands are known to be matrices."""
    return replace(one, terms=tuple(term for term in one.terms if matrices.keys() >= set(term.input)))


def _empty_list(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.raw_ops.EmptyTensorList(element_shape=[-1, spec.shape[1]], max_num_elements=-1, element_dtype=spec.dtype)


def _stack(loop: LoopEditor, operand: str, before: str, dtype: tf.DType) -> int:
    """Adds a list to a loop, to which each iteration appends an operand; returns its number among the variables."""
    variable = loop.add_variable(before, tf.variant, tf.TensorShape([]))
    node = tf.compat.v1.NodeDef(
        name=f"{loop.inside(variable)}/append", op="TensorListPushBack", input=[loop.inside(variable), operand]
    )
    node.attr["element_dtype"].type = dtype.as_datatype_enum
    loop.add(node)
    loop.set_result(variable, f"{node.name}:output_handle:0")
    return variable


def _take_out(loop: LoopEditor, one: _Sum) -> None:
    """Leaves the terms out of a sum in the body of a loop."""
    gone = {term.name for term in one.terms}
    left = [spelled for spelled in one.addition.input if node_of(loop.source(spelled, is_moved=True)) not in gone]
    if len(left) == 1:
        loop.replace(one.addition.name, left[0])
    else:
        one.addition.input[:] = left
        one.addition.attr["N"].i = len(left)
    for name in gone:
        loop.remove(name)


def _rows(matrices: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns the rows of all matrices of a list."""
    return tf.raw_ops.TensorListConcatV2(
        input_handle=matrices,
        element_shape=[-1, spec.shape[1]],
        leading_dims=tf.constant([], tf.int64),
        element_dtype=spec.dtype,
    ).tensor


def _of_all(term: NodeDef, rows: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns the sum of a term over all iterations, from the rows of its operands."""
    operands = [rows[operand] for operand in term.input]
    if term.op == "MatMul":
        return tf.linalg.matmul(*operands, transpose_a=True)
    return tf.raw_ops.BiasAddGrad(out_backprop=operands[0])
