"""Feeds of a session: the batch axis of each tensor, and its division among the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from autodist.batch.axis import axis_within
from autodist.batch.examples import count_examples, require_examples, rows_of, share_of
from autodist.batch.gathered import GatheredFeeds, GatheredInput
from autodist.capture.batch_requirements import BatchDivision, require_any_length
from autodist.capture.global_statistics_in_graphs import warn_replica_statistics
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.session_resources import GETS, MAKES, only_makes_iterators
from autodist.errors import CaptureError
from autodist.graph.applied import find_fed_updates
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.kernels import only_sets
from autodist.resources import ResourceSpec
from autodist.runtime.input_consistency import FeedRole
from autodist.sessions.sparse_placeholders import name_in_batch_axis

_PASSING = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS) | {"NoOp"}

Arrays = Mapping[tf.Tensor, np.ndarray]


@dataclass(frozen=True)
class SessionFeeds:
    """The division of the feeds of one worker's session.

    Attributes:
        spec: the machines, and whether batches are global.
        worker: index of this worker.
        batch_axis: axes that the script has set, by name of the tensor; None if every replica gets the whole value.
        shapes: shapes of the graph's variables.
        shared: names of tensors that every worker feeds with the same value.
        rows: number of examples: a tensor with a fixed first axis of this length has a batch axis; None: unknown.
    """

    spec: ResourceSpec
    worker: int
    batch_axis: Mapping[str, int | None]
    shapes: frozenset[tuple[int, ...]]
    shared: frozenset[str] = frozenset()
    rows: int | None = None

    def with_rows(self, whole: CapturedStep, captured: CapturedGraph, even_alone: bool = False) -> SessionFeeds:
        """Returns a copy with the number of examples per feed, if it is known and all first axes are fixed.

        The number is known if all tensors read by training have equal numbers of rows, and no worker has several
        replicas: a single replica gets all feeds of its worker. Only an open axis can be split.

        Args:
            whole: the complete graph, with its gradients.
            captured: the graph.
            even_alone: True to search also with a single replica, which splits nothing.
        """
        replicas = [self.spec.replicas_of(worker) for worker in range(len(self.spec.workers))]
        if max(replicas) > 1 or (sum(replicas) == 1 and not even_alone) or self.spec.batch == "global":
            return self
        read = [t for t in _read_by_training(whole, captured) if t.name not in self.batch_axis]
        if any(t.op.type in GETS or t.shape[0] is None for t in read):
            return self
        lengths = {t.shape[0] for t in read}
        lengths -= {1} if len(lengths) > 1 else set()
        return replace(self, rows=lengths.pop()) if len(lengths) == 1 else self

    def require_open_axes(self, whole: CapturedStep, captured: CapturedGraph) -> None:
        """Checks that all batches read by training can be split, on every worker with several replicas.

        Logs a warning if the loss uses statistics of each replica's examples instead of the whole batch.

        Raises:
            CaptureError: a placeholder has a fixed shape, or the graph works for one number of examples only.
        """
        most = max(map(self.spec.replicas_of, range(len(self.spec.workers))))
        read = _read_by_training(whole, captured)
        split = {t: axis for t in read if (axis := self._axis_of(t, most)) is not None}
        lengths = {t.shape[axis] for t, axis in split.items()} - {None}
        shares, replicas = self._shares(split, most), len(self.spec.replicas)
        if not split or replicas == 1:
            return
        gradients = [t for g in whole.gradients for t in g.tensors]
        step = captured.step(gradients, [], {t.name: axis for t, axis in split.items()})
        if shares > 1 and len(lengths) == 1:
            require_any_length(step, BatchDivision(lengths.pop(), shares, replicas))
        if self.spec.splits_batches:
            seeds = {whole.gradient_calls[g.call].seed for g in whole.gradients}
            warn_replica_statistics(step, captured.graph, seeds)

    def axes_of(self, arrays: Arrays, capture: Callable[[], CapturedStep]) -> list[int | None]:
        """Returns the batch axis of each fed tensor.

        Args:
            arrays: the feeds.
            capture: captures the run as if nothing were split.

        Raises:
            CaptureError: an axis is ambiguous.
        """
        if self._may_set(arrays):
            step = capture()
            if only_makes_iterators(step) or _sets_what_is_fed(step, arrays):
                return [None] * len(arrays)  # for example Variable.load, which feeds an initial value
        return [self._axis_of_fed(t, array) for t, array in arrays.items()]

    def are_global(self, arrays: Arrays, axes: Sequence[int | None]) -> bool:
        """Returns True if all split feeds are equal on all workers, so that each knows the number of examples."""
        split = split_of(arrays, axes)
        return bool(split) and all(map(self.is_global_batch, split))

    def are_gathered(self, arrays: Arrays, axes: Sequence[int | None]) -> bool:
        """Returns True if the workers' parts are gathered, and a pipeline gets the whole batch."""
        return self.spec.gathers_batches and not all(map(self.is_global_batch, split_of(arrays, axes)))

    def gathered(
        self,
        arrays: Arrays,
        axes: Sequence[int | None],
        gather_feeds: Callable[[Sequence[GatheredInput]], GatheredFeeds],
    ) -> tuple[Arrays, GatheredFeeds]:
        """Returns this worker's feeds after the parts of all workers were gathered.

        Args:
            arrays: this worker's feeds.
            axes: batch axis of each feed.
            gather_feeds: gathers the parts on the chief; a collective call.
        """
        split = split_of(arrays, axes)
        parts = sorted((t for t in split if not self.is_global_batch(t)), key=lambda t: t.name)
        fed = gather_feeds([GatheredInput(t.name, arrays[t], split[t]) for t in parts])
        return {**arrays, **dict(zip(parts, fed.values, strict=True))}, fed

    def fixed_rows(self, arrays: Arrays, axes: Sequence[int | None]) -> int | None:
        """Returns the number of examples on a worker, if the graph was built for a fixed number."""
        split = split_of(arrays, axes).items()
        lengths = (t.shape[axis] for t, axis in split if t.shape.rank and not self.is_global_batch(t))
        return next((length for length in lengths if length is not None), None)

    def division(self, arrays: Arrays, axes: Sequence[int | None]) -> BatchDivision:
        """Returns the division of the examples of a run."""
        replicas = len(self.spec.replicas)
        if self.are_gathered(arrays, axes):  # each worker feeds about as many
            return BatchDivision(examples_of(arrays, axes) * len(self.spec.workers), replicas, replicas)
        return BatchDivision(examples_of(arrays, axes), self._shares(split_of(arrays, axes), self._replicas), replicas)

    def own_part(self, arrays: Arrays, axes: Sequence[int | None], is_local: bool = False) -> Arrays:
        """Returns this worker's rows of global batches, and its own feeds unchanged.

        Args:
            arrays: feeds and iterator elements.
            axes: batch axis of each feed.
            is_local: True if no other worker takes part in the run: each then computes global batches whole.

        Raises:
            UnevenBatchError: two arrays have different numbers of examples, or there are none.
        """
        if len(self.spec.workers) == 1:
            return arrays
        split = split_of(arrays, axes)
        cut = {t: axis for t, axis in split.items() if self.is_global_batch(t)}
        if is_local and len(cut) == len(split):
            return arrays
        examples = count_examples([(t.name, arrays[t], axis) for t, axis in cut.items()])
        require_examples(examples > 0 or not cut)
        share = share_of(examples, self.spec.replica_workers, self.worker)
        return {t: rows_of(a, cut[t], share) if t in cut else a for t, a in arrays.items()}

    def roles(self, arrays: Arrays, axes: Sequence[int | None]) -> list[FeedRole]:
        """Returns the role of each array."""
        split = [FeedRole.GLOBAL if self.is_global_batch(t) else FeedRole.OWN for t in arrays]
        return [FeedRole.WHOLE if axis is None else role for role, axis in zip(split, axes, strict=True)]

    def whole_by_shape(self, arrays: Arrays, axes: Sequence[int | None]) -> list[tf.Tensor]:
        """Returns the tensors that every replica gets whole because of their fixed shape, not by `batch_axis`."""
        return [
            t for (t, array), axis in zip(arrays.items(), axes, strict=True)
            if axis is None and array.ndim and t.name not in self.batch_axis
        ]  # fmt: skip

    def _shares(self, split: Iterable[tf.Tensor], replicas: int) -> int:
        """Returns the number of parts of a batch, on a worker with this number of replicas."""
        return len(self.spec.replicas) if any(map(self.is_global_batch, split)) else replicas

    def is_global_batch(self, tensor: tf.Tensor) -> bool:
        """Returns True if every worker has the same batch: by default for elements of a graph's own iterator."""
        if tensor.name in self.shared:
            return True
        return tensor.op.type in GETS if self.spec.batch is None else self.spec.batch == "global"

    def _may_set(self, arrays: Arrays) -> bool:
        """Returns True if feeds may be values of variables; a cheap test before the expensive one."""
        if self.batch_axis.keys() & {t.name for t in arrays}:
            return False
        if any(op.type == MAKES for t in list(arrays)[:1] for op in t.graph.get_operations()):
            return True
        return any(not _is_open(t) or a.shape in self.shapes for t, a in arrays.items() if a.ndim)

    @property
    def _replicas(self) -> int:
        """Number of replicas of this worker."""
        return self.spec.replicas_of(self.worker)

    def _axis_of_fed(self, tensor: tf.Tensor, array: np.ndarray) -> int | None:
        if tensor.name not in self.batch_axis:
            return self._axis_of(tensor, self._replicas) if array.ndim else None
        axis = self.batch_axis[tensor.name]
        return None if axis is None else axis_within(axis, array.ndim, tensor.name)

    def _axis_of(self, tensor: tf.Tensor, replicas: int) -> int | None:
        """Returns the batch axis of a tensor of rank 1 or more on a worker with this number of replicas."""
        if tensor.name in self.batch_axis:
            return self.batch_axis[tensor.name]
        if _is_open(tensor) or tensor.op.type in GETS or (tensor.shape.rank and tensor.shape[0] == self.rows):
            return 0
        if replicas > 1:
            name = name_in_batch_axis(tensor)
            raise CaptureError(
                f"{tensor.name} has the fixed shape {tensor.shape}, and a worker has {replicas} replicas: is it one "
                "row per example, to be split, or the same for all? Leave its first axis open (None) for the one, set "
                f"create_distributed_session(batch_axis={{{name!r}: None}}) for the other."
            )
        return None


