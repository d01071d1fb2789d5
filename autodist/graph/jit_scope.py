"""The name scope that marks the nodes of nested `tf.function(jit_compile=True)`s, which XLA compiles.

TensorFlow passes the name scope of an op to the ops of its gradient (`gradient_tape/SCOPE/…`,
`gradients/SCOPE/…_grad/…`). The scope therefore also marks the backward pass of a nested function.
"""

from __future__ import annotations

import re

JIT_SCOPE = "autodist_jit_compile"

_PART = re.compile(rf"(^|/){JIT_SCOPE}(_\d+)?(?=/)")


def is_in_jit_scope(name: str) -> bool:
    """Returns True if a node belongs to a nested function with `jit_compile=True`, or to its gradient.

    >>> is_in_jit_scope("gradient_tape/autodist_jit_compile_1/dense/MatMul/MatMul"), is_in_jit_scope("dense/MatMul")
    (True, False)
    """
    return _PART.search(name) is not None


def without_jit_scope(name: str) -> str:
    """Returns the name that a variable would have outside of such a scope.

    >>> without_jit_scope("autodist_jit_compile/dense/kernel")
    'dense/kernel'
    """
    return _PART.sub("", name).removeprefix("/")
