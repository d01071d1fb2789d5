"""Which nodes the script asks XLA to compile: a name scope tells those of nested `tf.function(jit_compile=True)`s.

A name scope is what TensorFlow hands on from an op to the ops of its gradient (`gradient_tape/SCOPE/…`,
`gradients/SCOPE/…_grad/…`), so that the backward pass of a nested function is known by it, too.
"""

from __future__ import annotations

import re

JIT_SCOPE = "autodist_jit_compile"

_PART = re.compile(rf"(^|/){JIT_SCOPE}(_\d+)?(?=/)")


def is_in_jit_scope(name: str) -> bool:
    """Whether a node computes what stands in a nested function that asks for XLA, or its gradient.

    >>> is_in_jit_scope("gradient_tape/autodist_jit_compile_1/dense/MatMul/MatMul"), is_in_jit_scope("dense/MatMul")
    (True, False)
    """
    return _PART.search(name) is not None


def without_jit_scope(name: str) -> str:
    """The name that a variable would have outside of such a scope.

    >>> without_jit_scope("autodist_jit_compile/dense/kernel")
    'dense/kernel'
    """
    return _PART.sub("", name).removeprefix("/")
