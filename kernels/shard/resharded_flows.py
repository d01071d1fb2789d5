"""Dependence on the batch of a step whose tensors are divided."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.graph.names import tensor
from autodist.layout import DrawAt, Kind, Propagation, RowsOfDraw, Unknown


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
        return {} if node.startswith("autodist/reshard/") else self._captured.draws_within(node)

    def _source(self, name: str) -> str:
        return self._source_of.get(tensor(name), name)
