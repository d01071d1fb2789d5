"""Makes the plans of a script: captures its first training step, and asks each strategy for what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autodist.asked import Asked, named_builder
from autodist.cli.flops import count_flops
from autodist.cli.plans import LinkPlan, Plan, ShardPlan, SlotPlan, VariablePlan, WorkerPlan
from autodist.cli.script import Target
from autodist.cli.telling import UsageError
from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.item import GraphItem
from autodist.graph.placement import EVERY_WORKER, Placement
from autodist.kernels import Context, rewrite
from autodist.kernels.place.assign_owners import find_placements
from autodist.look import looking
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runtime.batches import share_of
from autodist.slots import find_slots
from autodist.step_plans import share_names
from autodist.strategies import (
    BuildsStrategy,
    SyncedVariable,
    ask_builder,
    check_strategy,
    link_bytes,
    resolve_specs,
    sums_by_worker,
    synced_variables,
    telling_places,
)
from autodist.strategies.links import Link
from autodist.strategies.nodes import alike_pieces, pieces
from autodist.strategies.table import synchronizer_text
from autodist.strategies.told_sums import told_sums
from autodist.synchronizers import cut_of


def make_plans(target: Target, asked: Asked, strategies: Sequence[str]) -> tuple[tuple[Plan, ...], ResourceSpec]:
    """The plans of a script's first training step, and the machines for which they are.

    The script runs in this process, on one device, up to that step.

    Args:
        target: the script.
        asked: machines in place of the script's; its strategy is not looked at.
        strategies: names of builders or files; none: the script's own.

    Raises:
        UsageError: it makes no AutoDist, or two, or ends before a training step.
        StrategyError, RewriteError: a strategy asks for what cannot be done.
        ScriptFailedError: the script failed by itself.
    """
    target.require()
    with target.as_main():  # a builder of the user's may stand beside the script
        for name in strategies:
            named_builder(name)  # now: the script may take long to come to its step
    look = _PlanningLook(asked, strategies)
    with looking(look):
        try:
            target.run_here()
        except _PlannedError:
            assert look.plans is not None, "it is raised once they are made"
    if look.plans is None:
        raise UsageError(_why_none(target, look.chosen is not None))
    return look.plans, look.spec


class _PlannedError(BaseException):
    """Ends the script, whose first training step has been planned."""


def _why_none(target: Target, was_made: bool) -> str:
    if not was_made:
        return (
            f"{target.name} makes no AutoDist. Wrap its training in `ad = AutoDist()` and `with ad.scope():`, as the "
            "README shows."
        )
    return (
        f"{target.name} ended before a training step of its AutoDist. What it trains has to be built in `with "
        "ad.scope():`, a step of its own needs @ad.function, and a graph ad.create_distributed_session(); pass the "
        "arguments, too, with which it trains."
    )


@dataclass
class _PlanningLook:
    """Lets a script run on one device up to its first step that trains.

    Attributes:
        asked: machines in place of the script's.
        strategies: to be planned; none: the script's own.
        chosen: machines and builder, once the script has made its AutoDist.
        plans: once the script has come to its step.
    """

    asked: Asked
    strategies: Sequence[str]
    chosen: tuple[ResourceSpec, BuildsStrategy] | None = None
    plans: tuple[Plan, ...] | None = None

    @property
    def spec(self) -> ResourceSpec:
        """The machines for which the plans are."""
        assert self.chosen is not None, "the script has made its AutoDist"
        return self.chosen[0]

    def choose(self, spec: ResourceSpec, builder: BuildsStrategy) -> ResourceSpec:
        """One device.

        Raises:
            UsageError: the script has made an AutoDist before.
        """
        if self.chosen is not None:
            raise UsageError(
                "the script makes two AutoDist objects, and it is not known which of them is meant; leave one, and "
                "open its scope() again."
            )
        if spec.is_given:
            raise UsageError(
                "the machines of a given cluster are known when its processes have met; say which to plan for, by "
                "--cluster or --workers."
            )
        self.chosen = spec, builder
        return ResourceSpec.local()

    def comes_to_step(
        self, item: GraphItem, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]], rehearses: bool
    ) -> None:
        """Makes the plans and ends the script; also one that catches that, and comes to another step."""
        if self.plans is None:
            assert self.chosen is not None, "the script has made its AutoDist"
            builders = {name: named_builder(name) for name in self.strategies} or {"": self.chosen[1]}
            step = _Step(share_names(item, names), self.spec, shapes, rehearses)
            self.plans = tuple(step.plan(name, builder) for name, builder in builders.items())
        raise _PlannedError


class _Step:
    """A captured step on some machines.

    Args:
        item: the step, under the session's names.
        spec: the machines.
        shapes: of its inputs, in what one device got of the first batch.
        rehearses: whether the item is all that will run, so that it can be rewritten.
    """

    def __init__(
        self, item: GraphItem, spec: ResourceSpec, shapes: Mapping[str, Sequence[int]], rehearses: bool
    ) -> None:
        self._item, self._spec, self._rehearses = item, spec, rehearses
        shapes = _of_the_chief(item, shapes, spec)
        self._rows, self._flops = gradient_rows(item, shapes), count_flops(item, shapes)
        self._slots = find_slots(item)
        self._names = [worker.name for worker in spec.workers]

    def plan(self, name: str, builder: BuildsStrategy) -> Plan:
        """What a builder makes of it.

        Raises:
            StrategyError, RewriteError: it cannot be done.
        """
        strategy = ask_builder(builder, self._item, self._spec)
        check_strategy(strategy, self._item, self._spec)
        strategy = resolve_specs(strategy, self._item, self._spec)
        if self._rehearses:
            with telling_places(builder):
                rewrite(self._item, Context(strategy, 0), "plan")  # which tells what the kernels refuse
        synced = {variable.name: variable for variable in synced_variables(self._item)}
        links: dict[Link, int] = {}
        variables = []
        for node in strategy.nodes:
            variable = synced[node.variable]
            rows = self._rows.get(variable.name, 0)
            own = {} if strategy.pipeline.stages else link_bytes(variable, node, strategy.graph_config, rows)
            variables.append(self._variable(variable, node, sums_by_worker(own, len(self._names))[0]))
            for link, count in own.items():
                links[link] = links.get(link, 0) + count
        return Plan(
            strategy=name or f"{strategy.builder} (the script's)",
            builder=strategy.builder,
            variables=tuple(variables),
            workers=self._workers(strategy, links),
            links=tuple(
                LinkPlan(source=self._names[source], target=self._names[target], bytes=count)
                for (source, target), count in sorted(links.items())
            ),
            sums=told_sums(strategy, self._item, self._spec),
        )

    def _variable(
        self, variable: SyncedVariable, node: strategy_pb2.VariableNode, sent: tuple[int, ...]
    ) -> VariablePlan:
        cut = cut_of(node)
        return VariablePlan(
            name=variable.name,
            shape=variable.shape,
            dtype=variable.dtype,
            bytes=variable.byte_size,
            gradient="sparse" if variable.is_sparse else "dense",
            rows=self._rows.get(variable.name),
            synchronizer=synchronizer_text(node),
            axis=None if cut is None else cut.axis,
            shards=tuple(
                ShardPlan(
                    owner=None if part.owner is None else self._names[part.owner],
                    shape=piece.shape,
                )
                for piece, part in pieces(variable, node)
            ),
            slots=tuple(SlotPlan(name=slot.name, bytes=slot.byte_size) for slot in self._slots[variable.name]),
            sent=sent,
        )

    def _workers(self, strategy: strategy_pb2.Strategy, links: Mapping[Link, int]) -> tuple[WorkerPlan, ...]:
        sent, received = sums_by_worker(links, len(self._names))
        held = held_bytes(self._item, strategy, len(self._names))
        of_workers = [replica.worker for replica in strategy.graph_config.replicas]
        replicas = [of_workers.count(worker.index) for worker in self._spec.workers]
        flops = (
            None if strategy.pipeline.stages else self._flops
        )  # which stage computes what is not known before it is traced
        return tuple(
            WorkerPlan(
                name=name,
                replicas=replicas[index],
                sent=sent[index],
                received=received[index],
                held=held[index],
                flops=None if flops is None else flops * replicas[index] // replicas[0],
            )
            for index, name in enumerate(self._names)
        )


def held_bytes(item: GraphItem, strategy: strategy_pb2.Strategy, workers: int) -> list[int]:
    """Bytes of variables, slots included, that each worker holds between two steps."""
    placements: Mapping[str, Placement] = find_placements(item, strategy) if workers > 1 else {}
    computing = {replica.worker for replica in strategy.graph_config.replicas}
    everywhere, with_replicas, held = 0, 0, [0] * workers
    for variable in item.variables:
        for shard in placements.get(variable.name, Placement()).shards(variable.shape):
            size = prod(shard.shape) * variable.dtype.size
            if shard.owner == EVERY_WORKER:
                everywhere += size
            else:
                for holder in (shard.owner, *shard.mates):
                    held[holder] += size
    synced = {variable.name: variable for variable in synced_variables(item)}
    for node in strategy.nodes:
        for piece, part, count in alike_pieces(synced[node.variable], node):
            if part.has_proxy and part.owner is not None:
                with_replicas += piece.byte_size * count
                held[part.owner] -= piece.byte_size * count if part.owner in computing else 0
    return [own + everywhere + (with_replicas if k in computing else 0) for k, own in enumerate(held)]


def _of_the_chief(
    item: GraphItem, shapes: Mapping[str, Sequence[int]], spec: ResourceSpec
) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs in the chief's part of the first batch, of which one device got the whole.

    What a script feeds as one worker's own part is that.
    """
    if not item.is_global:
        return {name: tuple(shape) for name, shape in shapes.items()}
    found = {}
    for name, shape in shapes.items():
        axis, lengths = item.inputs.get(name), list(shape)
        if axis is not None and lengths:
            share = share_of(lengths[axis], spec.replica_workers, 0)
            lengths[axis] = share.size
        found[name] = tuple(lengths)
    return found
