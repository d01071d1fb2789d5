"""The times of the nodes of a traced step, divided between updates of variables and the rest."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autodist.graph.names import node_of
from autodist.graph.step import CapturedStep, Step
from autodist.graph.walks import reach
from autodist.kernels.place.slots import find_slots
from autodist.runs.measuring.copied_step import PREFIX
from autodist.runtime.timeline import start_and_length
from autodist.strategies import synced_variables


@dataclass(frozen=True)
class NodeTimes:
    """The nodes of one step in time.

    Attributes:
        shares: seconds that a node takes, by node. Concurrent nodes share the time equally.
        ends: seconds from the start of the step to the end of a node, by node.
        length: seconds from the start of the first node to the end of the last one.
    """

    shares: Mapping[str, float]
    ends: Mapping[str, float]
    length: float

    @classmethod
    def of(cls, stats: Any, nodes: Container[str]) -> NodeTimes:
        """Returns the times in a trace; those of nodes that TensorFlow has added count for the node in their name."""
        events = sorted(_events(stats), key=lambda event: event.start)
        first = events[0].start if events else 0.0
        ends: dict[str, float] = {}
        shares: dict[str, float] = {}
        for event, share in zip(events, _shares(events), strict=True):
            name = _node_in_name(event.node, nodes)
            shares[name] = shares.get(name, 0.0) + share
            ends[name] = max(ends.get(name, 0.0), event.end - first)
        return cls(shares, ends, max(ends.values(), default=0.0))

    def scaled_to(self, seconds: float) -> NodeTimes:
        """Returns the same trace for a step that takes some seconds."""
        scale = seconds / self.length if self.length else 0.0
        shares = {name: share * scale for name, share in self.shares.items()}
        return NodeTimes(shares, {name: end * scale for name, end in self.ends.items()}, seconds)


class _Event(NamedTuple):
    """The execution of a node, in seconds."""

    node: str
    start: float
    end: float


def _events(stats: Any) -> Iterator[_Event]:
    """Yields the executions of nodes on their devices; on a GPU, those of its streams and not those of their launch."""
    has_streams = any(device.device.endswith(_ALL_STREAMS) for device in stats.dev_stats)
    for device in stats.dev_stats:
        if not has_streams or "GPU" not in device.device or device.device.endswith(_ALL_STREAMS):
            for node in device.node_stats:
                start, length = start_and_length(node)
                name = node.node_name.partition(":")[0].removeprefix(f"{PREFIX}/")
                yield _Event(name, start / 1e6, (start + length) / 1e6)


_ALL_STREAMS = "stream:all"
"""End of the name under which TensorFlow records the kernels of a GPU."""


def _node_in_name(name: str, nodes: Container[str]) -> str:
    """Returns the node whose name begins a name; "" if there is none.

    For example, TensorFlow runs the nodes of a loop's body as "loop/body/_1/product".
    """
    while name and name not in nodes:
        name = name.rpartition("/")[0]
    return name


def _shares(events: Sequence[_Event]) -> list[float]:
    """Returns the seconds of each event, in the order of their starts; concurrent events share the time equally.

    >>> _shares([_Event("a", 0.0, 4.0), _Event("b", 2.0, 4.0)])
    [3.0, 1.0]
    """
    result = [0.0] * len(events)
    running: list[tuple[float, int]] = []
    spent = now = 0.0  # `spent` is the share of an event that has run since the start

    def advance(until: float) -> None:
        nonlocal spent, now
        spent += (until - now) / len(running) if running else 0.0
        now = until

    for k, event in enumerate(events):
        while running and running[0][0] <= event.start:
            advance(running[0][0])
            result[heapq.heappop(running)[1]] += spent
        advance(event.start)
        result[k] = -spent
        heapq.heappush(running, (event.end, k))
    while running:
        advance(running[0][0])
        result[heapq.heappop(running)[1]] += spent
    return result


def medians_of(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each key's values: other processes disturb other nodes in each step."""
    return {key: statistics.median(one[key] for one in measured) for key in measured[0]}


def update_times(
    step: CapturedStep, updated: Mapping[str, Sequence[str]], trace: NodeTimes, estimates: Mapping[str, float]
) -> dict[str, float]:
    """Returns the seconds of the nodes that only update a variable and its slots, by the variable's name.

    Variables without such nodes get an estimate.

    Args:
        step: the step.
        updated: by node, the variables that it updates. If there are several, each has a part by its size.
        trace: the times of the nodes.
        estimates: estimated seconds of the update of each synchronized variable.
    """
    mapped = {name for names in updated.values() for name in names}
    seconds = {name: 0.0 if name in mapped else estimate for name, estimate in estimates.items()}
    # The assumed rate may be too low for this machine.
    scale = min(1.0, trace.length / total) if (total := sum(seconds.values())) else 1.0
    seconds = {name: estimate * scale for name, estimate in seconds.items()}
    sizes = {variable.name: max(1, variable.byte_size) for variable in step.variables}
    for node, share in trace.shares.items():
        names = updated.get(node, ())
        for name in names:
            seconds[name] += share * sizes[name] / sum(sizes[other] for other in names)
    return seconds


def updated_variables(step: CapturedStep, rewritten: Step) -> dict[str, tuple[str, ...]]:
    """Maps each node that only updates one variable and its slots to this variable.

    A node that writes several variables, such as a conditional update of all, is mapped to these.
    """
    graph_index, owner = rewritten.graph_index, _owners(step)
    needed = reach(_results(step), step.graph_index.data.__getitem__)
    needed |= reach(_results(rewritten), graph_index.data.__getitem__)
    updated: dict[str, tuple[str, ...]] = {}
    one: dict[str, str | None] = {}  # by node, the only variable that it leads to; None: others or several
    for name in reversed(graph_index.order):
        written = graph_index.effects[name].writes if name in graph_index.effects else frozenset()
        reached = {owner.get(handle) for handle in written} or {one[reader] for reader in graph_index.readers(name)}
        one[name] = next(iter(reached)) if len(reached) == 1 else None
        if name not in needed and (written or one[name] is not None):
            updated[name] = tuple(sorted(filter(None, reached)))
    return updated


def _owners(step: CapturedStep) -> dict[str, str]:
    """Maps the handles of the synchronized variables and of their slots to the names of the variables."""
    found = {slot.handle: name for name, slots in find_slots(step).items() for slot in slots}
    return found | {step.by_name[variable.name].handle: variable.name for variable in synced_variables(step)}


def _results(step: Step) -> Iterator[str]:
    """Yields the nodes of the outputs and of the gradients that a step has."""
    tensors = (*step.outputs, *(t for gradient in step.gradients for t in gradient.tensors))
    return (node_of(t) for t in tensors if node_of(t) in step.graph_index.nodes)


def ready_times(step: Step, ends: Mapping[str, float], otherwise: float = 0.0) -> dict[str, float]:
    """Returns the moment when the last gradient of each synchronized variable exists, by name.

    Args:
        step: the step.
        ends: ends of nodes. A node without one, which TensorFlow has merged with others, ends with the last source.
        otherwise: the moment if a kernel has removed the node of the gradient, for example by compiling the step.
    """
    known: dict[str, float] = {}
    for name in step.graph_index.order:
        sources = (known.get(source, 0.0) for source in step.graph_index.data[name])
        known[name] = ends[name] if name in ends else max(sources, default=0.0)
    ready: dict[str, float] = {}
    for gradient in step.gradients:
        found = max(known.get(node_of(t), otherwise) for t in gradient.tensors)
        ready[gradient.variable] = max(ready.get(gradient.variable, 0.0), found)
    return ready
