"""`evaluate` and `predict` on all replicas, and what each worker computes alone, as without AutoDist."""

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
from autodist.capture.fit_arguments import told_lengths
from autodist.capture.keras_batches import without_optionals
from autodist.capture.keras_libraries import steps_per_execution
from autodist.capture.keras_progress import TracedStep
from autodist.capture.made_functions import makes_its_own, set_maker
from autodist.capture.suspects import plain_variable
from autodist.errors import NotSharedError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.tf_compat.do_not_convert import converting, ours

log = logging.getLogger("autodist")

StepMaker = Callable[[Callable[..., Any], bool], TracedStep]
"""Makes of a Keras `test_step` or `predict_step`, a function of one batch, one that all replicas share."""


class Together(Protocol):
    """Says whether all workers make a call together; all that make it have to ask.

    What is called, and with which data, `describe` says, which is asked where there are several workers.
    """

    def __call__(self, describe: Callable[[], tuple[str, str]], is_certain: bool) -> bool: ...


class Evaluations:
    """How models are evaluated by several replicas.

    Args:
        distribute: makes a step that all replicas share; it raises NotSharedError where it would give another result.
        together: whether all workers make a call.
        digest_of: tells arrays apart.
        validates: whether a model is being validated in `fit`, which all workers come to.
        noting_interrupts: is entered around each evaluation, with what tells whether all workers make it.
        on_own: called with the name of a method and the variables of its model, where this worker computes by itself.
    """

    def __init__(
        self,
        distribute: StepMaker,
        together: Together,
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
        """Gives a model functions of ours, unless it or its class makes its own."""
        for name, shared in self.shared.items():
            if not makes_its_own(model, name):
                setattr(model, f"{name}_function", None)
                set_maker(model, name, self._maker(model, name, shared))

    @property
    def shared(self) -> Mapping[str, type[Shared]]:
        """By "test" and "predict", what Keras calls with the batches."""
        return {"test": SharedTest, "predict": _SharedPredict}

    def own_function(self, model: keras.Model, name: str) -> Callable[[Any], Any]:
        """Keras's own function, by which a worker computes the whole."""
        getattr(type(model), f"make_{name}_function")(model, force=True)
        return getattr(model, f"{name}_function")

    def own_step(self, model: keras.Model, name: str) -> Callable[[Any], Any]:
        """The model's step, a function of one batch."""
        own = getattr(model, f"{name}_step")

        @ours
        def step(data: Any) -> Any:
            return converting(own)(data)

        step.__name__ = f"{name}_step"
        return step

    def noting_interrupts(self, method: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
        """A model's `evaluate` or `predict`; if Ctrl-C leaves it while all workers make it, that is noted."""
        name, signature = _FUNCTIONS[method.__name__], inspect.signature(method)
        attribute = f"{name}_function"

        def is_shared() -> bool:
            made = getattr(model, attribute)
            return isinstance(made, Shared) and made.is_shared

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = getattr(model, attribute)
            if isinstance(made, Shared):
                made.begin()  # before Keras does: what is read until then may be interrupted, too

            def lengths() -> Mapping[str, str]:
                bound = signature.bind(*args, **kwargs)
                return told_lengths({one: argument(bound, one) for one in ("x", "steps")})

            self._lengths[id(model), name] = lengths
            try:
                with self._noting_interrupts(is_shared):
                    return method(*args, **kwargs)
            finally:
                self._lengths.pop((id(model), name), None)

        return call

    def lengths(self, model: keras.Model, name: str) -> Mapping[str, str]:
        """The arguments by which the `evaluate` or `predict` that has begun goes on after its first batch.

        Empty for a call with a single batch, also one that a callback makes meanwhile.
        """
        lengths = self._lengths.pop((id(model), name), None)
        return {} if lengths is None else lengths()

    def _maker(self, model: keras.Model, name: str, shared: type[Shared]) -> Callable[..., Any]:
        def make_function(force: bool = False) -> Any:
            """As Keras calls it where an evaluation begins."""
            made = getattr(model, f"{name}_function")
            if made is None or force:
                made = shared(self, model, name)
                setattr(model, f"{name}_function", made)
            made.begin()
            return made

        return make_function


class Shared:
    """What Keras calls with the batches of an evaluation.

    The first batch of an evaluation decides: where all workers were called with the same one, and with the same steps
    and length of the data, all replicas share the batches.

    Args:
        how: models are evaluated.
        model: that is.
        name: "test" or "predict".
    """

    def __init__(self, how: Evaluations, model: keras.Model, name: str) -> None:
        self._how, self._model, self._name = how, model, name
        self.plain = how.own_function(model, name)
        self._step: TracedStep | None = how.distribute(how.own_step(model, name), bool(model.jit_compile))
        self._is_shared: bool | None = None
        self._has_told = False

    def begin(self) -> None:
        """A new evaluation begins."""
        self._is_shared = None

    @property
    def is_shared(self) -> bool:
        """Whether all replicas share the evaluation, as its first batch has shown."""
        return bool(self._is_shared)

    def _shares(self, data: Any) -> bool:
        if self._is_shared is None:
            self._is_shared = self._step is not None and not self._model.run_eagerly and self._meets(data)
            if not self._is_shared:
                method = "evaluate" if self._name == "test" else self._name
                self._how.on_own(f"{method} of {self._model.name}", [*map(plain_variable, self._model.variables)])
        return self._is_shared

    def _meets(self, data: Any) -> bool:
        validates = self._how.validates(self._model)
        is_together = self._how.together(lambda: self._described(data), validates)
        if validates and not is_together and not self._has_told:
            self._has_told = True
            log.info(
                "each worker validates %s by data of its own, or by other steps than the other workers, and computes "
                "the whole by itself; the chief's results count. Where all give the same they share the work.",
                self._model.name, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        return is_together

    def _described(self, data: Any) -> tuple[str, str]:
        """The model and what it does; the batch, what follows it, and the number of traces, since all trace alike."""
        assert self._step is not None, "asked by who has one"
        model = [self._name, *(str(tuple(v.shape)) for v in self._model.variables)]
        leaves = tf.nest.flatten(data, expand_composites=True)
        given = [self._how.digest_of(leaf) if is_array(leaf) else repr(leaf) for leaf in leaves]
        lengths = self._how.lengths(self._model, self._name)
        return _hash(model), _hash([str(self._step.traces), *given, *(f"{one}: {lengths[one]}" for one in lengths)])

    @property
    def steps(self) -> int:
        """How many batches are taken in a call."""
        return steps_per_execution(self._model)

    def one(self, data: Any, alone: Callable[[Any], Any]) -> Any:
        taken = without_optionals(data)
        if not self._shares(taken):
            return alone(data)
        assert self._step is not None, "there is one where it is shared"
        try:
            return self._step(taken)
        except NotSharedError as error:
            self._is_shared = False
            self._step = None
            log.info(
                "each worker computes the whole of %s's %s by itself, since replicas that share it would not give what "
                "one device gives, or it is not known: %s.",
                self._model.name, _CALLED[self._name], str(error).rstrip("."), extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
            return alone(data)


def _hash(told: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(told).encode(), digest_size=16).hexdigest()


_CALLED = {"test": "evaluation", "predict": "prediction"}

_FUNCTIONS = {"evaluate": "test", "predict": "predict"}


class SharedTest(Shared):
    """Takes an iterator of batches; returns the last one's logs."""

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
    """The elements that an iterator has left."""
    while True:
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


def iterator_of(data: Any, spec: Any) -> Iterator[Any]:
    """An iterator of one batch, which Keras's function takes for one of the iterator that the batch comes from."""

    @ours
    def as_open(*leaves: Any) -> Any:
        return tf.nest.pack_sequence_as(spec, [_as_open(*pair) for pair in zip(leaves, specs, strict=True)])

    specs = tf.nest.flatten(spec)
    return iter(tf.data.Dataset.from_tensors(tuple(tf.nest.flatten(data))).map(as_open))


def _as_open(leaf: Any, spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return leaf
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=spec.shape)
