"""Batches that a session's graph takes from iterators of its own: got before the run that reads them, and fed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.iterators import elements_read, fed_to_iterators, require_alike, tell_begun_anew
from autodist.errors import CaptureError
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.resources import ResourceSpec
from autodist.runtime.program import Program

Fetches: TypeAlias = Sequence[tf.Tensor | tf.Operation]
Arrays: TypeAlias = Mapping[tf.Tensor, np.ndarray]

_QUEUES = having(Trait.QUEUE_GET) - {"IteratorGetNextAsOptional"}
_PULLS = having(Trait.QUEUE_GET | Trait.ITERATOR_GET)


@dataclass(frozen=True)
class _Getting:
    """What one structure of fetches and feeds reads of iterators.

    Attributes:
        elements: that are read.
        fed: what it takes to get them.
        program: gets them.
    """

    elements: Sequence[tf.Tensor]
    fed: Sequence[tf.Tensor]
    program: Program

    def next(self, arrays: Arrays) -> dict[tf.Tensor, np.ndarray]:
        values = self.program.run([arrays[t] for t in self.fed], examples=0)
        return dict(zip(self.elements, values, strict=True))


class SessionBatches:
    """Gets what the runs of one worker's session read of the graph's iterators.

    Every worker has iterators of its own, which go on with each run that reads them. Divided among the replicas is what
    they give, like what a script feeds.

    Args:
        spec: the machines.
        captured: the graph.
        make_program: makes a run of this worker alone.
    """

    def __init__(self, spec: ResourceSpec, captured: CapturedGraph, make_program: Callable[[Step], Program]) -> None:
        self._spec, self._captured, self._make_program = spec, captured, make_program
        self._gettings: dict[tuple[tuple[str, ...], frozenset[str]], _Getting | None] = {}

    def require_divisible(self, whole: Step) -> None:
        """Passes if what the training reads of iterators can be divided among the replicas.

        Args:
            whole: all of the graph, with its gradients.

        Raises:
            CaptureError: it cannot, or it would differ between workers, or it reads a queue that threads are to fill.
        """
        if self._captured.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
            trained = self._captured.step([t.name for t in self._trained(whole)], [], {})
            require_no_queue(trained, replicas=1)  # what iterators give is fed
        if len(self._spec.replicas) == 1:
            return
        read = elements_read(self._trained(whole), ())
        if read and len(self._spec.workers) > 1 and self._spec.batch != "per_worker":
            require_alike(whole.graph_def)

    def tell_begun_anew(self, whole: Step, steps: int) -> None:
        """Warns where a run that goes on after some steps would read the data of these steps once more."""
        tell_begun_anew(self._trained(whole), whole.graph_def, steps)

    def _trained(self, whole: Step) -> list[tf.Tensor]:
        return [self._captured.graph.get_tensor_by_name(t) for g in whole.gradients for t in g.tensors]

    def next_for(self, fetches: Fetches, arrays: Arrays) -> dict[tf.Tensor, np.ndarray]:
        """The whole batches that a run reads of iterators; nothing with one replica, whose run reads them itself.

        Args:
            fetches: what the run is asked for.
            arrays: what it is fed.

        Raises:
            CaptureError: the elements cannot be divided among replicas.
            OutOfRangeError: TensorFlow's: an iterator has come to its end.
        """
        if len(self._spec.replicas) == 1:
            return {}
        key = (tuple(f.name for f in fetches), frozenset(t.name for t in arrays))
        if key not in self._gettings:
            self._gettings[key] = self._find(fetches, {t.name: t for t in arrays})
        getting = self._gettings[key]
        return {} if getting is None else getting.next(arrays)

    def _find(self, fetches: Fetches, fed: Mapping[str, tf.Tensor]) -> _Getting | None:
        elements = elements_read(fetches, fed.keys())
        if not elements:
            return None
        needed = sorted(fed_to_iterators(elements, fed.keys()))
        item = self._captured.step([t.name for t in elements], [], dict.fromkeys(needed))
        return _Getting(elements, [fed[name] for name in needed], self._make_program(item))


def require_no_queue(item: Step, replicas: int) -> None:
    """Passes unless a run reads a queue or, with several replicas, an iterator's optional elements.

    Args:
        item: what runs.
        replicas: of all workers.

    Raises:
        CaptureError: it does. Each run has queues of its own, so that it would wait for ever.
    """
    pulling = item.graph_index.of_op(*sorted(_PULLS if replicas > 1 else _QUEUES))
    if pulling:
        raise CaptureError(
            f"the graph takes its data from a queue or from an iterator's optional elements ({pulling[0].name}), whose "
            "batches are not split over the replicas, and no run takes what another has put into a queue. Take them "
            "from an iterator's get_next(), or read each batch in Python and feed this worker's part "
            "(ad.distribute_dataset gives it)."
        )
