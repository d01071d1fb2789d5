"""Times of transfers between some workers, measured from one session on the chief."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.cluster.timeouts import processor_share
from autodist.graph.devices import cpu_of, task_of
from autodist.resources.measurements import MeasuredPair
from autodist.runtime.graph_runner import GraphRunner

SIZES = tuple(1 << power for power in (16, 19, 22, 24))
"""Bytes that a worker sends or receives; a larger size is measured only if the smaller one took little time."""

_ENOUGH = 0.02
"""Seconds of a transfer that suffice to measure the bandwidth."""

_TIMES_LEAST = 2
"""A transfer has to take this many times as long as that of one byte: TCP and HTTP/2 open their windows meanwhile."""

_RUNS_OF_NEXT_SIZE = 40
"""All runs of the next size take about as long as this many runs of a size, which is an eighth of it."""

_FEW_TURNS, _MANY_TURNS = 3, 21
"""Numbers of round trips in a run; the difference from a run with one round trip cancels the fixed cost of a run."""

_MESSAGES = 64
"""Number of small tensors in a run, in addition to one."""

_ROUGHLY, BRIEFLY, _WELL = 0.002, 0.02, 0.04
"""Seconds for which a run is repeated: for the choice of a size, for a pair among many, and for all else. The fastest
run counts, since the others were delayed."""

_LEAST_RUNS = 5
"""Number of repetitions until the deadline, however long they take; one delayed run alone would mislead."""

_SHORTEST = 1e-6
"""Seconds of a transfer; noise must not make it zero or less."""

_SHARED_NAME = "autodist_network_probe"
"""Name of a variable on each worker with the bytes to be sent."""

Link = tuple[int, int]
"""The sending and the receiving worker."""


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of measurements.

    Attributes:
        run: seconds for a run without an answer.
        deadline: value of `time.monotonic` after which nothing is measured that can be left out.
        repeated: seconds for which a run is repeated.
    """

    run: float
    deadline: float
    repeated: float = _WELL

    @classmethod
    def of(cls, seconds: float) -> TimeLimits:
        """Returns the limits of measurements that begin now; processes that share processors take longer to answer."""
        return cls(seconds / processor_share(), time.monotonic() + seconds)

    def earlier(self, seconds: float) -> TimeLimits:
        """Returns limits with a deadline that is some seconds earlier."""
        return replace(self, deadline=self.deadline - seconds)

    def is_over(self, after: float = 0.0) -> bool:
        """Returns True if the deadline will have passed after some seconds."""
        return time.monotonic() + after > self.deadline


@dataclass(frozen=True)
class _Source:
    """The bytes in a worker's memory; a variable provides them without a copy."""

    fill: tf.Operation
    value: tf.Tensor
    remove: tf.Operation


@contextlib.contextmanager
def probing(target: str, workers: int, used: Iterable[int], limits: TimeLimits) -> Iterator[Probe]:
    """Context of a session on the chief that times transfers between workers.

    Args:
        target: target of the chief's server.
        workers: number of workers of the run.
        used: the workers that send and receive.
        limits: limits of time.
    """
    config = tf.compat.v1.ConfigProto(device_filters=[task_of(worker, workers) for worker in {0, *used}])
    # Graph rewrites would remove transfers, or merge those of equal values.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    runner = GraphRunner(target, config)
    try:
        probe = Probe(runner, workers, used, limits)
        yield probe
        probe.remove()
    except BaseException:
        runner.abandon()  # closing may wait for a worker that does not answer
        raise
    runner.close()


