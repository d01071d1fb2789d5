"""A step on copies of its variables, in a graph and a session of its own."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session as c_api  # used by tf.compat.v1.Session

from autodist.capture.graphs import bodies_of
from autodist.errors import AutoDistError
from autodist.graph.step import CapturedStep, Step
from autodist.kernels import Context, rewrite
from autodist.logs.formatting import readable_seconds, words_of
from autodist.proto import strategy_pb2
from autodist.resources import Worker
from autodist.runs.measuring.measurable import LOOPS, Batch, CannotMeasure
from autodist.runs.memory_needs import available_memory
from autodist.runs.step_plans import share_names
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.heaps import trim_heaps
from autodist.runtime.threads import session_config
from autodist.runtime.variable_slices import in_groups
from autodist.strategies import all_reduce_node, synced_variables

log = logging.getLogger("autodist")

_MOST_STEPS, _ENOUGH = 15, 0.5
"""Steps are repeated as often, and for as many seconds, for each batch size; their median changes little afterwards."""

_TIMED_PART = 0.6
"""Part of the time limit for the steps that are timed; the other part is for those that are traced."""

_MOST_TRACES = 5

_MOST_OPTIMIZED = 3000
"""Nodes of the largest step that TensorFlow optimizes for the measurement on a CPU."""

PREFIX = "step"


@dataclass(frozen=True)
class OneReplica:
    """The resources of one replica of a worker.

    Attributes:
        device: the device of the replica ("cpu:0").
        replicas: number of replicas of its worker, which divide the worker's part of a batch; 0: the worker has none.
        config: config of a session with the threads of one replica.
        memory: bytes of memory of the worker; 0: not known.
    """

    device: str
    replicas: int
    config: tf.compat.v1.ConfigProto
    memory: int = 0

    @classmethod
    def of(cls, workers: Sequence[Worker], index: int) -> OneReplica:
        """Returns the resources of the first replica of worker `index`, which runs on this machine."""
        devices = workers[index].devices
        config = session_config(workers, index)
        config.experimental.ClearField("collective_group_leader")  # the session has no other workers
        on_cpu = max(1, sum(device.startswith("cpu:") for device in devices))
        config.inter_op_parallelism_threads = max(1, config.inter_op_parallelism_threads // on_cpu)
        config.use_per_session_threads = True  # otherwise, the number of threads is that of the process's first session
        return cls(next(iter(devices), "cpu:0"), len(devices), config, available_memory(workers, index))


def rewrite_for_one(step: CapturedStep, device: str, compilation: strategy_pb2.Compilation | None = None) -> Step:
    """Returns the step as a run with one replica executes it.

    Args:
        step: the captured step.
        device: the device of the replica.
        compilation: what XLA compiles; None: what the script requests.

    Raises:
        CannotMeasure: the kernels refuse the step.
    """
    replicas = [strategy_pb2.Replica(worker=0, device=device)]
    strategy = strategy_pb2.Strategy(
        nodes=[all_reduce_node(variable.name, spec="SHUFFLE") for variable in synced_variables(step)],
        graph_config=strategy_pb2.GraphConfig(replicas=replicas, one_machine=True, compilation=compilation),
    )
    named = share_names(replace(step, holders={}), {variable.name: variable.name for variable in step.variables})
    try:
        return rewrite(named, Context(strategy, 0), "measured_step")
    except AutoDistError as error:
        raise CannotMeasure(f"the step cannot be rewritten for one replica: {error}") from error


def _config_for(step: Step, replica: OneReplica) -> tf.compat.v1.ConfigProto:
    """Returns the config of the session for a step.

    TensorFlow's optimization of a graph of 10 000 nodes takes 10 s. On CPUs it makes little difference to steps without
    loops, so that a large one is measured without it.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(replica.config)
    has_loops = any(node.op in LOOPS for nodes in bodies_of(step.graph_def) for node in nodes)
    if replica.device.startswith("cpu:") and len(step.graph_def.node) > _MOST_OPTIMIZED and not has_loops:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


@dataclass(frozen=True)
class _Copy:
    """A copy of a variable: the placeholder of its value, the node that assigns it, and the function that reads it."""

    placeholder: str
    write: str
    byte_size: int
    read: Callable[[], Any]


