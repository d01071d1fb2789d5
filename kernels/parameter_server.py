"""Parameter servers: one worker holds a variable, sums its gradients and updates it; the others read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.editor import GraphEditor
from autodist.graph.effects import Effect, Effects
from autodist.graph.fragment import fragment
from autodist.graph.item import GraphItem, Join
from autodist.graph.names import node_of
from autodist.graph.order import topological
from autodist.graph.stages import Stages
from autodist.kernels.all_reduce import mean_of, own_rows, rows_of, weight_of
from autodist.kernels.base import Context, Kernel
from autodist.kernels.buckets import Bucket, digest, key_of, make_buckets
from autodist.kernels.exchange import Exchange
from autodist.kernels.own_part import OwnPart
from autodist.kernels.results import Results

PACK_BYTES = 256 << 10
"""Gradients are packed up to this size; larger ones go alone, since packing copies them."""


@dataclass(frozen=True)
class ParameterServers(Kernel):
    """Moves the update of each owned variable to its owner (Li et al., OSDI 2014), synchronously.

    Every worker brings its gradients to the owner, which adds them in the order of the workers, divides by the weight,
    applies the update once, and hands every worker a token. Where the update of one owner's variable needs what another
    owner has (a norm over all gradients), the tensors at that boundary travel, and each owner computes the rest itself.

        g → update(v)    becomes, at the owner,   g0 + g1 → update(v) → tokens;    elsewhere    g1 → send,  token → done
    """

    name: ClassVar[str] = "parameter-servers"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        if context.workers == 1 or not item.owners:
            return item
        return _Serving(item, context).run()


class _Serving:
    """The work of one `ParameterServers.apply`, in the order of `run`."""

    def __init__(self, item: GraphItem, context: Context) -> None:
        self.item, self.context = item, context
        self.owner = {item.by_name[name].handle: owner for name, owner in item.owners.items() if name in item.by_name}
        self.stages: Stages | None = item.stages
        self.results = Results(GraphEditor(item.graph_def))
        self.editor = self.results.editor
        effects = Effects(item.graph_def)
        self.effects: dict[str, Effect] = {n.name: e for n in item.graph_def.node if (e := effects.of(n))}
        self.joins = [j for j in item.joins if j.variable is not None and j.variable in item.owners]

    def run(self) -> GraphItem:
        self._require_one_owner_a_write()
        self._bring_gradients()
        part = OwnPart.find(self.item, self.context, self.editor, self.effects, self.owner, self.joins)
        self._require_same_outputs(part)
        part.exchange_boundary(self.results, self.context)
        self._hold_back_writes()
        self._hand_out_tokens()
        part.cut_control(self.editor)
        item = self.results.applied_to(self.item, self.joins)
        return replace(item, targets=tuple(t for t in item.targets if t in self.editor and not part.is_others(t)))

    def _require_one_owner_a_write(self) -> None:
        for name, effect in self.effects.items():
            holders = {self.owner.get(h) for h in effect.writes}
            if len(holders) > 1:
                written = sorted(self.item.by_handle[h].name for h in effect.writes)
                raise StrategyError(
                    f"{', '.join(written)} are written by one operation ({name}, {self.editor[name].op}), and the "
                    "strategy gives them different owners. Give them one owner (the PS builder does), or use AllReduce "
                    "for all of them."
                )

    def _require_same_outputs(self, part: OwnPart) -> None:
        """Workers of a session may fetch different things, so nothing can be sent for what one of them fetches."""
        if self.context.joins_outputs:
            return
        for name in self.item.outputs:
            node = node_of(name)
            if node in part.private and node not in part.computed:
                raise StrategyError(
                    f"{name} is fetched together with a training step, and it is made from what other workers have. "
                    "Fetch it in a run of its own after the step, or synchronise its variable by AllReduce."
                )

    # -- gradients -------------------------------------------------------------------------------------------------

    def _bring_gradients(self) -> None:
        dense = [j for j in self.joins if not j.is_sparse]
        for bucket in make_buckets(dense, self._owner_of, PACK_BYTES):
            self._bring_bucket(bucket, self._owner_of(bucket.joins[0]))
        for join in self.joins:
            if join.is_sparse:
                self._bring_rows(join, self._owner_of(join))

    def _owner_of(self, join: Join) -> int:
        """Who holds the variable that a join is for; each of `joins` is for one."""
        return self.item.owners[join.variable or ""]

    def _bring_bucket(self, bucket: Bucket, owner: int) -> None:
        exchange = Exchange(self.context, bucket.key)
        reads = self._reads_before_push(bucket.joins)
        with fragment(self.editor, f"push/{bucket.key}") as f, tf.device(self.context.cpu(self.context.worker)):
            mine = [bucket.pack(f), *weight_of(f, bucket.joins[0])]
            if owner == self.context.worker:
                values = bucket.unpack(mean_of(self._parts(exchange, mine)))
            else:
                exchange.send(owner, "gradient", mine, [f.after(reads)] if reads else [])
                values = []
        for join, value in zip(bucket.joins, values, strict=False):
            self.results.give(join, [f.name(value)])
        self.results.run(f.name(op) for op in exchange.effects)

    def _bring_rows(self, join: Join, owner: int) -> None:
        key = key_of([join])
        exchange = Exchange(self.context, key)
        reads = self._reads_before_push([join])
        with fragment(self.editor, f"push/{key}") as f, tf.device(self.context.cpu(self.context.worker)):
            mine = own_rows(f, join)
            if owner == self.context.worker:
                made = rows_of(self._parts(exchange, mine))
            else:
                exchange.send(owner, "gradient", mine, [f.after(reads)] if reads else [])
                made = []
        if made:
            self.results.give(join, [f.name(t) for t in made])
        self.results.run(f.name(op) for op in exchange.effects)

    def _parts(self, exchange: Exchange, mine: list[tf.Tensor]) -> list[list[tf.Tensor]]:
        me = self.context.worker
        return [mine if w == me else exchange.receive(w, "gradient", mine) for w in range(self.context.workers)]

    def _reads_before_push(self, joins: Iterable[Join]) -> list[str]:
        """This worker's reads of the variables, which must not see the update that its gradients bring about."""
        handles = {self.item.by_name[j.variable].handle for j in joins if j.variable}
        level = next(iter(joins)).level
        return [
            name for name, effect in self.effects.items()
            if effect.reads & handles and not effect.writes and not self._runs_once(name) and self._level(name) <= level
        ]  # fmt: skip

    def _runs_once(self, name: str) -> bool:
        return self.stages is not None and name in self.stages.once

    def _level(self, name: str) -> int:
        return self.stages.levels.get(name, 1) if self.stages else 1

    # -- writes ----------------------------------------------------------------------------------------------------

    def _owned_writes(self, owner: int) -> list[str]:
        return [
            name for name, effect in self.effects.items()
            if any(self.owner.get(h) == owner for h in effect.writes)
        ]  # fmt: skip

    def _hold_back_writes(self) -> None:
        """A write at the owner waits for all gradients of its variable: all workers have read the variable by then."""
        arrived: dict[str, list[tuple[int, str]]] = {}
        for join in self.joins:
            handle = self.item.by_name[join.variable or ""].handle
            for name in join.result:
                arrived.setdefault(handle, []).append((join.level, node_of(self.results.now(name))))
        for name in self._owned_writes(self.context.worker):
            for handle in self.effects[name].writes:
                ready = [node for level, node in arrived.get(handle, ()) if level <= self._level(name)]
                self.editor.add_control(name, ready)

    def _hand_out_tokens(self) -> None:
        ranks = rank_writes(self.item, self.effects, self.owner)
        for owner in range(self.context.workers):
            together: dict[tuple[int, int], list[str]] = {}
            for name in self._owned_writes(owner):
                together.setdefault((self._level(name), ranks[name]), []).append(name)
            for (level, rank), names in sorted(together.items()):
                self._token(f"{owner}/{level}/{rank}", owner, names)

    def _token(self, place: str, owner: int, writes: list[str]) -> None:
        """Word from an owner that some of its writes are done; elsewhere it stands for those writes."""
        exchange = Exchange(self.context, f"token/{_key_of_writes(self.item, self.effects, writes)}")
        with fragment(self.editor, f"token/{place}") as f, tf.device(self.context.cpu(self.context.worker)):
            done = tf.constant(True)
            if owner == self.context.worker:
                for to in range(self.context.workers):
                    if to != owner:
                        exchange.send(to, "done", [done], [f.after(writes)])
            else:
                exchange.receive(owner, "done", [done])
        names = [f.name(op) for op in exchange.effects]
        self.results.run(names)
        if owner != self.context.worker:
            for write in writes:
                self.editor.replace_control(write, names)
            self.editor.remove(writes)


