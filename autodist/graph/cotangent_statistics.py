"""Values of the batch that only the backward pass combines with cotangents, as a `tf.custom_gradient` may.

It scales the examples' cotangents by a mean or the largest value of the batch, for instance, or subtracts the mean of
the cotangents. On one device such a value covers the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from autodist.graph.batch_statistics import (
    BatchSearch,
    NodeInput,
    Statistic,
    differentiated_parts,
    first_unknown,
    is_mixed,
    met_at,
    met_mixing,
)
from autodist.graph.compared_examples import Rows, rows_behind
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, draws_numbers, having
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.layout import PerExample, Unknown
from autodist.layout.linearity import Linearity, find_linearity

_OF_SHAPES = having(Trait.OF_SHAPES)


@dataclass(frozen=True)
class InCotangents:
    """The values of the batch that a backward pass combines with cotangents.

    Attributes:
        wanted: the sums and means to reduce, and the rows to gather, by the inputs of nodes that read them.
        left: the nodes of a `tf.custom_gradient` that use another value, which each replica has of its own examples.
    """

    wanted: Mapping[NodeInput, Statistic | Rows]
    left: tuple[str, ...] = ()


def find_in_cotangents(search: BatchSearch, gradients: Iterable[str], is_custom: Callable[[str], bool]) -> InCotangents:
    """Returns the sums and means of the batch that only the backward pass uses, and rows for other values of it.

    The result is empty if examples see one another before a loss, as in layers of batch normalisation: the backward
    pass combines them there, too.

    Args:
        search: the step.
        gradients: the tensors of the gradients.
        is_custom: returns True for a node of the backward pass that a `tf.custom_gradient` has made.
    """
    step, gradients = search.step, list(gradients)
    if any(is_mixed(search.kind(name)) for name in differentiated_parts(search, range(len(step.gradient_calls)))):
        return InCotangents({})
    mixing, unknown = met_mixing(search, gradients), search.unknown(gradients)
    if not mixing and not unknown and not _has_custom(step):
        return InCotangents({})
    is_custom = functools.cache(is_custom)  # it reads a traceback
    seen = find_linearity(step.graph_index, [call.seed for call in step.gradient_calls])
    before = step.graph_index.data.__getitem__
    backward = _Backward(search, is_custom, seen, reach(map(node_of, unknown), before))
    result: dict[NodeInput, Statistic | Rows] = {
        place: one
        for place, one in mixing.items()
        if is_custom(place.node) or not seen.depends(search.inputs(place.node)[place.index])
    }
    numbers: dict[NodeInput, Statistic | Rows] = {}
    left: dict[str, list[str]] = {}
    for node in reach(map(node_of, gradients), before):
        if not backward.combines(node) or search.is_left(node):
            continue
        for place, name in backward.factors(node):
            met, is_unknown = met_at(search, place, name), isinstance(search.kind(name), Unknown)
            (numbers if is_unknown and _is_number(step, name) else result).update(met)
            if is_unknown and not met and _has_no_rows(step, name):
                left.setdefault(node, []).extend(first_unknown(search, [name]))
    # Lengths stay those of a replica, unless a number is computed from them: the gradient of a gather in batches
    # numbers its rows.
    result = {at: one for at, one in result.items() if not _is_length(step, search.inputs(at.node)[at.index])}
    rows = {node: rows_behind(search, nodes) for node, nodes in left.items()}
    gathered = {place: one for found in rows.values() for place, one in found.items()}
    return InCotangents(
        {**result, **numbers, **gathered},
        tuple(node for node, found in rows.items() if not found and is_custom(node) and not _draws(step, left[node])),
    )


class _Backward:
    """The nodes of the backward pass.

    Args:
        search: the step.
        is_custom: as for `find_in_cotangents`.
        seen: the tensors that depend on the cotangents of the losses.
        unknown: the nodes before the gradients that are not known to be sums over the examples.
    """

    def __init__(
        self, search: BatchSearch, is_custom: Callable[[str], bool], seen: Linearity, unknown: Collection[str]
    ) -> None:
        self._search, self._is_custom, self._seen, self._unknown = search, is_custom, seen, unknown
        self._spread: dict[str, bool] = {}

    def combines(self, node: str) -> bool:
        """Returns True for a node that combines cotangents with a value of the batch that their loss does not have."""
        cotangents = [name for name in self._search.inputs(node) if self._seen.depends(name)]
        if not cotangents or not self.factors(node):
            return False
        if all(isinstance(self._search.kind(name), PerExample) for name in cotangents):
            return node in self._unknown and isinstance(self._search.kind(tensor(node)), Unknown)
        return self._is_custom(node) and not self._is_spread(node)

    def factors(self, node: str) -> list[tuple[NodeInput, str]]:
        """Returns the inputs of a node that do not depend on cotangents."""
        inputs = enumerate(self._search.inputs(node))
        return [(NodeInput(node, k), name) for k, name in inputs if not self._seen.depends(name)]

    def _is_spread(self, node: str) -> bool:
        """Returns True if the function of a node makes rows of a mean's cotangent: that of a mean divides them."""
        if node not in self._spread:
            index = self._search.step.graph_index
            function = reach(
                [node], lambda name: filter(self._is_made, (*index.readers(name), *map(node_of, index.data[name])))
            )
            read = [name for one in function for name in self._search.inputs(one) if self._seen.depends(name)]
            given = [self._rank(name) for name in read if node_of(name) not in function]
            is_spread = max(self._rank(tensor(one)) for one in function) > min(given, default=0)
            self._spread.update(dict.fromkeys(function if self._is_made(node) else [node], is_spread))
        return self._spread[node]

    def _is_made(self, node: str) -> bool:
        """Returns True for a node with which a custom gradient computes a cotangent from another."""
        return self._seen.depends(tensor(node)) and self._is_custom(node)

    def _rank(self, name: str) -> int:
        return self._search.step.spec_of(name).shape.rank or 0


def _has_custom(step: CapturedStep) -> bool:
    return any(
        node.op == "IdentityN" and b"CustomGradient" in node.attr["_gradient_op_type"].s
        for node in step.graph_index.nodes.values()
    )


def _is_number(step: CapturedStep, name: str) -> bool:
    spec = step.spec_of(name)
    return spec.dtype.is_floating and spec.shape.is_fully_defined()


def _has_no_rows(step: CapturedStep, name: str) -> bool:
    """Returns True for a tensor of known shape, or of which nothing is known, as a result of Python code."""
    shape = step.spec_of(name).shape
    return shape.rank is None or shape.is_fully_defined()


def _draws(step: CapturedStep, nodes: Iterable[str]) -> bool:
    return any(draws_numbers(step.graph_index.nodes[node].op) for node in nodes)


def _is_length(step: CapturedStep, name: str) -> bool:
    """Returns True for an integer that is computed from shapes and constants alone."""
    nodes, data = step.graph_index.nodes, step.graph_index.data
    if not step.spec_of(name).dtype.is_integer:
        return False
    before = reach([node_of(name)], lambda node: () if nodes[node].op in _OF_SHAPES else map(node_of, data[node]))
    return all(nodes[node].op in _OF_SHAPES or nodes[node].op == "Const" or data[node] for node in before)