def _copies(step: Step, variables: Mapping[str, Callable[[], Any]]) -> tuple[tf.compat.v1.GraphDef, list[_Copy]]:
    """Returns nodes that set a step's variables, with the copies; thousands of nodes are made faster without a graph.

    Args:
        step: the rewritten step.
        variables: functions that return the values of its variables, by name.
    """
    made, copies = tf.compat.v1.GraphDef(), []
    for k, variable in enumerate(step.variables):
        handle = made.node.add()
        handle.CopyFrom(step.graph_index.nodes[variable.handle])
        dtype = tf.compat.v1.AttrValue(type=variable.dtype.as_datatype_enum)
        shape = tf.compat.v1.AttrValue(shape=tf.TensorShape(variable.shape).as_proto())
        value, copied, write = f"value_{k}", f"copied_{k}", f"write_{k}"
        made.node.add(name=value, op="Placeholder", device=handle.device, attr={"dtype": dtype, "shape": shape})
        # The fed array is the memory of the script's variable, which updates in place would change.
        made.node.add(name=copied, op="DeepCopy", input=[value], device=handle.device, attr={"T": dtype})
        inputs = [handle.name, copied]
        made.node.add(name=write, op="AssignVariableOp", input=inputs, device=handle.device, attr={"dtype": dtype})
        copies.append(_Copy(f"{value}:0", write, variable.byte_size, variables[variable.name]))
    return made, copies


