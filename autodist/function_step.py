"""`ad.function`: a TensorFlow 2 training step that runs on all replicas."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact  # what AutoGraph calls as it is
from tensorflow.python.eager.polymorphic_function import function_type_utils  # by which tf.function takes arguments
from tensorflow.python.util import nest  # tf.nest, with where each leaf stands

from autodist.batch_axis import axis_within, is_array, name_by_path, require_axis, require_mapping, said_of
from autodist.bound_functions import BoundFunction, BoundFunctions
from autodist.capture.batch_length import Dealt, fault_in_parts, require_any_length
from autodist.capture.function import CapturedFunction, capture_function
from autodist.capture.nested_step import call_in_function
from autodist.composite_rows import Rows, open_spec, rows_of
from autodist.errors import CaptureError, EmptyBatchError, UnevenBatchError
from autodist.graph_function import GraphFunction, GraphSessions
from autodist.messages import ALIKE_EVERYWHERE
from autodist.quiet import quiet_tensorflow
from autodist.run import Run
from autodist.running_step import RunningStep, prepare
from autodist.runtime.batches import (
    group_rows,
    require_examples,
    require_rows_for_all,
    share_of,
    take,
    told_rows,
    with_a_row,
)
from autodist.runtime.first_batches import Meant
from autodist.traces import TracedFor, Traces, constant_key

log = logging.getLogger("autodist")

_PLAIN = (bool, int, float, str, bytes)
COMPOSITES = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)

Passed = tuple[str, Any, Any, str]
"""A parameter, a leaf of what is passed for it, what the script declares of that, or None, and what it is called."""

_NO_LENGTH = re.compile(r"NoneType|None values|\(None\)|elements of \[[^]]*None|partially known|got None")
"""In what TensorFlow, and Python, say of a length that is not known."""

Constants = Sequence[tuple[str, Any]]
"""By parameter, the leaves of the arguments; None in the place of arrays."""


@dataclass(frozen=True)
class Leaf:
    """One array or tensor among the arguments of a step.

    Attributes:
        parameter: name of the parameter that it came in.
        value: the array.
        axis: along which it is split; None: every replica gets the whole.
        declared: its shape and dtype, as the script says; None: those of the value.
        name: what it is called among what came in that parameter.
    """

    parameter: str
    value: Any
    axis: int | None
    declared: tf.TensorSpec | None = None
    name: str = ""

    @property
    def rows(self) -> int:
        """Along the axis along which it is split."""
        return 0 if self.axis is None else int(np.shape(self.value)[self.axis])

    @property
    def spec(self) -> tf.TensorSpec:
        """Its shape, open along the batch axis, and its dtype."""
        shape: Sequence[int | None] = np.shape(self.value)
        if self.declared is not None:
            known = self.declared.shape
            shape = [None] * len(shape) if known.rank is None else known.as_list()
        return tf.TensorSpec([None if a == self.axis else n for a, n in enumerate(shape)], self.value.dtype)


@dataclass(frozen=True)
class Tracing:
    """How a step is traced; as for `tf.function`.

    Attributes:
        jit_compile: whether XLA is to compile the step.
        input_signature: shapes and dtypes of all arguments, for which it is traced once; None: those that come.
        reduce_retracing: whether shapes that differ are traced once more as one.
        autograph: whether Python's control flow is converted.
    """

    jit_compile: bool = False
    input_signature: Any = None
    reduce_retracing: bool = False
    autograph: bool = True

    def plain(self, function: Callable[..., Any]) -> Any:
        """The `tf.function` that is traced so."""
        return tf.function(
            function, self.input_signature, self.autograph, self.jit_compile or None, self.reduce_retracing
        )


@dataclass(frozen=True)
class _Traced:
    captured: CapturedFunction
    running: RunningStep


@autograph_artifact
class DistributedFunction:
    """A captured step; calling it runs the step on this worker's replicas and combines with the other workers.

    Arrays and tensors of rank 1 and more are split over the local replicas along their first axis, sparse and ragged
    ones by their examples; scalars go whole to every replica; all else is part of the step, as for `tf.function`. On a
    worker without replicas what is passed is not used, and what its replicas would return is nothing: no rows. Called
    while a step is captured, it is part of that step.

    Attributes:
        survivable: what a call raises on all workers alike, so that the script may go on.
        coming: numbers of examples of global batches that are known to come, refused with the first one if they are.

    Args:
        function: the step.
        run: in which it runs.
        batch_axis: by parameter, the axis along which it is split, negative ones counted from the last; None: every
            replica gets the whole.
        is_global: whether every worker passes the same global batch, of which each keeps its share; otherwise what is
            passed is this worker's own part.
        tracing: how it is traced.
        name_of: what `batch_axis` calls a leaf, by its parameter and its place in what is passed for it.
        sessions: runs it where it is called while a graph is built; None: there it runs as everywhere.
    """

    survivable: ClassVar[type[Exception] | tuple[type[Exception], ...]] = EmptyBatchError

    def __init__(
        self,
        function: Callable[..., Any],
        run: Run,
        batch_axis: Mapping[str, int | None] | None = None,
        is_global: bool = False,
        tracing: Tracing = Tracing(),
        name_of: Callable[[str, Sequence[Any]], str] = name_by_path,
        sessions: GraphSessions | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._run = function, run
        self._name = getattr(function, "__name__", type(function).__name__)
        named = require_mapping(batch_axis, "parameters")
        self._is_global, self._name_of = is_global, name_of
        self._tracing, self._plain = tracing, tracing.plain(function)
        self._has_told_of_tables = False
        self._traced: Traces[_Traced] = Traces(tracing.reduce_retracing)
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._signature = inspect.signature(function)
        self._of_instances = BoundFunctions(
            lambda method: DistributedFunction(method, run, batch_axis, is_global, tracing, name_of, sessions)
        )
        self.coming: tuple[int, ...] = ()
        unknown = {key for key in named if str(key).split("/")[0] not in self._signature.parameters}
        if unknown and name_of is name_by_path:
            raise CaptureError(
                f"batch_axis names {', '.join(sorted(map(str, unknown)))}, and {self._name} has the parameters "
                f"{', '.join(self._signature.parameters)}."
            )
        self._batch_axis = {name: require_axis(axis, f"{name} of {self._name}") for name, axis in named.items()}
        self._in_graph = None if sessions is None else self._graph_function(sessions)

    def _graph_function(self, sessions: GraphSessions) -> GraphFunction:
        def step(arguments: Mapping[str, Any]) -> Any:
            if self._tracing.jit_compile:
                raise CaptureError(
                    f"{self._name} asks for jit_compile, and is called where a graph is built. Leave tf.Graph() out, "
                    "or build what XLA is to compile within tf.xla.experimental.jit_scope()."
                )
            bound = self._signature.bind_partial()
            bound.arguments.update(arguments)
            return self._function(*bound.args, **bound.kwargs)

        def axis(parameter: str, path: Sequence[Any], value: Any) -> int | None:
            return self._axis(parameter, value, self._name_of(parameter, path))

        return GraphFunction(self._name, step, axis, sessions, self._is_global)

    @functools.cached_property
    def _declared(self) -> Mapping[str, Any] | None:
        """The signature by parameter; of a method, whose first one it does not name, asked for of bound ones alone."""
        signature = self._tracing.input_signature
        return None if signature is None else self._signature.bind(*signature).arguments

    @property
    def traces(self) -> int:
        """How many of its calls had to trace it so far."""
        return len(self._traced)

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> DistributedFunction | BoundFunction[DistributedFunction]:
        """The step of an instance, where the function is a method."""
        if instance is None or not hasattr(type(self._function), "__get__"):
            return self
        return self._of_instances.of(self._function, instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step.

        Returns:
            What the function returns: scalars combined over all workers, rows joined over the local replicas.

        Raises:
            CaptureError: the step cannot be captured, or does not take the part of the batch that a replica gets, or
                an argument cannot be split, or it trains within a `tf.function`.
            TypeError: TensorFlow's: arguments do not fit the signature.
            UnevenBatchError: arguments disagree in their number of examples, or no worker has any.
            WorkerFailedError: another worker ended badly.
            ClusterError: this worker failed in an earlier step.
        """
        if tf.inside_function():
            return call_in_function(self._plain, self._name, args, kwargs)
        arguments = self._bound(args, kwargs)
        if self._in_graph is not None and not tf.executing_eagerly():
            return self._in_graph(arguments)
        flat = [passed for p, value in arguments.items() for passed in self._flatten(p, value)]
        self._require_named(name for *_, name in flat)
        leaves = [Leaf(p, v, self._axis(p, v, name), spec, name) for p, v, spec, name in flat if is_array(v)]
        constants = tuple((p, None if is_array(v) else constant_key(v)) for p, v, *_ in flat)
        axes, specs = tuple(leaf.axis for leaf in leaves), tuple(leaf.spec for leaf in leaves)
        asked = TracedFor(constants, axes, specs, self._group(leaves))
        with self._run.missed_step.noted(but=self.survivable):
            require_rows_for_all(_split(leaves), asked.groups, self._shares)
            traced = self._traced.get(asked)
            if traced is not None and not self._is_outdated(traced):
                results = self._run_step(traced, leaves)
            else:
                results = self._first_call(asked, arguments, leaves, constants)
        self._run.first_batches.look()
        return results

    def _first_call(
        self, asked: TracedFor, arguments: Mapping[str, Any], leaves: Sequence[Leaf], constants: Constants
    ) -> Any:
        with quiet_tensorflow():
            made_for = self._traced.to_be_made(asked)
            traced = self._trace(arguments, leaves, made_for)
            self._traced.add(made_for, traced)
            self._tell_first_batch(traced, leaves, constants)
            with self._run.start_up.doing("making the first step"):
                results = self._run_step(traced, leaves)
        self._run.start_up.ends()
        return results

    def _is_outdated(self, traced: _Traced) -> bool:
        """Whether the script has filled lookup tables further since, so that the step has to be traced anew."""
        is_outdated = any(table.has_changed for table in traced.captured.tables)
        if is_outdated and not self._has_told_of_tables:
            self._has_told_of_tables = True
            log.warning(
                "a lookup table that %s reads was filled further since the step was traced, which is traced anew "
                "therefore, as each time that one is: fill it before the training.", self._name, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        return is_outdated

    def _bound(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments by parameter; as the signature has them, where there is one."""
        if self._declared is None:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        plain = self._plain
        bound = function_type_utils.bind_function_inputs(args, kwargs, plain.function_type, plain._default_values)
        return dict(bound.arguments)

    def _flatten(self, parameter: str, value: Any) -> Iterator[Passed]:
        """The leaves of an argument; of a sparse or ragged tensor, what it is made of.

        Raises:
            CaptureError: a sparse or ragged tensor is to be split, and cannot be.
        """
        is_whole = self._is_whole(parameter)
        declared: Iterable[Any] = itertools.repeat(None)
        if self._declared is not None and parameter in self._declared:
            declared = tf.nest.flatten(self._declared[parameter], expand_composites=is_whole)
        found = nest.flatten_with_tuple_paths(value, expand_composites=is_whole)
        for (path, leaf), spec in zip(found, declared, strict=False):
            name = self._name_of(parameter, path)
            if isinstance(leaf, COMPOSITES):
                rows = self._rows_of(parameter, leaf)
                if self._is_whole(name):
                    raise CaptureError(
                        f"batch_axis of {name} is None, and {name} of {self._name} is a {type(leaf).__name__} among "
                        "others; pass it dense."
                    )
                yield parameter, rows, None, name
                yield from ((parameter, array, open_spec(array), name) for array in rows.arrays(leaf))
            else:
                yield parameter, leaf, spec, name

    def _rows_of(self, parameter: str, composite: Any) -> Rows:
        return rows_of(composite, self._batch_axis.get(parameter, 0), f"{parameter} of {self._name}")

    def _is_whole(self, name: str) -> bool:
        key = said_of(self._batch_axis, name)
        return key is not None and self._batch_axis[key] is None

    def _axis(self, parameter: str, value: Any, name: str) -> int | None:
        key = said_of(self._batch_axis, name)
        if key is None:
            return 0 if np.ndim(value) else None
        axis = self._batch_axis[key]
        told = parameter if name == parameter else name
        return None if axis is None else axis_within(axis, np.ndim(value), f"{told} of {self._name}")

    def _require_named(self, names: Iterable[str]) -> None:
        """Passes if each key of `batch_axis` names a leaf of what is passed, or what leaves are part of.

        Raises:
            CaptureError: with what there is.
        """
        if self._name_of is name_by_path and not any("/" in key for key in self._batch_axis):
            return
        present = list(dict.fromkeys(names))
        for key in self._batch_axis:
            if not any(f"{name}/".startswith(f"{key}/") for name in present):
                raise CaptureError(f"batch_axis names {key}, and {self._name} is given {', '.join(present)}.")

    def _group(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Which of the arrays that are split have as many rows; what was apart in an earlier call stays apart."""
        split = [leaf for leaf in leaves if leaf.axis is not None]
        key = tuple(leaf.parameter for leaf in split)
        self._groups[key] = group_rows([leaf.rows for leaf in split], self._groups.get(key))
        return self._groups[key]

    @property
    def _shares(self) -> int:
        """The replicas among which what is passed is divided."""
        spec = self._run.spec
        return len(spec.replicas) if self._is_global else len(spec.workers[self._run.index].devices)

    def _require_fits_apart(self, captured: CapturedFunction, leaves: Sequence[Leaf]) -> None:
        """Passes a step that takes inputs of as many rows as there are, and each replica's part of them.

        Raises:
            UnevenBatchError: their shapes do not fit one another.
        """
        if not captured.item.apart:
            return
        rows = {name: x.rows for name, x in zip(captured.inputs, leaves, strict=True) if x.axis is not None}
        told = told_rows(_split(leaves))
        fault = fault_in_parts(captured.item, rows, self._shares)
        if fault is not None:
            raise UnevenBatchError(
                f"the inputs of {self._name} have different numbers of rows along their batch axes ({told}), and they, "
                f"or the parts that {self._shares} replicas get of them, do not fit one another: {fault}. Where an "
                "input is not one row an example, say so with batch_axis (None: every replica gets the whole)."
            )
        log.warning(
            "%s: its inputs have different numbers of rows (%s), and each is split by its own. Where every replica is "
            "to get the whole of one, say so with batch_axis.", self._name, told, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip

    def _trace(self, arguments: Mapping[str, Any], leaves: Sequence[Leaf], made_for: TracedFor) -> _Traced:
        def step(*tensors: tf.Tensor) -> Any:
            remaining = iter(tensors)
            bound = self._signature.bind_partial()

            def traced(name: str, value: Any) -> Any:
                if isinstance(value, COMPOSITES):
                    rows = self._rows_of(name, value)
                    return rows.tensor(*itertools.islice(remaining, rows.arrays_per_tensor))
                return next(remaining) if is_array(value) else value

            for name, value in arguments.items():  # in the order of `leaves`; a nest of all would sort them by name
                bound.arguments[name] = tf.nest.map_structure(
                    functools.partial(traced, name), value, expand_composites=self._is_whole(name)
                )
            return self._function(*bound.args, **bound.kwargs)

        axes = [leaf.axis for leaf in leaves]
        name = self._name
        has_nones = any(x is None for x in tf.nest.flatten(list(arguments.values())))
        with nullcontext() if has_nones else _explaining_open_axes(), self._run.start_up.doing(f"tracing {name}"):
            captured = self._capture(step, made_for.specs, axes)
        self._run.start_up.has_done("traced %s, a step on %d variables", name, len(captured.item.variables))
        apart = _apart(captured.inputs, leaves, made_for.groups)
        captured = replace(captured, item=replace(captured.item, is_global=self._is_global, apart=apart))
        self._require_fits_apart(captured, leaves)
        names = dict(zip(captured.inputs, (leaf.parameter for leaf in leaves), strict=True))
        require_any_length(captured.item, self._dealt(_count(leaves), names))
        own = self._own_part(leaves, _count(leaves))[0]
        shapes = {name: np.shape(value) for name, value in zip(captured.inputs, own, strict=True)}
        sources = {v.name: source for v, source in zip(captured.item.variables, captured.sources, strict=True)}
        return _Traced(captured, prepare(self._run, captured.item, sources, shapes, captured.tables))

    def _capture(
        self, step: Callable[..., Any], specs: tuple[tf.TensorSpec, ...], axes: Sequence[int | None]
    ) -> CapturedFunction:
        return capture_function(
            step, specs, axes,
            jit_compile=self._tracing.jit_compile, may_evaluate=True, autograph=self._tracing.autograph,
        )  # fmt: skip

    def _tell_first_batch(self, traced: _Traced, leaves: Sequence[Leaf], constants: Constants) -> None:
        """Lets the chief see whether the workers feed a training step what is meant."""
        if not traced.captured.item.gradients:
            return
        split = Meant.GLOBAL if self._is_global else Meant.OWN
        fed = [(x.parameter, x.value, Meant.WHOLE if x.axis is None else split) for x in leaves]
        fed += [(name, value, Meant.WHOLE) for name, value in constants if isinstance(value, _PLAIN)]
        self._run.first_batches.tell(self._name, fed)
        self._run.first_batches.send()

    def _dealt(self, examples: int, names: Mapping[str, str]) -> Dealt:
        return Dealt(examples, self._shares, len(self._run.spec.replicas), names)

    def _run_step(self, traced: _Traced, leaves: Sequence[Leaf]) -> Any:
        examples = _count(leaves)
        values, mine = self._own_part(leaves, examples)
        for count in self.coming:
            traced.running.require_even(count)
        results = iter(traced.running(values, mine, examples))
        return tf.nest.map_structure(
            lambda leaf: tf.constant(next(results)) if isinstance(leaf, tf.TensorSpec) else leaf,
            traced.captured.outputs,
        )

    def _own_part(self, leaves: Sequence[Leaf], examples: int) -> tuple[list[Any], int]:
        is_split = any(x.axis is not None for x in leaves)
        if is_split and (self._is_global or self._run.workers == 1):
            require_examples(examples > 0)
        if not self._is_global:
            if examples == 0:
                return [_numpy(x.value) if x.axis is None else with_a_row(x.value, x.axis) for x in leaves], 0
            return [_numpy(x.value) for x in leaves], examples
        workers = [r.worker.index for r in self._run.spec.replicas]
        shares = {n: share_of(n, workers, self._run.index) for n in {examples, *(x.rows for x in leaves)}}
        mine = [_numpy(x.value) if x.axis is None else take(x.value, x.axis, shares[x.rows]) for x in leaves]
        return mine, shares[examples].size


@contextmanager
def _explaining_open_axes() -> Iterator[None]:
    """What TensorFlow raises where a step uses the length of a batch axis says where a None comes from."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _NO_LENGTH.search(str(error)):
            error.add_note(
                "AutoDist captures a step with its batch axis open: x.shape[0] of an argument x is None there. Write "
                "tf.shape(x)[0] for it, or -1 where tf.reshape is to find it."
            )
        raise


def _count(leaves: Sequence[Leaf]) -> int:
    """The number of examples of a call: of rows of what is split first."""
    return next((leaf.rows for leaf in leaves if leaf.axis is not None), 0)


def _split(leaves: Sequence[Leaf]) -> list[tuple[str, int]]:
    """Name and number of rows of what is split."""
    return [(leaf.name, leaf.rows) for leaf in leaves if leaf.axis is not None]


def _apart(inputs: Sequence[str], leaves: Sequence[Leaf], groups: Sequence[int]) -> dict[str, str]:
    """Of the inputs that have not as many rows as the first, each with the first of as many."""
    split = [name for name, leaf in zip(inputs, leaves, strict=True) if leaf.axis is not None]
    first: dict[int, str] = {}
    for group, name in zip(groups, split, strict=True):
        first.setdefault(group, name)
    return {name: first[group] for name, group in zip(split, groups, strict=True) if group}


def _numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, tf.Tensor) else value
