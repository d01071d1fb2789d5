"""Batches from iterators in a session's graph: read in a separate run, and fed to the run that needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.session_resources import elements_read, fed_to_iterators, require_alike, warn_iterators_start_over
from autodist.errors import CaptureError
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.resources import ResourceSpec
from autodist.runtime.program import Program
from autodist.sessions.requests import Request

Fetches: TypeAlias = Sequence[tf.Tensor | tf.Operation]
Arrays: TypeAlias = Mapping[tf.Tensor, np.ndarray]

_QUEUES = having(Trait.QUEUE_GET) - {"IteratorGetNextAsOptional"}
_PULLS = having(Trait.QUEUE_GET | Trait.ITERATOR_GET)


@dataclass(frozen=True)
class _IteratorRun:
    """A run that reads the iterators for one structure of fetches and feeds.

    Attributes:
        elements: tensors that the run reads.
        fed: tensors that must be fed.
        program: the run.
    """

    elements: Sequence[tf.Tensor]
    fed: Sequence[tf.Tensor]
    program: Program

    def next(self, arrays: Arrays) -> dict[tf.Tensor, np.ndarray]:
        values = self.program.run([arrays[t] for t in self.fed], examples=0)
        return dict(zip(self.elements, values, strict=True))


class SessionBatches:
    """Reads the iterators of a graph for the runs of one worker's session.

    Every worker has its own iterators, which advance with each run that reads them. Their elements are divided among
    the replicas, like feeds of a script.

    Args:
        spec: the machines.
        captured: the graph.
        make_program: makes a program of this worker only.
    """

    def __init__(
        self, spec: ResourceSpec, captured: CapturedGraph, make_program: Callable[[CapturedStep], Program]
    ) -> None:
        self._spec, self._captured, self._make_program = spec, captured, make_program
        self._iterator_runs: dict[tuple[tuple[str, ...], tuple[str, ...]], _IteratorRun | None] = {}

    def require_divisible(self, whole: CapturedStep) -> None:
        """Checks that iterator elements read by training can be divided among the replicas.

        Raises:
            CaptureError: the elements cannot be divided or differ between workers, or training reads a queue filled by
                threads.
        """
        if self._captured.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
            trained = self._captured.step([t.name for t in self._trained(whole)], [], {})
            require_no_queue(trained, replicas=1)  # iterator elements are fed
        if len(self._spec.replicas) == 1:
            return
        read = elements_read(self._trained(whole), ())
        if read and len(self._spec.workers) > 1 and self._spec.batch != "per_worker":
            require_alike(whole.graph_def)

    def warn_iterators_start_over(self, whole: CapturedStep, steps: int) -> None:
        """Warns if a resumed run would read the data of earlier steps again."""
        warn_iterators_start_over(self._trained(whole), whole.graph_def, steps)

    def _trained(self, whole: CapturedStep) -> list[tf.Tensor]:
        return [self._captured.graph.get_tensor_by_name(t) for g in whole.gradients for t in g.tensors]

    def next_for(self, request: Request, arrays: Arrays) -> dict[tf.Tensor, np.ndarray]:
        """Returns the whole batches that a run reads from iterators; {} with one replica, whose run reads them itself.

        Raises:
            CaptureError: the elements cannot be divided among replicas.
            OutOfRangeError: TensorFlow's: an iterator is exhausted.
        """
        if len(self._spec.replicas) == 1:
            return {}
        if request.names not in self._iterator_runs:
            self._iterator_runs[request.names] = self._make_run(request.elements, {t.name: t for t in arrays})
        getting = self._iterator_runs[request.names]
        return {} if getting is None else getting.next(arrays)

    def _make_run(self, fetches: Fetches, fed: Mapping[str, tf.Tensor]) -> _IteratorRun | None:
        elements = elements_read(fetches, fed.keys())
        if not elements:
            return None
        needed = sorted(fed_to_iterators(elements, fed.keys()))
        step = self._captured.step([t.name for t in elements], [], dict.fromkeys(needed))
        return _IteratorRun(elements, [fed[name] for name in needed], self._make_program(step))


def require_no_queue(step: CapturedStep, replicas: int) -> None:
    """Checks that a run reads no queue and, with several replicas, no optional elements of an iterator.

    Raises:
        CaptureError: the run reads one. Each run has separate queues, and would wait forever.
    """
    pulling = step.graph_index.of_op(*sorted(_PULLS if replicas > 1 else _QUEUES))
    if pulling:
        raise CaptureError(
            f"the graph takes its data from a queue or from an iterator's optional elements ({pulling[0].name}), whose "
            "batches are not split over the replicas, and runs do not share queues. Use an iterator's get_next(), or "
            "read each batch in Python and feed this worker's part (see ad.distribute_dataset)."
        )
