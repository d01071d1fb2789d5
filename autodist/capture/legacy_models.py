"""Front end for Keras 2 (tf_keras): models compiled in a scope train through AutoDist, as those of Keras 3 do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from keras import tree

from autodist.capture.adopted_models import AdoptedModels, BatchAxis, explaining_graphs
from autodist.capture.fit_arguments import lengths_to_come
from autodist.capture.keras_batches import next_with_global_batch, on_several
from autodist.capture.keras_evaluations import Evaluations, Shared, SharedTest, iterator_of, until_end
from autodist.capture.keras_libraries import steps_per_execution
from autodist.capture.keras_progress import timing_the_start
from autodist.capture.patches import LEGACY_MODELS
from autodist.capture.train_functions import one_batch_step, plain_function


class LegacyModels(AdoptedModels):
    """Lets models of tf_keras train through distributed steps.

    The step is the function that the model's class makes by `make_train_function`, traced with an iterator of one
    batch: tf_keras's function, which calls `train_step`, or one of the script.
    """

    patches = LEGACY_MODELS

    def adopt(self, model: Any) -> None:
        """Sets a distributed train function on one model, unless it was built for a session."""
        if tf.executing_eagerly():
            super().adopt(model)

    def train_function(self, model: Any, batch_axis: BatchAxis) -> Callable[[Iterator[Any]], Any]:
        """Returns a function that trains a model on an iterator's next batches and returns the logs of the last one."""
        distributed = self._distribute(one_batch_step(model, "train"), bool(model.jit_compile), batch_axis)
        step = timing_the_start(distributed, model)

        def train(iterator: Iterator[Any]) -> Any:
            distributed.coming = lengths_to_come(model)
            steps = steps_per_execution(model)
            with explaining_graphs(model):
                first = next_with_global_batch(iterator)
                if steps > 1 and distributed.traces and distributed.reads_ahead:
                    return on_several(distributed, first, iterator, steps)
                logs = step(first[0])
                for _ in range(steps - 1):
                    try:
                        data, _ = next_with_global_batch(iterator)
                    except StopIteration:
                        break
                    logs = step(data)
            return logs

        return train


class LegacyEvaluations(Evaluations):
    """Evaluates models of tf_keras on several replicas."""

    @property
    def shared(self) -> Mapping[str, type[Shared]]:
        """The functions that tf_keras calls with the batches, by "test" and "predict"."""
        return {"test": SharedTest, "predict": _SharedPredict}

    def own_function(self, model: Any, name: str) -> Callable[[Any], Any]:
        """Returns a function that calls tf_keras's function of one batch once for each step of a call."""
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
        """Returns the model's step, a function of one batch."""
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
    """Concatenates the outputs of several batches."""
    return outputs[0] if len(outputs) == 1 else tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
