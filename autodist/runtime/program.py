"""A rewritten step, imported and ready to run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.batch.examples import require_even, require_examples, uneven
from autodist.errors import UnevenBatchError
from autodist.graph.inboxes import inboxes_of
from autodist.graph.names import node_of
from autodist.graph.parts import EvenSharesRequired
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, UNEVEN, ReplicatedStep, Step
from autodist.logs.quiet import quiet_tensorflow
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.heaps import collect_and_trim, trim_heaps, unmap_freed_blocks
from autodist.runtime.repeated import StepTensors, can_repeat, repeated
from autodist.runtime.runnable import RunMetadata, Runnable, RunOptions
from autodist.runtime.timeline import trace_file
from autodist.runtime.updates import Updates


@dataclass(frozen=True)
class ProgramOuterStep:
    """An outer step of a program.

    Attributes:
        every: the number of training steps from one run to the next.
        run: runs it.
    """

    every: int
    run: Callable[[], object]


class Program:
    """Runs one rewritten step.

    Args:
        graph_runners: graph runners of this worker.
        step: the rewritten step.
        inputs: the captured inputs, in the order in which `run` takes their values.
        updates: runs background updates that a step leaves for later.
        about: metadata for the file of a trace.

    Attributes:
        outer_steps: the outer steps that end local steps, by key.
    """

    def __init__(
        self,
        graph_runners: GraphRunners,
        step: Step,
        inputs: Sequence[str],
        updates: Updates,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(step, ReplicatedStep) and step.gathered_reads:
            unmap_freed_blocks()
        graph_runner, prefix = graph_runners.add(step.graph_def)
        present = {node.name for node in step.graph_def.node}
        graph_runners.initialize(graph_runner, {key: prefix + name for key, name in step.initializers.items()})
        # After the messages that initializers put into inboxes.
        graph_runners.inbox_loops.start(inboxes_of(step.graph_def).values())
        self._used = [node_of(name) in present for name in inputs]
        feeds = [prefix + name for name, used in zip(inputs, self._used, strict=True) if used]
        batch = len(feeds)
        self._counts_examples = node_of(EXAMPLES) in present
        if self._counts_examples:
            feeds.append(prefix + EXAMPLES)
        self._counts_all_examples = node_of(ALL_EXAMPLES) in present
        if self._counts_all_examples:
            feeds.append(prefix + ALL_EXAMPLES)
        op = lambda name: graph_runner.graph.get_operation_by_name(prefix + name)  # noqa: E731
        operations = [op(name) for name in step.targets]
        outputs = [graph_runner.graph.get_tensor_by_name(prefix + name) for name in step.outputs]
        collective = any(node.op.startswith("Collective") for node in step.graph_def.node)
        worker = _worker_of(step, feeds[0].removeprefix(prefix)) if feeds else 0
        trace = trace_file(prefix.rstrip("/"), worker, about or {}) if feeds else None
        self._once = Runnable(graph_runner, outputs, operations, feeds, collective, trace)
        self._updates, self._buffers = updates, graph_runners.persistent_buffers
        self._graph_runner, self._trace = graph_runner, trace
        fed = [graph_runner.graph.get_tensor_by_name(name) for name in feeds]
        self._returns_examples = step.counts_examples
        self._parts = StepTensors(outputs, operations, fed[:batch], fed[batch:], self._returns_examples)
        self._repeated: dict[int, Runnable] = {}
        self._frees_memory = bool(step.gradients)
        self._even = step.even_parts
        splits_batch = self._counts_examples or self._counts_all_examples
        self._is_divided = splits_batch and isinstance(step, ReplicatedStep) and bool(step.copies)
        self._is_global = step.is_global
        background = [op(name) for name in step.background_nodes]
        self._update = graph_runner.callable([], background, []) if background else None
        standing = [op(name) for name in step.standing_nodes]
        if standing:
            updates.repeat(graph_runner.callable([], standing, []))
        self.outer_steps = {
            key: ProgramOuterStep(one.every, graph_runner.callable([], [op(name) for name in one.nodes], []))
            for key, one in step.outer_steps.items()
        }
        if self._frees_memory:
            collect_and_trim()  # before the variables get their values

    def run(
        self,
        values: Sequence[Any],
        examples: int,
        options: RunOptions | None = None,
        metadata: RunMetadata | None = None,
        all_examples: int = 0,
    ) -> list[np.ndarray]:
        """Runs one step.

        Args:
            values: values of the inputs.
            examples: number of examples on this worker; 0 if `values` hold a padding row that does not count.
            options: TensorFlow's options for this run.
            metadata: filled with TensorFlow's metadata of this run.
            all_examples: number of examples on all workers, if the step was captured with global batches.

        Returns:
            The values of the step's outputs.

        Raises:
            EmptyBatchError: no worker has examples; raised on all workers.
            UnevenBatchError: the step needs the same number of examples on every replica, and the run found others.
        """
        self._buffers.begin_step()
        if self._update is not None:
            self._updates.release(self._update)
        return self._call(self._once.with_options(options, metadata), [values], examples, all_examples)

    @functools.cached_property
    def can_repeat(self) -> bool:
        """True if `repeat` may be called: several steps in one call have the same result as separate calls."""
        runs_alone = self._update is None and self._trace is None and bool(self._parts.batch)
        return runs_alone and can_repeat(self._graph_runner.graph.as_graph_def())

    def repeat(
        self,
        batches: Sequence[Sequence[Any]],
        examples: int,
        options: RunOptions | None = None,
        metadata: RunMetadata | None = None,
        all_examples: int = 0,
    ) -> list[np.ndarray]:
        """Runs one step on each of several batches, in one call; see `run`.

        Args:
            batches: values of the inputs of each step, with equal shapes.
            examples: number of examples on this worker in each batch.
            options: TensorFlow's options for the call.
            metadata: filled with TensorFlow's metadata of the call.
            all_examples: number of examples on all workers in each batch.

        Returns:
            The values of the last step's outputs.

        Raises:
            EmptyBatchError: no worker has examples.
            UnevenBatchError: the step needs the same number of examples on every replica, and the run found others.
        """
        self._buffers.begin_step()
        count, is_first = len(batches), len(batches) not in self._repeated
        with quiet_tensorflow(is_first):
            if is_first:
                self._repeated[count] = repeated(self._graph_runner, self._parts, count)
            run = self._repeated[count].with_options(options, metadata)
            return self._call(run, batches, examples, all_examples)

    def _call(
        self, run: Callable[..., Any], batches: Sequence[Sequence[Any]], examples: int, all_examples: int
    ) -> list[np.ndarray]:
        feeds = [value for values in batches for value, used in zip(values, self._used, strict=True) if used]
        if self._counts_examples:
            feeds.append(np.int64(examples))
        if self._counts_all_examples:
            feeds.append(np.int64(all_examples))
        try:
            outputs = self._first_run(run, feeds) if self._frees_memory else run(*feeds)
        except tf.errors.InvalidArgumentError as error:
            refusal = None if self._even is None else _uneven_parts(error, self._even)
            if refusal is not None:
                raise refusal from None
            if self._is_divided and _PART_OF_A_GROUP in str(error):
                error.add_note(_GROUPS_NOTE)
            raise
        if self._returns_examples:
            *outputs, some_examples = outputs
            require_examples(bool(some_examples > 0))
        return outputs

    def require_fits(self, examples: int, all_examples: int) -> None:
        """Checks a batch before a run, as far as this worker can.

        Raises:
            UnevenBatchError: the step needs the same number of examples on every replica, and the batch is uneven.
        """
        self.require_even(examples, all_examples if self._is_global else None)

    def require_even(self, examples: int | None, all_examples: int | None) -> None:
        """Checks the number of examples before a run, as far as it is known.

        Raises:
            UnevenBatchError: the step needs the same number of examples on every replica, and they would differ.
        """
        require_even(self._even, examples, all_examples)

    def _first_run(self, run: Callable[..., Any], feeds: Sequence[Any]) -> list[np.ndarray]:
        """Makes the first run of a step, and frees the memory that its preparation leaves."""
        self._frees_memory = False
        outputs = run(*feeds)
        trim_heaps()
        return outputs


_PART_OF_A_GROUP = "requested shape requires a multiple of"
"""Part of TensorFlow's message about a reshape with -1 whose other lengths do not fit the number of values."""

