"""Training, evaluation and input of Keras 3 and tf_keras models in a run, and the step by which they evaluate."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import GeneratorType
from typing import Any, ClassVar

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters

from autodist.batch.axis import is_array, keras_name
from autodist.capture.function import CapturedFunction
from autodist.capture.keras.evaluations import Evaluations, LegacyEvaluations
from autodist.capture.keras.fits import Fits
from autodist.capture.keras.libraries import legacy_keras, uses_legacy_keras
from autodist.capture.keras.model_state import reset_variables
from autodist.capture.keras.models import KerasModels, LegacyModels
from autodist.checkpoint.fit_wrappers import AroundFit, AroundLegacyFit
from autodist.errors import (
    CaptureError,
    CaptureMismatchError,
    NotSharedError,
    RewriteError,
    StrategyError,
    UnevenBatchError,
)
from autodist.functions.function_step import DistributedFunction
from autodist.functions.step_arguments import COMPOSITES
from autodist.functions.tracing import Tracing
from autodist.reading.input_shard import InputShard
from autodist.runs.run import Run
from autodist.runtime.dataset import DistributedDataset
from autodist.runtime.input_consistency import digest_of
from autodist.tf_compat.import_hooks import when_imported


class KerasTraining:
    """Makes the models of a run train on all replicas.

    Args:
        run: the run.
        around_fit: wraps a model's `fit` for the script.
        share: this worker's share of the data.
        saves: True if the YAML enables checkpoints of the training.
    """

    def __init__(self, run: Run, around_fit: AroundFit, share: InputShard, saves: bool) -> None:
        self._run, self._share = run, share
        self._is_global = run.spec.batch != "per_worker"
        self._fits = None
        if run.workers > 1:
            is_alike, have_joined = self._is_global and run.spec.shard is None, lambda: run.have_joined
            refusing = run.failed_step.guarding_until_step
            self._fits = Fits(
                run.index == 0,
                run.coordination.share_text,
                run.flush_together,
                self._note_reset,
                is_alike,
                have_joined,
                refusing,
            )
        shares = run.spec.shares_batches and self._is_global
        self._models = KerasModels(
            self._distribute,
            fits=self._fits,
            evaluations=self._evaluations(Evaluations) if shares else None,
            around_fit=around_fit,
            reading=share.reading() if self._is_global else None,
            whole_data=self._whole_data,
        )
        self._legacy = LegacyModels(
            self._distribute,
            fits=self._fits,
            evaluations=self._evaluations(LegacyEvaluations) if shares else None,
            around_fit=AroundLegacyFit(share, saves, run.end.noting_interrupts),
            whole_data=self._whole_data,
        )

    @contextmanager
    def adopting(self, batch_axis: Mapping[str, int | None] | None = None) -> Iterator[None]:
        """Adopts every model that is built, compiled or fitted while the context is open.

        Args:
            batch_axis: batch axes of the inputs of their `fit`; see `AutoDist.scope`.
        """
        with ExitStack() as opened:
            opened.enter_context(self._models.adopting(batch_axis))
            if uses_legacy_keras():
                importlib.import_module("tf_keras")
            legacy = self._legacy.adopting(batch_axis)
            opened.enter_context(when_imported("tf_keras", lambda: opened.enter_context(legacy)))
            yield

    def _whole_data(self, data: Any, trains: bool) -> Any:
        """Returns the whole batches of a data set of `ad.distribute_dataset`, since `fit` divides them; else the data.

        Raises:
            CaptureError: each worker passes its own batches, Keras would not take the data as batches, or the model
                trains on them (`trains`) and they were restored to a later position.
        """
        if not isinstance(data, DistributedDataset):
            return data
        if not self._is_global:
            raise CaptureError(
                "with batch: per_worker in the YAML, each worker passes its own batches to fit, evaluate and predict. "
                "A data set of ad.distribute_dataset has the whole batches of all workers: remove batch: per_worker, "
                "or pass a data set of this worker's batches."
            )
        if not _are_batches(data.dataset):
            raise CaptureError(
                f"ad.distribute_dataset has divided a {type(data.dataset).__name__}, which Keras does not take as "
                "batches: a list would be the inputs of a model. Pass a tf.data.Dataset or a keras.utils.PyDataset to "
                "ad.distribute_dataset or to fit itself, or arrays to fit."
            )
        if trains and data.is_restored:
            raise CaptureError(
                f"a data set of ad.distribute_dataset was restored to batch {data.place.taken} of its iteration "
                f"{data.place.ended + 1}, and fit reads it from its beginning. Resume fit by ad.checkpoint_callback, "
                "which saves its position, and leave the data set out of ad.checkpoint; or train in a loop over it."
            )
        return data.dataset

    def _distribute(
        self, step: Callable[..., Any], jit_compile: bool, batch_axis: Mapping[str, int | None], is_own: bool = False
    ) -> DistributedFunction:
        is_global = self._is_global and not is_own
        return DistributedFunction(step, self._run, batch_axis, is_global, Tracing(jit_compile), name_of=keras_name)

    def _evaluations(self, kind: type[Evaluations]) -> Evaluations:
        run, fits = self._run, self._fits
        return kind(
            lambda step, jit_compile: EvaluationStep(step, run, jit_compile),
            is_collective=run.coordination.is_made_by_all,
            digest_of=digest_of,
            validates=fits.validates if fits is not None else lambda model: False,
            noting_interrupts=run.end.noting_interrupts,
            on_reset=self._note_reset,
            on_own=run.early_values.warn,
        )

    def _note_reset(self, model: Any) -> None:
        self._run.tracker.mark_reset(reset_variables(model))


def _are_batches(data: Any) -> bool:
    """Returns True if Keras takes the data as batches."""
    legacy = legacy_keras()
    kinds = (tf.data.Dataset, keras.utils.PyDataset, GeneratorType, *([legacy.utils.Sequence] if legacy else []))
    names = ("is_torch_dataloader", "is_grain_dataset")  # Keras's own tests; an older Keras does not have both
    tests = [getattr(data_adapters, name) for name in names if hasattr(data_adapters, name)]
    return isinstance(data, kinds) or any(test(data) for test in tests)


class EvaluationStep(DistributedFunction):
    """A step without training, on a global batch: every worker gets the results of the whole batch.

    If sharing a step among replicas would change the result, all workers raise the same error, since each worker can
    compute the whole batch instead.

    Args:
        function: the step, of one argument.
        run: the run.
        jit_compile: True to compile the step with XLA.
    """

    survivable: ClassVar[type[Exception] | tuple[type[Exception], ...]] = (NotSharedError, UnevenBatchError)

    def __init__(self, function: Callable[..., Any], run: Run, jit_compile: bool = False) -> None:
        super().__init__(function, run, is_global=True, tracing=Tracing(jit_compile))

    def __call__(self, data: Any) -> Any:
        """Runs one step.

        Raises:
            NotSharedError: the step or the batch cannot be shared; nothing was computed or written.
        """
        strange = next(
            (x for x in tf.nest.flatten(data) if not (x is None or is_array(x) or isinstance(x, COMPOSITES))), None
        )
        if strange is not None:
            raise NotSharedError(f"a batch holds a {type(strange).__name__}")
        try:
            return super().__call__(data)
        except UnevenBatchError as error:
            raise NotSharedError(str(error)) from error

    def _trace(self, *args: Any) -> Any:
        try:
            return super()._trace(*args)
        except CaptureMismatchError:
            raise
        except (CaptureError, RewriteError, StrategyError) as error:
            raise NotSharedError(str(error)) from error

    def _capture(
        self, step: Callable[..., Any], specs: tuple[tf.TensorSpec, ...], axes: Sequence[int | None]
    ) -> CapturedFunction:
        try:
            captured = super()._capture(step, specs, axes)
        except Exception as error:  # the step may accept batches of one fixed length only
            raise NotSharedError(str(error)) from error
        if captured.step.gradients:
            raise NotSharedError("it trains")
        for leaf in tf.nest.flatten(captured.outputs):
            if not isinstance(leaf, tf.TensorSpec | str | bytes | int | float | bool | None):
                raise NotSharedError(f"it returns a {type(leaf).__name__}")
        return replace(captured, step=replace(captured.step, is_whole=True))
