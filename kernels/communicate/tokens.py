"""Tokens: word from an owner that some of its writes are done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autodist.graph.effects import Effect
from autodist.graph.item import GraphItem
from autodist.graph.stages import Stages
from autodist.kernels.communicate.buckets import digest


@dataclass(frozen=True)
class Group:
    """Writes of one owner that one token stands for.

    Attributes:
        owner: index of the worker.
        writes: names of the nodes.
        key: tells what is written, in the same way in all programs that write it.
    """

    owner: int
    writes: tuple[str, ...]
    key: str


def group_writes(
    item: GraphItem, effects: Mapping[str, Effect], owner: Mapping[str, int], stages: Stages
) -> list[Group]:
    """The writes of owned variables (`owner`, by handle) by owner, stage and rank."""
    ranks = rank_writes(item, effects, owner)
    together: dict[tuple[int, int, int], list[str]] = {}
    for name, effect in effects.items():
        holders = {owner[h] for h in effect.writes if h in owner}
        if holders:
            level = stages.level_of(name)
            together.setdefault((min(holders), level, ranks[name]), []).append(name)
    groups: list[Group] = []
    times: Counter[str] = Counter()
    for (holder, _, _), writes in sorted(together.items()):
        what = _key(item, effects, writes)
        key = f"{what}/{times[what]}" if what in times else what  # the same variables may be written once more, later
        times[what] += 1
        groups.append(Group(holder, tuple(writes), key))
    return groups


def rank_writes(item: GraphItem, effects: Mapping[str, Effect], owner: Mapping[str, int]) -> dict[str, int]:
    """For each write of an owned variable, how often it waits, from owner to owner, for writes of others.

    One token for all writes of an owner would make those that others wait for wait themselves for those that come after
    the others' (averages of weights, after an optimizer's last write).
    """
    reached: dict[str, dict[int, int]] = {}
    ranks: dict[str, int] = {}
    for name in item.wiring.order:
        before: dict[int, int] = {}
        for source in item.wiring.sources[name]:
            for holder, rank in reached.get(source, {}).items():
                before[holder] = max(rank, before.get(holder, 0))
        effect = effects.get(name)
        mine = next((owner[h] for h in effect.writes if h in owner), None) if effect else None
        if mine is not None:
            ranks[name] = max([r + (h != mine) for h, r in before.items()], default=0)
            before[mine] = ranks[name]
        if before:
            reached[name] = before
    return ranks


def _key(item: GraphItem, effects: Mapping[str, Effect], writes: list[str]) -> str:
    handles = sorted({item.by_handle[h].name for w in writes for h in effects[w].writes})
    return f"token/{digest(';'.join(handles))}"
