"""SplitConstants: each operand of each reader has a constant of its own."""

from __future__ import annotations

import textwrap

from autodist.kernels.shard.split_constants import SplitConstants
from tests.unit.kernels.rewrites import cases
from tests.unit.kernels.shard.imports import assert_imports

ANNOTATED = ("k = VarHandleOp(shape=[2, 2])", "mesh mesh = {a: 2, b: 2}", "variable k: [–, b]")


@cases(
    {
        "two readers have two constants": """
              x = Placeholder(shape=[2, 2])
              w = Placeholder(shape=[2, 2])
              c = [[1.0, 2.0], [3.0, 4.0]]
              y = AddV2(x, c)
            - z = MatMul(c, w)
            + z = MatMul(autodist/split_constants/z/0/c, w)
            + autodist/split_constants/z/0/c = [[1.0, 2.0], [3.0, 4.0]]
        """,
        "two operands of one reader have two constants": """
              x = Placeholder(shape=[2, 2])
              c = [[1.0, 2.0], [3.0, 4.0]]
            - y = MatMul(c, c, ^x)
              z = AddV2(y, x)
            + y = MatMul(c, autodist/split_constants/y/1/c, ^x)
            + autodist/split_constants/y/1/c = [[1.0, 2.0], [3.0, 4.0]]
        """,
        "all that leads to a constant is copied, and shared within the copy": """
              w = Placeholder(shape=[4, 4])
              start = 0.0
              limit = 16.0
              delta = 1.0
              two = [2.0]
              r = Range(start, limit, delta)
              s = AddV2(r, r)
              q = Maximum(s, two)
              sh = [4, 4]
            - m = Reshape(q, sh)
            + m = Reshape(autodist/split_constants/p/0/q, sh)
              p = MatMul(m, w)
            + autodist/split_constants/p/0/two = [2.0]
            + autodist/split_constants/p/0/r = Range(start, limit, delta)
            + autodist/split_constants/p/0/s = AddV2(autodist/split_constants/p/0/r, autodist/split_constants/p/0/r)
            + autodist/split_constants/p/0/q = Maximum(autodist/split_constants/p/0/s, autodist/split_constants/p/0/two)
              return q:0
        """,
        "a broadcast of a computed scalar is copied, the scalar is not": """
              x = Placeholder(shape=[2])
              axis = 0
              s = Sum(x, axis)
              dims = [2, 64]
              f = Fill(dims, s)
              n = Neg(f)
            - a = Abs(f)
            + a = Abs(autodist/split_constants/a/0/f)
            + autodist/split_constants/a/0/dims = [2, 64]
            + autodist/split_constants/a/0/f = Fill(autodist/split_constants/a/0/dims, s)
        """,
        "readers that are constant themselves share their operand": """
            c = [1.0, 2.0]
            n = Neg(c)
            a = Abs(c)
            return n:0, a:0
        """,
        "two constants with a common operand share it no longer": """
              x = Placeholder(shape=[2])
              c = [1.0, 2.0]
              n = Neg(c)
            - a = Abs(c)
            + a = Abs(autodist/split_constants/z/1/c)
              y = AddV2(x, n)
              z = AddV2(x, a)
            + autodist/split_constants/z/1/c = [1.0, 2.0]
        """,
        "a draw, a fed constant and a scalar are not copied": """
            x = Placeholder(shape=[2])
            seed = [1, 2]
            shape = [2]
            one = 1.0
            d = StatelessRandomUniform(shape, seed, dtype=float32)
            f = PlaceholderWithDefault(d)
            y = AddV2(x, d)
            z = Mul(y, d)
            u = Mul(y, one)
            v = Mul(z, one)
        """,
        "copies keep group marks": """
              x = Placeholder(shape=[2])
              c = [1.0, 2.0]
              y = AddV2(x, c)
            - z = Mul(x, c)
            + z = Mul(x, autodist/split_constants/z/1/c)
            + autodist/split_constants/z/1/c = [1.0, 2.0]
            - group 0: x:0, c:0
            + group 0: x:0, c:0, autodist/split_constants/z/1/c:0
        """,
        "a manual region gets the constants that it reads": """
              x = Placeholder(shape=[2])
              c = [1.0, 2.0]
              y = AddV2(x, c)
              i = Identity(x)
            - z = Mul(i, c)
            + z = Mul(i, autodist/split_constants/z/1/c)
              o = Identity(z)
            + autodist/split_constants/z/1/c = [1.0, 2.0]
              region f over a
              input i of f: [a]
              output o of f: [a]
            - body of f: z
            + body of f: autodist/split_constants/z/1/c, z
        """,
    }
)
def test_constants_are_split(text):
    assert_imports(SplitConstants(), _annotated(text))


def test_a_large_constant_is_read_through_barriers():
    text = """
          x = Placeholder(shape=[2])
          c = [1.0, 2.0]
        - y = AddV2(x, c)
        - z = Mul(x, c)
        + y = AddV2(x, autodist/split_constants/y/1/c)
        + z = Mul(x, autodist/split_constants/z/1/c)
        + autodist/split_constants/y/1/c = Identity(c)
        + autodist/split_constants/z/1/c = Identity(c)
        + barrier autodist/split_constants/y/1/c
        + barrier autodist/split_constants/z/1/c
    """
    assert_imports(SplitConstants(max_bytes=4), _annotated(text))


def test_a_large_constant_with_one_reader_is_left_alone():
    assert_imports(
        SplitConstants(max_bytes=4), _annotated("x = Placeholder(shape=[2])\nc = [1.0, 2.0]\ny = AddV2(x, c)")
    )


def test_without_annotations_nothing_is_split():
    assert_imports(SplitConstants(), "c = [1.0, 2.0]\nx = Placeholder(shape=[2])\ny = AddV2(x, c)\nz = Mul(x, c)")


def _annotated(text: str) -> str:
    """Returns a text with a sharding of another variable: a step without one is left alone."""
    lines = textwrap.dedent(text).strip("\n").splitlines()
    margin = "  " if any(line.startswith(("+ ", "- ")) for line in lines) else ""
    return "\n".join([*lines, *(margin + line for line in ANNOTATED)])
