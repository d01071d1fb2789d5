"""The search of `Auto`: plans as combinations of builders, then changes of single variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autodist import synchronizers
from autodist.compressors import Compressor
from autodist.errors import StrategyError
from autodist.logs.formatting import counted, readable_bytes
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce import AllReduce
from autodist.strategies.base import BuildsStrategy, make_strategy, workers_with_replicas
from autodist.strategies.build_strategy import call_builder
from autodist.strategies.diloco import DiLoCo
from autodist.strategies.fsdp import FSDP
from autodist.strategies.loads import worker_bandwidths
from autodist.strategies.nodes import pieces
from autodist.strategies.partitioned_ps import PartitionedPS
from autodist.strategies.plan_cost import CostModel, Prediction
from autodist.strategies.plan_loads import Load, Row
from autodist.strategies.ps import PS
from autodist.strategies.ps_load_balancing import PSLoadBalancing
from autodist.strategies.recompute import recomputed_blocks
from autodist.strategies.registry import find_builder
from autodist.strategies.sharded_all_reduce import ShardedAllReduce
from autodist.strategies.sum_summary import milliseconds
from autodist.strategies.uneven_partitioned_ps import UnevenPartitionedPS
from autodist.strategies.variables import GradientLike, GraphLike, SyncedVariable, VariableLike, synced_variables
from autodist.synchronizers import synchronizers_of

CHANGED = 64
"""Number of variables, the largest ones, that are changed one at a time."""

GAIN = 0.002
"""Least fraction of the predicted time by which a change of a variable must shorten it."""

LOSSY_GAIN = 0.05
"""Least fraction of the predicted time that a plan which changes the result must save."""

LISTED = 10
"""Number of plans in the result."""

BUILDERS: Mapping[str, BuildsStrategy] = {
    "AllReduce": AllReduce(),
    "ShardedAllReduce": ShardedAllReduce(),
    "PS": PS(),
    "PSLoadBalancing": PSLoadBalancing(),
    "PartitionedPS": PartitionedPS(),
}
"""The builders for dense variables."""

OF_TABLES = ("AllReduce", "PS", "PSLoadBalancing", "PartitionedPS")
"""Those for sparse variables."""

Nodes = Mapping[str, strategy_pb2.VariableNode]
"""By the variable's name."""


@dataclass(frozen=True)
class Plan:
    """A plan for all variables.

    Attributes:
        name: name of the builder, or of the builders.
        nodes: the nodes of the variables.
        load: the sum of the variables' loads.
        model: predicts the time.
        prefetch: as in the strategy.
        recomputes: True if activations are computed again, because of too little memory.
    """

    name: str
    nodes: Nodes
    load: Load
    model: CostModel = field(repr=False)
    prefetch: int = 0
    recomputes: bool = False

    @cached_property
    def prediction(self) -> Prediction:
        """The predicted time of a step, and the memory."""
        return self.model.predict(self.load)

    @property
    def is_lossy(self) -> bool:
        """True if it does not have the result of one device."""
        return any(map(_is_lossy, self.nodes.values()))

    @property
    def is_changeable(self) -> bool:
        """True if single variables may be changed: not if all are gathered by layer, or any makes local steps."""
        ways = (one for node in self.nodes.values() for one in synchronizers_of(node))
        return not self.prefetch and not any(isinstance(one, synchronizers.AllReduce) and one.local for one in ways)

    def with_tables(self, other: Plan) -> Plan:
        """Returns the plan with the nodes of another one for the sparse variables."""
        name = self.name if self.name == other.name else f"{self.name}, tables by {other.name}"
        return Plan(name, {**self.nodes, **other.nodes}, self.load + other.load, self.model)


@dataclass(frozen=True)
class _Part:
    """A step with some of its variables."""

    variables: Sequence[VariableLike]
    gradients: Sequence[GradientLike]

    @classmethod
    def of(cls, graph_item: GraphLike, names: Collection[str]) -> _Part:
        return cls(graph_item.variables, [one for one in graph_item.gradients if one.variable in names])


