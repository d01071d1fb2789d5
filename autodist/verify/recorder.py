"""What `autodist verify` has a script's process record: variables and outputs after each of some steps.

The process is told by its environment, so that the other workers, which are started like the first, do the same steps
in the same precision.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist.errors import AutoDistError, StrategyError
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, draws_numbers, having
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, LOCAL_KERNELS, Kernel
from autodist.kernels.place.slots import find_slots
from autodist.proto import strategy_pb2
from autodist.synchronizers import all_synchronizers
from autodist.verify.recording import ERROR, NOTES, OUTPUTS, SLOTS, STATE, VARIABLE, VARIABLES, Recording

SEED = 1
"""Of all that a script draws without a seed of its own, so that its runs draw the same."""


@functools.cache
def recorder() -> Recorder | None:
    """What records in this process; None: nothing does."""
    told = os.environ.get(VARIABLE)
    return None if told is None else Recorder(Recording(**json.loads(told)))


class Recorder:
    """Records the steps of the script that this process runs.

    Args:
        recording: what to record.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording, self._folder = recording, Path(recording.folder)
        self._steps = 0
        self._is_permuted, self._has_permuted = self.permutes, False
        self._has_noted = False
        self._stages: int | None = None
        self._micro_batches = 0

    @property
    def is_reference(self) -> bool:
        """Whether the step runs as it was captured, on one device."""
        return self._recording.is_reference

    @property
    def permutes(self) -> bool:
        """Whether the examples of each batch are given in another order than the script's."""
        return self._recording.permutation is not None

    def begin(self) -> None:
        """Called before the script builds anything."""
        if self._recording.in_float64:
            keras.config.set_floatx("float64")
        random.seed(SEED)
        np.random.seed(SEED)
        tf.random.set_seed(SEED)
        sys.excepthook = functools.partial(self._note_error, sys.excepthook)

    def kernels(self, kernels: Sequence[Kernel]) -> Sequence[Kernel]:
        """Those that rewrite a step: the reference runs as it was captured."""
        return LOCAL_KERNELS if self._recording.is_reference and kernels is KERNELS else kernels

    def require_exact(self, strategy: strategy_pb2.Strategy) -> None:
        """Passes a strategy under which the training is that of one device.

        Raises:
            StrategyError: it is meant to be another.
        """
        for variable, synchronizer in all_synchronizers(strategy):
            if synchronizer.inexact is not None:
                raise StrategyError(
                    f"{variable} {synchronizer.inexact}, so its training is not that of one device, and there is "
                    "nothing to verify. Verify the strategy with `sync: true`, `staleness: 0` and no compressor."
                )
        if strategy.pipeline.stages:
            self._stages, self._micro_batches = len(strategy.pipeline.stages), len(strategy.graph_config.replicas)

    def in_order(self, values: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
        """What is given to a step that trains, with the examples of each array in the order that was asked for.

        Args:
            values: arrays and tensors.
            axes: of each, the axis of its examples; None: it has none.
        """
        if self._recording.permutation is None:
            return list(values)
        if not all(axis is None or isinstance(v, np.ndarray | tf.Tensor) for v, axis in zip(values, axes, strict=True)):
            self._is_permuted = False  # sparse ones
            return list(values)
        if any(map(np.ndim, values)) and all(axis is None for axis in axes):
            self._is_permuted = False
        self._has_permuted = self._has_permuted or any(axis is not None for axis in axes)
        seed = [self._recording.permutation, self._steps]
        return [
            value if axis is None else _permuted(np.asarray(value), axis, np.random.default_rng(seed))
            for value, axis in zip(values, axes, strict=True)
        ]

    def after_step(
        self, item: Step, worker: int, values: Callable[[], Mapping[str, Any]], outputs: Callable[[], Any]
    ) -> None:
        """Records a step that trains, and ends the script with the last one.

        Args:
            item: the step as it was captured.
            worker: index of this one.
            values: gives those of the step's variables, by name.
            outputs: gives what the step has returned.
        """
        if self._steps < self._recording.steps:
            if worker == 0:
                self._note(item)
                self._write(item, values(), outputs())
            self._steps += 1
        if self._steps >= self._recording.steps or not self._is_of_use(item):
            raise SystemExit(0)

    def _is_of_use(self, item: Step) -> bool:
        return not self._recording.in_float64 or is_in_float64(item)

    def _note(self, item: Step) -> None:
        if self._has_noted:
            return
        self._has_noted = True
        ops = sorted({item.graph_index.nodes[name].op for name in _trained_by(item)})
        notes = {
            "is_in_float64": is_in_float64(item),
            "draws": [op for op in ops if draws_numbers(op) or op in having(Trait.SEEDED | Trait.GENERATOR)],
            "normalises": [op for op in ops if op.startswith("FusedBatchNorm")],
            "is_permuted": self._is_permuted,
            "has_permuted": self._has_permuted,
            "stages": self._stages,
            "micro_batches": self._micro_batches,
        }
        (self._folder / NOTES).write_text(json.dumps(notes), encoding="utf-8")

    def _write(self, item: Step, values: Mapping[str, Any], outputs: Any) -> None:
        trained = {gradient.variable for gradient in item.gradients}
        slots = {slot.name for kept in find_slots(item).values() for slot in kept}
        kinds = {name: VARIABLES if name in trained else SLOTS if name in slots else STATE for name in values}
        arrays = {f"{kinds[name]} {name}": _as_numbers(value) for name, value in values.items()}
        arrays |= {f"{OUTPUTS} {name}": _as_numbers(value) for name, value in _named(outputs)}
        file = self._folder / f"{self._steps}.npz"
        with open(file.with_suffix(".part"), "wb") as part:
            kept: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
            np.savez(part, **kept)
        file.with_suffix(".part").rename(file)

    def _note_error(
        self,
        otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        frames = [frame for frame in traceback.extract_tb(trace) if "autodist" not in Path(frame.filename).parts]
        where = f" ({frames[0].filename}:{frames[0].lineno})" if frames and not isinstance(error, AutoDistError) else ""
        told = str(error) if isinstance(error, AutoDistError) else f"{kind.__name__}: {error}{where}"
        (self._folder / ERROR).write_text(json.dumps(told), encoding="utf-8")
        otherwise(kind, error, trace)


def _permuted(array: np.ndarray, axis: int, draws: np.random.Generator) -> np.ndarray:
    """The array with its examples in another order; arrays of one length get the same one of equal `draws`."""
    return np.take(array, draws.permutation(array.shape[axis]), axis)


def _trained_by(item: Step) -> set[str]:
    """The nodes of a step's training: of a session's graph, none of those that make initial values."""
    gradients = [node_of(t) for gradient in item.gradients for t in gradient.tensors]
    updates = reach(gradients, item.graph_index.consumers.__getitem__)
    return reach(updates, item.graph_index.data.__getitem__)


def is_in_float64(item: Step) -> bool:
    """Whether all trained variables of a step are."""
    return all(item.by_name[gradient.variable].dtype == tf.float64 for gradient in item.gradients)


def _named(outputs: Any) -> list[tuple[str, Any]]:
    return [("/".join(map(str, path)) or "value", value) for path, value in keras.tree.flatten_with_path(outputs)]


def _as_numbers(value: Any) -> np.ndarray | None:
    """An array that NumPy can write and subtract; None of what is none."""
    if not isinstance(value, tf.Tensor | np.ndarray | np.generic | int | float):
        return None
    array = np.asarray(value)
    if array.dtype.kind in "biuf":
        return array
    return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else None
