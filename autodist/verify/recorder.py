"""Recorder of `autodist verify`: saves variables and outputs after each step in the script's process.

Environment variables configure it, so all workers of the script run the same steps in the same precision.
"""

from __future__ import annotations

import functools
import json
import logging
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
from autodist.graph.editor import NodeDef
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, draws_numbers, having
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, LOCAL_KERNELS, AnyKernel
from autodist.kernels.place.slots import find_slots
from autodist.logs.terminal import EXPLAINS_DIFFERENCES
from autodist.proto import strategy_pb2
from autodist.synchronizers import all_synchronizers
from autodist.verify.records import ERROR, NOTES, OUTPUTS, SLOTS, STATE, VARIABLE, VARIABLES, Recording

SEED = 1
"""Seed of all random numbers that the script does not seed, so that its runs are equal."""


@functools.cache
def recorder() -> Recorder | None:
    """Returns the recorder of this process; None if it does not record."""
    setting = os.environ.get(VARIABLE)
    return None if setting is None else Recorder(Recording(**json.loads(setting)))


class Recorder:
    """Records the steps that the script runs in this process.

    Args:
        recording: the values to record.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording, self._folder = recording, Path(recording.folder)
        self._steps = 0
        self._is_permuted, self._has_permuted = self.permutes, False
        self._notes: dict[str, Any] = {}
        self._messages = _Messages()
        self._stages: int | None = None
        self._micro_batches = 0

    @property
    def is_reference(self) -> bool:
        """True if the step runs as captured, on one device."""
        return self._recording.is_reference

    @property
    def permutes(self) -> bool:
        """True if the examples of each batch are permuted."""
        return self._recording.permutation is not None

    def begin(self) -> None:
        """Called before the script builds anything."""
        if self._recording.in_float64:
            keras.config.set_floatx("float64")
        random.seed(SEED)
        np.random.seed(SEED)
        tf.random.set_seed(SEED)
        logger = logging.getLogger("autodist")
        logger.addHandler(self._messages)
        logger.setLevel(logging.INFO)
        sys.excepthook = functools.partial(self._note_error, sys.excepthook)

    def kernels(self, kernels: Sequence[AnyKernel]) -> Sequence[AnyKernel]:
        """Returns the kernels that rewrite a step; the reference runs the captured step."""
        return LOCAL_KERNELS if self._recording.is_reference and kernels is KERNELS else kernels

    def require_exact(self, strategy: strategy_pb2.Strategy) -> None:
        """Checks that training under a strategy equals that of one device.

        Raises:
            StrategyError: the strategy changes the training.
        """
        for variable, synchronizer in all_synchronizers(strategy):
            if synchronizer.inexact is not None:
                raise StrategyError(
                    f"{variable} {synchronizer.inexact}, so its training differs from that of one device, and there "
                    "is nothing to verify. Verify the strategy with `sync: true`, `staleness: 0`, no compressor and no "
                    "local steps."
                )
        if strategy.pipeline.stages:
            self._stages, self._micro_batches = len(strategy.pipeline.stages), len(strategy.graph_config.replicas)

    def in_order(self, values: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
        """Returns the inputs of a training step, with the examples of each array permuted if requested.

        Args:
            values: arrays and tensors.
            axes: the batch axis of each; None: it has none.
        """
        if self._recording.permutation is None:
            return list(values)
        if not all(axis is None or isinstance(v, np.ndarray | tf.Tensor) for v, axis in zip(values, axes, strict=True)):
            self._is_permuted = False  # sparse inputs
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
        self, step: CapturedStep, worker: int, values: Callable[[], Mapping[str, Any]], outputs: Callable[[], Any]
    ) -> None:
        """Records a training step; exits the script after the last one.

        Args:
            step: the captured step.
            worker: index of this worker.
            values: returns the values of the step's variables, by name.
            outputs: returns the outputs of the step.
        """
        if self._steps < self._recording.steps:
            if worker == 0:
                self._write_notes(step)
                self._write(step, values(), outputs())
            self._steps += 1
        if self._steps >= self._recording.steps or not self._has_requested_precision(step):
            raise SystemExit(0)

    def _has_requested_precision(self, step: CapturedStep) -> bool:
        return not self._recording.in_float64 or is_in_float64(step)

    def _write_notes(self, step: CapturedStep) -> None:
        if self._notes:
            if self._notes["messages"] != self._messages.texts:  # of a step captured since
                self._store_notes()
            return
        nodes = [step.graph_index.nodes[name] for name in _training_nodes(step)]
        ops = sorted({node.op for node in nodes})
        self._notes = {
            "is_in_float64": is_in_float64(step),
            "has_coarse_parts": any(map(_loses_precision, nodes)),
            "draws": [op for op in ops if draws_numbers(op) or op in having(Trait.SEEDED | Trait.GENERATOR)],
            "normalises": [op for op in ops if op.startswith("FusedBatchNorm")],
            "is_permuted": self._is_permuted,
            "has_permuted": self._has_permuted,
            "stages": self._stages,
            "micro_batches": self._micro_batches,
        }
        self._store_notes()

    def _store_notes(self) -> None:
        self._notes["messages"] = list(self._messages.texts)
        (self._folder / NOTES).write_text(json.dumps(self._notes), encoding="utf-8")

    def _write(self, step: CapturedStep, values: Mapping[str, Any], outputs: Any) -> None:
        trained = {gradient.variable for gradient in step.gradients}
        slots = {slot.name for kept in find_slots(step).values() for slot in kept}
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
        text = str(error) if isinstance(error, AutoDistError) else f"{kind.__name__}: {error}{where}"
        (self._folder / ERROR).write_text(json.dumps(text), encoding="utf-8")
        otherwise(kind, error, trace)


class _Messages(logging.Handler):
    """Keeps the messages of AutoDist that may give the reason why a run differs from that of one device."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or any(hasattr(record, key) for key in EXPLAINS_DIFFERENCES):
            self.texts.append(record.getMessage())


