"""`evaluate` and `predict` on all replicas, or by each worker alone as without AutoDist."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras import tree

from autodist.batch.axis import is_array
from autodist.capture.keras.call_arguments import arguments_of, comparable_lengths, with_bound_arguments
from autodist.capture.keras.libraries import steps_per_execution
from autodist.capture.keras.steps import TracedStep, iterator_of, without_optionals
from autodist.capture.keras.train_functions import makes_its_own, one_batch_step, plain_function, set_maker
from autodist.capture.local_steps import plain_variable
from autodist.errors import NotSharedError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.data_sets import until_end
from autodist.tf_compat.do_not_convert import converting, ours

log = logging.getLogger("autodist")

StepMaker = Callable[[Callable[..., Any], bool], TracedStep]
"""Makes a step that all replicas share from a Keras `test_step` or `predict_step`, a function of one batch."""

_CALLED = {"test": "evaluation", "predict": "prediction"}
_FUNCTIONS = {"evaluate": "test", "predict": "predict"}


class IsCollectiveCall(Protocol):
    """Returns True if all workers make a call together; a collective call.

    `describe` returns texts for the call and its data; it is called if there are several workers.
    """

    def __call__(self, describe: Callable[[], tuple[str, str]], is_certain: bool) -> bool: ...


class Evaluations:
    """Evaluates models on several replicas.

    Args:
        distribute: makes a step that all replicas share; raises NotSharedError if it would return another result.
        is_collective: returns True if all workers make a call.
        digest_of: returns a digest of an array.
        validates: returns True if a model is being validated in `fit`, which all workers do.
        noting_interrupts: context around each evaluation; its argument returns True if all workers make it.
        on_reset: called with a model whose metrics Keras has reset on every worker.
        on_own: called with the name of a method and the variables of its model if this worker computes alone.
    """

    def __init__(
        self,
        distribute: StepMaker,
        is_collective: IsCollectiveCall,
        digest_of: Callable[[Any], str],
        validates: Callable[[keras.Model], bool] = lambda model: False,
        noting_interrupts: Callable[[Callable[[], bool]], AbstractContextManager[None]] = lambda is_shared: (
            nullcontext()
        ),
        on_reset: Callable[[Any], None] = lambda model: None,
        on_own: Callable[[str, Sequence[Any]], None] = lambda method, variables: None,
    ) -> None:
        self.distribute, self.is_collective, self.digest_of = distribute, is_collective, digest_of
        self.validates, self.on_reset, self.on_own = validates, on_reset, on_own
        self._noting_interrupts = noting_interrupts
        self._lengths: dict[tuple[int, str], Callable[[], Mapping[str, str]]] = {}

    @property
    def shared(self) -> Mapping[str, type[Shared]]:
        """The functions that Keras calls with the batches, by "test" and "predict"."""
        return {"test": Shared, "predict": _SharedPredict}

    def adopt(self, model: keras.Model) -> None:
        """Sets distributed functions on a model, except those that it or its class makes."""
        for name, shared in self.shared.items():
            if not makes_its_own(model, name):
                setattr(model, f"{name}_function", None)
                set_maker(model, name, self._maker(model, name, shared))

    def own_function(self, model: keras.Model, name: str) -> Callable[[Any], Any]:
        """Returns Keras's own function, by which a worker computes alone."""
        getattr(type(model), f"make_{name}_function")(model, force=True)
        return getattr(model, f"{name}_function")

    def own_step(self, model: keras.Model, name: str) -> Callable[[Any], Any]:
        """Returns the model's step, a function of one batch."""
        own = getattr(model, f"{name}_step")

        @ours
        def step(data: Any) -> Any:
            return converting(own)(data)

        step.__name__ = f"{name}_step"
        return step

    def noting_interrupts(self, method: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
        """Wraps a model's `evaluate` or `predict` so that Ctrl-C is recorded if all workers make the call."""
        name = _FUNCTIONS[method.__name__]

        def current() -> Shared | None:
            made = getattr(model, f"{name}_function")
            return made if isinstance(made, Shared) else None

        def is_shared() -> bool:
            made = current()
            return made is not None and made.is_shared

        def call(bound: inspect.BoundArguments) -> Any:
            made = current()
            if made is not None:
                made.begin()  # before Keras does: reading the first batch may be interrupted, too
            self._lengths[id(model), name] = lambda: comparable_lengths(arguments_of(bound))
            try:
                with self._noting_interrupts(is_shared):
                    return method(*bound.args, **bound.kwargs)
            finally:
                self._lengths.pop((id(model), name), None)

        return with_bound_arguments(method, call)

    def lengths(self, model: keras.Model, name: str) -> Mapping[str, str] | None:
        """Returns the arguments that determine the number of batches of the current `evaluate` or `predict`.

        None for a call with a single batch, also one by a callback in the meantime.
        """
        lengths = self._lengths.pop((id(model), name), None)
        return None if lengths is None else lengths()

    def _maker(self, model: keras.Model, name: str, shared: type[Shared]) -> Callable[..., Any]:
        def make_function(force: bool = False) -> Any:
            """Called by Keras at the start of an evaluation."""
            made = getattr(model, f"{name}_function")
            if made is None or force:
                made = shared(self, model, name)
                setattr(model, f"{name}_function", made)
            made.begin()
            return made

        return make_function


class Shared:
    """The function that Keras calls with the batches of an evaluation.

    The first batch of an evaluation decides: if all workers have the same batch, steps and length of the data, all
    replicas share the batches.
    """

    def __init__(self, evaluations: Evaluations, model: keras.Model, name: str) -> None:
        self._evaluations, self._model, self._name = evaluations, model, name
        self._plain = evaluations.own_function(model, name)
        step = evaluations.own_step(model, name)
        self._step: TracedStep | None = evaluations.distribute(step, bool(model.jit_compile))
        self._is_shared: bool | None = None
        self._has_reset = False
        self._has_logged = False

    def begin(self) -> None:
        """Starts a new evaluation."""
        self._is_shared = None

    @property
    def is_shared(self) -> bool:
        """True if all replicas share the evaluation, as decided at its first batch."""
        return bool(self._is_shared)

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """Evaluates the next batches of an iterator, as many as a call has steps."""
        if self._is_shared is False:
            return self._plain(iterator)
        spec = iterator.element_spec if isinstance(iterator, tf.data.Iterator) else None

        def alone(data: Any) -> Any:
            return self._plain(iter((data,)) if spec is None else iterator_of(data, spec))

        results = [self._evaluate(next(iterator), alone)]
        for data in itertools.islice(until_end(iterator), steps_per_execution(self._model) - 1):
            results.append(self._evaluate(data, alone))
        return joined(results, self._name)

    def _evaluate(self, data: Any, alone: Callable[[Any], Any]) -> Any:
        """Evaluates one batch, on all replicas or by `alone`."""
        batch = without_optionals(data)
        if not self._shares(batch):
            return alone(data)
        assert self._step is not None, "a shared evaluation has a step"
        try:
            return self._step(batch)
        except NotSharedError as error:
            self._is_shared = False
            self._step = None
            log.info(
                "each worker computes the whole of %s's %s alone, since sharing it among replicas might not give the "
                "result of one device: %s.",
                self._model.name, _CALLED[self._name], str(error).rstrip("."), extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
            return alone(data)

    def _shares(self, data: Any) -> bool:
        if self._is_shared is None:
            self._is_shared = self._step is not None and not self._model.run_eagerly and self._is_collective(data)
            if self._is_shared and self._has_reset:
                self._evaluations.on_reset(self._model)
            if not self._is_shared:
                method = "evaluate" if self._name == "test" else self._name
                variables = [*map(plain_variable, self._model.variables)]
                self._evaluations.on_own(f"{method} of {self._model.name}", variables)
        return self._is_shared

    def _is_collective(self, data: Any) -> bool:
        validates = self._evaluations.validates(self._model)
        is_collective = self._evaluations.is_collective(lambda: self._described(data), validates)
        if validates and not is_collective and not self._has_logged:
            self._has_logged = True
            log.info(
                "each worker validates %s alone, since their data or steps differ; the chief's "
                "results count. Pass the same on all workers to share the work.",
                self._model.name, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        return is_collective

    def _described(self, data: Any) -> tuple[str, str]:
        """Returns a hash of the model and call, and one of the batch, the lengths and the number of traces."""
        assert self._step is not None, "its caller has one"
        model = [self._name, *(str(tuple(v.shape)) for v in self._model.variables)]
        leaves = tf.nest.flatten(data, expand_composites=True)
        digests = [self._evaluations.digest_of(leaf) if is_array(leaf) else repr(leaf) for leaf in leaves]
        lengths = self._evaluations.lengths(self._model, self._name)
        self._has_reset = lengths is not None and self._name == "test"
        lengths = lengths or {}
        return _hash(model), _hash([str(self._step.traces), *digests, *(f"{one}: {lengths[one]}" for one in lengths)])


class _SharedPredict(Shared):
    """The function of Keras 3 for `predict`, which takes a list of batches."""

    def __call__(self, batches: Any) -> Any:
        return joined([self._evaluate(data, lambda one: self._plain([one])) for data in batches], self._name)


class LegacyEvaluations(Evaluations):
    """Evaluates models of tf_keras on several replicas."""

    @property
    def shared(self) -> Mapping[str, type[Shared]]:
        """The functions that tf_keras calls with iterators, by "test" and "predict"."""
        return {"test": Shared, "predict": Shared}

    def own_function(self, model: Any, name: str) -> Callable[[Any], Any]:
        """Returns a function that calls tf_keras's function of one batch once for each step of a call."""
        of_one = plain_function(model, name)

        def own(iterator: Iterator[Any]) -> Any:
            results = [of_one(iterator)]
            for _ in range(steps_per_execution(model) - 1):
                try:
                    results.append(of_one(iterator))
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
            return joined(results, name)

        return own

    def own_step(self, model: Any, name: str) -> Callable[[Any], Any]:
        """Returns the model's step, a function of one batch."""
        return one_batch_step(model, name)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def joined(results: list[Any], name: str) -> Any:
    """Returns the result of several batches: the logs of the last one, or the concatenated predictions."""
    if name == "test" or len(results) == 1:
        return results[-1]
    return tree.map_structure(lambda *parts: tf.concat(parts, 0), *results)
