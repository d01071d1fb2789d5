"""Steps that only evaluate: run on all replicas, if the result is the same as on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import tensorflow as tf

from autodist.batch.axis import is_array
from autodist.capture.function import CapturedFunction
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
from autodist.runs.run import Run


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
        if captured.item.gradients:
            raise NotSharedError("it trains")
        for leaf in tf.nest.flatten(captured.outputs):
            if not isinstance(leaf, tf.TensorSpec | str | bytes | int | float | bool | None):
                raise NotSharedError(f"it returns a {type(leaf).__name__}")
        return replace(captured, item=replace(captured.item, is_whole=True))