def _read_by_training(whole: CapturedStep, captured: CapturedGraph) -> list[tf.Tensor]:
    """Returns placeholders and iterator elements that gradients depend on, except scalars and unknown ranks."""
    gradients = [t for g in whole.gradients for t in g.tensors]
    needed = reach(map(node_of, gradients), whole.graph_index.data.__getitem__)
    nodes = [n.name for n in whole.graph_index.of_op("Placeholder", *GETS) if n.name in needed]
    return [t for name in nodes for t in captured.graph.get_operation_by_name(name).outputs if t.shape.rank]


def _is_open(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is None or (tensor.shape.rank > 0 and tensor.shape[0] is None)


def _sets_what_is_fed(step: CapturedStep, arrays: Arrays) -> bool:
    """Returns True if a run only sets variables, and no feed can be a batch."""
    if not only_sets(step):
        return False
    values = _assigned(step) | find_fed_updates(step).keys()
    return all(t.name in values or not _is_open(t) for t, a in arrays.items() if a.ndim)


def _assigned(step: CapturedStep) -> set[str]:
    """Returns the inputs of a run that are assigned to variables unchanged, and not used otherwise."""
    assigned = set()
    for name in step.inputs:
        front, ends = [node_of(name)], True
        while front and ends:
            source = front.pop()
            for consumer in step.graph_index.consumers[source]:
                node = step.graph_index.nodes[consumer]
                if node.op in _PASSING:
                    front.append(consumer)
                elif node.op != "AssignVariableOp" or node_of(node.input[1]) != source:
                    ends = False
        if ends:
            assigned.add(name)
    return assigned


def split_of(arrays: Arrays, axes: Sequence[int | None]) -> dict[tf.Tensor, int]:
    """Returns the batch axes of the feeds that are split."""
    return {t: axis for t, axis in zip(arrays, axes, strict=True) if axis is not None}


def examples_of(arrays: Arrays, axes: Sequence[int | None]) -> int:
    """Returns the number of examples in the feeds.

    Raises:
        UnevenBatchError: two arrays have different numbers.
    """
    counts = _counts(arrays, axes)
    if len(counts) > 1:
        count_examples([(t.name, arrays[t], axis) for t, axis in split_of(arrays, axes).items()])
    return counts.pop() if counts else 0


def disagree(arrays: Arrays, axes: Sequence[int | None]) -> bool:
    """Returns True if the arrays that are split have different numbers of examples."""
    return len(_counts(arrays, axes)) > 1


def _counts(arrays: Arrays, axes: Sequence[int | None]) -> set[int]:
    """Returns the numbers of examples of the feeds that are split; without tensors as keys, whose hash takes longer."""
    return {a.shape[axis] for a, axis in zip(arrays.values(), axes, strict=True) if axis is not None}