_GROUPS_NOTE = (
    "Each replica reshapes its part of the batch. If the step joins examples in groups of equal size, as "
    "tf.reshape(x, [-1, 4, n]) does, each replica needs whole groups: train on batches of a multiple of the group's "
    "size times the number of replicas, including the last one. Or gather the rows before with "
    "tf.distribute.get_replica_context().all_gather(rows, axis=0), or pass every replica the whole batch "
    '(batch_axis={"x": None}), or train with one replica.'
)
"""Note at the error of such a reshape in a step with several replicas."""


def _uneven_parts(error: tf.errors.InvalidArgumentError, even: EvenSharesRequired) -> UnevenBatchError | None:
    """Returns the error for a run that stopped because workers fed different numbers of examples; None for others."""
    match = re.search(rf"\[{re.escape(UNEVEN)}\] \[(\d+)\]", str(error))
    if match is None:
        return None
    among = even.here if even.is_own else even.replicas
    fault = f"the batch has {match[1]} examples for {among} replicas, and not equally many for each"
    refusal = uneven(even, fault, among)
    refusal.has_run = True
    return refusal


def _worker_of(step: Step, fed: str) -> int:
    """Returns the worker that runs the step: the one that feeds one of its inputs."""
    device = next(node.device for node in step.graph_def.node if node.name == node_of(fed))
    return int(tf.DeviceSpec.from_string(device).task or 0)
