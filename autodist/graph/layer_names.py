"""Names of the layers of a captured graph: the path of a layer for each name scope."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from itertools import accumulate

from autodist.graph.effects import NO_EFFECT
from autodist.graph.step import CapturedStep


def layer_names(step: CapturedStep, nodes: Collection[str]) -> dict[str, str]:
    """Returns the name of the layer of each scope around some nodes, in the order of the graph.

    A scope may differ from the path of its layer: a functional model adds a scope, and TensorFlow appends an index to
    a scope that was used before. Keras opens each scope twice, so each of its scopes has such an index. The variables
    that the nodes of a scope read show the path. Otherwise, a scope has its own name below the path of the scope around
    it, without the index if no other scope there has the same name.

        model_1/block_1_1/dense_2/MatMul/ReadVariableOp reads model/block_1/dense/kernel
        model_1 → model,  model_1/block_1_1 → model/block_1,  model_1/block_1_1/dense_2 → model/block_1/dense
    """
    paths: dict[str, str] = {}
    for name in nodes:
        for handle in step.graph_index.effects.get(name, NO_EFFECT).reads:
            if handle in step.by_handle:
                _align(name, step.by_handle[handle].name, paths)
    scopes = dict.fromkeys(
        scope
        for name in step.graph_index.nodes
        if name in nodes and "/" in name
        for scope in accumulate(name.split("/")[:-1], lambda outer, inner: f"{outer}/{inner}")
    )
    counts = Counter(map(_without_index, scopes))
    names: dict[str, str] = {}
    for scope in scopes:
        plain = _without_index(scope)
        outer, _, own = (plain if counts[plain] == 1 else scope).rpartition("/")
        names[scope] = paths.get(scope, f"{names[outer]}/{own}" if outer else own)
    return names


def _without_index(scope: str) -> str:
    return re.sub(r"_\d+$", "", scope)


def _align(node: str, variable: str, paths: dict[str, str]) -> None:
    """Records the paths of the scopes around a node that reads a variable."""
    wanted, position, scope = variable.split("/")[:-1], 0, ""
    for part in node.split("/")[:-1]:
        scope = f"{scope}/{part}" if scope else part
        if position < len(wanted) and re.fullmatch(rf"{re.escape(wanted[position])}(_\d+)*", part):
            position += 1
            paths.setdefault(scope, "/".join(wanted[:position]))