class CopiedStep:
    """Runs a step on copies of its variables.

    Args:
        step: the rewritten step.
        also: tensors that a run returns besides the step's outputs.
        replica: the replica that runs it.
        limit: seconds after which a run is cancelled.
    """

    def __init__(self, step: Step, also: Sequence[str], replica: OneReplica, limit: float) -> None:
        self._step, self._also, self._limit = step, also, limit
        self._graph_runner = GraphRunner("", _config_for(step, replica))

    @contextmanager
    def on_copies(self, variables: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
        """Context in which the step can run; its copies of the variables are freed afterwards.

        Args:
            variables: functions that return the values of its variables, by name.

        Raises:
            CannotMeasure: a run fails or takes too long.
        """
        try:
            self._begin(variables)
            yield
        except tf.errors.DeadlineExceededError:
            limit = readable_seconds(self._limit)
            raise CannotMeasure(f"a step takes longer than {limit} on one replica") from None
        except (tf.errors.OpError, ValueError) as error:
            raise CannotMeasure(f"the step fails on one replica: {words_of(error)}") from error
        finally:
            self._close()

    def _begin(self, variables: Mapping[str, Callable[[], Any]]) -> None:
        # In this order, since TensorFlow prepares each transfer from the complete graph of its session.
        self._set(*_copies(self._step, variables))
        self._import(PREFIX)

    def in_another_form(self, step: Step, name: str) -> CopiedStep:
        """Returns the same step, rewritten otherwise, on the same copies.

        Args:
            step: the other rewritten step.
            name: a name for it.
        """
        other = copy.copy(self)
        other._step = step
        other._import(name)
        return other

    def _import(self, name: str) -> None:
        graph = self._graph_runner.graph
        graph.import_nodes(self._step.graph_def, name)
        prefix = name + "/"
        self._feeds = {name: graph.get_tensor_by_name(prefix + name).ref() for name in self._step.inputs}
        self._fetches = [graph.get_tensor_by_name(prefix + name) for name in (*self._step.outputs, *self._also)]
        self._targets = [graph.get_operation_by_name(prefix + name) for name in self._step.targets]
        first = [graph.get_operation_by_name(prefix + name) for name in self._step.initializers.values()]
        if first:
            self._graph_runner.session.run(first)

    def _set(self, nodes: tf.compat.v1.GraphDef, copies: Sequence[_Copy]) -> None:
        graph, session = self._graph_runner.graph, self._graph_runner.session
        graph.import_nodes(nodes, "copies")
        for some in in_groups(copies):
            fed = {graph.get_tensor_by_name(f"copies/{one.placeholder}"): np.asarray(one.read()) for one in some}
            session.run([graph.get_operation_by_name(f"copies/{one.write}") for one in some], fed)
            del fed  # before the next values are read

    def __call__(self, batch: Batch, is_traced: bool = False) -> _Ran:
        """Runs one step.

        `Session.run` takes as much time as a small step. `_do_run`, which it calls, takes little, and all runs with it
        share one optimized graph, traced or not.

        Raises:
            tf.errors.DeadlineExceededError: the step takes longer than the limit.
        """
        level = tf.compat.v1.RunOptions.FULL_TRACE if is_traced else tf.compat.v1.RunOptions.NO_TRACE
        options = tf.compat.v1.RunOptions(timeout_in_ms=max(1, int(1000 * self._limit)), trace_level=level)
        feeds = {self._feeds[name]: value for name, value in batch.items()}
        given, filled = c_api.TF_NewBufferFromString(options.SerializeToString()), c_api.TF_NewBuffer()
        metadata = tf.compat.v1.RunMetadata()
        try:
            start = time.perf_counter()
            values = self._graph_runner.session._do_run(None, self._targets, self._fetches, feeds, given, filled)
            seconds = time.perf_counter() - start
            if is_traced:
                metadata.ParseFromString(c_api.TF_GetBuffer(filled))
        finally:
            c_api.TF_DeleteBuffer(given)
            c_api.TF_DeleteBuffer(filled)
        return _Ran(seconds, values[len(self._step.outputs) :], metadata.step_stats)

    def _close(self) -> None:
        self._graph_runner.close()
        del self._graph_runner
        trim_heaps()


@dataclass(frozen=True)
class _Ran:
    """One step.

    Attributes:
        seconds: its duration.
        values: of the tensors that it returns besides the step's outputs.
        stats: TensorFlow's statistics, if it was traced.
    """

    seconds: float
    values: Sequence[np.ndarray]
    stats: Any


@dataclass(frozen=True)
class StepTimes:
    """Durations of steps.

    Attributes:
        whole: seconds of a step with the batch.
        half: seconds of a step with half of the batch; None if it could not run in time.
        traced: the traced steps, of the batch.
    """

    whole: float
    half: float | None
    traced: Sequence[_Ran]

    @classmethod
    def of(cls, runs: CopiedStep, whole: Batch, half: Batch | None, seconds: float) -> StepTimes:
        """Runs steps for some seconds after the first one: at least one that is timed, and one that is traced."""
        runs(whole)  # TensorFlow prepares the graph, and its kernels allocate memory
        start = time.monotonic()
        durations = _in_turns(runs, whole, half, _TIMED_PART * seconds)
        traced = [runs(whole, is_traced=True)]
        while len(traced) < _MOST_TRACES and time.monotonic() < start + seconds:
            traced.append(runs(whole, is_traced=True))
        return cls(*durations, traced)

    def fixed(self, examples: int, half: int, updates: float) -> float:
        """Returns the part of a step that does not depend on the number of examples.

        Args:
            examples: number of examples of the batch.
            half: number of examples of half of the batch.
            updates: seconds of the updates: the result if half of the batch was not timed.
        """
        if self.half is None:
            return min(updates, self.whole)
        each = (self.whole - self.half) / (examples - half)
        return min(max(0.0, self.whole - examples * each), self.whole)


def _in_turns(runs: CopiedStep, whole: Batch, half: Batch | None, limit: float) -> tuple[float, float | None]:
    """Returns the median durations of steps with two batches; the second is None if there is no time for it.

    The batches take turns, so that a change in the load of the machine concerns both.
    """
    start = time.monotonic()
    durations: tuple[list[float], list[float]] = [], []
    while not durations[0] or (passed := time.monotonic() - start) < limit:
        if len(durations[0]) > _MOST_STEPS and passed > 2 * _ENOUGH:
            break
        durations[0].append(runs(whole).seconds)
        if half is not None and time.monotonic() - start < limit:
            try:
                durations[1].append(runs(half).seconds)
            except tf.errors.InvalidArgumentError as error:  # the model may have the number of examples in a constant
                log.debug("the step was not measured with half of its batch: %s", words_of(error))
                half = None
    # Kernels may prepare for new shapes in the first step of each.
    first, second = (statistics.median(some[1:] or some) if some else None for some in durations)
    assert first is not None, "a step has run"
    return first, second
