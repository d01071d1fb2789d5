"""Stale parameter servers: owners sum all workers' gradients of a step, and workers need not wait for the update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import node_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.background_program import BackgroundProgram
from autodist.kernels.communicate.buckets import PACK_BYTES, Bucket, key_of, make_buckets
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.completion_signals import group_writes, rank_writes
from autodist.kernels.communicate.reduce_by_shuffle import own_rows, rows_of, weight_of
from autodist.kernels.communicate.results import Results
from autodist.kernels.sums import reduce_to_mean
from autodist.placement.synchrony import Synchrony, SyncMode

Parts = list[list[tf.Tensor]]


@dataclass(frozen=True)
class StaleServers(Kernel[ReplicatedStep, ReplicatedStep]):
    """Lets workers run up to s steps ahead of the slowest one and read the current values (Ho et al., NeurIPS 2013).

    A step sends its gradients to the owner and takes one token from a queue that starts with s of them. The update is
    part of no step. The owner runs it in the background, once per step, when all workers' gradients of that step have
    arrived. It then sends every worker a message, with the new values of variables that have cached copies. A
    background program of that worker refreshes the copies and adds a token. So the gradients of one step make one
    update, as without staleness.

        g → update(v)  becomes  g → send,  token → done;
        in the background, at the owner:  g0 + g1 → update(v) → v → send;    on each worker:  v → copy → token
    """

    name: ClassVar[str] = "stale-servers"
    after: ClassVar[Mapping[str, str]] = {
        "set-sync-mode": "it sets the synchrony of owned variables",
        "read-cached-copies": "it redirects the reads of the compute part",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        stale = {name: k for name, k in step.synchrony_of.items() if k.mode is SyncMode.STALE}
        if not stale:
            return step
        return _Servers(step, context, {step.by_name[name].handle: k for name, k in stale.items()}).run()


class _Servers:
    """Implements one `StaleServers.apply`; the methods are in the order of `run`."""

    def __init__(self, step: ReplicatedStep, context: Context, kept: dict[str, Synchrony]) -> None:
        self.step, self.context, self.order, self.kept = step, context, step.order, kept
        self.owner = {handle: step.owners[step.by_handle[handle].name] for handle in kept}
        self.results = Results(step)
        self.editor = self.results.editor
        self.effects = step.graph_index.effects
        self.reductions = [j for j in step.reductions if j.variable and step.by_name[j.variable].handle in kept]
        self.background = BackgroundProgram(step, context, self.editor, self.effects, self.owner, self.reductions)

    def run(self) -> ReplicatedStep:
        self._require_own_outputs()
        gradient_dependent = self._made_from_gradients()
        self._send_gradients()
        if self.context.worker in self.owner.values():
            checks = [name for name in self.step.targets if name in gradient_dependent]
            self.editor.run(
                self.background.build(1 + max(synchrony.staleness for synchrony in self.kept.values()), checks)
            )
        self._await_completion()
        self._drop_control_dependencies(gradient_dependent)
        self.editor.serve(self.background.effects)
        return self.results.to_step(self.reductions)

    def _require_own_outputs(self) -> None:
        summed = {node_of(t): j.variable for j in self.reductions for t in j.result}
        for name in self.step.outputs:
            made_from = self.editor.ancestors([name], control=False) & summed.keys()
            if made_from:
                raise StrategyError(
                    f"{name} is returned by the step and computed from the gradient of {summed[min(made_from)]}. With "
                    "staleness, only the owner of the variable has this gradient, some steps later. Return something "
                    "else, or set staleness: 0."
                )

    def _made_from_gradients(self) -> set[str]:
        """Returns the nodes that the owners compute, outside of any step."""
        results = [node_of(t) for pending in self.reductions for t in pending.result]
        return reach((reader for name in results for reader in self.editor.readers(name)), self.editor.readers)

    def _drop_control_dependencies(self, gradient_dependent: Collection[str]) -> None:
        for name in gradient_dependent:
            if name in self.editor:
                self.editor.replace_control(name, [])

    # -- gradients -------------------------------------------------------------------------------------------------

    def _handle_of(self, pending: PendingReduction) -> str:
        return self.step.by_name[pending.variable or ""].handle

    def _send_gradients(self) -> None:
        def group_of(pending: PendingReduction) -> Hashable:
            return self.owner[self._handle_of(pending)], self.kept[self._handle_of(pending)]

        for bucket in make_buckets([j for j in self.reductions if not j.is_sparse], group_of, PACK_BYTES):
            self._send_part(
                bucket.reductions, functools.partial(_pack, bucket), functools.partial(_unpack_mean, bucket)
            )
        for pending in self.reductions:
            if pending.is_sparse:
                self._send_part(
                    [pending], functools.partial(own_rows, pending=pending), functools.partial(_join_rows, pending)
                )

    def _send_part(
        self,
        reductions: Sequence[PendingReduction],
        pack: Callable[[SubgraphBuilder], list[tf.Tensor]],
        combine: Callable[[SubgraphBuilder, Parts], list[tf.Tensor]],
    ) -> None:
        """Sends this worker's part of some reductions to their owner, which combines all parts in the background."""
        handle, key = self._handle_of(reductions[0]), key_of(reductions)
        owner, capacity = self.owner[handle], self.kept[handle].staleness + 2
        with subgraph(self.editor, f"push/{key}") as f, tf.device(self.context.cpu(self.context.worker)):
            exchange = Communicator(f, self.context, key, reductions[0].group, capacity)
            part = pack(f)
            if exchange.contributes:
                exchange.send(owner, "gradient", part)
        self.editor.run(exchange.effects)
        if owner == self.context.worker:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in part]
            with subgraph(self.editor, f"combine/{key}") as f, tf.device(self.context.cpu(self.context.worker)):
                exchange = Communicator(f, self.context, key, reductions[0].group, capacity)
                tensors = combine(f, [exchange.receive(w, "gradient", specs) for w in exchange.group.workers])
            names = [t for pending in reductions for t in pending.result]
            self.background.register(dict(zip(names, map(f.name, tensors), strict=True)), exchange.effects)

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _await_completion(self) -> None:
        """Makes the step take a token for each group of writes, which this worker's background program adds."""
        me = self.context.worker
        assert self.order is not None, "set by SetSyncMode"
        for group in group_writes(self.step, self.owner, rank_writes(self.order, self.owner), self.context.group):
            staleness = min(self.kept[h].staleness for w in group.writes for h in self.effects[w].writes)
            with subgraph(self.editor, group.key) as f, tf.device(self.context.cpu(me)):
                exchange = Communicator(f, self.context, group.key, group.readers, staleness + 2)
                done = tf.constant(True)
                exchange.receive(me, "done", [done])
                filled = exchange.prefill(me, "done", [done], staleness)
            self.editor.run(exchange.effects)
            self.editor.initialize({f"{group.key}/{group.owner}": f.name(filled)})
            self.background.complete(group, staleness + 2)
            for write in group.writes:
                self.editor.replace_control(write, exchange.effects)
            self.editor.remove(group.writes)


def _pack(bucket: Bucket, f: SubgraphBuilder) -> list[tf.Tensor]:
    return [bucket.pack(f), *weight_of(f, bucket.reductions[0])]


def _unpack_mean(bucket: Bucket, f: SubgraphBuilder, parts: Parts) -> list[tf.Tensor]:
    return bucket.unpack(f, reduce_to_mean(parts))


def _join_rows(pending: PendingReduction, f: SubgraphBuilder, parts: Parts) -> list[tf.Tensor]:
    return rows_of(pending, parts)
