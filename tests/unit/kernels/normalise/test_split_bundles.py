"""SplitBundles: an op that only forwards tensors does not make them depend on each other."""

from __future__ import annotations

from autodist.graph.parts import VariableGradient
from autodist.kernels.normalise.split_bundles import SplitBundles
from tests.unit.kernels.rewrites import assert_rewrites, cases

CASES = {
    "a graph without bundles stays": """
        a = Placeholder()
        b = Neg(a)
    """,
    "each reader of a bundle reads the tensor that it forwards": """
        a = Placeholder()
        b = Placeholder()
      - both = IdentityN(a, b)
      - x = Neg(both)
      - y = Neg(both:1)
      + x = Neg(a)
      + y = Neg(b)
        run x, y
    """,
    "bundles of bundles are split, also for outputs": """
        a = Placeholder()
        b = Placeholder()
      - i = IdentityN(a, b)
      - j = IdentityN(i:1, i)
      - x = Neg(j)
      - return j:1
      + x = Neg(b)
      + return a:0
        run x
    """,
    "a node that waits for a bundle waits for all of its inputs": """
        a = Placeholder()
        b = Placeholder()
        c = Placeholder()
      - i = IdentityN(a, b, ^c)
      - x = Neg(c, ^i)
      + x = Neg(c, ^a, ^b, ^c)
        run x
    """,
    "a reader of a bundle waits for the control inputs of the bundle": """
      - a = Placeholder()
        b = Placeholder()
        c = Placeholder()
      - i = IdentityN(a, b, ^c)
      - x = Neg(i:1)
      + x = Neg(b, ^c)
        run x
    """,
}


@cases(CASES)
def test_rewrites(text):
    assert_rewrites(SplitBundles(), text)


def test_gradients_are_the_bundled_tensors():
    found = assert_rewrites(
        SplitBundles(),
        """
          - a = Placeholder()
            b = Placeholder()
          - i = IdentityN(a, b)
          - x = Neg(i:1)
          + x = Neg(b)
            run x
        """,
        gradients=(VariableGradient("v", ("i:1",), 0),),
    )
    assert found.gradients == (VariableGradient("v", ("b:0",), 0),)
