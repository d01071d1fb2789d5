"""Makes the runs of a session, each on this worker's part of the feeds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist.batch.examples import require_examples, with_a_row
from autodist.errors import CaptureError, ReductionError
from autodist.kernels import Fetching
from autodist.runs.run import Run
from autodist.runtime.input_consistency import digest_of
from autodist.runtime.program import Program
from autodist.runtime.runnable import RunMetadata, RunOptions
from autodist.sessions.feeds import SessionFeeds, examples_of
from autodist.sessions.programs import Fetches, Prepared
from autodist.sessions.requests import Request
from autodist.sessions.sparse_placeholders import name_in_batch_axis

log = logging.getLogger("autodist")

_NOT_ALIKE = (
    "in this run not all workers fetch the same. Fetch it on every worker to get the value of the whole batch, and "
    "print it if ad.is_chief is true"
)
_NO_LOCKSTEP = (
    "no variable's update waits for all workers (sync: false, or a staleness), so there is no common batch. ad.reduce "
    "combines values of all workers on request"
)


class SessionRuns:
    """Makes the runs of one session."""

    def __init__(self, run: Run, feeds: SessionFeeds) -> None:
        self._run, self._feeds = run, feeds
        self._has_reported = False
        self._compared: set[str] = set()
        self._logged: set[str] = set()

    def make(
        self,
        prepared: Prepared,
        request: Request,
        arrays: Mapping[tf.Tensor, np.ndarray],
        options: RunOptions | None,
        metadata: RunMetadata | None,
    ) -> tuple[list[np.ndarray | None], int]:
        """Makes a run; returns a value for each element of the request, and the number of this worker's examples.

        Args:
            prepared: the run.
            request: fetches and feeds of the run.
            arrays: the complete feeds.
            options: TensorFlow's options for this worker's run.
            metadata: filled as the options request.

        Raises:
            UnevenBatchError: inputs have different numbers of examples, or there are none and the run needs one.
            FetchedElsewhereError: others fetch other outputs, and owners would have to send these.
            ReductionError: workers feed different gradients.
            CaptureError: workers feed different values for tensors that must be equal on all.
        """
        if prepared.trains:
            self._report_first_batch(arrays, prepared.axes)
            self._require_whole_alike(arrays, prepared.axes)
        is_together = self._is_together(prepared, request)
        program = self._program_of(prepared, is_together)
        if self._run.recorder is not None and prepared.trains:
            permuted = self._run.recorder.in_order(list(arrays.values()), prepared.axes)
            arrays = dict(zip(arrays, permuted, strict=True))
        batch, fed = arrays, None
        if prepared.is_gathered and (is_together or not prepared.is_local):
            batch, fed = self._feeds.gathered(arrays, prepared.axes, self._run.coordination.gather_feeds)
        own = self._feeds.own_part(batch, prepared.axes, prepared.is_local)
        whole = examples_of(batch, prepared.axes) if prepared.is_global else 0
        all_examples = whole if fed is None else fed.all_examples
        outputs = self._values_of(prepared, program, own, all_examples, options, metadata)
        examples = examples_of(own, prepared.axes)
        if fed is None:
            return _in_place(request, own, outputs), examples
        return _in_place(request, arrays, fed.own_rows(outputs, prepared.row_axes())), examples

    def _report_first_batch(self, arrays: Mapping[tf.Tensor, np.ndarray], axes: Sequence[int | None]) -> None:
        """Before the first training run, sends this worker's feeds to the input consistency check."""
        only_chief_counts = self._run.spec.gathers_batches and not self._feeds.are_gathered(arrays, axes)
        if not self._has_reported and not only_chief_counts:
            self._has_reported = True
            roles = self._feeds.roles(arrays, axes)
            fed = [(t.name, a, role) for (t, a), role in zip(arrays.items(), roles, strict=True)]
            self._run.input_consistency.record("session", sorted(fed, key=lambda one: one[0]))
            self._run.input_consistency.send()

    def _is_together(self, prepared: Prepared, request: Request) -> bool:
        """Returns True if all workers make this run; they agree on it only if that makes a difference."""
        coordination = self._run.coordination
        return bool(prepared.fetches.shared) and coordination.is_made_by_all(lambda: ("session", request.digest), True)

    def _program_of(self, prepared: Prepared, is_together: bool) -> Program | None:
        """Returns the program of a run; None if there is nothing to run.

        Raises:
            FetchedElsewhereError: others fetch other outputs, and owners would have to send these.
        """
        if prepared.program is None:
            return None
        if not is_together:
            self._log_own(prepared.fetches)
        return prepared.program(Fetching.BY_ALL if is_together else Fetching.BY_EACH)

    def _log_own(self, fetches: Fetches) -> None:
        """Logs fetches that are computed from this worker's examples only, once each."""
        new = [name for name in fetches.own if name not in self._logged]
        self._logged.update(new)
        if new:
            reason = _NOT_ALIKE if fetches.shared else _NO_LOCKSTEP
            log.warning(
                "the session's fetch of %s is computed from this worker's own examples: %s.", ", ".join(new), reason
            )

    def _values_of(
        self,
        prepared: Prepared,
        program: Program | None,
        own: Mapping[tf.Tensor, np.ndarray],
        all_examples: int,
        options: RunOptions | None,
        metadata: RunMetadata | None,
    ) -> list[np.ndarray]:
        if program is None:
            return []
        examples = examples_of(own, prepared.axes)
        is_one_workers = (prepared.is_local and not prepared.is_gathered) or self._run.workers == 1
        if is_one_workers and any(axis is not None for axis in prepared.axes):
            require_examples(examples > 0 or (prepared.is_local and prepared.has_rows()))
        values = [
            a if axis is None else with_a_row(a, axis) for a, axis in zip(own.values(), prepared.axes, strict=True)
        ]
        program.require_fits(examples, all_examples)
        call = (program.run, values, examples, options, metadata, all_examples)
        if prepared.is_read_only:
            self._run.flush()
        elif not prepared.is_local:
            self._run.coordination.reach_collective()
        if not prepared.sets or self._run.workers == 1:
            return self._run.guard(*call)
        self._require_fed_alike(prepared, own)
        self._run.coordination.flush_for_chief()
        if self._run.index == 0:
            results = self._run.guard(*call)
            self._run.coordination.wait_for_chief()
            return results
        self._run.coordination.wait_for_chief()
        return self._run.guard(*call)

    def _require_fed_alike(self, prepared: Prepared, arrays: Mapping[tf.Tensor, np.ndarray]) -> None:
        """Checks that all workers feed the same values in place of gradients.

        Raises:
            ReductionError: two workers feed different values; raised on all workers.
        """
        if not prepared.updates:
            return
        for tensor in self._differing({t: arrays[t] for t in prepared.updates}):
            raise ReductionError(
                f"each worker feeds another {tensor.name}, which updates {prepared.updates[tensor]}: AutoDist cannot "
                "know how to reduce gradients of each worker's own examples that are fed. Feed the same value on all: "
                'ad.reduce(gradient, "mean") if each is the gradient of a mean over the same number of examples, or '
                '"sum" for sums.'
            )

    def _require_whole_alike(self, arrays: Mapping[tf.Tensor, np.ndarray], axes: Sequence[int | None]) -> None:
        """Checks that all workers feed the same values for tensors of a fixed shape, when they are first fed.

        Raises:
            CaptureError: two workers feed different values; raised on all workers.
        """
        if self._run.workers == 1:
            return
        whole_by_shape = [t for t in self._feeds.whole_by_shape(arrays, axes) if t.name not in self._compared]
        counts = self._run.index in self._run.spec.feeding_workers
        differing = self._differing({t: arrays[t] for t in whole_by_shape}, counts)
        if differing:
            names, key = ", ".join(f"{t.name} {t.shape}" for t in differing), name_in_batch_axis(differing[0])
            raise CaptureError(
                f"the workers feed different values for tensors of a fixed shape: {names}. Are they one row per "
                "example, or the same for all? Leave the first axis open (None) for the one, or set the batch axis, "
                f"create_distributed_session(batch_axis={{{key!r}: 0}}); for the other feed the same on every worker, "
                f"or set batch_axis={{{key!r}: None}}, and each computes with its own value."
            )
        self._compared |= {t.name for t in whole_by_shape}

    def _differing(self, arrays: Mapping[tf.Tensor, np.ndarray], counts: bool = True) -> list[tf.Tensor]:
        """Returns the tensors that workers feed with different values; a collective call, also if `counts` is False."""
        if not arrays:
            return []
        digests = np.array([int(digest_of(a)[:12] or "0", 16) for a in arrays.values()])
        digest_pairs = np.concatenate([digests, -digests])
        if not counts:
            digest_pairs = np.full_like(digest_pairs, np.iinfo(digest_pairs.dtype).min)
        largest, smallest = np.split(self._run.coordination.reduce(digest_pairs, "max"), 2)
        return list(itertools.compress(arrays, largest != -smallest))


def _in_place(
    request: Request, feeds: Mapping[tf.Tensor, np.ndarray], outputs: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    """Returns the value of each element of a request: its feed, or the next output of the run."""
    values = iter(outputs)
    return [_value_of(e, feeds, values) for e in request.elements]


def _value_of(
    element: tf.Tensor | tf.Operation, feeds: Mapping[tf.Tensor, np.ndarray], values: Iterator[np.ndarray]
) -> np.ndarray | None:
    """Returns the value of one fetch: its feed, or else the next output of the run; None for an operation."""
    if isinstance(element, tf.Operation):
        return None
    return feeds[element] if element in feeds else next(values)
