"""A network model: the bytes, messages and links that a bucket uses, and the time for them.

The numbers follow from the description of the two algorithms alone, so that a test can compare them with rewritten
graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autodist.placement.group import Group
from autodist.resources import ResourceSpec
from autodist.strategies.subgroups import choose_subgroups, sum_cost
from autodist.synchronizers import Subgroups
from bench.comparisons import Result

RESNET50 = 102_228_128
"""Bytes of ResNet50's gradients."""

ON_PAPER = {16: 1.0, 64: 0.7, 256: 0.5}
"""Number of workers → limit for the time of subgroups, relative to SHUFFLE."""

Link = tuple[int, int]
"""The sending and the receiving worker."""


@dataclass(frozen=True)
class Vector:
    """A vector that is reduced over workers.

    Attributes:
        elements: number of elements; a multiple of `step`.
        element_bytes: bytes of each element.
        step: pieces are multiples of it, in elements.
        whole_bytes: a vector of at most this size is not divided.
    """

    elements: int
    element_bytes: int
    step: int
    whole_bytes: int

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def goes_whole(self) -> bool:
        return self.bytes <= self.whole_bytes

    def cut(self, count: int) -> list[Vector]:
        steps = self.elements // self.step
        lengths = [(steps // count + (k < steps % count)) * self.step for k in range(count)]
        return [Vector(length, self.element_bytes, self.step, self.whole_bytes) for length in lengths]


def messages(vector: Vector, group: Group, subgroups: Subgroups | None) -> list[tuple[Link, int]]:
    """Returns all messages of the reduction of one vector over a group: link and bytes of each."""
    readers = sorted(group.everyone)
    found = _by_all(vector, readers, group.workers) if subgroups is None else _in_subgroups(vector, subgroups)
    return [(link, size) for link, size in found if link[0] != link[1]]


def by_link(
    sent: Sequence[tuple[Link, int]],
) -> tuple[Counter[Link], Counter[Link]]:
    """Returns the messages and bytes of each link."""
    count: Counter[Link] = Counter()
    size: Counter[Link] = Counter()
    for link, bytes_ in sent:
        count[link] += 1
        size[link] += bytes_
    return count, size


def _by_all(vector: Vector, readers: Sequence[int], owners: Sequence[int]) -> Iterator[tuple[Link, int]]:
    if len(readers) <= 2 or vector.goes_whole:
        yield from (((source, to), vector.bytes) for source in owners for to in readers)
        return
    for owner, piece in zip(owners, vector.cut(len(owners)), strict=True):
        yield from (((source, owner), piece.bytes) for source in owners)
        yield from (((owner, to), piece.bytes) for to in readers)


def _in_subgroups(vector: Vector, subgroups: Subgroups) -> Iterator[tuple[Link, int]]:
    if vector.goes_whole:
        for number, group in enumerate(subgroups.groups):
            yield from (((source, to), vector.bytes) for source in group.workers for to in group.everyone)
            others = [to for other in subgroups.groups if other is not group for to in other.everyone]
            yield from (((subgroups.sender(number, to), to), vector.bytes) for to in others)
        return
    for rank, piece in enumerate(vector.cut(subgroups.ranks)):
        for group in subgroups.groups:
            yield from (((source, group.workers[rank]), piece.bytes) for source in group.workers)
            yield from (((group.workers[rank], to), piece.bytes) for to in group.everyone)
        yield from _by_all(piece, subgroups.across(rank), subgroups.across(rank))


def compare_sums_on_paper() -> list[Result]:
    """Compares the reduction of ResNet50's gradients at 25 Gbit/s in subgroups and by all workers, one worker per
    machine.
    """
    results = []
    for workers, most in ON_PAPER.items():
        nodes = [
            {"address": f"10.0.{k // 256}.{k % 256}", "cpus": [0], "chief": not k, "network_bandwidth": 25}
            for k in range(workers)
        ]
        spec = ResourceSpec.from_dict({"nodes": nodes})
        numbers = choose_subgroups(spec, RESNET50, is_asked=True)
        subgroups = Subgroups.of(numbers, Group.of_workers(range(workers)))
        ours, peer = sum_cost(subgroups, spec, RESNET50), sum_cost(None, spec, RESNET50)
        seconds, others = (f"{1000 * cost.seconds:.0f} ms" for cost in (ours, peer))
        note = f"on paper; {ours.calls} workers called, {ours.messages * ours.buckets} messages, of {peer.calls} and "
        note += f"{peer.messages * peer.buckets} by SHUFFLE"
        what = f"resnet50, sums on {workers} workers"
        results.append(Result("growth", what, seconds, others, ours.seconds / peer.seconds, most, note))
    return results
