"""Which small buckets may travel in the same messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import PendingReduction
from autodist.graph.step import Step
from autodist.kernels.base import Context
from autodist.kernels.communicate.buckets import Bucket


def find_fused_buckets(
    item: Step, buckets: Sequence[Bucket], others: Sequence[Bucket], context: Context, most_bytes: int
) -> tuple[list[list[Bucket]], list[Bucket]]:
    """Buckets that teams add up in the same messages, in groups, and those that travel alone, both in their order.

    A message costs more than the bytes of a small bucket. What travels together is sent when all of it is there, so
    buckets do only where equally many others stand one behind the other before each: none then waits for another's sum,
    nor two groups for each other. Where owners update variables a step has more exchanges than its joins, and each
    bucket travels alone.

    Args:
        item: the step.
        buckets: that are added up as they are.
        others: that compressors add up.
        context: for whom.
        most_bytes: of a bucket that may travel with others.
    """
    small = [b for b in buckets if b.byte_size <= most_bytes and context.adds_in_teams(b.joins[0])]
    if len(small) < 2 or item.replication is None or item.replication.variable_placements:
        return [], list(buckets)
    ranks = _ranks(item, item.replication.joins, [*buckets, *others])
    groups: dict[int, list[Bucket]] = {}
    for bucket in small:
        groups.setdefault(ranks[id(bucket)], []).append(bucket)
    together = [group for group in groups.values() if len(group) > 1]
    taken = {id(bucket) for group in together for bucket in group}
    return together, [bucket for bucket in buckets if id(bucket) not in taken]


def _ranks(item: Step, joins: Iterable[PendingReduction], buckets: Sequence[Bucket]) -> dict[int, int]:
    """By the `id` of each bucket, the longest chain of joins and whole buckets before it."""
    bucket_of = {t: id(bucket) for bucket in buckets for join in bucket.joins for t in join.result}
    joined = {t for join in joins for t in join.result}
    ranks = {id(bucket): 0 for bucket in buckets}
    while True:  # a bucket's sums are there when all that it holds has come: each turn settles one rank more
        before = _before(item, {t: ranks[bucket_of[t]] if t in bucket_of else 0 for t in joined})
        found = {id(bucket): max(before[node_of(t)] for t in _local(bucket)) for bucket in buckets}
        if found == ranks:
            return ranks
        ranks = found


def _before(item: Step, joined: Mapping[str, int]) -> dict[str, int]:
    """For each node, the rank of the last sum that it is made of, and one more; `joined`: by tensor, at least that."""
    found: dict[str, int] = {}
    for name in item.graph_index.order:
        rank = 0
        for i in item.graph_index.nodes[name].input:
            before = found.get(node_of(i), 0)
            if not is_control(i) and tensor(i) in joined:
                before = max(before, joined[tensor(i)]) + 1
            rank = max(rank, before)
        found[name] = rank
    return found


def _local(bucket: Bucket) -> Iterable[str]:
    for join in bucket.joins:
        yield from join.local
        if join.weight is not None:
            yield join.weight
