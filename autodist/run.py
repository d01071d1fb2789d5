"""Run: one training run as one worker sees it, from the first captured step to the end of the script."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from autodist import restarts
from autodist.chief_acts import ChiefActs
from autodist.cluster.member import Member
from autodist.cluster.script_end import watch_script_end
from autodist.errors import AutoDistError, CheckpointError, ClusterError, MachinesAwayError
from autodist.fingerprint import Fingerprint, require_equal
from autodist.graph.devices import home_of
from autodist.graph.item import GraphItem
from autodist.graph.ops import Trait
from autodist.graph.placement import Placement
from autodist.graph.renaming import Renaming
from autodist.kernels import KERNELS, SETTING_KERNELS, Kernel, own_kernels
from autodist.look import look
from autodist.missed_step import MissedStep
from autodist.peers import Peers
from autodist.proto import strategy_pb2
from autodist.recording import SEED, recorder
from autodist.resources import ResourceSpec
from autodist.runtime.arrays import combine_parts, pack_part, require_reduction, unpack
from autodist.runtime.common_calls import Call, CommonCalls, Note
from autodist.runtime.first_batches import FirstBatches
from autodist.runtime.gpus import GPUSupport
from autodist.runtime.hosts import Hosts
from autodist.runtime.mailbox import Mailbox
from autodist.runtime.memories import Saved
from autodist.runtime.messages import Messages
from autodist.runtime.pieces import Pieces
from autodist.runtime.program import Program
from autodist.runtime.spread import Spread
from autodist.runtime.threads import session_config
from autodist.runtime.updates import Updates
from autodist.runtime.variables import Kept, Tracked, VariableTracker
from autodist.start_up import StartUp
from autodist.starting import Starting
from autodist.step_plans import StepPlans
from autodist.strategies import BuildsStrategy
from autodist.told_strategy import tell_strategy
from autodist.written_values import WrittenValues

log = logging.getLogger("autodist")

_INTERRUPTED = "the chief was interrupted"

FIT = "fit"
RESTORE = "ad.checkpoint(…).restore"


@dataclass
class Run:
    """Holds what lives as long as the run: the other workers, the session, the script's variables.

    Args:
        spec: the machines.
        builder: decides the strategy; None on the others, which the chief tells.
        member: this process's part, None on the chief.
        seed: drawn by the chief for the whole run.
        resumed: the checkpoint from which it goes on by what the YAML says; empty: there is none.

    Attributes:
        on_tracked: called with a step, and the variables that it works on, when it was captured and before it runs.
        on_session: called with a session's variables, by name, before its first run that trains; gives, on the chief,
            what gives the value that one is to have.
        before_step: called before each training step of the script's, with what tells that from other steps.
        after_step: called after each, or after several that were made in one call.
        on_training: called where a step that trains is made ready to run on all replicas.
        on_first_program: called once the first one is.
        draws: operations of steps that draw from a state which TensorFlow keeps to itself.
        chief: what the chief does for all workers between two steps.
        is_told_apart: whether the script has asked which worker it is, so that each may do something else.
        before_end: called on the chief at the end of its script, while all values are still there; what one raises is
            how the run ends.
        has_agreed: whether the workers have told one another what they read of files that are dealt out.
        tables: names of the lookup tables that this worker has filled.
        recorder: records its training steps; None: nobody has asked for that.
        step: how many training steps were made, those before a checkpoint that was restored included.
        is_in_step: whether a training step runs that is not counted yet; what is asked for meanwhile waits for it.
        on_schedule: called, on the chief, with each schedule by which the run is saved from now on.
        end_reason: why the others are stopped where the script ends badly by itself.
        saved_step: of the last checkpoint that was saved or restored; None: there was none.
        end_error: what has failed at the end of the script, after all that it does itself.
    """

    spec: ResourceSpec
    builder: BuildsStrategy | None
    member: Member | None
    seed: int
    resumed: Mapping[str, Any] = field(default_factory=dict)
    strategy: strategy_pb2.Strategy | None = None
    _hosts: Hosts | None = None
    _calls: CommonCalls | None = None
    _mailbox: Mailbox | None = None

    def __post_init__(self) -> None:
        self.index = self.member.index if self.member else 0
        self.workers = len(self.spec.workers)
        self.start_up = StartUp(is_chief=self.index == 0)
        self._peers = Peers(self.spec, self.member, self._payload(), self.seed, self.start_up)
        self._end = watch_script_end()
        self.tracker = VariableTracker(self.pull)
        self._updates = Updates(self._on_failed_update)
        # All workers do the same in the same order, so threads of the script take turns.
        self.turn: AbstractContextManager[object] = threading.RLock() if self.workers > 1 else nullcontext()
        self.missed_step = MissedStep(lambda: self._peers.have_joined, self.turn)
        self.first_batches = FirstBatches(
            self.index,
            [w.name for w in self.spec.workers],
            frozenset(self.spec.replica_workers),
            lambda: self._messages if self._hosts is not None else None,
            self.guard,
        )
        self._landings: list[Callable[[], Any]] = []
        self.on_training: Callable[[], None] = lambda: None
        self.on_schedule: Callable[[Any], None] = lambda schedule: None
        self.end_reason = "the chief's script failed"
        self.on_first_program: Callable[[], None] | None = None
        self.draws: set[str] = set()
        self.chief = ChiefActs(self)
        self._awaited_memories: Saved | None = None
        self.on_tracked: Callable[[GraphItem, Mapping[str, Tracked]], None] = lambda item, variables: None
        self.on_session: Callable[[Mapping[str, Kept]], Mapping[str, Kept]] = lambda variables: {}
        self.before_step: Callable[[object], None] = lambda step: None
        self.after_step: Callable[[], None] = lambda: None
        self.before_end: list[Callable[[], None]] = []
        self.is_told_apart = False
        self.tables: set[str] = set()
        self.recorder = recorder()
        self._plans = StepPlans(self.spec, self.builder, self.index, self.recorder)
        self.step = int(self.resumed.get("step", 0))
        self.is_in_step = False
        self.saved_step = restarts.before().saved if not self.resumed else self.step
        self.end_error: AutoDistError | None = None
        self._has_told_of_evaluation = False
        self._has_work = self.has_agreed = False

    @classmethod
    def begin(
        cls,
        choose: Callable[[], tuple[ResourceSpec, BuildsStrategy]],
        resume: Callable[[ResourceSpec], Mapping[str, Any]] = lambda spec: {},
    ) -> Run:
        """The run that this process takes part in: the chief's own, or the one that its chief has started.

        Args:
            choose: reads machines and strategy; called on the chief, whose choice counts.
            resume: finds the checkpoint that it goes on from, with its seed; likewise.
        """
        member = Member.from_environment()
        if member is None:
            spec, builder = choose()
            resumed = resume(spec)
            earlier = Starting.under_way(spec) if len(spec.workers) > 1 else None
            if earlier is not None:
                return cls(spec, builder, None, earlier.seed, resumed)
            drawn = restarts.seed_of_next_run(
                lambda: SEED if recorder() else resumed.get("seed", secrets.randbelow(2**31))
            )
            return cls(spec, builder, None, drawn, resumed)
        told = json.loads(member.payload)
        return cls(ResourceSpec.from_payload(told["spec"]), None, member, told["seed"], told.get("resumed", {}))

    def _payload(self) -> bytes:
        """What the chief tells the others that it starts."""
        told = {"spec": self.spec.for_workers().to_payload(), "seed": self.seed, "resumed": self.resumed}
        return json.dumps(told).encode()

    def start_others(self) -> None:
        """On the chief, begins to start the other workers, which import, read data and trace while its script does."""
        self._peers.begin()

    def check_others(self) -> None:
        """Raises, in the chief's script, what has kept the others from coming to their first step.

        Raises:
            ClusterError: they could not be started.
            WorkerFailedError: one of them has ended badly.
        """
        self._peers.check()

    def check_devices(self) -> None:
        """Passes if the GPUs that the machines are said to have are there.

        Raises:
            ResourceSpecError: one is not.
        """
        if any(node.gpus for node in self.spec.nodes):
            present = len(tf.config.list_physical_devices("GPU"))
            node = self.spec.workers[self.index].node if self.member else None
            self.spec.check_gpus(present, node, lambda: GPUSupport.of_this_process().why_too_few(present))

    # -- steps -----------------------------------------------------------------------------------------------------

    def settle(self, tracked: Tracked, placement: Placement) -> None:
        """Moves a variable to where a step that trains it, or that keeps something for one that does, wants it."""
        tracked.is_settled = True
        placement = placement.with_copies_of(tracked.placement)
        if placement != tracked.placement:
            if tracked.is_behind:
                self.pull()
            tracked.placement, tracked.is_ahead = placement, True

    def plan(
        self,
        item: GraphItem,
        names: Mapping[str, str],
        rehearses: bool = True,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[strategy_pb2.Strategy, Renaming]:
        """The chief's strategy for a step, and under which names the chief has it; the first plan waits for the others.

        Args:
            item: the step.
            names: under which the session knows each variable.
            rehearses: whether the item is what will run, so that the chief may rewrite it before the others join.
            shapes: of the step's inputs, in this worker's part of the first batch, where it is known.

        Raises:
            StrategyError: the strategy asks for what cannot be done; before any worker trains.
            CaptureMismatchError: this worker captured another step than the chief.
        """
        self.check_others()
        looks = look()
        if looks is not None and item.gradients:
            looks.comes_to_step(item, names, shapes or {}, rehearses)
        strategy = self._plans.build(item, names) if self.index == 0 else None
        if self._hosts is None:
            if strategy is not None and rehearses and self.workers > 1:
                self._plans.rehearse(item, strategy, names)
            self._start()
        strategy, renaming = self._agree(item, strategy)
        self._plans.decide(strategy, names, renaming)
        if self.strategy is None and strategy.nodes:
            self.strategy = strategy
            if self.index == 0:
                plans, columns = self._plans, self.start_up.columns
                tell_strategy(strategy, item, plans.rehearsed, self.spec, columns, shapes or {}, plans.take_seen())
        return strategy, renaming

    def program(
        self,
        item: GraphItem,
        strategy: strategy_pb2.Strategy,
        names: Mapping[str, str],
        joins_outputs: bool,
        kernels: Sequence[Kernel] = KERNELS,
        fetches_alike: bool = False,
    ) -> tuple[Program, GraphItem]:
        """A step rewritten for this worker and ready to run, and the rewritten item.

        Args:
            item: the step.
            strategy: as `plan` gave it.
            names: under which the session knows each variable.
            joins_outputs: as in `Context`.
            kernels: that rewrite it.
            fetches_alike: as in `Context`.

        Raises:
            FetchedElsewhereError: workers may fetch different things, and one is at other workers.
        """
        self._has_work = self._has_work or kernels is not SETTING_KERNELS
        if item.gradients:
            self.on_training()
            self.draws |= {node.name for node in item.wiring.having(Trait.SEEDED)}
        rewritten = self._plans.rewritten(item, strategy, names, joins_outputs, kernels, fetches_alike)
        program = Program(self.hosts, rewritten, list(item.inputs), self._updates)
        if program.land is not None:
            self._landings.append(program.land)
        if item.gradients and self.on_first_program is not None:
            look, self.on_first_program = self.on_first_program, None
            look()
        return program, rewritten

    def _agree(self, item: GraphItem, strategy: strategy_pb2.Strategy | None) -> tuple[strategy_pb2.Strategy, Renaming]:
        """The chief's strategy, on every worker, for a step that all have captured alike, and the chief's names."""
        self.passes()
        mine = Fingerprint.of(item, own_kernels())
        if strategy is not None:
            self._messages.exchange(mine.packed_with(strategy.SerializeToString(deterministic=True)))
            return strategy, Renaming()
        theirs, content = Fingerprint.unpack(self.exchange())
        renaming = require_equal(theirs, mine, f"worker {self.index}")
        return strategy_pb2.Strategy.FromString(content), renaming

    @property
    def deals_files(self) -> bool:
        """Whether the files of data sets are dealt out to several workers."""
        return self.spec.shard is not None and self.workers > 1

    @property
    def has_idle_workers(self) -> bool:
        """Whether other workers were started, and have had nothing to do but to set variables."""
        return self._peers.have_joined and not self._has_work

    @property
    def has_worked(self) -> bool:
        """Whether a step was made, or something was reduced: more than that variables were set."""
        return self._has_work

    # -- start and end ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = session_config(self.spec.workers, self.index)
        self._hosts = Hosts(self._peers.join(config), config)
        if self._awaited_memories is not None:
            self._hosts.memories.resume(self._awaited_memories)
        beside = self._hosts.beside
        self._messages = Messages(beside, self.index, self.workers)
        self._pieces = Pieces(beside, self.index, self.workers, self._home)
        self._mailbox = Mailbox(beside, self.index, self.workers) if self.workers > 1 else None
        spread = Spread(beside, self.index, self.workers, self._home)
        self.written_values = WrittenValues(self._pieces, spread, self.tracker, self._mailbox, self.guard, self.pull)
        if self._mailbox is not None:
            send = self._mailbox.open_box(lambda message: calls.receive(Note.decode(message)))
            self._calls = calls = CommonCalls(self.index, self.workers, lambda to, note: send(to, note.encode()))
            self._mailbox.start()
            self._require_alike()

    def _home(self, worker: int, dtype: tf.DType) -> str:
        """The device on which a worker keeps a variable."""
        first = next(iter(self.spec.workers[worker].devices), "cpu:0")
        return home_of(worker, self.workers, first, dtype)

    @property
    def have_joined(self) -> bool:
        """Whether this worker has met the others, so that steps can run."""
        return self._hosts is not None

    @property
    def hosts(self) -> Hosts:
        """Where this worker's steps run; there from the first plan on."""
        assert self._hosts is not None, "the first plan starts them"
        return self._hosts

    @property
    def pieces(self) -> Pieces:
        """Where the variables' values lie; there from the first plan on."""
        return self._pieces

    def _close_session(self) -> None:
        """Takes leave of the other workers' servers, unless one may be gone: that would wait for it for ever."""
        if self._hosts is None:
            return
        if not self._peers.have_joined or (self._peers.is_idle and self._updates.is_idle and not self.ends_badly):
            self.written_values.close()
            if self._calls is not None and self._mailbox is not None:
                self.guard(self._calls.leave)
                self._mailbox.close()
            self._hosts.close()
        else:
            self._hosts.abandon()

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls what may fail because another worker went away; then the cause is raised, and not what followed.

        Raises:
            WorkerFailedError: another worker ended badly.
        """
        return self._peers.guard(call, *args)

    def _on_failed_update(self, error: BaseException) -> BaseException:
        """Steps, which would wait for ever for an update that failed beside them, raise the cause instead."""
        told = self._peers.cause_of(error) or ClusterError(
            f"an update of what this worker owns failed: {type(error).__name__}: {error}"
        )
        self._peers.fail(told)
        return told

    def reduce(self, value: Any, how: str) -> np.ndarray:
        """The mean, sum, largest or smallest of a value over all workers; all of them call it alike.

        Raises:
            ReductionError: it cannot be reduced so; on all workers.
        """
        require_reduction(how)
        mine = pack_part(value, how)
        if self.workers == 1:
            return unpack(combine_parts([mine]))
        self._has_work = True
        with self.turn:
            if self._hosts is None:
                self.check_others()
                self._start()
            self.passes()
            parts = self.gather(mine)
            return unpack(self.exchange(combine_parts(parts) if parts else b""))

    def agree(self, said: str, decide: Callable[[list[str]], str]) -> str:
        """What the chief decides of what each worker says, on every worker; all of them call it alike, between steps.

        Args:
            said: by this worker.
            decide: is called on the chief with what they say, by worker.
        """
        self._has_work = self.has_agreed = True
        with self.missed_step.noted():
            if self._hosts is None:
                self.check_others()
                self._start()
            self.passes()
            heard = [one.decode() for one in self.gather(said.encode())]
            return self.exchange(decide(heard).encode() if heard else b"").decode()

    def share(self, said: str, what: str = FIT, is_certain: bool = True) -> str:
        """What the chief says, on every worker; all of them call it alike, also before there are others.

        Args:
            said: by the chief.
            what: is called, by the script, in which they do.
            is_certain: whether all are known to call it. Before they have joined, those that do not are found out then.

        Raises:
            CheckpointError, ClusterError: they do not; where it comes out as they join, on all workers.
        """
        if self._hosts is None:
            self.check_others()
            if self.index == 0:
                self._peers.say(what, said)
                return said
            heard = self._peers.hear(what)
            if heard is not None:
                return heard
            with self.missed_step.noted():
                self._start()  # which raises, on all workers
        with self.missed_step.noted(but=CheckpointError):
            if not is_certain and self._calls is not None:
                if not self.guard(self._calls.are_made_together, Call(what), True):
                    raise _not_alike(f"{self._who(self.index)} calls {what}, and others do not", what)
            self.passes()
            return self.exchange(said.encode()).decode()

    def _who(self, index: int) -> str:
        return f"worker {index}" if index > 0 else "the chief"

    def _require_alike(self) -> None:
        """Passes where all workers have come to the same calls by now, in which the chief has said something.

        Raises:
            CheckpointError, ClusterError: they have not; on all workers.
        """
        parts = self.gather(json.dumps(self._peers.apart).encode())
        apart = {w: told for w, part in enumerate(parts) if (told := json.loads(part)) is not None}
        found = json.dumps(next(iter(apart.items()), None)).encode()
        first = json.loads(self.exchange(found))
        if first is not None:
            worker, (mine, chiefs) = first
            told = f"{self._who(worker)} has come to {mine or 'a step'}, and the chief to {chiefs or 'a step'}"
            raise _not_alike(told, RESTORE if RESTORE in (mine, chiefs) else FIT)

    def have_made(self, steps: int) -> None:
        """Training steps were made, several of them in one call."""
        self.step += steps
        self.after_step()

    def passes(self) -> None:
        """This worker comes to what all workers do alike: a step, or what they tell one another between two."""
        if self._calls is not None and self._calls.passes():
            self.guard(self._calls.answer)

    def makes_together(self, describe: Callable[[], tuple[str, str]], is_certain: bool) -> bool:
        """Whether all workers make a call that each can also make for itself; the first may wait for them to join.

        Before they have joined nobody can be asked. Then it is all workers' if the script cannot know which it is on,
        and else nobody else's: one that runs on the chief alone would wait for others, which have no part in it.

        Args:
            describe: says what is called, and with which data.
            is_certain: whether all workers are known to come to it.
        """
        if self.workers == 1:
            return True
        if self.missed_step:  # by Ctrl-C, say: the others wait in it, and come to nothing that follows
            return False
        if self._hosts is None:
            self.check_others()
            if self.is_told_apart:
                self._tell_of_evaluation_alone()
                return False
            is_certain = True
            self._start()
        assert self._calls is not None, "there are several workers"
        with self.missed_step.noted():
            return bool(self.guard(self._calls.are_made_together, Call(*describe()), is_certain))

    def _tell_of_evaluation_alone(self) -> None:
        if not self._has_told_of_evaluation:
            self._has_told_of_evaluation = True
            log.info(
                "before the first training step, evaluations run on this worker alone, since the script has asked "
                "which worker it is; all workers share those that come before ad.is_chief and ad.worker_index."
            )

    def resume_memories(self, saved: Saved) -> None:
        """Gives what kernels keep on this worker what a checkpoint has of it, now or when a step has it."""
        if self._hosts is None:
            self._awaited_memories = saved
        else:
            self.guard(self._hosts.memories.resume, saved)

    def exchange(self, said: bytes = b"") -> bytes:
        """What the chief says, once all others have come to it; all of them call it alike."""
        heard: bytes = self.guard(self._messages.exchange, said)
        return heard

    def gather(self, said: bytes) -> list[bytes]:
        """On the chief, what each worker says; on the others nothing. All of them call it alike."""
        heard: list[bytes] = self.guard(self._messages.gather, said)
        return heard

    def leave_words(self, words: bytes) -> None:
        """At the end of another worker's script, leaves the chief something to hear at the end of its own."""
        self.guard(self._messages.leave, words)

    def last_words(self) -> list[bytes]:
        """On the chief, at the end of its script, what all others have left; nothing where one does something else."""
        if self._calls is None or not self.guard(self._calls.have_all_left):
            return []
        heard: list[bytes] = self.guard(self._messages.left)
        return heard

    def wait_for_chief(self, say: bytes = b"set") -> None:
        """On another worker, returns once the chief has called it as well."""
        self.exchange(say)

    def meet(self) -> None:
        """On the chief, waits until all others have finished their last step."""
        self.land()
        self.passes()
        self.guard(self._messages.meet)

    @property
    def ends_badly(self) -> bool:
        """Whether the script that ends does so before its part is done."""
        failed = self._end.is_bad or self._peers.failure is not None or bool(self.missed_step)
        return failed or self._is_interrupted

    def heed_leaving(self, heed: Callable[[str], None]) -> None:
        """On the chief, from now on calls `heed`, in another thread, with each worker to which SIGTERM has come."""
        self._peers.on_leaving = heed

    def lose(self, worker: str, reason: str) -> NoReturn:
        """On the chief, ends the run as if a worker had ended badly.

        Raises:
            WorkerFailedError: it.
        """
        self._peers.lose(worker, reason)

    @property
    def lost(self) -> restarts.Lost | None:
        """On the chief, what this run was lost by, where the script has ended by nothing else."""
        fault, ended_by = self._peers.fault, self._end.raised
        if fault is None or self._is_interrupted or not (ended_by is None or _comes_of_others(ended_by)):
            return None
        away = self._nodes_of(fault.workers if isinstance(fault, MachinesAwayError) else ())
        step = None if self._hosts is None else self.step + 1
        return restarts.Lost(fault, step, self.saved_step, away, self._nodes_of(self._peers.leaving))

    def _nodes_of(self, workers: Collection[str]) -> tuple[str, ...]:
        """Addresses of other nodes than the chief's that run one of these workers."""
        others = (worker for worker in self.spec.workers if not worker.node.chief)
        return tuple(dict.fromkeys(worker.node.address for worker in others if worker.name in workers))

    @property
    def _is_interrupted(self) -> bool:
        """Whether Ctrl-C was the last that came to the script's steps, though it may have caught that and gone on."""
        moment = self._end.interrupted_at
        return moment is not None and not self.missed_step.has_made_one_since(moment)

    def finish(self) -> None:
        """Ends the run where the script ends: on the chief when all workers are done, on others when the chief is."""
        try:
            self._take_leave()
        except KeyboardInterrupt:
            self._peers.abort(_INTERRUPTED)
            raise

    def _take_leave(self) -> None:
        try:
            if not self.ends_badly:
                self.guard(self._updates.wait)
        except Exception:
            self._close_session()
            self._peers.abort("the chief's updates failed")
            raise
        failures = [] if self.ends_badly else list(self._close_what_is_open())
        # Before the other workers end: closing takes leave of their servers.
        self._close_session()
        if self.ends_badly:  # another worker just leaves, which is told to the chief
            self._peers.abort(_INTERRUPTED if self._is_interrupted else self.end_reason)
            for error in self._close_what_is_open():  # the others are told first; how it ends is known already
                log.error("%s", error)
            self._tell_what_no_status_tells()
        else:
            self._peers.finish()
            for error in failures:
                raise error

    def _close_what_is_open(self) -> Iterator[AutoDistError]:
        """Does what is to be done before the run ends; gives what of it fails."""
        while self.before_end:
            try:
                self.before_end.pop()()
            except AutoDistError as error:
                yield error

    def _tell_what_no_status_tells(self) -> None:
        """On the chief, raises what failed and has not made the script itself end badly.

        Raises:
            WorkerFailedError: another worker ended badly while the script was in no step.
            ClusterError: a step failed in a thread of the script, which nobody waits for.
        """
        if self.index != 0:
            return  # its chief tells
        if self._end.is_bad and not self._peers.have_joined:
            return  # the script's own error is the first cause; others have come to the same, maybe
        if self._peers.failure is not None and not self._peers.is_told:
            raise self._peers.failure
        for error in self._end.uncaught:
            if error is self.missed_step.error or isinstance(error, AutoDistError):
                raise ClusterError(
                    f"a step failed in a thread of the script: {type(error).__name__}: {error}"
                ) from error

    # -- variables -------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Brings the script's variables up to date with the session's."""
        if self._hosts is not None:
            with self.turn:
                self.land()
                self.guard(self._pieces.pull, [t for t in self.tracker if t.is_behind])

    def land(self) -> None:
        """Waits until all is written that this worker's steps have asked for: updates may come some steps later."""
        for land in self._landings:
            self.guard(land)


def _comes_of_others(error: BaseException | None) -> bool:
    """Whether an exception is, or was raised while there was, one that tells what has become of other workers."""
    while error is not None and not isinstance(error, ClusterError):
        error = error.__cause__ or error.__context__
    return error is not None


def _not_alike(told: str, what: str) -> CheckpointError | ClusterError:
    """What to raise where workers call different things."""
    mend = f"Call {what} on every worker at the same place, and not under `if ad.is_chief:`."
    if what == RESTORE:
        return CheckpointError(f"{told}. All workers restore what the chief has found, or none. {mend}")
    return ClusterError(f"{told}. {mend}")
