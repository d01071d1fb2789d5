"""SplitConstants: each operand of each reader has a constant of its own; merge_constants takes equal ones back."""

from __future__ import annotations

import textwrap

import pytest

from autodist.kernels.shard.merge_constants import merge_constants
from autodist.kernels.shard.split_constants import SplitConstants
from autodist.sharding import Sharding
from tests.unit.kernels.rewrites import cases, lines_of_step
from tests.unit.kernels.shard.imports import assert_imports, imported

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
            + copy autodist/split_constants/z/0/c of c
        """,
        "two operands of one reader have two constants": """
              x = Placeholder(shape=[2, 2])
              c = [[1.0, 2.0], [3.0, 4.0]]
            - y = MatMul(c, c, ^x)
              z = AddV2(y, x)
            + y = MatMul(c, autodist/split_constants/y/1/c, ^x)
            + autodist/split_constants/y/1/c = [[1.0, 2.0], [3.0, 4.0]]
            + copy autodist/split_constants/y/1/c of c
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
            + copy autodist/split_constants/p/0/two of two
            + copy autodist/split_constants/p/0/r of r
            + copy autodist/split_constants/p/0/s of s
            + copy autodist/split_constants/p/0/q of q
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
            + copy autodist/split_constants/a/0/dims of dims
            + copy autodist/split_constants/a/0/f of f
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
            + copy autodist/split_constants/z/1/c of c
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
            + copy autodist/split_constants/z/1/c of c
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
            + copy autodist/split_constants/z/1/c of c
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
        + copy autodist/split_constants/y/1/c of c
        + copy autodist/split_constants/z/1/c of c
    """
    assert_imports(SplitConstants(max_bytes=4), _annotated(text))


def test_a_large_constant_with_one_reader_is_left_alone():
    assert_imports(
        SplitConstants(max_bytes=4), _annotated("x = Placeholder(shape=[2])\nc = [1.0, 2.0]\ny = AddV2(x, c)")
    )


def test_without_annotations_nothing_is_split():
    assert_imports(SplitConstants(), "c = [1.0, 2.0]\nx = Placeholder(shape=[2])\ny = AddV2(x, c)\nz = Mul(x, c)")


CHAIN = """
  x = Placeholder(shape=[2])
  c = [1.0, 2.0]
  n = Neg(c)
  y = AddV2(x, n)
  z = Mul(x, n)
  u = Sub(x, n)
"""


@pytest.mark.parametrize(
    "cut, kept",
    [
        ([], []),
        (["autodist/split_constants/z/1/n:0"], ["autodist/split_constants/z/1/n"]),
        (["autodist/split_constants/z/1/n:0", "autodist/split_constants/u/1/n:0"], ["autodist/split_constants/z/1/n"]),
        (["autodist/split_constants/z/1/c:0"], ["autodist/split_constants/z/1/c", "autodist/split_constants/z/1/n"]),
        (["n:0"], ["autodist/split_constants/z/1/n"]),
    ],
)
def test_copies_that_came_out_alike_are_merged(cut, kept):
    split = imported(SplitConstants(), _annotated(CHAIN))
    merged = merge_constants(split, lambda name: Sharding.parse("[b]") if name in cut else None)
    assert sorted(merged.annotations.copies) == kept
    assert [name for name in merged.graph_index.nodes if name.startswith("autodist/")] == kept
    readers = {name: merged.graph_index.nodes[name].input[1] for name in "yzu"}
    of = [name for name in kept if name.endswith("/n")] or ["n"]
    assert readers["y"] == "n" and readers["z"] == of[0] and readers["u"] in ("n", *of)
    assert merge_constants(merged, lambda name: Sharding.parse("[b]") if name in cut else None) is merged


def test_merging_after_splitting_gives_the_step_back():
    text = _annotated(CHAIN)
    split = imported(SplitConstants(), text)
    assert sorted(lines_of_step(merge_constants(split, lambda _: None))) == sorted(text.strip().splitlines())


def _annotated(text: str) -> str:
    """Returns a text with a sharding of another variable: a step without one is left alone."""
    lines = textwrap.dedent(text).strip("\n").splitlines()
    margin = "  " if any(line.startswith(("+ ", "- ")) for line in lines) else ""
    return "\n".join([*lines, *(margin + line for line in ANNOTATED)])
