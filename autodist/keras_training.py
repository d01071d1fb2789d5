"""How models of Keras train, evaluate and read their data in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autodist.batch_axis import keras_name
from autodist.capture.keras_evaluations import Evaluations
from autodist.capture.keras_fits import Fits
from autodist.capture.keras_models import KerasModels
from autodist.checkpoint.around_fit import AroundFit
from autodist.functions.evaluation_step import EvaluationStep
from autodist.functions.function_step import DistributedFunction
from autodist.functions.tracing import Tracing
from autodist.own_share import OwnShare
from autodist.runs.run import Run
from autodist.runtime.first_batches import digest_of


def keras_models(run: Run, around_fit: AroundFit, share: OwnShare) -> KerasModels:
    """What lets models train on all replicas.

    Args:
        run: in which they train.
        around_fit: makes of a model's `fit` what the script calls.
        share: of this worker in the data.
    """
    steps_are_global = run.spec.batch != "per_worker"

    def distribute(
        step: Callable[..., Any], jit_compile: bool, batch_axis: Mapping[str, int | None], is_own: bool = False
    ) -> DistributedFunction:
        is_global = steps_are_global and not is_own
        return DistributedFunction(step, run, batch_axis, is_global, Tracing(jit_compile), name_of=keras_name)

    fits = Fits(run.index == 0, run.talk.share, run.land_together) if run.workers > 1 else None
    evaluations = Evaluations(
        lambda step, jit_compile: EvaluationStep(step, run, jit_compile),
        together=run.talk.makes_together,
        digest_of=digest_of,
        validates=fits.validates if fits is not None else lambda model: False,
        noting_interrupts=run.end.noting_interrupts,
    )
    return KerasModels(
        distribute,
        fits=fits,
        evaluations=evaluations if run.spec.shares_batches and steps_are_global else None,
        around_fit=around_fit,
        reading=share.reading() if steps_are_global else None,
    )
