"""Parameter servers: one worker owns a variable, sums its gradients and updates it; the other workers read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.errors import FetchedElsewhereError
from autodist.graph.names import node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.buckets import PACK_BYTES, Bucket, key_of, make_buckets
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.completion_signals import WriteGroup, group_writes, rank_writes
from autodist.kernels.communicate.node_assignment import EVERYWHERE, NOBODY
from autodist.kernels.communicate.pace_gathers import PacedGathers
from autodist.kernels.communicate.read_messages import ReadMessages
from autodist.kernels.communicate.reduce_by_shuffle import own_rows, rows_of, weight_of
from autodist.kernels.communicate.remote_reads import group_reads
from autodist.kernels.communicate.results import Results
from autodist.kernels.communicate.value_messages import ValueMessages
from autodist.kernels.communicate.versions import StartSignal, Versions
from autodist.kernels.communicate.worker_part import WorkerPart
from autodist.kernels.replica_dependent import after_loops
from autodist.kernels.sums import reduce_to_mean
from autodist.placement.group import Group
from autodist.placement.synchrony import SyncMode


@dataclass(frozen=True)
class ParameterServers(Kernel[ReplicatedStep, ReplicatedStep]):
    """Moves the update of each owned variable to its owner (Li et al., OSDI 2014), synchronously.

    Every worker sends its gradients to the owner. The owner sums them in rank order, divides by the weight, applies the
    update once, and sends every worker a completion signal, with the new values of variables that have cached copies.
    If an owner's update depends on tensors of another owner (a global gradient norm), these tensors are sent, and each
    owner computes the rest.

        g → update(v)    becomes, at the owner,   g0 + g1 → update(v) → tokens;    elsewhere    g1 → send,  token → done
    """

    name: ClassVar[str] = "parameter-servers"
    after: ClassVar[Mapping[str, str]] = {
        "set-sync-mode": "it sets the synchrony of owned variables",
        "read-cached-copies": "it redirects the reads of the compute part",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if all(k.mode is not SyncMode.SYNCHRONOUS for k in step.synchrony_of.values()):
            return step
        return _Servers(step, context).run()


class _Servers:
    """Implements one `ParameterServers.apply`; the methods are in the order of `run`."""

    def __init__(self, step: ReplicatedStep, context: Context) -> None:
        self.step, self.context, self.stages = step, context, step.stages
        self.owner = {
            step.by_name[name].handle: step.owners[name]
            for name, synchrony in step.synchrony_of.items() if synchrony.mode is SyncMode.SYNCHRONOUS
        }  # fmt: skip
        self.results = Results(step)
        self.editor = self.results.editor
        self.effects = step.graph_index.effects
        self.reductions = [j for j in step.reductions if j.variable and step.by_name[j.variable].handle in self.owner]
        assert step.order is not None, "set by SetSyncMode"
        self.order = step.order
        self.part = WorkerPart.find(step, context, self.effects, self.owner, self.reductions)
        self.needed = self.part.needed()
        self.read_groups = group_reads(step, self.owner, context, self.part.runs)
        self.versions = Versions(step, self.owner, self.reductions, self.read_groups, context)
        self.gathers = PacedGathers(step)
        self.values = ValueMessages(step, context, self.editor, self.owner)

    def run(self) -> ReplicatedStep:
        part = self.part
        self._send_gradients()
        self._exchange_reads()
        self._require_same_outputs(part)
        part.exchange_boundary(self.results, self.context)
        self._delay_writes()
        self._exchange_completion_signals(rank_writes(self.order, self.owner, self.versions.awaited(), part.private))
        part.drop_control(self.editor)
        self.editor.drop_targets(filter(part.is_others, self.editor.targets))
        return self.results.to_step(self.reductions)

    def _require_same_outputs(self, part: WorkerPart) -> None:
        """Refuses fetches that need tensors of other workers: workers of a session may fetch different outputs."""
        if self.context.reduces_outputs:
            return
        for name in self.step.outputs:
            node = node_of(name)
            if part.private.get(node, NOBODY) - {EVERYWHERE} and node not in part.computed:
                raise FetchedElsewhereError(
                    f"{name} is fetched together with a training step and depends on values of other workers, which do "
                    "not fetch it in this run. Fetch it on every worker, not only under `if ad.is_chief`; or fetch it "
                    "in a run of its own after the step; or synchronize its variable by AllReduce."
                )

    # -- gradients -------------------------------------------------------------------------------------------------

    def _send_gradients(self) -> None:
        """Sends gradients to the owners, after this worker's reads that must not see the updates made by them."""
        dense = [j for j in self.reductions if not j.is_sparse]
        for bucket in make_buckets(dense, self._owner_of, PACK_BYTES):
            owner = self._owner_of(bucket.reductions[0])
            self._send_bucket(bucket, owner, self._early_reads(owner))
        for pending in self.reductions:
            if pending.is_sparse:
                owner = self._owner_of(pending)
                self._send_rows(pending, owner, self._early_reads(owner))

    def _owner_of(self, pending: PendingReduction) -> int:
        """Returns the owner of the variable that a reduction belongs to; each of `reductions` belongs to one."""
        return self.step.owners[pending.variable or ""]

    def _send_bucket(self, bucket: Bucket, owner: int, reads: Sequence[str]) -> None:
        with subgraph(self.editor, f"push/{bucket.key}") as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(f, self.context, bucket.key, bucket.group)
            part = [bucket.pack(f), *weight_of(f, bucket.reductions[0])]
            parts = exchange.gather(owner, "gradient", part, reads)
            values = bucket.unpack(f, reduce_to_mean(parts)) if parts else []
        for pending, value in zip(bucket.reductions, values, strict=False):
            self.results.set_result(pending, [f.name(value)])
        if values and self.gathers.pace(bucket):
            self.gathers.wait(self.editor, bucket, node_of(f.name(values[0])))
        self.editor.run(exchange.effects)

    def _send_rows(self, pending: PendingReduction, owner: int, reads: Sequence[str]) -> None:
        key = key_of([pending])
        with subgraph(self.editor, f"push/{key}") as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(f, self.context, key, pending.group)
            parts = exchange.gather(owner, "gradient", own_rows(f, pending), reads)
            rows = rows_of(pending, parts) if parts else []
        if rows:
            self.results.set_result(pending, [f.name(t) for t in rows])
        self.editor.run(exchange.effects)

    def _early_reads(self, owner: int) -> list[str]:
        return after_loops(self.step.graph_index, self.versions.early_reads(owner, self.needed))

    # -- reads and writes ------------------------------------------------------------------------------------------

    def _exchange_reads(self) -> None:
        """Reads this worker's variables for the replicas of others, and receives the values that it needs of others."""
        me = self.context.worker
        for group in self.read_groups:
            readers = [w for w in self.context.group.everyone if group.of(w)]
            for reader in readers if group.owner == me else [me] if me in readers else []:
                messages = ReadMessages(self.step, self.editor, self.context, group, reader)
                if group.owner == me:
                    messages.answer(self.versions.writes, self.order.position)
                else:
                    messages.request()

    def _delay_writes(self) -> None:
        """Makes each write at the owner wait until all workers have read the previous version (`versions`)."""
        for name, gradients in self.versions.gradients_before.items():
            if self._owns_written(name):
                arrived = [node_of(self.results.now(t)) for pending in gradients for t in pending.result]
                self.editor.add_control(name, arrived)
        for signal in self.versions.start_signals():
            if self.context.worker in (signal.worker, signal.owner):
                self._exchange_start_signal(signal)

    def _owns_written(self, write: str) -> bool:
        """Returns True if this worker owns a variable that a node writes."""
        return any(self.owner.get(handle) == self.context.worker for handle in self.effects[write].writes)

    def _exchange_start_signal(self, signal: StartSignal) -> None:
        """Sends a start signal to an owner, or makes this worker's writes wait for it."""
        with (
            subgraph(self.editor, f"{signal.key}/{signal.worker}") as f,
            tf.device(self.context.cpu(self.context.worker)),
        ):
            exchange = Communicator(f, self.context, signal.key, Group.of_workers([signal.worker, signal.owner]))
            done = tf.constant(True)
            if signal.worker == self.context.worker:
                exchange.send(signal.owner, "read", [done], self._early_reads(signal.owner))
            else:
                exchange.receive(signal.worker, "read", [done])
        self.editor.run(exchange.effects)
        if signal.owner == self.context.worker:
            for write in signal.writes:
                self.editor.add_control(write, exchange.effects)

    # -- values ----------------------------------------------------------------------------------------------------

    def _exchange_completion_signals(self, ranks: Mapping[str, int]) -> None:
        replacements: dict[str, tuple[str, ...]] = {}
        for group in group_writes(self.step, self.owner, ranks, self.context.group):
            if group.owner == self.context.worker:
                self._send_values(group)
            else:
                replacements.update(dict.fromkeys(group.writes, self._receive_values(group)))
        self.editor.replace_targets(replacements)
        self.editor.remove(replacements)

    def _send_values(self, group: WriteGroup) -> None:
        with subgraph(self.editor, group.key) as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(f, self.context, group.key, group.readers)
            refreshed = self.values.send(f, exchange, group)
        self.editor.run([*exchange.effects, *refreshed])

    def _receive_values(self, group: WriteGroup) -> tuple[str, ...]:
        """Updates the cached copies; makes consumers of the writes wait for the owner's signal, its last message."""
        with subgraph(self.editor, group.key) as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(f, self.context, group.key, group.readers)
            refreshed = self.values.receive(f, exchange, group)
        self.editor.run([*exchange.effects, *refreshed])
        signal = exchange.effects[-1:]
        for write in group.writes:
            self.editor.replace_control(write, signal, self.editor.consumers(write))
        return tuple(signal)