def _permuted(array: np.ndarray, axis: int, draws: np.random.Generator) -> np.ndarray:
    """Returns the array with permuted examples; equal `draws` give arrays of one length the same order."""
    return np.take(array, draws.permutation(array.shape[axis]), axis)


def _training_nodes(step: CapturedStep) -> set[str]:
    """Returns the nodes of a step's training; in a session's graph, without those of initial values."""
    gradients = [node_of(t) for gradient in step.gradients for t in gradient.tensors]
    updates = reach(gradients, step.graph_index.consumers.__getitem__)
    return reach(updates, step.graph_index.data.__getitem__)


def _loses_precision(node: NodeDef) -> bool:
    """Returns True if a node casts float64 to a lower precision, as the losses of `tf.compat.v1.losses` do."""
    if node.op != "Cast" or node.attr["SrcT"].type != tf.float64.as_datatype_enum:
        return False
    to = tf.as_dtype(node.attr["DstT"].type)
    return to.is_floating and to.size < tf.float64.size


def is_in_float64(step: CapturedStep) -> bool:
    """Returns True if all trained variables of a step are float64."""
    return all(step.by_name[gradient.variable].dtype == tf.float64 for gradient in step.gradients)


def _named(outputs: Any) -> list[tuple[str, Any]]:
    return [("/".join(map(str, path)) or "value", value) for path, value in keras.tree.flatten_with_path(outputs)]


def _as_numbers(value: Any) -> np.ndarray | None:
    """Converts a value to an array that NumPy can write and subtract; returns None if that is impossible."""
    if not isinstance(value, tf.Tensor | np.ndarray | np.generic | int | float):
        return None
    array = np.asarray(value)
    if array.dtype.kind in "biuf":
        return array
    return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else None
