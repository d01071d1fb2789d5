"""Plans a captured training step under strategies, without a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, prod

import tensorflow as tf

from autodist.batch.examples import share_of
from autodist.cli.planned_steps import PlannedSteps
from autodist.cli.plans import LinkPlan, PlannedStrategy, ShardPlan, SlotPlan, VariablePlan, WorkerPlan
from autodist.cli.recomputed_blocks import RecomputedBlockPlan, without_recomputed
from autodist.graph.activations import activation_bytes
from autodist.graph.flops import flops_of_nodes, with_inferred_shapes
from autodist.graph.gradient_rows import gradient_rows
from autodist.graph.ops import Trait, having
from autodist.graph.partial_count import PartialCount
from autodist.graph.recomputation import Block
from autodist.graph.recomputation_costs import recomputation_costs
from autodist.graph.step import CapturedStep
from autodist.kernels import Context, rewrite
from autodist.kernels.place.assign_owners import find_holders
from autodist.kernels.place.slots import find_slots
from autodist.placement.group import Group
from autodist.placement.holder import Holder, Slice
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.runs.log_strategy import figures_of
from autodist.runs.memory_needs import bytes_of_slices, outer_momentum_bytes
from autodist.runs.mesh_costs import MeshCosts, mesh_costs
from autodist.runs.stage_costs import Rewriting, StageCosts, costs_of
from autodist.strategies import (
    SyncedVariable,
    errors_with_place,
    find_mesh,
    find_pipeline,
    link_bytes,
    sums_by_worker,
    synced_variables,
)
from autodist.strategies.choice_table import ChoiceFigures
from autodist.strategies.cost import Link, sent_in_stage_group
from autodist.strategies.mesh_table import MeshFigures
from autodist.strategies.nodes import pieces
from autodist.strategies.pipeline import MODEL
from autodist.strategies.strategy_file import strategy_yaml
from autodist.strategies.sum_summary import sum_summary
from autodist.strategies.table import synchronizer_text
from autodist.synchronizers import mesh_of, partitioning_of, stages_of, workers_of_stages


class PlannedStep:
    """A captured step on given machines.

    Args:
        step: the step, under the session's names.
        spec: the machines.
        shapes: the shapes of its inputs in the first batch on one device.
        rehearses: True if the step is all that will run, so that it can be rewritten.
    """

    def __init__(
        self, step: CapturedStep, spec: ResourceSpec, shapes: Mapping[str, Sequence[int]], rehearses: bool
    ) -> None:
        self._step, self._spec, self._rehearses = step, spec, rehearses
        self._global_shapes, self._shapes = shapes, _of_the_chief(step, shapes, spec.replica_workers)
        inferred = with_inferred_shapes(step, sorted(step.named), self._shapes)
        self._rows, self._flops = gradient_rows(step, self._shapes), count_flops(inferred)
        self._activations = None if self._flops is None else activation_bytes(step, inferred)
        self._global_rows = gradient_rows(step, shapes)
        self._synced = {variable.name: variable for variable in synced_variables(step)}
        self._slots = find_slots(step)
        self._names = [worker.name for worker in spec.workers]

    def plan(self, name: str, steps: PlannedSteps, names: Mapping[str, str], shown_as: str = "") -> PlannedStrategy:
        """Returns the plan of the step under a strategy.

        Args:
            name: the name of the strategy; "": the script's.
            steps: plans the script's steps under the strategy; this step is the next.
            names: maps each variable to its name in the session.
            shown_as: the step's name.

        Raises:
            StrategyError, RewriteError: the strategy is not possible for this step.
        """
        strategy, step = steps.next(self._step, names, self._shapes)
        seen, context = Rewriting(), Context(strategy, 0)
        if self._rehearses:
            with errors_with_place(steps.builder):
                rewrite(step, context, "plan", also=seen)  # raises what the kernels refuse
        named = name or f"{strategy.builder} (the script's)"
        if strategy.HasField("mesh"):
            costs = self._mesh_costs(context, step, seen, steps, names)
            if strategy.pipeline.stages:
                of_stages = costs_of(step, context, self._global_shapes, seen)
                return self._of_pipeline_on_mesh(named, shown_as, steps, costs, of_stages)
            return self._on_mesh(named, shown_as, steps, costs)
        held = held_bytes(step, strategy, len(self._names))
        if strategy.pipeline.stages:
            return self._of_pipeline(
                named, shown_as, strategy, held, costs_of(step, context, self._global_shapes, seen)
            )
        return self._of_replicas(named, shown_as, strategy, held)

    def _of_replicas(
        self, name: str, shown_as: str, strategy: strategy_pb2.Strategy, held: Sequence[int]
    ) -> PlannedStrategy:
        """Returns the plan of a step that each replica computes for its part of the batch."""
        sent: Counter[Link] = Counter()
        variables = []
        for node in strategy.nodes:
            variable = self._synced[node.variable]
            rows = self._rows.get(variable.name)
            own = link_bytes(variable, node, strategy.graph_config, rows or 0)
            variables.append(self._variable(variable, node, rows, sums_by_worker(own, len(self._names))[0]))
            sent.update(own)
        links = {link: PartialCount(count) for link, count in sent.items()}
        of_workers = [replica.worker for replica in strategy.graph_config.replicas]
        replicas = [of_workers.count(worker.index) for worker in self._spec.workers]
        flops = [None if self._flops is None else self._flops * count // replicas[0] for count in replicas]
        recomputed = recomputed_block_plans(self._step, strategy, self._shapes)
        kept = self._activations and without_recomputed(self._activations, recomputed)
        activations = [kept and PartialCount(kept.count * count // replicas[0], kept.is_least) for count in replicas]
        return PlannedStrategy(
            strategy=name,
            builder=strategy.builder,
            step=shown_as,
            variables=tuple(variables),
            workers=self._workers(held, links, replicas, flops, activations),
            links=self._links(links),
            sums=sum_summary(strategy, self._step, self._spec),
            recomputed=recomputed,
            choice=ChoiceFigures.of(strategy.choice) if strategy.HasField("choice") else None,
            strategy_file=strategy_yaml(strategy),
        )

    def _mesh_costs(
        self, context: Context, step: CapturedStep, seen: Rewriting, steps: PlannedSteps, names: Mapping[str, str]
    ) -> MeshCosts:
        """Returns the costs on a mesh, and keeps the shardings for later steps.

        Raises:
            StrategyError, RewriteError: the step cannot be sharded.
        """
        workers = [replica.worker for replica in context.replicas]
        with errors_with_place(steps.builder):
            costs = mesh_costs(step, context, _of_the_chief(step, self._global_shapes, workers), seen)
        steps.keep_shardings(costs.sharded.shardings, names)
        return costs

    def _on_mesh(self, name: str, shown_as: str, steps: PlannedSteps, costs: MeshCosts) -> PlannedStrategy:
        """Returns the plan of a step on a mesh: each worker holds parts, and computes on parts."""
        strategy, figures = costs.strategy, self._mesh_figures(steps, costs)
        parts = {part.name: part for part in figures.variables}
        of_workers = [place.worker for place in strategy.mesh.places]
        replicas = [of_workers.count(worker.index) for worker in self._spec.workers]
        parts_of_batch = [len(Context(strategy, worker.index).local_replicas) for worker in self._spec.workers]
        variables = []
        for node in strategy.nodes:
            sent, _ = sums_by_worker(costs.sums[node.variable], len(self._names))
            found = self._variable(self._synced[node.variable], node, costs.rows.get(node.variable), sent)
            part = parts[node.variable]
            shards = (ShardPlan(owner=None, shape=part.part_shape),)
            synchronizer = found.synchronizer if any(sent) else "none"
            update = {"sharding": part.text, "shards": shards, "synchronizer": synchronizer}
            variables.append(found.model_copy(update=update))
        return PlannedStrategy(
            strategy=name,
            builder=strategy.builder,
            step=shown_as,
            variables=tuple(variables),
            workers=self._workers(
                [costs.held(worker.index) for worker in self._spec.workers],
                costs.links,
                replicas,
                [None if costs.examples is None else costs.flops.count * count for count in parts_of_batch],
                [None if costs.examples is None else costs.activations * count for count in parts_of_batch],
            ),
            links=self._links(costs.links),
            mesh=figures,
        )

    def _mesh_figures(self, steps: PlannedSteps, costs: MeshCosts) -> MeshFigures:
        """Returns the figures of a mesh, with the patterns of the builder that match no variable."""
        builder = find_mesh(steps.builder) or find_pipeline(steps.builder)
        unmatched = [] if builder is None else builder.unmatched(variable.name for variable in self._step.variables)
        return costs.figures([repr(pattern) for pattern in unmatched])

    def _of_pipeline_on_mesh(
        self, name: str, shown_as: str, steps: PlannedSteps, costs: MeshCosts, of_stages: StageCosts | None
    ) -> PlannedStrategy:
        """Returns the plan of pipelines that are the rows of a mesh: a worker computes a part of its stage."""
        strategy, figures = costs.strategy, self._mesh_figures(steps, costs)
        held = [costs.held(worker.index) for worker in self._spec.workers]
        made = self._of_pipeline(name, shown_as, strategy, held, of_stages)
        links = costs.links
        for (source, reader), count in ({} if of_stages is None else of_stages.links).items():
            for shift in range(mesh_of(strategy).sizes[MODEL]):  # the pipelines of all rows send the same
                link = source + shift, reader + shift
                links[link] = links.get(link, PartialCount()) + count
        parts = {part.name: part for part in figures.variables}
        of_parts = {variable.name: variable for variable in synced_variables(costs.sharded)}
        variables = []
        for node in strategy.nodes:
            part, found = parts[node.variable], self._of_stage(node, strategy, of_parts[node.variable])
            shards = tuple(shard.model_copy(update={"shape": part.part_shape}) for shard in found.shards)
            whole = {"shape": part.shape, "bytes": part.bytes, "sharding": part.text, "shards": shards}
            variables.append(found.model_copy(update=whole))
        replicas = [worker.replicas for worker in made.workers]
        flops, none = [worker.flops for worker in made.workers], [None] * len(self._names)
        workers = self._workers(held, links, replicas, flops, none)
        update = {"variables": tuple(variables), "workers": workers, "links": self._links(links), "mesh": figures}
        return made.model_copy(update=update)

    def _of_pipeline(
        self, name: str, shown_as: str, strategy: strategy_pb2.Strategy, held: Sequence[int], costs: StageCosts | None
    ) -> PlannedStrategy:
        """Returns the plan of a pipeline: a worker computes its stage, and the graph determines the transfers."""
        links = {} if costs is None else costs.links
        figures = figures_of(strategy, self._step, self._names, held, costs)
        stage_of_worker = {name: stage for stage in figures.stages for name in stage.workers}
        flops = [stage_of_worker[name].flops(figures.micro_batches) for name in self._names]
        none = [None] * len(self._names)  # they depend on the order of the micro-batches
        return PlannedStrategy(
            strategy=name,
            builder=strategy.builder,
            step=shown_as,
            variables=tuple(self._of_stage(node, strategy) for node in strategy.nodes),
            workers=self._workers(held, links, [figures.micro_batches] * len(self._names), flops, none),
            links=self._links(links),
            pipeline=figures,
        )

    def _of_stage(
        self, node: strategy_pb2.VariableNode, strategy: strategy_pb2.Strategy, part: SyncedVariable | None = None
    ) -> VariablePlan:
        """Returns the plan of a variable of a stage; the stage's workers exchange its gradient for their examples.

        Args:
            node: of the variable.
            strategy: a strategy with stages.
            part: the part of the variable that a worker of the stage holds; None: all of it.
        """
        stages, variable = stages_of(strategy), part or self._synced[node.variable]
        group = stages.group_of(node.parameter_server.owner)
        global_rows = self._global_rows.get(variable.name)
        rows = None if global_rows is None else ceil(global_rows / group.size)
        places = sum(len(one.workers) for one in stages.groups)
        step, row = (sent.by_worker(places) for sent in sent_in_stage_group(variable, group))
        parts = len(self._names) // places
        sent = tuple(step[k // parts] + row[k // parts] * (rows or 0) for k in range(len(self._names)))
        found, stage = self._variable(variable, node, rows, sent), stages.stage_of(group.workers[0])
        first, *others = (self._names[worker] for worker in workers_of_stages(strategy)[stage])
        holders = {"owner": first, "mates": tuple(others)}
        shards = tuple(shard.model_copy(update=holders) for shard in found.shards)
        return found.model_copy(update={"synchronizer": f"stage {stage}", "shards": shards})

    def _variable(
        self, variable: SyncedVariable, node: strategy_pb2.VariableNode, rows: int | None, sent: tuple[int, ...]
    ) -> VariablePlan:
        cut = partitioning_of(node)
        return VariablePlan(
            name=variable.name,
            shape=variable.shape,
            dtype=variable.dtype,
            bytes=variable.byte_size,
            gradient="sparse" if variable.is_sparse else "dense",
            rows=rows,
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

    def _links(self, links: Mapping[Link, PartialCount]) -> tuple[LinkPlan, ...]:
        return tuple(
            LinkPlan(source=self._names[source], target=self._names[target], bytes=sent.count, is_least=sent.is_least)
            for (source, target), sent in sorted(links.items(), key=lambda one: one[0])
        )

    def _workers(
        self,
        held: Sequence[int],
        links: Mapping[Link, PartialCount],
        replicas: Sequence[int],
        flops: Sequence[int | None],
        activations: Sequence[PartialCount | None],
    ) -> tuple[WorkerPlan, ...]:
        sent, received = sums_by_worker({link: one.count for link, one in links.items()}, len(self._names))
        return tuple(
            WorkerPlan(
                name=name,
                replicas=replicas[index],
                sent=sent[index],
                received=received[index],
                is_least=any(one.is_least for link, one in links.items() if index in link),
                held=held[index],
                flops=flops[index],
                activations=activations[index],
            )
            for index, name in enumerate(self._names)
        )


def recomputed_block_plans(
    step: CapturedStep, strategy: strategy_pb2.Strategy, shapes: Mapping[str, Sequence[int]]
) -> tuple[RecomputedBlockPlan, ...]:
    """Returns the plans of the blocks that a strategy recomputes.

    Args:
        step: the captured step.
        strategy: the strategy.
        shapes: the shapes of the step's inputs on one worker, by name.
    """
    blocks = [Block(one.name, tuple(one.scopes)) for one in strategy.recomputed_blocks]
    if not blocks:
        return ()
    graph = with_inferred_shapes(step, sorted(step.named), shapes)
    return tuple(
        RecomputedBlockPlan(name=one.block, bytes=one.bytes, flops=one.flops, kept=one.kept)
        for one in recomputation_costs(step, blocks, graph, flops_of_nodes(graph))
    )


def held_bytes(step: CapturedStep, strategy: strategy_pb2.Strategy, workers: int) -> list[int]:
    """Returns the bytes that each worker holds between two steps: variables, slots, copies, and outer momentum."""
    holders: Mapping[str, Holder] = find_holders(step, strategy) if workers > 1 else {}
    slices: list[tuple[int, Slice | None]] = []
    for variable in step.variables:
        holder = holders.get(variable.name) or Holder.whole(variable.shape, Group.all_workers(workers))
        slices += [(prod(one.shape) * variable.dtype.size, one) for one in holder.slices]
    return bytes_of_slices(slices, outer_momentum_bytes(step, strategy), workers)


def _of_the_chief(
    step: CapturedStep, shapes: Mapping[str, Sequence[int]], replica_workers: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the inputs in the chief's part of the first batch; `shapes` are those on one device.

    An input that the script feeds as one worker's own part keeps its shape. `replica_workers` has the worker of each
    replica.
    """
    if not step.is_global:
        return {name: tuple(shape) for name, shape in shapes.items()}
    found = {}
    for name, shape in shapes.items():
        axis, lengths = step.inputs.get(name), list(shape)
        if axis is not None and lengths:
            share = share_of(lengths[axis], replica_workers, 0)
            lengths[axis] = share.size
        found[name] = tuple(lengths)
    return found


_INPUTS = having(Trait.FED | Trait.ITERATOR_GET)


def count_flops(graph: tf.Graph) -> int | None:
    """Counts the FLOPs of a step by `flops_of_nodes`, without ops that lack a formula or a shape.

    A loop body counts once.

    Args:
        graph: the step, with the shapes that follow from those of its inputs.

    Returns:
        None if the shape of a fed or iterator-produced tensor is not known.
    """
    inputs = [t for op in graph.get_operations() if op.type in _INPUTS for t in op.outputs]
    if not all(tensor.shape.is_fully_defined() for tensor in inputs):
        return None
    return PartialCount.of(flops_of_nodes(graph).values()).count
