"""Finds values that are zero wherever a divisor is: in sum(mask · loss) / sum(mask), the dividend vanishes with it.

Only such a quotient is a mean with the divisor as its weight. In sum(loss) / sum(mask), a replica whose mask is all
zeros contributes to the dividend, though its weight is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import tensorflow as tf

from autodist.graph.names import data_inputs
from autodist.graph.ops import Trait, having
from autodist.layout.combine import Operand
from autodist.layout.factors import EXAMPLES, NONE, Count, Factor, Factors, PartialSum, additive_over
from autodist.layout.facts import REPLICATED, Base, Dims, Form, Statistic, UnknownFact, form_of
from autodist.layout.kinds import Elements
from autodist.layout.op_context import OpContext, Scope, tensor_name

Keys = frozenset[str]
"""Names of tensors. A value is zero wherever their product is."""

NOTHING: Keys = frozenset()

NO_WEIGHT = "it divides a sum over the batch by a sum that may be zero on a replica where the dividend is not"


def vanish_with(ctx: OpContext, index: int, factors: Factors) -> bool:
    """Returns True if an input is zero on every replica on which one of its divisors is zero.

    Args:
        ctx: a product, a quotient or a reduction.
        index: of the input.
        factors: its divisors have negative exponents.
    """
    search = _Search(ctx.scope)
    return all(search.vanishes(ctx.inputs[index], factor) for factor, exponent in factors if exponent < 0)


def is_summed(operand: Operand) -> TypeGuard[Form]:
    """Returns True for a sum over the examples, of something other than ones, that may be divided by counts."""
    if not isinstance(operand, Form) or operand.rows is not None:
        return False
    return operand.base is Base.PARTIAL_SUM or any(isinstance(f, PartialSum) and e > 0 for f, e in operand.factors)


def differs_where_zero(ctx: OpContext, left: Form, right: Form, sign: int = 1) -> Statistic | UnknownFact:
    """Returns the layout of a quotient whose divisor is not its weight, or of the product with such a quotient."""
    unknown = ctx.unknown(NO_WEIGHT)
    return unknown if left.degree + sign * right.degree else Statistic(unknown.reason)


@dataclass(frozen=True)
class Guard:
    """A selection by the comparison of a divisor with zero.

    Attributes:
        divisor: its form.
        factor: the sum or count that the divisor is.
        nonzero: index of the operand that is selected if the divisor is not zero.
        zero: index of the operand that is selected if it is zero.
    """

    divisor: Form
    factor: Factor
    nonzero: int
    zero: int


def guard_of(ctx: OpContext) -> Guard | None:
    """Returns the guard of a selection; None if its condition is no comparison of a sum or count with zero."""
    condition = ctx.scope.producer(ctx.inputs[0])
    if condition is None or condition.op not in _GUARDS:
        return None
    compared = OpContext(condition, [tensor_name(name) for name in condition.input[:2]], [], ctx.scope)
    divisor = form_of(ctx.scope.fact(compared.inputs[0])) if compared.is_zero(1) else None
    factor = _counted(divisor)
    if factor is None or (condition.op == "Greater" and not _is_count(ctx.scope, compared.inputs[0])):
        return None
    assert isinstance(divisor, Form)
    return Guard(divisor, factor, *_GUARDS[condition.op])


def guarded_count(ctx: OpContext, index: int) -> Form | None:
    """Returns the form of the count in `maximum(count, 1)` or `where(count == 0, 1, count)`; None for other inputs."""
    _, node = ctx.origin(index)
    if node is None or node.op not in ("Maximum", *_SELECTIONS):
        return None
    inputs = data_inputs(node)
    guarded = OpContext(node, inputs, [ctx.scope.fact(name) for name in inputs], ctx.scope)
    if node.op in _SELECTIONS:
        guard = guard_of(guarded)
        chosen = None if guard is None else form_of(guarded.facts[guard.nonzero])
        return guard.divisor if guard is not None and chosen == guard.divisor else None
    for count, other in ((0, 1), (1, 0)):
        form, bound = form_of(guarded.facts[count]), guarded.constant(other)
        if bound is not None and bound.size == 1 and 0 <= bound.reshape(-1)[0] <= 1 and isinstance(form, Form):
            if _counted(form) is not None and _is_count(ctx.scope, inputs[count]):
                return form
    return None


def _counted(operand: Operand | None) -> Factor | None:
    is_scalar = isinstance(operand, Form) and operand.base is Base.REPLICATED
    return additive_over(operand.factors, NONE) if isinstance(operand, Form) and is_scalar else None


def _is_count(scope: Scope, tensor: str) -> bool:
    """Returns True if a scalar is a count of rows or of True elements."""
    if isinstance(scope.fact(tensor), Dims):
        return True
    node = scope.producer(tensor)
    while node is not None and (node.op == "Sum" or node.op in _PASSING):
        if node.op == "Cast" and node.attr["SrcT"].type == tf.bool.as_datatype_enum:
            return True
        source = tensor_name(node.input[0])
        if node.op == "Cast" and isinstance(scope.fact(source), Dims):
            return True
        node = scope.producer(source)
    return False


class _Search:
    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._known: dict[str, Keys] = {}

    def vanishes(self, name: str, divisor: Factor) -> bool:
        """Returns True if a tensor is zero where a divisor is; True, too, if the divisor has divided it before."""
        if isinstance(divisor, Count):
            return not isinstance(divisor.of, Elements) or self._is_over(name, divisor)
        if divisor in dict(self._factors(name)):
            return True
        if not divisor.tensor.startswith(self._scope.tag):
            return False
        return self._masks(divisor.tensor.removeprefix(self._scope.tag)) <= self.keys(name)

    def _masks(self, name: str) -> Keys:
        """Returns the tensors whose product is zero wherever a sum without negative terms is zero.

        A count of all examples needs none: a replica without examples has nothing to add up.
        """
        node, form = self._scope.producer(name), form_of(self._scope.fact(name))
        is_of_all = isinstance(form, Form) and form.rows is not None and form.rows.count == EXAMPLES
        if form == REPLICATED or (is_of_all and self._is_filled(name, 1)):
            return NOTHING
        if node is None or node.op in _QUOTIENTS:
            return frozenset([name])
        zeros = self._zeros(node)
        return NOTHING.union(*map(self._masks, zeros)) if zeros else frozenset([self._first_like(name)])

    def _factors(self, name: str) -> Factors:
        form = form_of(self._scope.fact(name))
        return form.factors if isinstance(form, Form) else frozenset()

    def _is_over(self, name: str, count: Count) -> bool:
        """Returns True for rows whose number is the count, and for what is summed over such rows only."""
        form = form_of(self._scope.fact(name))
        if isinstance(form, Form) and form.rows is not None:
            return form.rows.count == count
        node = self._scope.producer(name)
        if node is None or node.op not in _LINEAR:
            return False
        return any(self._is_over(one, count) for one in data_inputs(node))

    def keys(self, name: str) -> Keys:
        """Returns the tensors whose product being zero makes a tensor zero; at least the tensor itself."""
        if name not in self._known:
            self._known[name] = frozenset([name])  # in case of a loop
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> Keys:
        node = self._scope.producer(name)
        itself = frozenset([name])
        if node is None or isinstance(self._scope.fact(name), Dims):
            return itself
        if zeros := self._zeros(node):
            return itself.union(*map(self.keys, zeros))
        if node.op in _SUMS and (data := data_inputs(node)):
            return itself | frozenset.intersection(*map(self.keys, data))
        return frozenset([self._first_like(name)])

    def _zeros(self, node: tf.compat.v1.NodeDef) -> Sequence[str]:
        """Returns operands of a node whose product being zero, or False, makes its result so; empty if unknown."""
        data = data_inputs(node)
        if node.op in _PRODUCTS:
            return data
        is_unary = node.op in _ZERO_TO_ZERO and len(data) == 1
        if node.op in _LINEAR or is_unary or (node.op in _COMPARISONS_WITH_ZERO and self._is_filled(data[1], 0)):
            return data[:1]
        if node.op in _SELECTIONS and self._is_filled(data[2], 0):
            return data[:2]
        if node.op in _SELECTIONS and self._is_filled(data[1], 0):
            condition = self._scope.producer(data[0])
            compared = [] if condition is None or condition.op != "Equal" else data_inputs(condition)
            return [compared[0], data[2]] if compared and self._is_filled(compared[1], 0) else []
        return []

    def _first_like(self, name: str) -> str:
        """Returns the first of all comparisons of equal operands, any other tensor itself."""
        node = self._scope.producer(name)
        if node is None or node.op not in _COMPARISONS:
            return name
        operands = tuple(map(self._operand, data_inputs(node)))
        return self._scope.same_as((node.op, operands), name)

    def _operand(self, name: str) -> str:
        value = self._scope.constant(name)
        return self._first_like(name) if value is None else f"{value.dtype} {value.tolist()}"

    def _is_filled(self, name: str, number: int) -> bool:
        node = self._scope.producer(name)
        return node is not None and OpContext(node, [name], [], self._scope).is_filled_with(0, number)


_PRODUCTS = having(Trait.PRODUCT) | {"LogicalAnd"}
_LINEAR = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS | Trait.REPEATS | Trait.COMBINES | Trait.QUOTIENT)
"""Ops whose result is zero if their first operand is."""
_ZERO_TO_ZERO = having(Trait.ZERO_TO_ZERO)
_QUOTIENTS = having(Trait.QUOTIENT)
_COMPARISONS = having(Trait.COMPARISON)
_SUMS = having(Trait.SUM)
_SELECTIONS = having(Trait.SELECTS)
_PASSING = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS)
_GUARDS = {"Greater": (1, 2), "NotEqual": (1, 2), "Equal": (2, 1)}
"""For each comparison of the divisor with zero: the operand selected if it is nonzero, and the one if it is zero."""
_COMPARISONS_WITH_ZERO = _GUARDS.keys() - {"Equal"}
"""Comparisons that are False if the first operand is zero."""
