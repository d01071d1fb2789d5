"""Dependence on the batch of a step whose tensors are divided, and of one with copies for several places."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.graph.names import node_of, output_index, tensor
from autodist.layout import DrawAt, Kind, Propagation, RowsOfDraw, Unknown

RESHARDS = "autodist/reshard/"
"""Prefix of reshard nodes; each makes one tensor."""


class ReshardedFlows(Propagation):
    """Dependence on the batch of a step whose tensors are divided: that of the whole tensors."""

    def __init__(self, captured: Propagation, source_of: Mapping[str, str], added: frozenset[str]) -> None:
        self._captured, self._source_of, self._added = captured, source_of, added

    def kind(self, name: str) -> Kind:
        source = self._source(name)
        if source in self._added:
            return Unknown("it was made where variables were gathered")
        return self._captured.kind(source)

    def rows_for_each(self, name: str) -> int | None:
        source = self._source(name)
        return None if source in self._added else self._captured.rows_for_each(source)

    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        return {} if node.startswith(RESHARDS) else self._captured.draws_within(node)

    def _source(self, name: str) -> str:
        return self._source_of.get(tensor(name), name)


class CopiedFlows(Propagation):
    """Dependence on the batch of a step with copies of nodes: that of the nodes that were copied.

    Args:
        step: that of the step without copies.
        parts: the copies (`StepWithOwners.parts`).
        source_of: the tensors of which new tensors are copies.
    """

    def __init__(self, step: Propagation, parts: Mapping[str, tuple[int, str]], source_of: Mapping[str, str]) -> None:
        self._step, self._parts, self._source_of = step, parts, source_of

    def kind(self, name: str) -> Kind:
        return self._step.kind(self._source(name))

    def rows_for_each(self, name: str) -> int | None:
        return self._step.rows_for_each(self._source(name))

    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        return self._step.draws_within(self._copied(node))

    def _source(self, name: str) -> str:
        name = self._source_of.get(tensor(name), name)
        if node_of(name) not in self._parts:
            return name
        copied = self._copied(node_of(name))
        return copied if copied.startswith(RESHARDS) else f"{copied}:{output_index(name)}"

    def _copied(self, node: str) -> str:
        return self._parts[node][1] if node in self._parts else node
