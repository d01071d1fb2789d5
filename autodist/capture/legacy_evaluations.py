"""`evaluate` and `predict` of models of tf_keras on all replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from keras import tree

from autodist.capture.keras_evaluations import Evaluations, Shared, SharedTest, iterator_of, until_end
from autodist.capture.keras_libraries import steps_per_execution
from autodist.capture.made_functions import one_batch_step, plain_function


class LegacyEvaluations(Evaluations):
    """How models of tf_keras are evaluated by several replicas."""

    @property
    def shared(self) -> Mapping[str, type[Shared]]:
        """By "test" and "predict", what tf_keras calls with the batches."""
        return {"test": SharedTest, "predict": _SharedPredict}

    def own_function(self, model: Any, name: str) -> Callable[[Any], Any]:
        """What calls the function that tf_keras makes of one batch as often as a call has steps."""
        of_one = plain_function(model, name)

        def own(iterator: Iterator[Any]) -> Any:
            found = [of_one(iterator)]
            for _ in range(steps_per_execution(model) - 1):
                try:
                    found.append(of_one(iterator))
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
            return found[-1] if name == "test" else _joined(found)

        return own

    def own_step(self, model: Any, name: str) -> Callable[[Any], Any]:
        """The model's step, a function of one batch."""
        return one_batch_step(model, name)


class _SharedPredict(Shared):
    """Takes an iterator of batches; returns the outputs of as many of them as a call has steps."""

    def __call__(self, iterator: Iterator[Any]) -> Any:
        spec = iterator.element_spec  # type: ignore[attr-defined]

        def alone(data: Any) -> Any:
            return self.plain(iterator_of(data, spec))

        outputs = [self.one(next(iterator), alone)]
        outputs += [self.one(data, alone) for data in itertools.islice(until_end(iterator), self.steps - 1)]
        return _joined(outputs)


def _joined(outputs: list[Any]) -> Any:
    """The outputs of several batches as one."""
    return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
