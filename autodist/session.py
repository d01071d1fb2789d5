"""DistributedSession: what a TensorFlow 1 script uses in place of `tf.compat.v1.Session`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.client.session import SessionInterface  # by which a Saver knows that it is given a session
from tensorflow.python.framework import stack  # the stack of default sessions, by which Tensor.eval finds its own

from autodist.batch_axis import axis_within, require_axis, require_mapping
from autodist.capture.batch_length import require_any_length
from autodist.capture.gradients import GradientNotes
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.graph_training import require_training, tell_unordered
from autodist.capture.iterators import GETS, concerns_iterators_alone, share_iterators
from autodist.capture.tables import fills_tables_alone, require_unchanged, share_tables
from autodist.errors import CaptureError, CaptureMismatchError, EmptyBatchError, FetchedElsewhereError, ReductionError
from autodist.graph.applied import find_fed_updates
from autodist.graph.find_stages import written_handles
from autodist.graph.flows import flows_of
from autodist.graph.item import GraphItem, place_variables
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.placement import Placement
from autodist.graph.propagation import PerExample, Replicated
from autodist.kernels import KERNELS, LOCAL_KERNELS, SETTING_KERNELS, Kernel, find_placements, only_sets
from autodist.messages import ALIKE_EVERYWHERE
from autodist.plain_shapes import plain_shapes
from autodist.proto import strategy_pb2
from autodist.quiet import quiet_tensorflow
from autodist.run import Run
from autodist.runtime.batches import require_examples, tell_of_empty_micro_batches, with_a_row
from autodist.runtime.program import Program, RunMetadata, RunOptions
from autodist.runtime.variables import Kept
from autodist.session_batches import SessionBatches
from autodist.session_checkpoints import resume
from autodist.session_feeds import SessionFeeds, examples_of
from autodist.session_initial_values import InitialValues
from autodist.session_requests import ABSENT, Request, Requests, check_options, expanded, refuse_partial_runs

log = logging.getLogger("autodist")

_PULLS = having(Trait.ITERATOR_GET | Trait.QUEUE_GET)

_COUNT = itertools.count()
"""Sessions of this process; all workers make theirs in the same order."""


@dataclass(frozen=True)
class _Fetched:
    """What one structure of fetches and feeds runs.

    Attributes:
        program: the run; None where all that is fetched is given.
        axes: for each feed, along which it is split.
        sets: whether it only sets variables.
        trains: whether it applies gradients.
        looks: whether it is run to see, or save, what the training has made: it trains nothing and takes no batch.
        is_global: whether every worker is given the same batch.
        is_alone: whether no other worker has a part in it, since it trains nothing and writes nothing.
        gives_rows: whether all that is fetched has a row for each example, or does not ask for examples.
        updates: what is fed in place of gradients, with the variable that each is for.
        elsewhere: what is wrong with it where not all workers make it; "": nothing.
    """

    program: Program | None
    axes: Sequence[int | None]
    sets: bool
    trains: bool
    looks: bool
    is_global: bool
    is_alone: bool
    gives_rows: Callable[[], bool]
    updates: Mapping[tf.Tensor, str]
    elsewhere: str


class DistributedSession(SessionInterface):
    """Runs a graph on all replicas; made by `AutoDist.create_distributed_session`.

    What is fed is this worker's own data, split over its replicas along the batch axis: the first axis of a placeholder
    that leaves it open. What is fetched is joined over this worker's replicas; where it has none, what is fed is not
    used, and what its replicas would give is nothing: no rows, 0.

    Args:
        run: in which it runs.
        captured: the graph.
        notes: the calls of `gradient` in the scope; more may come, and are refused. None: they are for later sessions.
        batch_axis: by placeholder (or its name), another axis to split along, negative ones counted from the last;
            None: every replica gets the whole.
        shared: names of tensors for which every worker feeds the same, of which each keeps its share.
        earlier: a session of the same graph, as it was before, that has the same values; by default it has its own.
    """

    def __init__(
        self,
        run: Run,
        captured: CapturedGraph,
        notes: GradientNotes | None,
        batch_axis: Mapping[Any, int | None] | None = None,
        shared: frozenset[str] = frozenset(),
        earlier: DistributedSession | None = None,
    ) -> None:
        self._run, self._captured, self._notes = run, captured, notes
        self._version = captured.graph.version
        self._requests = Requests(captured.graph)
        named = dict(itertools.starmap(self._named_axis, require_mapping(batch_axis, "placeholders").items()))
        self._feeds = SessionFeeds(run.spec, run.index, named, frozenset(v.shape for v in captured.variables), shared)
        # Each session has values of its own, as TensorFlow's have.
        self._prefix: str = f"session_{next(_COUNT)}" if earlier is None else earlier._prefix
        self._names = {v.name: f"{self._prefix}/{v.handle}" for v in captured.variables}
        whole = captured.whole()
        require_training(captured, whole)
        tell_unordered(whole)
        self._batches = SessionBatches(run.spec, captured, lambda item: self._program(item, LOCAL_KERNELS))
        self._batches.require_divisible(whole)
        self._feeds.require_open_axes(whole, captured)
        self._strategy: strategy_pb2.Strategy = self._plan(whole)
        self._placements: Mapping[str, Placement] = self._placed(whole, {} if earlier is None else earlier._placements)
        self._initial_values: InitialValues = InitialValues(
            run,
            captured,
            lambda item, kernels: self._program(place_variables(item, self._placements), kernels),
            set() if earlier is None else earlier._initial_values.settled,
        )
        self._fetched: dict[Any, _Fetched] = {}
        self._has_told = self._is_resumed = False
        self._default: AbstractContextManager[Any] | None = None

    def _plan(self, whole: GraphItem) -> strategy_pb2.Strategy:
        strategy, renaming = self._run.plan(whole, self._names, rehearses=False)
        for mine, theirs in [*renaming.variables.items(), *renaming.nodes.items()][:1]:
            raise CaptureMismatchError(
                f"worker {self._run.index} has {mine} in its session's graph where the chief has {theirs}: a graph "
                "counts names up by itself, so something is built in one of the two that the other has not. Build the "
                "same graph on every worker."
            )
        return strategy

    def _placed(self, whole: GraphItem, earlier: Mapping[str, Placement]) -> dict[str, Placement]:
        """Where each variable lies; what an earlier session has placed stays there.

        Raises:
            CaptureError: the strategy wants one elsewhere, which no step trained before.
        """
        if self._run.workers == 1:
            return {}
        placements = find_placements(place_variables(whole, earlier), self._strategy)
        wanted = find_placements(whole, self._strategy) if earlier else placements
        for node in self._strategy.nodes:
            if wanted[node.variable] != placements[node.variable]:
                raise CaptureError(
                    f"{node.variable} is trained by a step that was called after one which only reads it, when every "
                    "worker had it already, and the strategy gives it an owner. Call the step that trains it first, or "
                    "use AllReduce, or build the graph of all steps and run it by create_distributed_session()."
                )
        return placements

    @property
    def graph(self) -> tf.Graph:
        """The graph that it runs."""
        return self._captured.graph

    @property
    def graph_def(self) -> tf.compat.v1.GraphDef:
        """That graph as a protocol buffer, as the script has built it."""
        return self.graph.as_graph_def()

    @property
    def sess_str(self) -> str:
        """The server that it runs on; empty where this worker is alone."""
        return str(self._run.hosts.beside.session.sess_str)

    @plain_shapes()
    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: RunOptions | None = None,
        run_metadata: RunMetadata | None = None,
    ) -> Any:
        """Runs what `fetches` names, as `tf.compat.v1.Session.run` does.

        Args:
            fetches: a tensor, an operation, a variable, a name, or any nest of these.
            feed_dict: values of placeholders or other tensors.
            options: of TensorFlow for this worker's run: a time limit, whether to trace. A run that a time limit ends
                is a step that this worker has missed.
            run_metadata: a `tf.compat.v1.RunMetadata`, filled with what `options` ask for: what this worker's run did,
                by the names of the rewritten step's nodes. What the other workers' own runs did is not in it; the
                environment variable AUTODIST_TRACE traces each worker.

        Returns:
            The values in the structure of `fetches`; None for operations.

        Raises:
            CaptureError: variables or gradients were added after the session was made, or an input cannot be split, or
                `options` name nodes of the script's graph.
            UnevenBatchError: inputs disagree in their number of examples, or there are none where one is needed.
            WorkerFailedError: another worker ended badly.
            ClusterError: this worker failed in an earlier run.
        """
        self._require_same_training()
        check_options(options, run_metadata)
        feeds = {} if feed_dict is None else feed_dict
        request = self._requests.of(fetches, feeds)
        arrays = request.arrays(feeds.values())
        known = self._fetched.get(request.key(arrays))
        if known is not None and known.trains:
            self._run.before_step(known)
        with self._run.missed_step.noted(but=tf.errors.OutOfRangeError):
            arrays |= self._batches.next_for(request.elements, arrays)
        try:
            with self._run.missed_step.noted(but=EmptyBatchError), quiet_tensorflow(when=known is None):
                fetched = self._first_of(request, arrays) if known is None else known
                self._run.is_in_step = fetched.trains
                found = self._make_step(fetched, request, arrays, options, run_metadata)
            self._run.first_batches.look()
            if known is None and not (fetched.sets or fetched.looks):
                self._run.start_up.ends()
            if fetched.trains:
                self._run.have_made(1)
        finally:
            self._run.is_in_step = False
        if fetched.trains and self._run.recorder is not None:
            self._run.recorder.after_step(self._captured.whole(), self._run.index, self._values, dict)
        return request.filled(fetches, found)

    def _require_same_training(self) -> None:
        """Passes if no variables or gradients were added after the session was made.

        Raises:
            CaptureError: some were.
        """
        if self.graph.version != self._version:
            if self._notes is not None:
                self._captured.require_same_training(self._notes.calls)
            self._version = self.graph.version

    def _first_of(self, request: Request, arrays: Mapping[tf.Tensor, np.ndarray]) -> _Fetched:
        """What a request runs that has not been made before."""
        fetched = self._fetched[request.key(arrays)] = self._prepare(request.elements, arrays)
        self._resume(fetched)
        return fetched

    def _make_step(
        self,
        fetched: _Fetched,
        request: Request,
        arrays: dict[tf.Tensor, np.ndarray],
        options: RunOptions | None,
        metadata: RunMetadata | None,
    ) -> list[np.ndarray | None]:
        """Runs what is fetched on this worker's part of what is fed; its value for each element of the request."""
        if fetched.trains:
            self._tell_first_batch(arrays, fetched.axes)
        self._require_common(fetched, request)
        if self._run.recorder is not None and fetched.trains:
            given = self._run.recorder.in_order(list(arrays.values()), fetched.axes)
            arrays = dict(zip(arrays, given, strict=True))
        own = dict(zip(arrays, self._feeds.own_part(arrays, fetched.axes, fetched.is_alone), strict=True))
        whole = examples_of(arrays, fetched.axes) if fetched.is_global else 0
        values = iter(self._run_fetched(fetched, own, whole, options, metadata))
        return [_value_of(e, own, values) for e in request.elements]

    @plain_shapes()
    def saved_variables(self) -> dict[str, Kept]:
        """How the session has each variable that a Saver of the graph would save, by its name."""
        saved = {
            v.handle.op.name: v.op.name for v in self.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        }
        return {
            saved[v.handle]: Kept(
                self._names[v.name], v.dtype, tuple(v.shape), self._placements.get(v.name, Placement())
            )
            for v in self._captured.variables
            if v.handle in saved
        }

    @plain_shapes()
    def give_initial_values(self) -> None:
        """Gives variables that no run has set their initial values; all workers call it."""
        self._initial_values.give()

    def note_given(self) -> None:
        """Notes that all variables were given values beside any run."""
        self._initial_values.settled |= {v.handle for v in self._captured.variables}

    def _values(self) -> dict[str, np.ndarray]:
        """What the graph's variables hold, by name."""
        listed = {v.handle.op.name: v for v in self.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)}
        values: dict[str, np.ndarray] = self.run(
            {v.name: listed[v.handle] for v in self._captured.variables if v.handle in listed}
        )
        return values

    def make_callable(
        self, fetches: Any, feed_list: Sequence[Any] | None = None, accept_options: bool = False
    ) -> Callable[..., Any]:
        """What runs `fetches`, given a value for each of `feed_list`, as `tf.compat.v1.Session.make_callable` does.

        Args:
            fetches: as for `run`.
            feed_list: what is fed, in the order of the values.
            accept_options: whether it takes `options` and `run_metadata` too.

        Raises:
            TypeError, CaptureError: `fetches` or `feed_list` cannot be run or fed.
        """
        if not isinstance(feed_list, list | tuple | None):
            raise TypeError(f"feed_list is {feed_list!r}; it must be a list or a tuple.")
        for fetch in tf.nest.flatten(expanded(fetches)):
            if fetch is not ABSENT:
                self._requests.element(fetch)
        keys = [self._requests.tensor(key) for key in feed_list or ()]

        def call(*values: Any, **told: Any) -> Any:
            if len(values) != len(keys):
                raise TypeError(f"{len(keys)} values are fed in each run, and {len(values)} were given.")
            if told and not accept_options:
                raise TypeError(f"{', '.join(told)}: make_callable(accept_options=True) makes what takes it.")
            return self.run(fetches, dict(zip(keys, values, strict=True)), **told)

        return call

    def _resume(self, fetched: _Fetched) -> None:
        """Before the first run that trains, which comes after those that initialise."""
        if not fetched.trains:
            return
        if not self._is_resumed:
            self._is_resumed = True
            resume(self._run, {v.name: self._kept(v) for v in self._captured.variables})
            if self._run.resumed:
                self._batches.tell_begun_anew(self._captured.whole(), self._run.step)
        self._run.before_step(fetched)

    def _kept(self, variable: Variable) -> Kept:
        placement = self._placements.get(variable.name, Placement())
        return Kept(self._names[variable.name], variable.dtype, tuple(variable.shape), placement)

    partial_run_setup = partial_run = refuse_partial_runs

    def _tell_first_batch(self, arrays: Mapping[tf.Tensor, np.ndarray], axes: Sequence[int | None]) -> None:
        """Lets the chief see, with the first run that trains, whether the workers feed what is meant."""
        if not self._has_told:
            self._has_told = True
            meanings = self._feeds.meanings(arrays, axes)
            fed = [(t.name, a, meant) for (t, a), meant in zip(arrays.items(), meanings, strict=True)]
            self._run.first_batches.tell("session", sorted(fed, key=lambda one: one[0]))
            self._run.first_batches.send()

    def _run_fetched(
        self,
        fetched: _Fetched,
        own: Mapping[tf.Tensor, np.ndarray],
        all_examples: int,
        options: RunOptions | None,
        metadata: RunMetadata | None,
    ) -> list[np.ndarray]:
        if fetched.program is None:
            return []
        examples = examples_of(own, fetched.axes)
        if any(axis is not None for axis in fetched.axes) and (fetched.is_alone or self._run.workers == 1):
            require_examples(examples > 0 or (fetched.is_alone and fetched.gives_rows()))
        values = [
            a if axis is None else with_a_row(a, axis) for a, axis in zip(own.values(), fetched.axes, strict=True)
        ]
        asked = (fetched.program.run, values, examples, options, metadata, all_examples)
        if fetched.looks:
            self._run.land()
        elif not fetched.is_alone:
            self._run.talk.passes()
        if not fetched.sets or self._run.workers == 1:
            return self._run.guard(*asked)
        self._require_fed_alike(fetched, own)
        self._run.talk.meet()
        if self._run.index == 0:
            results = self._run.guard(*asked)
            self._run.talk.wait_for_chief()
            return results
        self._run.talk.wait_for_chief()
        return self._run.guard(*asked)

    def _prepare(
        self, elements: Sequence[tf.Tensor | tf.Operation], arrays: Mapping[tf.Tensor, np.ndarray]
    ) -> _Fetched:
        outputs = [e.name for e in elements if isinstance(e, tf.Tensor) and e not in arrays]
        got = {t.op.name for t in arrays if t.op.type in GETS}
        targets = [e.name for e in elements if isinstance(e, tf.Operation) and e.name not in got]
        ranks = {t.name: a.ndim for t, a in arrays.items() if t.shape.rank is None}
        capture = functools.partial(self._captured.step, outputs, targets, ranks=ranks)
        axes = self._feeds.axes_of(arrays, lambda: capture(dict.fromkeys((t.name for t in arrays), None)))
        item = place_variables(capture({t.name: a for t, a in zip(arrays, axes, strict=True)}), self._placements)
        self._require_fed_data(item)
        item = replace(item, is_global=self._feeds.are_global(arrays, axes))
        dealt = self._feeds.dealt(arrays, axes)
        require_any_length(item, dealt)
        if item.gradients:
            tell_of_empty_micro_batches(dealt.examples, self._run.spec.micro_batches)
        updates = {} if item.gradients else find_fed_updates(item)
        if updates:
            self._run.on_training()
        sets = only_sets(item)
        is_local = concerns_iterators_alone(item) or fills_tables_alone(item)
        kernels = SETTING_KERNELS if sets else LOCAL_KERNELS if is_local else KERNELS
        if kernels is KERNELS and len(self._run.spec.replicas) > 1:
            require_unchanged(item.graph_def, "a run that takes a batch")
        looks = not item.gradients and all(axis is None for axis in axes)
        is_alone = not item.gradients and not written_handles(item)
        if sets:
            self._initial_values.note_set(item)
        elif outputs or targets:
            self._initial_values.give_before(item)
        if not (is_alone or item.gradients or sets):
            self._tell_of_own_share(item, dict(zip(arrays, axes, strict=True)))
        program, elsewhere = self._program_of(item, kernels)
        return _Fetched(
            program, axes, sets, bool(item.gradients), looks, item.is_global, is_alone,
            functools.partial(_gives_rows, item), {t: updates[t.name].name for t in arrays if t.name in updates},
            elsewhere,
        )  # fmt: skip

    def _program_of(self, item: GraphItem, kernels: Sequence[Kernel]) -> tuple[Program | None, str]:
        """A run, and what is wrong with it where not all workers make it; no run where there is nothing to do."""
        if not item.outputs and not item.targets:
            return None, ""
        try:
            return self._program(item, kernels), ""
        except FetchedElsewhereError as error:
            return self._program(item, kernels, fetches_alike=True), str(error)

    def _require_common(self, fetched: _Fetched, request: Request) -> None:
        """Passes where owners need not send what is fetched of theirs, or all workers fetch it in this run.

        Raises:
            FetchedElsewhereError: others fetch something else.
        """
        if not fetched.elsewhere:
            return
        asked = hashlib.sha256("\n".join(itertools.chain(*request.names)).encode()).hexdigest()
        if not self._run.talk.makes_together(lambda: ("session", asked), is_certain=True):
            raise FetchedElsewhereError(fetched.elsewhere)

    def _require_fed_alike(self, fetched: _Fetched, arrays: Mapping[tf.Tensor, np.ndarray]) -> None:
        """Passes if all workers feed the same in place of gradients.

        Raises:
            ReductionError: they do not; on all workers.
        """
        if not fetched.updates:
            return
        hashes = [hashlib.sha256(arrays[t].tobytes()).hexdigest()[:12] for t in fetched.updates]
        digests = np.array([int(one, 16) for one in hashes])
        largest, smallest = np.split(self._run.talk.reduce(np.concatenate([digests, -digests]), "max"), 2)
        differs = largest != -smallest
        for tensor, variable in itertools.compress(fetched.updates.items(), differs):
            raise ReductionError(
                f"each worker feeds another {tensor.name}, of which {variable} is updated: how gradients that workers "
                "make of their own examples are to be joined is not known where they are fed. Let all feed the same: "
                'ad.reduce(gradient, "mean"), where each is that of a mean over as many examples, or "sum" for sums.'
            )

    def _tell_of_own_share(self, item: GraphItem, axes: Mapping[tf.Tensor, int | None]) -> None:
        """Names what a run that keeps state, but trains nothing, fetches of this worker's share of a global batch."""
        if self._run.workers == 1 or not any(
            self._feeds.is_shared_out(t) for t, axis in axes.items() if axis is not None
        ):
            return
        flows = flows_of(item)
        own = [name for name in item.outputs if not isinstance(flows.kind(name), Replicated)]
        if own:
            log.warning(
                "%s is fetched in a run that also writes variables, in which each worker has its share of the batch: "
                "it is that of this worker's share alone. Fetch it in a run of its own, or what the variables hold.",
                ", ".join(own), extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def _program(self, item: GraphItem, kernels: Sequence[Kernel], fetches_alike: bool = False) -> Program:
        shared = share_tables(share_iterators(item, self._prefix), self._prefix)
        return self._run.program(
            shared, self._strategy, self._names,
            joins_outputs=False, kernels=kernels, fetches_alike=fetches_alike,
        )[0]  # fmt: skip

    def _require_fed_data(self, item: GraphItem) -> None:
        pulling = [node.name for node in item.graph_def.node if node.op in _PULLS]
        if pulling and len(self._run.spec.replicas) > 1:
            raise CaptureError(
                f"the graph takes its data from a queue or from an iterator's optional elements ({pulling[0]}), whose "
                "batches are not split over the replicas. Take them from an iterator's get_next(), or read each batch "
                "in Python and feed this worker's part (ad.distribute_dataset gives it)."
            )

    def _named_axis(self, key: Any, axis: Any) -> tuple[str, int | None]:
        """The name of a tensor that `batch_axis` names, and the axis."""
        try:
            tensor = self._requests.tensor(key)
        except (KeyError, TypeError, ValueError) as error:
            raise CaptureError(
                f"batch_axis names {key!r}, which is no tensor of the session's graph ({error}); give a placeholder or "
                "its name."
            ) from error
        found = require_axis(axis, tensor.name)
        if found is None or tensor.shape.rank is None:
            return tensor.name, found
        return tensor.name, axis_within(found, tensor.shape.rank, tensor.name)

    # -- as tf.compat.v1.Session -----------------------------------------------------------------------------------

    def as_default(self) -> AbstractContextManager[Any]:
        """Makes it the session that `Tensor.eval` and `Operation.run` use."""
        return stack.default_session(self)

    def close(self) -> None:
        """Nothing needs closing before the script ends: other workers may still read what this one holds."""

    def __enter__(self) -> Self:
        self._default = self.as_default()
        self._default.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._default is not None:
            self._default.__exit__(kind, error, trace)
            self._default = None


def _gives_rows(item: GraphItem) -> bool:
    """Whether what a run returns of no examples is no rows, or asks for none."""
    flows = flows_of(item)
    return all(isinstance(flows.kind(name), PerExample | Replicated) for name in item.outputs)


def _value_of(
    element: tf.Tensor | tf.Operation, given: Mapping[tf.Tensor, np.ndarray], values: Iterator[np.ndarray]
) -> np.ndarray | None:
    """What a run gives for one fetch: what was given for it, the next of what was run, None for an operation."""
    if isinstance(element, tf.Operation):
        return None
    return given[element] if element in given else next(values)