class Probe:
    """Times transfers between workers; created by `probing`."""

    def __init__(self, runner: GraphRunner, workers: int, used: Iterable[int], limits: TimeLimits) -> None:
        self._runner, self._workers, self._limits = runner, workers, limits
        self._options = tf.compat.v1.RunOptions(timeout_in_ms=round(1000 * limits.run))
        with self._on(0):
            self._size = tf.compat.v1.placeholder(tf.int32, [])
        self._sources = {worker: self._source(worker) for worker in used}

    def pair(self, one: int, other: int) -> MeasuredPair:
        """Measures the link between two workers in both directions."""
        there, back = self.bandwidth([(one, other)]), self.bandwidth([(other, one)])
        return MeasuredPair(one, other, self.round_trip(one, other), there, back)

    def round_trip(self, one: int, other: int) -> float:
        """Returns the seconds for one byte from one worker to the other and back."""
        self._fill([one], 1)
        least = self._fastest(self._forth_and_back(one, other, 1))
        turns = _FEW_TURNS
        run = self._forth_and_back(one, other, turns)
        if self._fastest(run, _ROUGHLY) < _ENOUGH:
            turns = _MANY_TURNS
            run = self._forth_and_back(one, other, turns)
        return max(self._fastest(run) - least, _SHORTEST) / (turns - 1)

    def bandwidth(self, links: Sequence[Link]) -> float:
        """Returns the bytes per second of the busiest worker in its busier direction, while all links are in use."""
        sources = sorted({source for source, _ in links})
        shares = max(max(Counter(ends).values()) for ends in zip(*links, strict=True))
        self._fill(sources, 1)
        run = self._run([self._copy(self._sources[source].value, target).op for source, target in links])
        least = self._fastest(run)
        enough = max(least + _ENOUGH, _TIMES_LEAST * least)
        size, taken = SIZES[0], 0.0
        for size in SIZES:
            self._fill(sources, size // shares)
            taken = self._fastest(run, _ROUGHLY)
            is_last = size == SIZES[-1] or self._limits.is_over(_RUNS_OF_NEXT_SIZE * taken)
            if is_last or taken > enough:
                taken = min(taken, self._fastest(run))
            if is_last or taken > enough:
                break
        return size // shares * shares / max(taken - least, _SHORTEST)

    def message(self, one: int, other: int) -> float:
        """Returns the seconds by which each further small tensor from one worker to another prolongs a transfer."""
        self._fill([one], 4)
        value = self._sources[one].value
        sent = [self._copy(self._copy(value, one), other).op for _ in range(1 + _MESSAGES)]
        few, many = (self._fastest(self._run(part)) for part in (sent[:1], sent))
        return max(many - few, 0.0) / _MESSAGES

    def call(self) -> float:
        """Returns the seconds by which each further worker prolongs a run."""
        parts = [self._nothing(worker) for worker in self._sources]
        further = len(parts) - 2
        if further < 1:
            return 0.0
        few, many = (self._fastest(self._run(some)) for some in (parts[:2], parts))
        return max(many - few, 0.0) / further

    def reach(self, one: int, other: int) -> None:
        """Sends one byte from one worker to the other and back."""
        self._fill([one], 1)
        self._forth_and_back(one, other, 1)

    def remove(self) -> None:
        """Removes the bytes to be sent from the workers' memory."""
        self._run([source.remove for source in self._sources.values()])

    @contextlib.contextmanager
    def _on(self, worker: int) -> Iterator[None]:
        with self._runner.graph.as_default(), tf.device(cpu_of(worker, self._workers)):
            yield

    def _source(self, worker: int) -> _Source:
        with self._on(worker):
            variable = tf.raw_ops.VarHandleOp(dtype=tf.uint8, shape=tf.TensorShape(None), shared_name=_SHARED_NAME)
            fill = tf.raw_ops.AssignVariableOp(resource=variable, value=tf.zeros([self._size], tf.uint8))
            value = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.uint8)
            return _Source(fill, value, tf.raw_ops.DestroyResourceOp(resource=variable, ignore_lookup_error=True))

    def _fill(self, workers: Iterable[int], size: int) -> None:
        """Sets the number of bytes that each of these workers sends in a transfer."""
        fills = [self._sources[worker].fill for worker in workers]
        self._runner.session.run(fills, {self._size: size}, options=self._options)

    def _copy(self, value: tf.Tensor, worker: int) -> tf.Tensor:
        """Copies a value on a worker, to which it is sent if it is on another one."""
        with self._on(worker):
            return tf.identity(value)

    def _forth_and_back(self, one: int, other: int, turns: int) -> Callable[[], object]:
        value = self._sources[one].value
        for worker in (other, one) * turns:
            value = self._copy(value, worker)
        return self._run([value.op])

    def _nothing(self, worker: int) -> tf.Operation:
        with self._on(worker):
            return tf.no_op()

    def _run(self, operations: Sequence[tf.Operation]) -> Callable[[], object]:
        """Runs operations, which places them and sets up connections, and returns a function that runs them again."""
        call = self._runner.session.make_callable(list(operations), accept_options=True)
        call(options=self._options)
        return lambda: call(options=self._options)

    def _fastest(self, run: Callable[[], object], seconds: float | None = None) -> float:
        """Returns the shortest duration of runs that are repeated for some seconds; None: as the limits say."""
        least, seconds = (_LEAST_RUNS, self._limits.repeated) if seconds is None else (1, seconds)
        durations: list[float] = []
        while sum(durations) < seconds or (len(durations) < least and not self._limits.is_over()):
            began = time.perf_counter()
            run()
            durations.append(time.perf_counter() - began)
        return min(durations)
