"""`evaluate` and `predict` on all replicas, or by each worker alone as without AutoDist."""

from __future__ import annotations

import functools
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
from autodist.capture.bound_calls import argument
from autodist.capture.fit_arguments import comparable_lengths
from autodist.capture.keras_batches import without_optionals
from autodist.capture.keras_libraries import steps_per_execution
from autodist.capture.keras_progress import TracedStep
from autodist.capture.suspects import plain_variable
from autodist.capture.train_functions import makes_its_own, set_maker
from autodist.errors import NotSharedError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.tf_compat.do_not_convert import converting, ours

log = logging.getLogger("autodist")

StepMaker = Callable[[Callable[..., Any], bool], TracedStep]
"""Makes a step that all replicas share from a Keras `test_step` or `predict_step`, a function of one batch."""


class IsCollectiveCall(Protocol):
    """Returns True if all workers make a call together; all of them have to call this.

    `describe` returns texts for the call and its data; it is called if there are several workers.
    """

    def __call__(self, describe: Callable[[], tuple[str, str]], is_certain: bool) -> bool: ...


class Evaluations:
    """Evaluates models on several replicas.

    Args:
        distribute: makes a step that all replicas share; raises NotSharedError if it would return another result.
        together: returns True if all workers make a call.
        digest_of: returns a digest of an array.
        validates: returns True if a model is being validated in `fit`, which all workers do.
        noting_interrupts: context around each evaluation; its argument returns True if all workers make it.
        on_own: called with the name of a method and the variables of its model if this worker computes alone.
    """

    def __init__(
        self,
        distribute: StepMaker,
        together: IsCollectiveCall,
        digest_of: Callable[[Any], str],
        validates: Callable[[keras.Model], bool] = lambda model: False,
        noting_interrupts: Callable[[Callable[[], bool]], AbstractContextManager[None]] = lambda is_shared: (
            nullcontext()
        ),
        on_own: Callable[[str, Sequence[Any]], None] = lambda method, variables: None,
    ) -> None:
        self.on_own = on_own
        self.distribute, self.together, self.digest_of, self.validates = distribute, together, digest_of, validates
        self._noting_interrupts = noting_interrupts
        self._lengths: dict[tuple[int, str], Callable[[], Mapping[str, str]]] = {}

    def adopt(self, model: keras.Model) -> None:
        """Sets distributed functions on a model, except those that it or its class makes."""
        for name, shared in self.shared.items():
            if not makes_its_own(model, name):
                setattr(model, f"{name}_function", None)
                set_maker(model, name, self._maker(model, name, shared))

    @property
    def shared(self) -> Mapping[str, type[Shared]]:
        """The functions that Keras calls with the batches, by "test" and "predict"."""
        return {"test": SharedTest, "predict": _SharedPredict}

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
        name, signature = _FUNCTIONS[method.__name__], inspect.signature(method)
        attribute = f"{name}_function"

        def is_shared() -> bool:
            made = getattr(model, attribute)
            return isinstance(made, Shared) and made.is_shared

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = getattr(model, attribute)
            if isinstance(made, Shared):
                made.begin()  # before Keras does: reading the first batch may be interrupted, too

            def lengths() -> Mapping[str, str]:
                bound = signature.bind(*args, **kwargs)
                return comparable_lengths({one: argument(bound, one) for one in ("x", "steps")})

            self._lengths[id(model), name] = lengths
            try:
                with self._noting_interrupts(is_shared):
                    return method(*args, **kwargs)
            finally:
                self._lengths.pop((id(model), name), None)

        return call

    def lengths(self, model: keras.Model, name: str) -> Mapping[str, str]:
        """Returns the arguments that determine the number of batches of the current `evaluate` or `predict`.

        Empty for a call with a single batch, also one by a callback in the meantime.
        """
        lengths = self._lengths.pop((id(model), name), None)
        return {} if lengths is None else lengths()

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

    Args:
        how: the evaluations of the scope.
        model: the evaluated model.
        name: "test" or "predict".
    """

    def __init__(self, how: Evaluations, model: keras.Model, name: str) -> None:
        self._how, self._model, self._name = how, model, name
        self.plain = how.own_function(model, name)
        self._step: TracedStep | None = how.distribute(how.own_step(model, name), bool(model.jit_compile))
        self._is_shared: bool | None = None
        self._has_logged = False

    def begin(self) -> None:
        """Starts a new evaluation."""
        self._is_shared = None

    @property
    def is_shared(self) -> bool:
        """True if all replicas share the evaluation, as decided at its first batch."""
        return bool(self._is_shared)

    def _shares(self, data: Any) -> bool:
        if self._is_shared is None:
            self._is_shared = self._step is not None and not self._model.run_eagerly and self._is_collective(data)
            if not self._is_shared:
                method = "evaluate" if self._name == "test" else self._name
                self._how.on_own(f"{method} of {self._model.name}", [*map(plain_variable, self._model.variables)])
        return self._is_shared

    def _is_collective(self, data: Any) -> bool:
        validates = self._how.validates(self._model)
        is_together = self._how.together(lambda: self._described(data), validates)
        if validates and not is_together and not self._has_logged:
            self._has_logged = True
            log.info(
                "each worker validates %s alone, since their data or steps differ; the chief's "
                "results count. Pass the same on all workers to share the work.",
                self._model.name, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        return is_together

    def _described(self, data: Any) -> tuple[str, str]:
        """Returns a hash of the model and call, and one of the batch, the lengths and the number of traces."""
        assert self._step is not None, "its caller has one"
        model = [self._name, *(str(tuple(v.shape)) for v in self._model.variables)]
        leaves = tf.nest.flatten(data, expand_composites=True)
        digests = [self._how.digest_of(leaf) if is_array(leaf) else repr(leaf) for leaf in leaves]
        lengths = self._how.lengths(self._model, self._name)
        return _hash(model), _hash([str(self._step.traces), *digests, *(f"{one}: {lengths[one]}" for one in lengths)])

    @property
    def steps(self) -> int:
        """Number of batches in one call."""
        return steps_per_execution(self._model)

    def one(self, data: Any, alone: Callable[[Any], Any]) -> Any:
        taken = without_optionals(data)
        if not self._shares(taken):
            return alone(data)
        assert self._step is not None, "a shared evaluation has a step"
        try:
            return self._step(taken)
        except NotSharedError as error:
            self._is_shared = False
            self._step = None
            log.info(
                "each worker computes the whole of %s's %s alone, since sharing it among replicas might not give the "
                "result of one device: %s.",
                self._model.name, _CALLED[self._name], str(error).rstrip("."), extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
            return alone(data)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


_CALLED = {"test": "evaluation", "predict": "prediction"}

_FUNCTIONS = {"evaluate": "test", "predict": "predict"}


class SharedTest(Shared):
    """Takes an iterator of batches; returns the logs of the last one."""

    def __call__(self, iterator: Iterator[Any]) -> Any:
        if self._is_shared is False:
            return self.plain(iterator)
        spec = iterator.element_spec if isinstance(iterator, tf.data.Iterator) else None

        def alone(data: Any) -> Any:
            return self.plain(iter((data,)) if spec is None else iterator_of(data, spec))

        logs = self.one(next(iterator), alone)
        for data in itertools.islice(until_end(iterator), self.steps - 1):
            logs = self.one(data, alone)
        return logs


class _SharedPredict(Shared):
    """Takes a list of batches; returns the outputs of all of them."""

    def __call__(self, batches: Sequence[Any]) -> Any:
        outputs = [self.one(data, self._alone) for data in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def _alone(self, data: Any) -> Any:
        return self.plain([data])


def until_end(iterator: Iterator[Any]) -> Iterable[Any]:
    """Yields the remaining elements of an iterator."""
    while True:
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


def iterator_of(data: Any, spec: Any) -> Iterator[Any]:
    """Returns an iterator of one batch with the element spec of the batch's iterator, to avoid another trace."""

    @ours
    def as_open(*leaves: Any) -> Any:
        return tf.nest.pack_sequence_as(spec, [_as_open(*pair) for pair in zip(leaves, specs, strict=True)])

    specs = tf.nest.flatten(spec)
    return iter(tf.data.Dataset.from_tensors(tuple(tf.nest.flatten(data))).map(as_open))


def _as_open(leaf: Any, spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return leaf
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=spec.shape)
