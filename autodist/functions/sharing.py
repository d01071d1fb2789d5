"""How what a step is called with is shared out over the workers and their replicas."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autodist.capture.batch_length import Dealt, fault_in_parts
from autodist.capture.function import CapturedFunction
from autodist.errors import UnevenBatchError
from autodist.functions.step_arguments import Leaf, count_examples, split_rows
from autodist.reading.own_batches import WholeBatch
from autodist.resources import ResourceSpec
from autodist.runtime.batches import require_examples, share_of, take, told_rows, with_a_row
from autodist.terminal_log import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

Cut = Callable[[Any], np.ndarray]


@dataclass(frozen=True)
class OwnArrays:
    """Takes one worker's part of the arrays of a call.

    Attributes:
        cuts: for each array, what takes this worker's part of it.
        examples: that this worker has; 0 where its part is a row that does not count.
        all_examples: that were passed.
    """

    cuts: Sequence[Cut]
    examples: int
    all_examples: int

    def of(self, values: Iterable[Any]) -> list[np.ndarray]:
        """The part of the arrays of one call."""
        return [cut(value) for cut, value in zip(self.cuts, values, strict=True)]


@dataclass(frozen=True)
class Sharing:
    """How the arguments of one step are shared out.

    Attributes:
        step: its name.
        spec: the machines.
        worker: the index of this one.
        is_global: whether every worker passes the same global batch, of which each keeps its share; otherwise what is
            passed is this worker's own part.
    """

    step: str
    spec: ResourceSpec
    worker: int
    is_global: bool

    @property
    def replicas(self) -> int:
        """Among how many replicas what is passed is divided."""
        return len(self.spec.replicas) if self.is_global else self.spec.replicas_of(self.worker)

    def count(self, leaves: Sequence[Leaf], whole: WholeBatch | None) -> int:
        """The number of examples of the global batch, or of what this worker passes.

        Args:
            leaves: what is passed.
            whole: the global batch, where this worker's part of it is passed; None: what `is_global` says.
        """
        return count_examples(leaves) if whole is None else whole.examples

    def dealt(self, examples: int, names: Mapping[str, str]) -> Dealt:
        """How so many examples are dealt out; `names` has the parameter of each input."""
        return Dealt(examples, self.replicas, len(self.spec.replicas), names)

    def own_part(self, leaves: Sequence[Leaf], whole: WholeBatch | None) -> OwnArrays:
        """What takes this worker's part of arrays of these shapes.

        Args:
            leaves: what is passed.
            whole: as for `count`.

        Raises:
            EmptyBatchError: there are no examples, and no other worker can have any.
        """
        examples = self.count(leaves, whole)
        is_split = any(x.axis is not None for x in leaves)
        if is_split and (self.is_global or len(self.spec.workers) == 1):
            require_examples(examples > 0)
        if not self.is_global:
            return OwnArrays([_with_a_row(x) if examples == 0 else np.asarray for x in leaves], examples, examples)
        workers = self.spec.replica_workers
        if whole is not None:
            return OwnArrays([np.asarray] * len(leaves), share_of(examples, workers, self.worker).size, examples)
        shares = {n: share_of(n, workers, self.worker) for n in {examples, *(x.rows for x in leaves)}}
        cuts: list[Cut] = [
            np.asarray if x.axis is None else functools.partial(take, axis=x.axis, share=shares[x.rows]) for x in leaves
        ]
        return OwnArrays(cuts, shares[examples].size, examples)

    def require_fits_apart(self, captured: CapturedFunction, leaves: Sequence[Leaf]) -> None:
        """Passes a step whose inputs may have different numbers of rows, in the whole batch and in each replica's part.

        Raises:
            UnevenBatchError: these do not fit one another in the step.
        """
        if not captured.item.apart:
            return
        rows = {name: x.rows for name, x in zip(captured.inputs, leaves, strict=True) if x.axis is not None}
        told = told_rows(split_rows(leaves))
        fault = fault_in_parts(captured.item, rows, self.replicas)
        if fault is not None:
            raise UnevenBatchError(
                f"the inputs of {self.step} have different numbers of rows along their batch axes ({told}), and they, "
                f"or the parts that {self.replicas} replicas get of them, do not fit one another: {fault}. Where an "
                "input is not one row an example, say so with batch_axis (None: every replica gets the whole)."
            )
        log.warning(
            "%s: its inputs have different numbers of rows (%s), and each is split by its own. Where every replica is "
            "to get the whole of one, say so with batch_axis.", self.step, told, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def _with_a_row(leaf: Leaf) -> Cut:
    return np.asarray if leaf.axis is None else functools.partial(with_a_row, axis=leaf.axis)
