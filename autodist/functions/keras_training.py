"""Training, evaluation and input of Keras 3 and tf_keras models in a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from autodist.batch.axis import keras_name
from autodist.capture.imported_later import when_imported
from autodist.capture.keras_evaluations import Evaluations
from autodist.capture.keras_fits import Fits
from autodist.capture.keras_libraries import uses_legacy_keras
from autodist.capture.keras_models import KerasModels
from autodist.capture.legacy_models import LegacyEvaluations, LegacyModels
from autodist.checkpoint.fit_wrappers import AroundFit, AroundLegacyFit
from autodist.functions.evaluation_step import EvaluationStep
from autodist.functions.function_step import DistributedFunction
from autodist.functions.tracing import Tracing
from autodist.reading.input_shard import InputShard
from autodist.runs.run import Run
from autodist.runtime.input_consistency import digest_of


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
            refusing = run.failed_step.noted_until_step
            self._fits = Fits(
                run.index == 0, run.coordination.share, run.flush_together, is_alike, have_joined, refusing
            )
        shares = run.spec.shares_batches and self._is_global
        self._models = KerasModels(
            self._distribute,
            fits=self._fits,
            evaluations=self._evaluations(Evaluations) if shares else None,
            around_fit=around_fit,
            reading=share.reading() if self._is_global else None,
        )
        self._legacy = LegacyModels(
            self._distribute,
            fits=self._fits,
            evaluations=self._evaluations(LegacyEvaluations) if shares else None,
            around_fit=AroundLegacyFit(share, saves, run.end.noting_interrupts),
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

    def _distribute(
        self, step: Callable[..., Any], jit_compile: bool, batch_axis: Mapping[str, int | None], is_own: bool = False
    ) -> DistributedFunction:
        is_global = self._is_global and not is_own
        return DistributedFunction(step, self._run, batch_axis, is_global, Tracing(jit_compile), name_of=keras_name)

    def _evaluations(self, kind: type[Evaluations]) -> Evaluations:
        run, fits = self._run, self._fits
        return kind(
            lambda step, jit_compile: EvaluationStep(step, run, jit_compile),
            together=run.coordination.all_make,
            digest_of=digest_of,
            validates=fits.validates if fits is not None else lambda model: False,
            noting_interrupts=run.end.noting_interrupts,
            on_own=run.own_values.warn,
        )
