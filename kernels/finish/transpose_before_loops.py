"""TransposeBeforeLoops: transposes the matrices with which a loop multiplies once, before the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.graph.loop_editor import LoopEditor
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.finish.loop_constants import add_before, find_constant
from autodist.kernels.finish.loop_kernel import LoopKernel


@dataclass(frozen=True)
class TransposeBeforeLoops(LoopKernel):
    """Transposes matrices with which each iteration multiplies once, before the loop.

    The backward loop of a recurrent layer multiplies gradients with the transposed recurrent kernel. On a CPU a product
    of few rows with a transposed matrix of 256 × 1024 takes 2.0 ms instead of 0.7 ms (64 rows, one core).

        for t: … dz[t] · rᵀ …       becomes       s = transpose(r);  for t: … dz[t] · s …
    """

    name: ClassVar[str] = "transpose-before-loops"
    after: ClassVar[Mapping[str, str]] = {
        "sum-after-loops": "a product that is computed after the loop needs no transposed matrix",
    }

    def change(self, editor: StepEditor[Step], loop: LoopEditor) -> bool:
        products = [node for node in loop.of_op("MatMul") if node.attr["transpose_b"].b]
        found = [(node, constant) for node in products if (constant := find_constant(editor, loop, node.input[1]))]
        if not found:
            return False
        with editor.subgraph(f"transposed/{loop.node.name}") as f:
            matrices = [f.name(tf.transpose(constant.build(f), [1, 0])) for _, constant in found]
        add_before(editor, loop, f.made, [constant for _, constant in found])
        for (node, constant), matrix in zip(found, matrices, strict=True):
            variable = loop.add_variable(matrix, constant.dtype, tf.TensorShape([None, None]))
            node.input[1] = loop.inside(variable)
            node.attr["transpose_b"].b = False
        loop.finish()
        return True
