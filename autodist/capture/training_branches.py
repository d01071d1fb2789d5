"""Conditionals in whose branches a step computes its gradients, as one that trains two models in turns.

Their branches are traced into the step's graph (`inline.BranchesInGraph`), so that these gradients are synchronized
like others. Every step then computes both branches, and keeps the results of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from autodist.capture.gradients import RecordedGradientCall
from autodist.capture.graphs import is_of_function
from autodist.errors import CaptureError
from autodist.graph.branch_effects import first_effect
from autodist.graph.editor import NodeDef
from autodist.graph.effects import READS
from autodist.graph.functions import branches_of, functions_by_name
from autodist.graph.ops import assigns, draws_numbers
from autodist.graph.origins import line_of
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


def find_training_branches(graph: tf.Graph, noted: Sequence[RecordedGradientCall]) -> frozenset[str]:
    """Returns the conditionals whose branches compute gradients of variables, if no other gradients are computed.

    Empty if one of these gradients is in a loop or in `tf.switch_case`.

    Args:
        graph: the graph of the step.
        noted: the calls of `gradient` in it and in the graphs of its functions.

    Raises:
        CaptureError: a branch has effects other than reads and assignments of variables.
    """
    training = [call.graph for call in noted if call.pairs and is_of_function(call.graph)]
    if not training or graph in training:
        return frozenset()
    definition = graph.as_graph_def()
    functions = functions_by_name(definition.library)
    by_branch = {branch: node for node in definition.node if node.op == "If" for branch in branches_of(node)}
    found = {name: by_branch.get(name) for name in (_outermost(inner, graph) for inner in training)}
    nodes = {node.name: node for node in found.values() if node is not None}
    if None in found.values():
        return frozenset()
    for node in nodes.values():
        _require_no_effects(graph, node, functions)
    lines = [line_of(graph.get_operation_by_name(name)) or name for name in sorted(nodes)]
    log.info(
        "the step computes its gradients in tf.cond (%s): each step computes both branches, and keeps the results of "
        "one.", ", ".join(lines), extra=ALIKE_EVERYWHERE,
    )  # fmt: skip
    return frozenset(nodes)


def _require_no_effects(graph: tf.Graph, node: NodeDef, functions: Mapping[str, tf.compat.v1.FunctionDef]) -> None:
    effect = first_effect(node, functions, lambda n: n.op in READS or assigns(n.op) or draws_numbers(n.op))
    if effect is not None:
        line = line_of(graph.get_operation_by_name(node.name)) or node.name
        raise CaptureError(
            f"the step computes its gradients in a tf.cond ({line}), and a branch contains {effect.op} "
            f"({effect.name}). Every step would compute both branches, so that they may only compute, and read and "
            "assign variables. Move it out of the tf.cond, or move tape.gradient out of it; the apply_gradients of a "
            "Keras 3 optimizer may stay in it."
        )


def _outermost(graph: Any, step: tf.Graph) -> str:
    """Returns the name of the function of the step's graph that holds a graph, or "" if the step does not hold it."""
    while is_of_function(graph.outer_graph) and graph.outer_graph is not step:
        graph = graph.outer_graph
    return graph.name if graph.outer_graph is step else ""