def rank_writes(item: GraphItem, effects: Mapping[str, Effect], owner: Mapping[str, int]) -> dict[str, int]:
    """For each write of an owned variable, how often it waits, from owner to owner, for writes of others.

    One token for all writes of an owner would make those that others wait for wait themselves for those that come after
    the others' (averages of weights, after an optimizer's last write).
    """
    reached: dict[str, dict[int, int]] = {}
    ranks: dict[str, int] = {}
    for node in topological(item.graph_def):
        before: dict[int, int] = {}
        for source in {node_of(i) for i in node.input}:
            for holder, rank in reached.get(source, {}).items():
                before[holder] = max(rank, before.get(holder, 0))
        effect = effects.get(node.name)
        mine = next((owner[h] for h in effect.writes if h in owner), None) if effect else None
        if mine is not None:
            ranks[node.name] = max([r + (h != mine) for h, r in before.items()], default=0)
            before[mine] = ranks[node.name]
        if before:
            reached[node.name] = before
    return ranks


def _key_of_writes(item: GraphItem, effects: Mapping[str, Effect], writes: list[str]) -> str:
    """Names what was written, in the same way in all programs that write it."""
    handles = sorted({item.by_handle[h].name for w in writes for h in effects[w].writes})
    return digest(";".join(handles))
