"""Input sharing: splits the arguments of a step among the workers and their replicas."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autodist.batch.examples import format_rows, require_examples, share_of, take, with_a_row
from autodist.batch.gathered import GatheredFeeds, GatheredInput
from autodist.capture.batch_requirements import BatchDivision, fault_in_parts
from autodist.capture.function import CapturedFunction
from autodist.errors import UnevenBatchError
from autodist.functions.step_arguments import Leaf, count_examples, split_rows
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import GlobalBatch
from autodist.resources import ResourceSpec

log = logging.getLogger("autodist")

TakePart = Callable[[Any], np.ndarray]
"""Returns this worker's part of an array."""


@dataclass(frozen=True)
class OwnArrays:
    """Takes one worker's part of the arrays of a call.

    Attributes:
        takes: one for each array.
        examples: number of this worker's examples; 0 if its part is a padding row that does not count.
        all_examples: number of examples passed to the call.
    """

    takes: Sequence[TakePart]
    examples: int
    all_examples: int

    def of(self, values: Iterable[Any]) -> list[np.ndarray]:
        """Returns this worker's part of the arrays of one call."""
        return [take_part(value) for take_part, value in zip(self.takes, values, strict=True)]


@dataclass(frozen=True)
class InputShare:
    """A worker's feeds for one run of a step.

    Attributes:
        values: the values of this worker's arrays.
        examples: number of this worker's examples; 0 if its part is a padding row that does not count.
        all_examples: number of examples passed to the call.
        fed: the gathered feeds of all workers in a pipeline; None if each worker feeds its own part.
    """

    values: Sequence[np.ndarray]
    examples: int
    all_examples: int
    fed: GatheredFeeds | None = None


@dataclass(frozen=True)
class Sharing:
    """The division of a step's arguments among workers and replicas.

    Attributes:
        step: name of the step.
        spec: the machines.
        worker: index of this worker.
        is_global: True if every worker passes the same global batch and keeps its share; False if each passes its own
            part (in a pipeline, the parts of all workers form the batch).
    """

    step: str
    spec: ResourceSpec
    worker: int
    is_global: bool

    @property
    def replicas(self) -> int:
        """Number of replicas among which the arguments are divided."""
        if self.is_gathered:  # each worker passes about as many examples
            return -(-len(self.spec.replicas) // len(self.spec.workers))
        return len(self.spec.replicas) if self.is_global else self.spec.replicas_of(self.worker)

    def count(self, leaves: Sequence[Leaf], global_batch: GlobalBatch | None) -> int:
        """Returns the number of examples of the global batch, or of this worker's arguments.

        Args:
            leaves: arrays of the arguments.
            global_batch: the global batch, if the arguments are this worker's part of it; None: as `is_global`.
        """
        return count_examples(leaves) if global_batch is None else global_batch.examples

    def division(self, examples: int, names: Mapping[str, str]) -> BatchDivision:
        """Returns the division of this many examples; `names` has the parameter of each input."""
        replicas = len(self.spec.replicas)
        if self.is_gathered:
            return BatchDivision(examples * len(self.spec.workers), replicas, replicas, names)
        return BatchDivision(examples, self.replicas, replicas, names)

    def own_part(self, leaves: Sequence[Leaf], global_batch: GlobalBatch | None) -> OwnArrays:
        """Returns the functions that take this worker's part of arrays of these shapes.

        Args:
            leaves: arrays of the arguments.
            global_batch: as for `count`.

        Raises:
            EmptyBatchError: there are no examples, and no other worker can have any.
        """
        examples = self.count(leaves, global_batch)
        is_split = any(x.axis is not None for x in leaves)
        if is_split and (self.is_global or len(self.spec.workers) == 1):
            require_examples(examples > 0)
        if not self.is_global:
            if is_split:
                self.spec.require_own_batches()
            return OwnArrays([_with_a_row(x) if examples == 0 else np.asarray for x in leaves], examples, examples)
        workers = self.spec.replica_workers
        if global_batch is not None:
            return OwnArrays([np.asarray] * len(leaves), share_of(examples, workers, self.worker).size, examples)
        shares = {n: share_of(n, workers, self.worker) for n in {examples, *(x.rows for x in leaves)}}
        takes: list[TakePart] = [
            np.asarray if x.axis is None else functools.partial(take, axis=x.axis, share=shares[x.rows]) for x in leaves
        ]
        return OwnArrays(takes, shares[examples].size, examples)

    @property
    def is_gathered(self) -> bool:
        """True if the workers' feeds are gathered, so that the step gets the whole batch: in a pipeline."""
        return self.spec.gathers_batches and not self.is_global

    def part(
        self,
        leaves: Sequence[Leaf],
        own: OwnArrays,
        values: Sequence[Any],
        gather_feeds: Callable[[Sequence[GatheredInput]], GatheredFeeds],
    ) -> InputShare:
        """Returns this worker's feeds for one run.

        Args:
            leaves: arrays of the arguments' shapes.
            own: takes this worker's part of the arrays.
            values: the values of the arguments.
            gather_feeds: gathers the feeds of all workers on the chief; a collective call.
        """
        if not self.is_gathered or all(leaf.axis is None for leaf in leaves):
            return InputShare(own.of(values), own.examples, own.all_examples)
        fed = gather_feeds(
            [GatheredInput(x.name, np.asarray(v), x.axis, x.is_padded) for x, v in zip(leaves, values, strict=True)]
        )
        feeds = [v if x.axis is None else with_a_row(v, x.axis) for x, v in zip(leaves, fed.values, strict=True)]
        return InputShare(feeds, fed.examples, fed.all_examples, fed)

    def shape(self, leaf: Leaf) -> Sequence[int]:
        """Returns the shape of a step's input, as far as this worker knows it before a run."""
        times = len(self.spec.workers) if self.is_gathered else 1
        return [n * times if a == leaf.axis else n for a, n in enumerate(np.shape(leaf.value))]

    def require_fits_apart(self, captured: CapturedFunction, leaves: Sequence[Leaf]) -> None:
        """Checks inputs with different numbers of rows, for the whole batch and for each replica's part.

        Raises:
            UnevenBatchError: the shapes of the inputs do not fit together in the step.
        """
        if not captured.step.apart or len(self.spec.replicas) == 1:
            return
        rows = {name: x.rows for name, x in zip(captured.inputs, leaves, strict=True) if x.axis is not None}
        counts = format_rows(split_rows(leaves))
        fault = fault_in_parts(captured.step, rows, self.replicas)
        if fault is not None:
            raise UnevenBatchError(
                f"the inputs of {self.step} have different numbers of rows along their batch axes ({counts}), and "
                f"they, or the parts that {self.replicas} replicas get of them, do not fit one another: {fault}. If an "
                "input does not have one row per example, set its batch_axis (None: every replica gets all of it). If "
                "the step takes rows by a constant batch size, use tf.shape(…)[0] in its place."
            )
        log.warning(
            "%s: its inputs have different numbers of rows (%s), and each is split by its own. If every replica should "
            "get the whole of one, set its batch_axis to None: for example of a graph's nodes and edges, if the edges "
            "name nodes by their position.", self.step, counts, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def _with_a_row(leaf: Leaf) -> TakePart:
    return np.asarray if leaf.axis is None else functools.partial(with_a_row, axis=leaf.axis)
