"""Completion signals: messages from an owner that a group of its writes has finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autodist.graph.effects import NO_EFFECT, Effect
from autodist.graph.execution_order import ExecutionOrder
from autodist.graph.step import ReplicatedStep
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.node_assignment import EVERYWHERE, NOBODY, Owners
from autodist.placement.group import Group


@dataclass(frozen=True)
class WriteGroup:
    """Writes of one owner that share a completion signal.

    Attributes:
        owner: index of the worker.
        writes: names of the nodes.
        key: identifies the written variables, in the same way in all programs that write them.
        readers: the group whose workers receive the signal.
    """

    owner: int
    writes: tuple[str, ...]
    key: str
    readers: Group


def group_writes(
    step: ReplicatedStep, owner: Mapping[str, int], ranks: Mapping[str, int], readers: Group
) -> list[WriteGroup]:
    """Groups the writes of owned variables (`owner`, by handle) by owner and rank."""
    effects = step.graph_index.effects
    together: dict[tuple[int, int], list[str]] = {}
    for name in filter(ranks.__contains__, effects):
        [holder] = {owner[h] for h in effects[name].writes if h in owner}
        together.setdefault((holder, ranks[name]), []).append(name)
    groups: list[WriteGroup] = []
    times: Counter[str] = Counter()
    for (holder, _), writes in sorted(together.items()):
        what = _key(step, effects, writes)
        key = f"{what}/{times[what]}" if what in times else what  # the same variables may be written again, later
        times[what] += 1
        groups.append(WriteGroup(holder, tuple(writes), key, readers))
    return groups


def rank_writes(
    order: ExecutionOrder,
    owner: Mapping[str, int],
    awaited: Mapping[str, Sequence[str]] = MappingProxyType({}),
    private: Mapping[str, Owners] = MappingProxyType({}),
) -> dict[str, int]:
    """Maps each write of an owned variable to its rank: how often it waits for other workers after earlier writes.

    Two writes of an owner can share a completion signal only if their ranks are equal. Otherwise a worker that needs
    only the first write would wait for the second, which may wait for that worker: for its gradients, its reads or its
    writes.

    Args:
        order: the execution order of the whole step.
        owner: the owner of each owned variable, by handle.
        awaited: by name in the order, the work of other workers that it waits for in addition to its sources.
        private: by node, the workers that have all its inputs (`WorkerPart`).
    """
    reached: dict[str, dict[int, int]] = {}  # by owner of an earlier write: twice its rank, plus 1 if others intervene
    ranks: dict[str, int] = {}
    messages = set(order.messages)
    for name in order.names:
        before: dict[int, int] = {}
        for source in order.sources[name]:
            _take_later(before, reached.get(source, {}), 0)
        for source in awaited.get(name, ()):
            _take_later(before, reached.get(source, {}), 1)
        if not before and name not in order.graph_index.effects:
            continue
        effect = order.graph_index.effects.get(name, NO_EFFECT)
        mine = next((owner[h] for h in sorted(effect.writes) if h in owner), None)
        if mine is not None:
            ranks[name] = max((r // 2 + 1 if h != mine else (r + 1) // 2 for h, r in before.items()), default=0)
            before[mine] = 2 * ranks[name]
        else:
            holders = private.get(name, NOBODY)
            only = next(iter(holders)) if len(holders) == 1 else EVERYWHERE
            for holder in before:
                if name in messages or only not in (holder, EVERYWHERE):
                    before[holder] |= 1
        if before:
            reached[name] = before
    return ranks


def _take_later(before: dict[int, int], found: Mapping[int, int], is_away: int) -> None:
    for holder, rank in found.items():
        before[holder] = max(rank | is_away, before.get(holder, 0))


def _key(step: ReplicatedStep, effects: Mapping[str, Effect], writes: list[str]) -> str:
    handles = sorted({step.by_handle[h].name for w in writes for h in effects[w].writes})
    return f"completion_signal/{digest(';'.join(handles))}"
