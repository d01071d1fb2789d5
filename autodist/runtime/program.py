"""Program: a rewritten step, imported and ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autodist.graph.item import EXAMPLES, GraphItem
from autodist.graph.names import node_of
from autodist.runtime.host import Host


class Program:
    """Runs one rewritten step.

    Args:
        host: where it runs.
        item: the rewritten step.
        inputs: the captured inputs, in the order in which `run` takes their values.
    """

    def __init__(self, host: Host, item: GraphItem, inputs: Sequence[str]) -> None:
        prefix = host.add(item.graph_def)
        present = {node.name for node in item.graph_def.node}
        self._used = [node_of(name) in present for name in inputs]
        feeds = [prefix + name for name, used in zip(inputs, self._used, strict=True) if used]
        self._counts_examples = node_of(EXAMPLES) in present
        if self._counts_examples:
            feeds.append(prefix + EXAMPLES)
        operations = [host.graph.get_operation_by_name(prefix + name) for name in item.targets]
        outputs = [host.graph.get_tensor_by_name(prefix + name) for name in item.outputs]
        collective = any(node.op.startswith("Collective") for node in item.graph_def.node)
        self._run = host.callable([outputs, operations], feeds, collective)

    def run(self, values: Sequence[Any], examples: int) -> list[np.ndarray]:
        """One step.

        Args:
            values: of the inputs.
            examples: how many examples this worker has; 0 where `values` hold a row that does not count.

        Returns:
            The values of the step's outputs.
        """
        given = [value for value, used in zip(values, self._used, strict=True) if used]
        if self._counts_examples:
            given.append(np.int64(examples))
        return self._run(*given)[0]
