"""The terms that a loss is the sum of, and losses that add a penalty to a sum over the batch."""

from __future__ import annotations

from autodist.graph.item import GraphItem
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.propagation import Propagation, Replicated, Sum

ADDING = ("Add", "AddV2", "AddN", "Identity")
"""Ops through which a loss is the sum of its terms; beside these a sum of what is stacked, as Keras writes it."""


def loss_terms(item: GraphItem, target: str) -> list[str]:
    """The tensors that are added up to a target, sorted."""
    nodes = item.wiring.nodes
    found: list[str] = []
    front = [tensor(target)]
    while front:
        name = front.pop()
        node = nodes[node_of(name)]
        stacked = nodes[node_of(node.input[0])] if node.op == "Sum" else None
        if node.op in ADDING:
            front += [tensor(i) for i in node.input if not is_control(i)]
        elif stacked is not None and stacked.op == "Pack" and _is_scalar(item, name, stacked.input[0]):
            front += [tensor(i) for i in stacked.input if not is_control(i)]
        else:
            found.append(name)
    return sorted(found)


def _is_scalar(item: GraphItem, *names: str) -> bool:
    return all(item.spec_of(tensor(name)).shape.rank == 0 for name in names)


def is_sum_with_penalty(flows: Propagation, terms: list[str]) -> bool:
    """Whether some terms are sums over the batch, and all others the same on all replicas.

    A sum counts once for each replica, a penalty once in all: no one weight of the replicas suits both.
    """
    kinds = [flows.kind(term) for term in terms]
    is_sum = [isinstance(kind, Sum) for kind in kinds]
    return any(is_sum) and not all(is_sum) and all(isinstance(kind, Sum | Replicated) for kind in kinds)
