"""`ad.function`: a TensorFlow 2 training step that runs on all replicas."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from autodist.batch.axis import name_by_path
from autodist.batch.examples import require_rows_for_all, warn_empty_micro_batches
from autodist.capture.batch_requirements import require_any_length, require_no_rows_by_position
from autodist.capture.function import CapturedFunction, capture_function
from autodist.capture.keras.distribution.checks import check_current_distribution, has_distribution
from autodist.errors import CaptureError, EmptyBatchError
from autodist.functions.bound_functions import BoundFunction, BoundFunctions
from autodist.functions.graph_function import GraphFunction, GraphSessions
from autodist.functions.running_step import RunningStep, prepare
from autodist.functions.sharing import OwnArrays, Sharing
from autodist.functions.step_arguments import Constants, Leaf, StepArguments, inputs_apart, split_rows
from autodist.functions.tracing import (
    BY_ITSELF,
    TracedFor,
    Traces,
    Tracing,
    call_in_function,
    constant_key,
    explaining_open_axes,
    form_of,
)
from autodist.graph.flows import row_axes
from autodist.logs.quiet import quiet_tensorflow
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import GlobalBatch, ReadBatch
from autodist.runs.dry_run import active_dry_run
from autodist.runs.run import Run
from autodist.runtime.input_consistency import FeedRole
from autodist.tf_compat.do_not_convert import converting, ours

log = logging.getLogger("autodist")

_PLAIN = (bool, int, float, str, bytes)


@dataclass(frozen=True)
class _Traced:
    captured: CapturedFunction
    running: RunningStep

    @functools.cached_property
    def row_axes(self) -> Sequence[int | None]:
        """Batch axis of each output; None: it has no rows of examples."""
        return row_axes(self.captured.step)


@dataclass(frozen=True)
class _Known:
    """Cached state for later calls of one form, which differ only in the values of their arrays.

    Attributes:
        traced: the trace for these calls.
        own: takes this worker's part of the arrays.
        leaves: descriptions of the arrays, without values.
    """

    traced: _Traced
    own: OwnArrays
    leaves: Sequence[Leaf]


@ours
class DistributedFunction:
    """A captured step; a call runs it on this worker's replicas and combines the results with the other workers.

    Arrays and tensors of rank 1 and more are split over the local replicas along their first axis, sparse and ragged
    tensors by example. Scalars are passed whole to every replica. All other arguments are constants of the step, as for
    `tf.function`. A worker without replicas ignores its arguments, and returns no rows. A call inside another captured
    step becomes part of that step.

    Attributes:
        survivable: exceptions that a call raises on all workers together, after which the script may continue.
        coming: numbers of examples of known later global batches: if one would be refused, the first call raises.
        global_batch: the global batch, if the next call's argument is already this worker's part of it; None if
            `is_global` decides.

    Args:
        function: the step.
        run: the run.
        batch_axis: by parameter, the axis to split, negative ones counted from the last; None: every replica gets the
            whole array.
        is_global: True if every worker passes the same global batch and keeps its share; False if each passes its own
            part.
        tracing: options of the trace.
        name_of: returns the name of a leaf in `batch_axis`, from its parameter and its path in the argument.
        sessions: runs the calls made while a graph is built; None if these run like all other calls.
    """

    survivable: ClassVar[type[Exception] | tuple[type[Exception], ...]] = EmptyBatchError

    def __init__(
        self,
        function: Callable[..., Any],
        run: Run,
        batch_axis: Mapping[str, int | None] | None = None,
        is_global: bool = False,
        tracing: Tracing = BY_ITSELF,
        name_of: Callable[[str, Sequence[Any]], str] = name_by_path,
        sessions: GraphSessions | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._run = function, run
        self._name = getattr(function, "__name__", type(function).__name__)
        self._sharing = Sharing(self._name, run.spec, run.index, is_global)
        self._tracing, self._plain = tracing, tracing.plain(function)
        self._arguments = StepArguments(self._name, function, self._plain, tracing.input_signature, batch_axis, name_of)
        self._has_warned_of_tables = False
        self._traced: Traces[_Traced] = Traces(tracing.reduce_retracing)
        self._known: dict[Hashable, _Known] = {}
        self._of_instances = BoundFunctions(
            lambda method: DistributedFunction(method, run, batch_axis, is_global, tracing, name_of, sessions)
        )
        self.coming: tuple[int, ...] = ()
        self.global_batch: GlobalBatch | None = None
        self._trains = False
        self._graph_step = None if sessions is None else self._graph_function(sessions)

    @property
    def _converted(self) -> Callable[..., Any]:
        return converting(self._function) if self._tracing.autograph else self._function

    def _graph_function(self, sessions: GraphSessions) -> GraphFunction:
        def step(arguments: Mapping[str, Any]) -> Any:
            if self._tracing.jit_compile:
                raise CaptureError(
                    f"{self._name} has jit_compile, and is called while a graph is built. Leave tf.Graph() out, "
                    "or build the part for XLA within tf.xla.experimental.jit_scope()."
                )
            return self._arguments.call(self._converted, arguments)

        return GraphFunction(self._name, step, self._arguments.axis_at, sessions, self._sharing.is_global)

    @property
    def traces(self) -> int:
        """Number of traces of the step so far."""
        return len(self._traced)

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> DistributedFunction | BoundFunction[DistributedFunction]:
        """Returns the step bound to an instance, if the function is a method."""
        if instance is None or not hasattr(type(self._function), "__get__"):
            return self
        return self._of_instances.of(self._function, instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step.

        Returns:
            The function's result: scalars combined over all workers, rows concatenated over the local replicas.

        Raises:
            CaptureError: the step cannot be captured, does not accept a replica's part of the batch, or trains within a
                `tf.function`; or an argument cannot be split.
            TypeError: TensorFlow's: arguments do not match the signature.
            UnevenBatchError: arguments have different numbers of examples, or no worker has any.
            WorkerFailedError: another worker failed.
            ClusterError: this worker failed in an earlier step.
        """
        if tf.inside_function():
            if (dry_run := active_dry_run()) is not None:
                dry_run.on_nested_call(self._name)
            return call_in_function(self._plain, self._name, args, kwargs)
        self._check_distribution()
        arguments = self._bind(args, kwargs) if kwargs else None
        form, arrays = form_of(args if arguments is None else list(arguments.items()))
        key = None if form is None else (form, None if self.global_batch is None else self.global_batch.examples)
        known = self._known.get(key)
        if known is None or self._is_outdated(known.traced) or not tf.executing_eagerly():
            return self._call_unknown(key, arrays, self._bind(args, kwargs))
        with self._making_step():
            return self._run_step(known.traced, known.own, known.leaves, arrays)

    @contextmanager
    def _making_step(self) -> Iterator[None]:
        """Context of each step: guards it, and reports to the observer and the input consistency check."""
        if self._trains:
            self._run.observer.before_step(self)
        with self._run.failed_step.guarding(but=self.survivable):
            yield
        self._run.input_consistency.report_faults()

    def _check_distribution(self) -> None:
        """Checks the current Keras distribution: the script may have set it since the trace."""
        if has_distribution():
            with self._run.failed_step.guarding(is_step=False, is_before=True):
                check_current_distribution()

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        with self._run.failed_step.guarding(is_step=False, is_before=True):
            return self._arguments.bind(args, kwargs)

    @property
    def reads_ahead(self) -> bool:
        """True if `on_each` may run several steps in one call, for which all their batches must be read first."""
        return self._sharing.is_global and self._run.recorder is None

    def on_each(self, batches: Sequence[ReadBatch]) -> Any:
        """Runs a step on each of several batches, in one call if they have the same form; returns the last result.

        All workers must decide alike, so the numbers of examples of the global batches are compared. A worker's parts
        of two batches may have equally many rows while those of another worker differ.

        Args:
            batches: each with the global batch that it is this worker's part of, or None.
        """
        self._check_distribution()
        forms, arrays = zip(*(form_of((data,)) for data, _ in batches), strict=True)
        examples = [None if global_batch is None else global_batch.examples for _, global_batch in batches]
        keys = {*zip(forms, examples, strict=True)}
        known = self._known.get(keys.pop()) if forms[0] is not None and len(keys) == 1 and len(batches) > 1 else None
        is_ready = known is not None and not self._is_outdated(known.traced) and tf.executing_eagerly()
        if known is None or not is_ready or not known.traced.running.can_repeat:
            return [self._call_with(*pair) for pair in batches][-1]
        own = known.own
        with self._making_step():
            for count in self.coming:
                known.traced.running.require_even(count)
            outputs = known.traced.running.repeat([own.of(some) for some in arrays], own.examples, own.all_examples)
        return _results(known.traced, outputs)

    def _call_with(self, data: Any, global_batch: GlobalBatch | None) -> Any:
        self.global_batch = global_batch
        return self(data)

    def _call_unknown(self, form: Hashable | None, arrays: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
        """Runs a call of a new form; caches its analysis for later calls of that form."""
        if self._graph_step is not None and not tf.executing_eagerly():
            return self._graph_step(arguments)
        with self._run.failed_step.guarding(is_step=False, is_before=True):
            leaves, constants = self._arguments.flatten(arguments)
            key = tuple((parameter, constant_key(value)) for parameter, value in constants)
            axes, specs = tuple(leaf.axis for leaf in leaves), tuple(leaf.spec for leaf in leaves)
            trace_key = TracedFor(key, axes, specs, self._arguments.group(leaves))
        if any(trace_key.groups):  # arrays that had equal numbers of rows by chance now have different ones
            self._known.clear()
        with self._making_step():
            require_rows_for_all(split_rows(leaves), trace_key.groups, self._sharing.replicas)
            traced = self._traced.get(trace_key)
            if traced is not None and not self._is_outdated(traced):
                own = self._sharing.own_part(leaves, self.global_batch)
                results = self._run_step(traced, own, leaves, self._permuted(traced, leaves))
            else:
                traced, own, results = self._first_call(trace_key, arguments, leaves, constants)
        traced.running.after(lambda: results)
        is_all = len(arrays) == len(leaves) and all(a is x.value for a, x in zip(arrays, leaves, strict=True))
        if form is not None and is_all and not any(trace_key.groups) and self._run.recorder is None:
            self._known[form] = _Known(traced, own, [replace(leaf, value=None) for leaf in leaves])
        return results

    def _first_call(
        self, trace_key: TracedFor, arguments: Mapping[str, Any], leaves: Sequence[Leaf], constants: Constants
    ) -> tuple[_Traced, OwnArrays, Any]:
        self._known.clear()
        with quiet_tensorflow():
            made_for = self._traced.to_be_made(trace_key)
            traced = self._trace(arguments, leaves, made_for)
            self._traced.add(made_for, traced)
            if traced.captured.step.gradients and not self._trains:
                self._trains = True
                self._run.observer.before_step(self)
            self._report_first_batch(traced, leaves, constants)
            own = self._sharing.own_part(leaves, self.global_batch)
            with self._run.startup.showing("making the first step"):
                results = self._run_step(traced, own, leaves, self._permuted(traced, leaves))
        if not traced.running.is_dry_run:
            self._run.startup.finish()
        return traced, own, results

    def _is_outdated(self, traced: _Traced) -> bool:
        """Returns True if the script has added to a lookup table since the trace, so that the step must be retraced."""
        is_outdated = any(table.has_changed for table in traced.captured.tables)
        if is_outdated and not self._has_warned_of_tables:
            self._has_warned_of_tables = True
            log.warning(
                "a lookup table that %s reads was filled further since the step was traced, so the step is traced "
                "again, now and after each such change: fill it before the training.",
                self._name, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        return is_outdated

    def _trace(self, arguments: Mapping[str, Any], leaves: Sequence[Leaf], made_for: TracedFor) -> _Traced:
        @ours
        def step(*tensors: tf.Tensor) -> Any:
            return self._arguments.call(self._converted, self._arguments.unflatten(arguments, tensors))

        axes = [leaf.axis for leaf in leaves]
        name = self._name
        has_nones = any(x is None for x in tf.nest.flatten(list(arguments.values())))
        with nullcontext() if has_nones else explaining_open_axes(), self._run.startup.showing(f"tracing {name}"):
            captured = self._capture(step, made_for.specs, axes)
        self._run.startup.log_done("traced %s, a step on %d variables", name, len(captured.step.variables))
        apart = inputs_apart(captured.inputs, leaves, made_for.groups)
        is_global = self._sharing.is_global or self._sharing.is_gathered
        captured = replace(captured, step=replace(captured.step, is_global=is_global, apart=apart))
        self._sharing.require_fits_apart(captured, leaves)
        names = dict(zip(captured.inputs, (leaf.parameter for leaf in leaves), strict=True))
        examples = self._sharing.count(leaves, self.global_batch)
        division = self._sharing.division(examples, names)
        by_name = {name: leaf.name or leaf.parameter for name, leaf in zip(captured.inputs, leaves, strict=True)}
        require_no_rows_by_position(captured.step, replace(division, names=by_name))
        require_any_length(captured.step, division)
        if captured.step.gradients:
            warn_empty_micro_batches(division.examples, self._run.spec.micro_batches)
        own = self._sharing.own_part(leaves, self.global_batch).of(leaf.value for leaf in leaves)
        own_leaves = [replace(leaf, value=value) for leaf, value in zip(leaves, own, strict=True)]
        shapes = {name: self._sharing.shape(leaf) for name, leaf in zip(captured.inputs, own_leaves, strict=True)}
        sources = {v.name: source for v, source in zip(captured.step.variables, captured.sources, strict=True)}
        batch = dict(zip(captured.inputs, own, strict=True))
        return _Traced(captured, prepare(self._run, captured.step, sources, shapes, captured.tables, name, batch))

    def _capture(
        self, step: Callable[..., Any], specs: tuple[tf.TensorSpec, ...], axes: Sequence[int | None]
    ) -> CapturedFunction:
        xla = self._run.spec.xla
        with self._run.failed_step.guarding(is_step=False, is_before=True):  # an error of the script's code, too
            return capture_function(
                step, specs, axes,
                jit_compile=self._tracing.jit_compile,
                autograph=self._tracing.autograph,
                is_split=self._run.spec.splits_batches,
                builds_for_xla=None if xla is None else bool(xla),
            )  # fmt: skip

    def _report_first_batch(self, traced: _Traced, leaves: Sequence[Leaf], constants: Constants) -> None:
        """Sends the chief this worker's first feeds of a training step, to compare them with the other workers'."""
        only_chief_counts = self._run.spec.gathers_batches and self._sharing.is_global
        if not traced.captured.step.gradients or only_chief_counts:
            return
        split = FeedRole.GLOBAL if self._sharing.is_global else FeedRole.OWN
        if self.global_batch is None:
            fed = [(x.parameter, x.value, FeedRole.WHOLE if x.axis is None else split) for x in leaves]
        else:
            fed = [(name, array, FeedRole.GLOBAL) for name, array in self.global_batch.alike]
        fed += [(name, value, FeedRole.WHOLE) for name, value in constants if isinstance(value, _PLAIN)]
        self._run.input_consistency.record(self._name, fed)
        self._run.input_consistency.send()

    def _permuted(self, traced: _Traced, leaves: Sequence[Leaf]) -> list[Any]:
        """Returns the arrays, permuted to the order of examples of a recorded step."""
        values = [leaf.value for leaf in leaves]
        if self._run.recorder is None or not traced.captured.step.gradients:
            return values
        return list(self._run.recorder.in_order(values, [leaf.axis for leaf in leaves]))

    def _run_step(self, traced: _Traced, own: OwnArrays, leaves: Sequence[Leaf], values: Sequence[Any]) -> Any:
        for count in self.coming:
            traced.running.require_even(count)
        part = self._sharing.part(leaves, own, values, self._run.coordination.gather_feeds)
        outputs = traced.running(part.values, part.examples, part.all_examples)
        return _results(traced, outputs if part.fed is None else part.fed.own_rows(outputs, traced.row_axes))


def _results(traced: _Traced, values: Sequence[np.ndarray]) -> Any:
    """Builds the step's result from the values of its outputs."""
    outputs = traced.captured.outputs
    if isinstance(outputs, tf.TensorSpec):  # usually one loss; `tf.nest` would take longer than the rest
        return tf.constant(values[0])
    results = iter(values)
    return tf.nest.map_structure(
        lambda leaf: tf.constant(next(results)) if isinstance(leaf, tf.TensorSpec) else leaf, outputs
    )
