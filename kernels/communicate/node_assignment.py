"""Node assignment: the worker that runs each node of the part that runs once, and the tensors that workers exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.effects import Effect
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import ReplicatedStep
from autodist.kernels.context import Context

Owners = frozenset[int]
NOBODY: Owners = frozenset()

EVERYWHERE = -1
"""Stands, among the owners of the inputs of a node, for inputs that every worker has."""

Workers = int
"""A set of workers as a bit mask: bit k stands for worker k. One pass over the graph with bit masks covers all workers;
a walk per worker would cost workers × nodes."""


@dataclass(frozen=True)
class NodeAssignment:
    """The nodes that each worker runs of the part that runs once, and the tensors that it needs from other workers.

    Attributes:
        runs: by node, the workers that run it.
        tensors: name, the worker that has the tensor, and the workers that need it from there; sorted by name.
    """

    runs: Mapping[str, Workers]
    tensors: Sequence[tuple[str, int, frozenset[int]]]

    def by(self, worker: int) -> frozenset[str]:
        """Returns the nodes that a worker runs."""
        bit = 1 << worker
        return frozenset(name for name, workers in self.runs.items() if workers & bit)


def assign_nodes(
    step: ReplicatedStep,
    effects: Mapping[str, Effect],
    owner: Mapping[str, int],
    private: Mapping[str, Owners],
    brought: Mapping[str, int],
    context: Context,
) -> NodeAssignment:
    """Assigns nodes to workers: walks from each worker's roots (its writes and outputs) to their inputs.

    Args:
        step: the step.
        effects: the effects of its nodes.
        owner: the owner of each owned variable, by handle.
        private: the workers that have all inputs of a node (see `WorkerPart`).
        brought: the worker that has the gradient behind each tensor that the part that runs once reads.
        context: the worker for which the step is rewritten.
    """
    return _Walk(step, effects, owner, private, brought, context).run()


def only_other(private: Mapping[str, Owners], name: str, me: int) -> int | None:
    """Returns the only worker that has all inputs of a node, if it is not worker `me`."""
    holders = private.get(name, NOBODY)
    only = next(iter(holders)) if len(holders) == 1 else me
    return only if only not in (me, EVERYWHERE) else None


def once(step: ReplicatedStep) -> list[str]:
    """Returns the nodes that run once, in topological order."""
    return sorted(step.stages.once, key=step.stages.order.__getitem__)


class _Walk:
    """Implements `assign_nodes`: one pass for all workers, each node once, after all its consumers."""

    def __init__(
        self,
        step: ReplicatedStep,
        effects: Mapping[str, Effect],
        owner: Mapping[str, int],
        private: Mapping[str, Owners],
        brought: Mapping[str, int],
        context: Context,
    ) -> None:
        self._step, self._effects, self._owner, self._private = step, effects, owner, private
        self._brought, self._every = brought, sum(1 << worker for worker in context.group.everyone)
        self._outputs = step.outputs if context.reduces_outputs else ()
        self._runs: dict[str, Workers] = {}
        self._new: dict[str, Workers] = {}
        self._of_holder: dict[str, Workers] = {}
        self._of_reduction: dict[str, Workers] = {}

    def run(self) -> NodeAssignment:
        for output in self._outputs:
            self._request(self._of_holder, output, self._others(node_of(output)))
        for name, workers in self._roots():
            self._enter(name, workers)
        while self._new:  # repeats only if a loop has a back edge
            for name in reversed(self._step.graph_index.order):
                workers = self._new.pop(name, 0)
                if workers:
                    self._visit(name, workers)
        return NodeAssignment(self._runs, self._tensors())

    def _tensors(self) -> list[tuple[str, int, frozenset[int]]]:
        found = []
        for name in sorted(self._of_holder.keys() | self._of_reduction.keys()):
            of_reduction = self._of_reduction.get(name, 0)
            of_holder = self._of_holder.get(name, 0) & ~of_reduction
            if of_reduction:
                found.append((name, self._brought[name], _members(of_reduction)))
            if of_holder:
                found.append((name, next(iter(self._private[node_of(name)])), _members(of_holder)))
        return found

    def _visit(self, name: str, workers: Workers) -> None:
        """Records the inputs of a node that workers need to run it."""
        for i in self._step.graph_index.nodes[name].input:
            source, need = node_of(i), workers
            if not is_control(i) and tensor(i) in self._brought:
                far = need & ~_bit(self._brought[tensor(i)])
                self._request(self._of_reduction, tensor(i), far)
                need &= ~far
            others = need & self._others(source) & ~self._writers(source)
            if not is_control(i):
                self._request(self._of_holder, tensor(i), others)
            if source in self._private:
                self._enter(source, need & ~others)

    def _enter(self, name: str, workers: Workers) -> None:
        new = workers & ~self._runs.get(name, 0)
        if new:
            self._runs[name] = self._runs.get(name, 0) | new
            self._new[name] = self._new.get(name, 0) | new

    def _request(self, requested: dict[str, Workers], name: str, workers: Workers) -> None:
        if workers:
            requested[name] = requested.get(name, 0) | workers

    def _roots(self) -> Iterator[tuple[str, Workers]]:
        """Yields the nodes that workers run as roots: writes of variables they hold, and outputs of the step."""
        for name in once(self._step):
            if name in self._effects:
                yield name, self._writers(name)
        for name in (*map(node_of, self._outputs), *self._step.targets):
            effect = self._effects.get(name)
            if not (effect and effect.writes):
                yield name, self._every & ~self._others(name)

    def _others(self, name: str) -> Workers:
        """Returns the workers that lack a node if a single other worker has all its inputs."""
        holders = self._private.get(name, NOBODY)
        if len(holders) != 1 or EVERYWHERE in holders:
            return 0
        return self._every & ~_bit(*holders)

    def _writers(self, name: str) -> Workers:
        """Returns the workers that hold all variables that a node writes."""
        effect = self._effects.get(name)
        if not (effect and effect.writes):
            return 0
        owners = {self._owner[handle] for handle in effect.writes if handle in self._owner}
        return self._every if not owners else _bit(*owners) if len(owners) == 1 else 0


def _bit(worker: int) -> Workers:
    """Returns the bit mask of one worker; the empty set for `EVERYWHERE`."""
    return 0 if worker == EVERYWHERE else 1 << worker


def _members(workers: Workers) -> frozenset[int]:
    return frozenset(k for k, digit in enumerate(reversed(bin(workers)[2:])) if digit == "1")
