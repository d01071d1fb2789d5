"""RewriteRows: rules for rows, applied one after the other until none changes the step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from autodist.errors import RewriteError
from autodist.graph.step_editor import StepEditor
from autodist.kernels import Context
from autodist.kernels.rows.gather_before_arithmetic import GatherBeforeArithmetic
from autodist.kernels.rows.gather_rows import GatherRows
from autodist.kernels.rows.rewrite_rows import RULES, RewriteRows
from autodist.kernels.rows.scatter_rows import ScatterRows
from autodist.kernels.rule import Facts, Refusal, Rule
from autodist.proto import strategy_pb2
from tests.unit.kernels.rewrites import assert_rewrites, step_of

NOBODY = Context(strategy_pb2.Strategy(), 0)
EXP = step_of("a = Placeholder()\nb = Exp(a)")


@dataclass(frozen=True)
class Turns(Rule):
    """Makes nodes of one op those of another."""

    op: str = ""
    into: str = ""
    name: ClassVar[str] = "turns"

    @property
    def ops(self):
        return (self.op,)

    def match(self, rows, node):
        def rewrite():
            node.op = self.into

        return rewrite


CHAIN = Turns("Tanh", "Sin"), Turns("Cos", "Tanh"), Turns("Exp", "Cos")


@pytest.mark.parametrize("rules", [CHAIN, CHAIN[::-1]])
def test_rules_are_applied_until_none_changes_anything_in_any_order(rules):
    assert_rewrites(
        RewriteRows(rules),
        """
            a = Placeholder()
          - b = Exp(a)
          - c = Cos(b)
          + b = Sin(a)
          + c = Sin(b)
        """,
    )


def test_a_step_that_no_rule_changes_is_the_same_object():
    assert_rewrites(RewriteRows(), "a = Placeholder()\nb = Neg(a)")


def test_two_rules_that_disagree_are_named():
    @dataclass(frozen=True)
    class Back(Turns):
        name: ClassVar[str] = "turns-back"

    rules = Turns("Exp", "Log"), Back("Log", "Exp")
    with pytest.raises(RewriteError, match="the rules turns and turns-back still change the step after 10 rounds"):
        RewriteRows(rules).apply(EXP, NOBODY)


def test_a_rule_that_fits_what_it_makes_is_named():
    with pytest.raises(RewriteError, match="the rules turns and turns still change the step after 10 rounds"):
        RewriteRows((Turns("Exp", "Exp"),)).apply(EXP, NOBODY)


def test_an_error_in_a_rule_says_its_name():
    @dataclass(frozen=True)
    class Fails(Turns):
        name: ClassVar[str] = "fails"

        def match(self, rows, node):
            raise KeyError(node.name)

    with pytest.raises(KeyError) as error:
        RewriteRows((Fails("Exp", "Log"),)).apply(EXP, NOBODY)
    assert error.value.__notes__ == ["in the kernel fails, for worker 0"]


def test_a_node_that_the_same_round_has_removed_is_not_matched():
    @dataclass(frozen=True)
    class Removes(Rule):
        name: ClassVar[str] = "removes"
        ops: ClassVar[tuple[str, ...]] = ("Neg",)

        def match(self, rows, node):
            return (lambda: rows.editor.remove(["c", "b"])) if node.name == "c" else None

    assert_rewrites(RewriteRows((Removes(),)), "  a = Placeholder()\n- b = Neg(a)\n- c = Neg(b)")


TABLE = "axis = 0\nids = Placeholder(dtype=int32, shape=[3])\nv = VarHandleOp()\nr = ReadVariableOp(v)\n"
PRODUCT = "m = MatMul(r, r)\ng = GatherV2(m, ids, axis)"
LATE = "w = AssignVariableOp(v, r)\nl = ReadVariableOp(v, ^w)\ni = Cast(l, DstT=int32)\ng = GatherV2(r, i, axis)"


@pytest.mark.parametrize(
    "rule, text, name, reason",
    [
        (GatherBeforeArithmetic(), PRODUCT, "g", "m:0 is not computed from a variable"),
        (GatherBeforeArithmetic(), "g = GatherV2(ids, ids, axis)", "g", "it does not gather whole rows of ids:0"),
        (GatherRows(), LATE, "r", "the rows that g gathers are only known after the variable has changed"),
        (ScatterRows(), "w = AssignAddVariableOp(v, r)", "w", r"ReadVariableOp \(r\) may be nonzero in every row"),
    ],
)
def test_a_rule_says_why_it_leaves_a_node(rule, text, name, reason):
    item = step_of(TABLE + text)
    editor = StepEditor(item)
    answer = rule.match(Facts(item, editor), editor[name])
    assert isinstance(answer, Refusal)
    assert re.search(reason, answer.reason)


def test_refusals_are_told_in_the_log(caplog):
    with caplog.at_level("DEBUG", "autodist"):
        RewriteRows().apply(step_of(TABLE + PRODUCT), NOBODY)
    (said,) = [record.getMessage() for record in caplog.records]
    why = "m:0 is not computed from a variable by row-wise arithmetic"
    assert said == f"gather-before-arithmetic leaves g as it is, since {why}"


def test_every_rule_has_a_name_of_its_own():
    assert len({rule.name for rule in RULES}) == len(RULES)