def choose(
    graph_item: GraphLike,
    spec: ResourceSpec,
    allow: Collection[str] = (),
    more: Sequence[str] = (),
    recomputes: bool = False,
) -> strategy_pb2.Strategy:
    """Returns the plan with the shortest predicted step among those that fit into memory, with its reasons.

    Args:
        graph_item: the captured step.
        spec: the machines, with measurements.
        allow: kinds of plans that change the result; see `Auto`.
        more: names of further builders.
        recomputes: True if the backward pass computes activations again under every plan.

    Raises:
        StrategyError: no plan fits into memory, or a builder of `more` failed.
    """
    if recomputes:
        spec = spec.with_measurements(replace(spec.measurements.recomputing(), recomputation=None))
    return _Search(graph_item, spec, allow, more).choose()


class _Search:
    """One search; see `choose`."""

    def __init__(self, graph_item: GraphLike, spec: ResourceSpec, allow: Collection[str], more: Sequence[str]) -> None:
        self._graph_item, self._spec, self._allow, self._more = graph_item, spec, allow, more
        self._measurements = spec.measurements
        self._variables = synced_variables(graph_item)
        self._by_name = {variable.name: variable for variable in self._variables}
        self._model = CostModel.of(spec, self._variables)
        self._reasons: dict[tuple[object, ...], str] = {}

    def choose(self) -> strategy_pb2.Strategy:
        if len(self._spec.workers) == 1:
            return call_builder(AllReduce(), self._graph_item, self._spec)  # nothing is sent under any plan
        plans = self._different(self._plans())
        if all(map(self._missing, plans)):
            plans = self._different([*plans, *self._smaller(plans)])
        fitting = [plan for plan in plans if not self._missing(plan)]
        if not fitting:
            raise StrategyError(self._no_fit(plans))
        best = min(fitting, key=lambda plan: plan.prediction.seconds * (1 + LOSSY_GAIN * plan.is_lossy))
        alternatives = self._alternatives(plans)
        if best.is_changeable:
            best = self._improved(best, alternatives)
        return self._strategy(best, plans, alternatives)

    # -- whole plans -----------------------------------------------------------------------------------------------

    def _plans(self) -> Iterator[Plan]:
        """Yields the plans that are compared as wholes."""
        dense = [variable.name for variable in self._variables if not variable.is_sparse]
        tables = [variable.name for variable in self._variables if variable.is_sparse]
        builders = self._builders()
        for name, builder in builders.items():
            own = self._plan(name, self._built(builder, dense, self._spec) if dense else {})
            if not tables:
                yield own
                continue
            rest = self._spec.with_owned_bytes(self._owned(own.nodes))
            for of_tables in OF_TABLES:
                if dense or name == of_tables:
                    yield own.with_tables(self._plan(of_tables, self._built(builders[of_tables], tables, rest)))
        if "local_steps" in self._allow:  # of all variables: one update may need the gradients of several
            yield self._plan("DiLoCo", self._built(DiLoCo(), self._by_name, self._spec))
        for name in self._more:
            strategy = call_builder(find_builder(name)(), self._graph_item, self._spec)
            if strategy.HasField("mesh") or strategy.HasField("pipeline"):
                raise OptionError(
                    "builders",
                    f"Auto cannot compare {name}, which divides the model: processes must know that when they start. "
                    f"Use `builder: {name}`, or remove it from `builders`.",
                )
            yield self._plan(name, {node.variable: node for node in strategy.nodes}, strategy.prefetch)

    def _smaller(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """Yields plans that need less memory, and are slower: they send parameters again, or recompute activations."""
        if len(workers_with_replicas(self._spec)) > 1:
            strategy = call_builder(FSDP(), self._graph_item, self._spec)
            sharded = self._plan("FSDP", {node.variable: node for node in strategy.nodes}, strategy.prefetch)
            yield sharded
            plans = [*plans, sharded]
        if self._measurements.recomputation is not None:
            model = CostModel.of(self._spec.with_measurements(self._measurements.recomputing()), self._variables)
            for plan in plans:
                yield replace(plan, name=f"{plan.name}, recomputed", model=model, recomputes=True)

    def _different(self, plans: Iterable[Plan]) -> list[Plan]:
        """Returns the plans by their predicted times, the first one of equal plans."""
        found: dict[tuple[bytes, bool], Plan] = {}
        for plan in plans:
            nodes = make_strategy("", self._spec, self._variables, plan.nodes.values())
            found.setdefault((nodes.SerializeToString(deterministic=True), plan.recomputes), plan)
        return sorted(found.values(), key=lambda plan: plan.prediction.seconds)

    def _builders(self) -> dict[str, BuildsStrategy]:
        builders = dict(BUILDERS)
        if len(set(worker_bandwidths(self._spec))) > 1:
            builders["UnevenPartitionedPS"] = UnevenPartitionedPS()
            fastest = int(np.argmax([float(rate) for rate in worker_bandwidths(self._spec)]))
            builders["PS"] = PS(owner=fastest)
        if "compressor" in self._allow:
            builders["AllReduce in bfloat16"] = AllReduce(compressor=Compressor.named("BFLOAT16")())
        for kind in ("INT8", "FLOAT8"):
            if kind in self._allow:
                compressor = Compressor.named(kind)()
                builders[f"AllReduce in {kind}"] = AllReduce(compressor=compressor)
                builders[f"ShardedAllReduce, values in {kind}"] = ShardedAllReduce(value_compressor=compressor)
        if "staleness" in self._allow:
            builders["PSLoadBalancing, one step old"] = PSLoadBalancing(staleness=1)
        return builders

    def _built(self, builder: BuildsStrategy, names: Collection[str], spec: ResourceSpec) -> Nodes:
        strategy = call_builder(builder, _Part.of(self._graph_item, set(names)), spec)
        return {node.variable: node for node in strategy.nodes}

    def _owned(self, nodes: Nodes) -> list[int]:
        """Returns the bytes that each worker owns, those of earlier steps included."""
        owned = list(self._spec.owned_bytes or [0] * len(self._spec.workers))
        for name, node in nodes.items():
            for piece, synchronizer in pieces(self._by_name[name], node):
                if synchronizer.owner is not None:
                    owned[synchronizer.owner] += piece.byte_size
        return owned

    def _plan(self, name: str, nodes: Nodes, prefetch: int = 0) -> Plan:
        load = self._model.loads.empty()
        for variable, node in nodes.items():
            self._add(load, variable, node)
        return Plan(name, nodes, load, self._model, prefetch)

    def _add(self, load: Load, name: str, node: strategy_pb2.VariableNode, times: float = 1.0) -> None:
        for row, column, amount in self._model.loads.entries(self._by_name[name], node):
            # Whole bytes: sums are then exact, so that changes leave no residue.
            load[row, column] += times * (amount if row == Row.WORK else round(amount))

    def _with(self, load: Load, name: str, before: strategy_pb2.VariableNode, after: strategy_pb2.VariableNode) -> Load:
        """Returns the load with another node of a variable."""
        changed = load.copy()
        self._add(changed, name, before, -1.0)
        self._add(changed, name, after)
        return changed

    # -- memory ----------------------------------------------------------------------------------------------------

    def _missing(self, plan: Plan) -> int:
        """Returns the bytes that the plan needs beyond the memory of a worker, of the one that lacks most."""
        memory = self._measurements.memory
        lacks = [held - of for held, of in zip(plan.prediction.held, memory, strict=False) if of]
        return max(0, *lacks) if lacks else 0

    def _no_fit(self, plans: Sequence[Plan]) -> str:
        least = min(plans, key=self._missing)
        memory = self._measurements.memory
        worker = max(range(len(memory)), key=lambda k: least.prediction.held[k] - memory[k])
        return (
            f"No plan fits into the memory of {self._spec.workers[worker].name}: {least.name}, which needs least, "
            f"needs {readable_bytes(least.prediction.held[worker])} there (activations: "
            f"{readable_bytes(least.model.spec.measurements.activations)}), and it has "
            f"{readable_bytes(memory[worker])}. Use a smaller batch or layers to `recompute` for the activations, more "
            "workers for the variables, or `builder: Mesh` or `Pipeline`, which divide the layers."
        )

    # -- single variables ------------------------------------------------------------------------------------------

    def _alternatives(self, plans: Sequence[Plan]) -> dict[str, list[strategy_pb2.VariableNode]]:
        """Returns the different nodes of each variable in the plans whose variables may be changed one at a time."""
        found: dict[str, dict[bytes, strategy_pb2.VariableNode]] = {name: {} for name in self._by_name}
        for plan in plans:
            if plan.is_changeable:
                for name, node in plan.nodes.items():
                    found[name].setdefault(node.SerializeToString(deterministic=True), node)
        return {name: list(nodes.values()) for name, nodes in found.items()}

    def _improved(self, plan: Plan, alternatives: Mapping[str, Sequence[strategy_pb2.VariableNode]]) -> Plan:
        """Returns the plan with the largest variables changed, one at a time, as long as the predicted time falls."""
        largest = sorted(self._variables, key=lambda variable: -variable.byte_size)[:CHANGED]
        nodes, best = dict(plan.nodes), plan
        for variable in largest:
            for node in alternatives[variable.name]:
                load = self._with(best.load, variable.name, nodes[variable.name], node)
                other = replace(best, load=load)
                gain = LOSSY_GAIN if _is_lossy(node) else GAIN
                if other.prediction.seconds < (1 - gain) * best.prediction.seconds and not self._missing(other):
                    nodes[variable.name], best = node, other
        count = sum(nodes[name] is not plan.nodes[name] for name in nodes)
        return replace(best, nodes=nodes, name=f"{plan.name}, {counted(count, 'variable')} changed") if count else plan

    def _reason(
        self, variable: SyncedVariable, plan: Plan, alternatives: Sequence[strategy_pb2.VariableNode]
    ) -> strategy_pb2.Reason:
        """Returns the cost of a variable in the plan, and that of its runner-up; variables of one form share them."""
        node, facts = plan.nodes[variable.name], self._model.facts
        form = _kind(node), variable.shape, variable.dtype, variable.is_sparse, facts.slots.get(variable.name)
        if form not in self._reasons:
            self._reasons[form] = self._compared(variable, plan, alternatives)
        return strategy_pb2.Reason(variable=variable.name, text=self._reasons[form])

    def _compared(self, variable: SyncedVariable, plan: Plan, alternatives: Sequence[strategy_pb2.VariableNode]) -> str:
        node = plan.nodes[variable.name]
        others = {
            _kind(other): plan.model.predict(self._with(plan.load, variable.name, node, other)).seconds
            for other in alternatives
            if _kind(other) != _kind(node)
        }
        text = f"{_kind(node)}: {'sparse' if variable.is_sparse else 'dense'}, {readable_bytes(variable.byte_size)}"
        if not others:
            return text
        runner_up = min(others, key=lambda kind: others[kind])
        more = others[runner_up] - plan.prediction.seconds
        return f"{text}; {runner_up} would take {milliseconds(abs(more))} {'more' if more >= 0 else 'less'} a step"

    # -- the result ------------------------------------------------------------------------------------------------

    def _strategy(
        self, best: Plan, plans: Sequence[Plan], alternatives: Mapping[str, Sequence[strategy_pb2.VariableNode]]
    ) -> strategy_pb2.Strategy:
        strategy = make_strategy("Auto", self._spec, self._variables, best.nodes.values())
        strategy.prefetch = best.prefetch
        compared = [best, *(plan for plan in plans if plan is not best)]
        strategy.choice.alternatives.extend(
            strategy_pb2.Alternative(
                name=plan.name,
                seconds=plan.prediction.seconds,
                sent=plan.prediction.sent,
                held=max(plan.prediction.held),
                exceeds_memory=bool(self._missing(plan)),
            )
            for plan in compared[:LISTED]
        )
        strategy.choice.terms.extend(
            strategy_pb2.Term(name=name, seconds=seconds) for name, seconds in best.prediction.terms.items()
        )
        strategy.choice.reasons.extend(
            self._reason(variable, best, alternatives[variable.name]) for variable in self._variables
        )
        strategy.choice.basis, strategy.choice.compared = self._basis(), len(compared)
        if best.recomputes:
            strategy.choice.recomputes = True
            strategy.recomputed_blocks.extend(recomputed_blocks(True, strategy, self._graph_item))
        return strategy

    def _basis(self) -> str:
        """Describes the origin of the times."""
        network, step = self._model.network, self._measurements.step
        links = f"links measured {network.measured_at}" if network.measured_at else "assumed links"
        if step is None:
            return f"{links}, no step measured"
        if not self._model.facts.is_measured:
            return f"{links}, a step estimated by its FLOPs ({self._measurements.why_not})"
        return f"{links}, a step of {milliseconds(step.seconds)} measured"


def _is_lossy(node: strategy_pb2.VariableNode) -> bool:
    return any(one.inexact is not None for one in synchronizers_of(node))


def _kind(node: strategy_pb2.VariableNode) -> str:
    """Returns the kind of a node for sentences: "all-reduce", "PS", "PS in shards"."""
    first = node.shards[0] if node.shards else node
    kind = "all-reduce" if first.HasField("all_reduce") else "PS"
    return f"{kind} in shards" if node.shards else kind
