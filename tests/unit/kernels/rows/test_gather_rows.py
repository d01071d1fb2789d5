"""GatherRows: a gather from a read costs as much as its rows, not as the table."""

from __future__ import annotations

from autodist.kernels.rows.gather_rows import GatherRows
from tests.unit.kernels.rewrites import assert_rewrites, cases

CASES = {
    "a gather of a read becomes a gather in the variable": """
        table = VarHandleOp(shape=[6, 2])
        ids = Placeholder(dtype=int32, shape=[None])
        axis = 0
      - read = ReadVariableOp(table)
      - rows = GatherV2(read, ids, axis)
      + rows = ResourceGather(table, ids)
        return rows:0
    """,
    "the shape of a value read after a write is read after the write": """
        v = VarHandleOp()
        a = Placeholder()
        w = AssignVariableOp(v, a)
      - r = ReadVariableOp(v, ^w)
      - s = Shape(r)
      + s = VariableShape(v, ^w)
        return s:0
    """,
    "a write that waits for the read waits for the gather: its value need not depend on the rows": """
        v = VarHandleOp()
        ids = Placeholder(dtype=int32)
        a = Placeholder()
        axis = 0
      - r = ReadVariableOp(v)
      - g = GatherV2(r, ids, axis)
      - w = AssignAddVariableOp(v, a, ^r)
      + g = ResourceGather(v, ids)
      + w = AssignAddVariableOp(v, a, ^g)
        run g, w
    """,
    "a write of the read value waits for the gather": """
        v = VarHandleOp()
        ids = Placeholder(dtype=int32)
        axis = 0
        r = ReadVariableOp(v)
      - g = GatherV2(r, ids, axis)
      - w = AssignAddVariableOp(v, r)
      + g = ResourceGather(v, ids)
      + w = AssignAddVariableOp(v, r, ^g)
        run g, w
    """,
    "a read that the step returns stays": """
        v = VarHandleOp()
        ids = Placeholder(dtype=int32)
        a = Placeholder()
        axis = 0
        r = ReadVariableOp(v)
      - g = GatherV2(r, ids, axis)
      - w = AssignAddVariableOp(v, a, ^r)
      + g = ResourceGather(v, ids)
      + w = AssignAddVariableOp(v, a, ^r, ^g)
        return r:0
    """,
    "one of two gathers that would wait for each other stays": """
        v = VarHandleOp()
        u = VarHandleOp()
        a = Placeholder()
        axis = 0
      - rv = ReadVariableOp(v)
        ru = ReadVariableOp(u)
      - wv = AssignAddVariableOp(v, a, ^rv)
      + wv = AssignAddVariableOp(v, a, ^gv)
        wu = AssignAddVariableOp(u, a, ^ru)
        lv = ReadVariableOp(v, ^wv)
        lu = ReadVariableOp(u, ^wu)
        iv = Cast(lv, DstT=int32)
        iu = Cast(lu, DstT=int32)
      - gv = GatherV2(rv, iu, axis)
      + gv = ResourceGather(v, iu)
        gu = GatherV2(ru, iv, axis)
    """,
    "a step without gathers stays": """
        v = VarHandleOp()
        r = ReadVariableOp(v)
        x = Neg(r)
    """,
    "a gather along the second axis stays": """
        table = VarHandleOp(shape=[6, 2])
        ids = Placeholder(dtype=int32, shape=[None])
        axis = 1
        read = ReadVariableOp(table)
        columns = GatherV2(read, ids, axis)
    """,
    "a gather of a sum stays": """
        table = VarHandleOp(shape=[6, 2])
        ids = Placeholder(dtype=int32, shape=[None])
        axis = 0
        one = 1.0
        read = ReadVariableOp(table)
        sum = AddV2(read, one)
        rows = GatherV2(sum, ids, axis)
    """,
    "the shape of another tensor stays, even if it waits for a read": """
        v = VarHandleOp()
        a = Placeholder()
        r = ReadVariableOp(v)
        s = Shape(a, ^r)
    """,
    "a gather stays if its rows are chosen after a write of the variable": """
        v = VarHandleOp()
        a = Placeholder()
        axis = 0
        r = ReadVariableOp(v)
        w = AssignAddVariableOp(v, a, ^r)
        late = ReadVariableOp(v, ^w)
        ids = Cast(late, DstT=int32)
        g = GatherV2(r, ids, axis)
    """,
}


@cases(CASES)
def test_rewrites(text):
    assert_rewrites(GatherRows(), text)
