"""Conditionals in whose branches a step computes its gradients, as one that trains two models in turns.

Their branches are traced into the step's graph (`inline.BranchesInGraph`), so that these gradients are synchronized
like others. Every step then computes both branches, and keeps the results of one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autodist.capture.gradients import RecordedGradientCall
from autodist.capture.graphs import is_of_function
from autodist.graph.functions import branches_of, functions_by_name
from autodist.graph.ops import Trait, having
from autodist.graph.origins import line_of
from autodist.graph.read_again import may_have_both
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


def find_training_branches(graph: tf.Graph, noted: Sequence[RecordedGradientCall]) -> frozenset[str]:
    """Returns the conditionals whose branches compute gradients of variables, if no other gradients are computed.

    Empty if one of these gradients is in a loop, or in a conditional whose branches do more than compute, read and
    write variables.

    Args:
        graph: the graph of the step.
        noted: the calls of `gradient` in it and in the graphs of its functions.
    """
    training = [call.graph for call in noted if call.pairs and is_of_function(call.graph)]
    if not training or graph in training:
        return frozenset()
    definition = graph.as_graph_def()
    functions = functions_by_name(definition.library)
    by_branch = {
        branch: node
        for node in definition.node if node.op in having(Trait.BRANCH) for branch in branches_of(node)
    }  # fmt: skip
    nodes = [by_branch.get(_outermost(inner, graph)) for inner in training]
    result = {node.name for node in nodes if node is not None and node.op == "If" and may_have_both(node, functions)}
    if None in nodes or len(result) < len({node.name for node in nodes if node is not None}):
        return frozenset()
    lines = [line_of(graph.get_operation_by_name(name)) or name for name in sorted(result)]
    log.info(
        "the step computes its gradients in tf.cond (%s): each step computes both branches, and keeps the results of "
        "one.", ", ".join(lines), extra=ALIKE_EVERYWHERE,
    )  # fmt: skip
    return frozenset(result)


def _outermost(graph: Any, step: tf.Graph) -> str:
    """Returns the name of the function of the step's graph that holds a graph, or "" if the step does not hold it."""
    while is_of_function(graph.outer_graph) and graph.outer_graph is not step:
        graph = graph.outer_graph
    return graph.name if graph.outer_graph is step else ""
