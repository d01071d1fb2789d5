"""The table of ops: each op is listed there once, and its traits are listed nowhere else."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorflow.python.framework import op_def_registry

import autodist
import autodist.kernels
import autodist.strategies
from autodist.graph.ops import Trait, draws_numbers, filling, having, linear_operands
from autodist.graph.ops.table import ROWS, TABLE

FOLDERS = [Path(package.__file__).parent for package in (autodist, autodist.kernels, autodist.strategies)]

TABLES = {
    "layout": ({"RULES"}, "the column of the table that has functions in it, each beside its entries"),
    "layout/folding.py": ({"_FOLDS", "_OF_SHAPE"}, "what an op makes of constants, in functions"),
    "capture/loss_decomposition.py": ({"_AGAIN", "_UNARY", "_BINARY", "_DATA_INPUTS"}, "how an op is made once more"),
    "place/partition": ({"RULES", "READS", "COMPLETED"}, "how an op is done on pieces, in functions"),
    "rows/signs.py": ({"_BINARY"}, "what sign an op makes of two, in functions"),
    "rows/zero_rows.py": ({"_BOUNDS"}, "which bounds leave zero as it is, in functions"),
}
"""By file or folder: dictionaries that map ops to functions, and the reason for each."""

EXCEPTIONS = {
    (
        "capture/loss_decomposition.py",
        frozenset({"Const", "ReadVariableOp"}),
    ): "all that is alike everywhere by itself",
    ("layout/vanishing.py", frozenset({"Greater", "NotEqual", "Equal"})): "an idiom: `where(s > 0, a / s, 0)`",
    ("layout/images.py", frozenset({"Minimum", "Maximum"})): "an idiom: `minimum(maximum(x, n), n)`",
    ("finish/loop_constants.py", frozenset({"Const", "Softmax", "Transpose"})): "what cannot fail, besides arithmetic",
    ("finish/compilable.py", frozenset({"Stack", "TensorArray"})): "what names begin with",
    (
        "graph/node_rules.py",
        frozenset({"ResourceScatterAdd", "ResourceScatterSub"}),
    ): "adding a row of zeros changes nothing",
    (
        "graph/node_rules.py",
        frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}),
    ): "the variable and the value are divided alike",
    (
        "graph/node_rules.py",
        frozenset({"Fill", "GatherV2", "IdentityN", "Reshape", "Squeeze"}),
    ): "rules that need shapes or divided rows",
    ("graph/static_shapes.py", frozenset({"GatherV2", "StridedSlice"})): "what gradients compute shapes with",
    (
        "shard/partials.py",
        frozenset({"ConcatV2", "ExpandDims", "Pack", "Reshape", "Squeeze", "Transpose"}),
    ): "moves, through which a largest or smallest value may pass before it is complete",
    ("shard/partials.py", frozenset({"Any", "LogicalOr", "Max", "Maximum"})): "the ops that a maximum completes",
    ("shard/partials.py", frozenset({"All", "LogicalAnd", "Min", "Minimum"})): "the ops that a minimum completes",
    ("shard/part_shapes.py", frozenset({"MatrixDiagV2", "MatrixDiagV3"})): "TensorFlow checks a shape of theirs",
    (
        "shard/softmaxes.py",
        frozenset(
            {
                "Softmax",
                "LogSoftmax",
                "SoftmaxCrossEntropyWithLogits",
                "SparseSoftmaxCrossEntropyWithLogits",
            }
        ),
    ): "what the kernel rewrites, each into other arithmetic",
    ("rows/gather_rows.py", frozenset({"GatherV2", "Shape"})): "what the kernel rewrites, each into another op",
}
"""By file and ops: lists of ops that express no trait, and the reason for each."""


class _Lists(ast.NodeVisitor):
    """Finds expressions that list two or more ops."""

    def __init__(self, tables: set[str]) -> None:
        self.tables, self.found = {*tables, "__all__"}, []

    def visit_Assign(self, node: ast.Assign) -> None:
        self._unless_table(node, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._unless_table(node, [node.target])

    def _unless_table(self, node: ast.stmt, targets: list[ast.expr]) -> None:
        if not any(isinstance(t, ast.Name) and t.id in self.tables for t in targets):
            self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._note(node, node.keys)

    def visit_MatchOr(self, node: ast.MatchOr) -> None:
        self._note(node, [p.value for p in node.patterns if isinstance(p, ast.MatchValue)])

    def visit_Call(self, node: ast.Call) -> None:
        self._note(node, node.args)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        compared = [one.comparators[0] for one in node.values if isinstance(one, ast.Compare)]
        self._note(node, compared)

    def visit_Constant(self, node: ast.Constant) -> None:
        words = node.value.split() if isinstance(node.value, str) else []
        self._note(node, [ast.Constant(word) for word in words] if all(map(is_op, words)) else [])

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            self._note(node, node.elts)
        else:
            super().generic_visit(node)

    def _note(self, node: ast.expr, among: list[ast.expr | None]) -> None:
        ops = [one.value for one in among if isinstance(one, ast.Constant) and is_op(one.value)]
        if len(ops) > 1:
            self.found.append((node.lineno, frozenset(ops)))
        super().generic_visit(node)


def is_op(word: object) -> bool:
    return isinstance(word, str) and word[:1].isupper() and op_def_registry.get(word) is not None


def lists_in(source: str, tables: set[str] = frozenset()) -> list[frozenset[str]]:
    visitor = _Lists(tables)
    visitor.visit(ast.parse(source))
    return [ops for _, ops in visitor.found]


def lists_outside() -> Iterator[tuple[str, int, frozenset[str]]]:
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            if name.startswith("graph/ops/"):
                continue
            tables = {table for at, (tables, _) in TABLES.items() if name.startswith(at) for table in tables}
            visitor = _Lists(tables)
            visitor.visit(ast.parse(path.read_text()))
            yield from ((name, line, ops) for line, ops in visitor.found)


def test_ops_are_listed_nowhere_but_in_the_table():
    found = list(lists_outside())
    assert [f"{name}:{line} {sorted(ops)}" for name, line, ops in found if (name, ops) not in EXCEPTIONS] == []
    assert EXCEPTIONS.keys() == {(name, ops) for name, _, ops in found}, "an exception is no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "READS = frozenset({'ReadVariableOp', 'ResourceGather'})",
        "if node.op in ('Add', 'AddV2'): pass",
        "if node.op == 'Add' or node.op == 'AddV2': pass",
        "LINEAR = 'Add AddV2'.split()",
        "HOW = {'Add': 1, 'AddV2': 2}",
        "HOW = [*others, 'Add', 'AddV2']",
        "wiring.of_op('Add', 'AddV2')",
        "match node.op:\n    case 'Add' | 'AddV2': pass",
    ],
)
def test_a_list_of_ops_is_found_however_it_is_written(source):
    assert len(lists_in(source)) == 1 and len(lists_in(source)[0]) == 2


def test_other_words_are_no_list_of_ops():
    assert not lists_in("words = ['Add', 'one', 'all']; text = 'Add this'; RULES = {'Add': 1}; one = ['Add']")
    assert not lists_in("RULES = {'Add': 1, 'AddV2': 1}", {"RULES"})


def test_every_op_of_the_table_is_one_and_stands_in_one_row():
    names = [name for row in ROWS for name in row.names.split()]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert [name for name in TABLE if op_def_registry.get(name) is None] == []


def test_every_trait_is_had_and_asked_for():
    assert [trait.name for trait in Trait if not having(trait)] == []
    text = "".join(path.read_text() for folder in FOLDERS for path in folder.rglob("*.py") if "ops/" not in str(path))
    assert [trait.name for trait in Trait if f"Trait.{trait.name}" not in text] == []


def test_ops_that_have_one_of_several_traits_are_those_of_each():
    assert having(Trait.READ | Trait.QUERY) == having(Trait.READ) | having(Trait.QUERY)
    assert "Add" in having(Trait.ELEMENTWISE) and "MatMul" not in having(Trait.ELEMENTWISE)


def test_of_an_op_that_does_not_stand_in_the_table_nothing_is_known():
    assert linear_operands("NoSuchOp", 2) is None and filling("NoSuchOp") is None and not draws_numbers("NoSuchOp")


def test_indices_stand_before_the_data_of_which_a_stitch_is_linear():
    assert linear_operands("DynamicStitch", 6) == ([3, 4, 5], False)
