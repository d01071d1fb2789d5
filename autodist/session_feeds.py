"""What is fed to a session: along which axis each tensor is split over the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from autodist.capture.batch_length import Dealt, require_any_length
from autodist.errors import CaptureError
from autodist.graph.item import GraphItem
from autodist.graph.names import node_of
from autodist.graph.walks import reach
from autodist.resources import ResourceSpec
from autodist.runtime.batches import count_examples

Arrays = Mapping[tf.Tensor, np.ndarray]


@dataclass(frozen=True)
class SessionFeeds:
    """How one worker's session splits what it is fed.

    Attributes:
        spec: the machines.
        worker: whose session it is.
        batch_axis: by name of a tensor, the axis that the script has named; None: every replica gets the whole.
    """

    spec: ResourceSpec
    worker: int
    batch_axis: Mapping[str, int | None]

    def require_open_axes(self, whole: GraphItem, graph: tf.Graph) -> None:
        """Passes if every placeholder that the training needs can be split, on whichever worker has several replicas.

        Args:
            whole: all of the graph, with its gradients.
            graph: that it was captured from.

        Raises:
            CaptureError: one has a fixed shape.
        """
        most = max((self._replicas_of(worker.index) for worker in self.spec.workers), default=1)
        needed = reach([node_of(t) for g in whole.gradients for t in g.tensors], whole.wiring.data.__getitem__)
        placeholders = [graph.get_tensor_by_name(f"{n.name}:0") for n in whole.wiring.of_op("Placeholder")]
        fixed = [t for t in placeholders if t.op.name in needed and t.shape.rank]
        split = {t: axis for t in fixed if (axis := self._axis_of(t, most)) is not None}
        lengths = {t.shape[axis] for t, axis in split.items()} - {None}
        if most > 1 and len(lengths) == 1:
            item = replace(whole, inputs={t.name: axis for t, axis in split.items()})
            require_any_length(item, Dealt(lengths.pop(), most, len(self.spec.replicas)))

    def axes_of(self, arrays: Arrays) -> list[int | None]:
        """For each tensor that is fed, the axis along which it is split.

        Raises:
            CaptureError: it cannot be told.
        """
        here = self._replicas_of(self.worker)
        return [
            self._axis_of(t, here) if array.ndim or t.name in self.batch_axis else None for t, array in arrays.items()
        ]

    def dealt(self, arrays: Arrays, axes: Sequence[int | None]) -> Dealt:
        """How the examples of a run are dealt out."""
        return Dealt(examples_of(arrays, axes), self._replicas_of(self.worker), len(self.spec.replicas))

    def _replicas_of(self, worker: int) -> int:
        return sum(r.worker.index == worker for r in self.spec.replicas)

    def _axis_of(self, tensor: tf.Tensor, replicas: int) -> int | None:
        """The axis along which a tensor that has axes is split over a worker's replicas."""
        if tensor.name in self.batch_axis:
            return self.batch_axis[tensor.name]
        if tensor.shape.rank is None or tensor.shape[0] is None:
            return 0
        if replicas > 1:
            raise CaptureError(
                f"{tensor.name} has the fixed shape {tensor.shape}, and a worker has {replicas} replicas: is it one "
                "row an example, to be split, or the same for all? Leave its first axis open (None) for the one, say "
                f"create_distributed_session(batch_axis={{{tensor.op.name!r}: None}}) for the other."
            )
        return None


def examples_of(arrays: Arrays, axes: Sequence[int | None]) -> int:
    """The number of examples that is fed.

    Raises:
        UnevenBatchError: two arrays disagree.
    """
    return count_examples([(t.name, a, x) for (t, a), x in zip(arrays.items(), axes, strict=True) if x is not None])
