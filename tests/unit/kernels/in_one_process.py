"""Many workers in one process: their rewritten graphs share one session, without servers.

A direct session has one device, so devices are cleared, and each worker's nodes have a name of their own. TensorFlow
identifies a variable or a queue by its worker and its `shared_name`; here the worker becomes part of the `shared_name`.
All workers' steps then run in one `session.run`, and queues carry the same tensors as between machines. In place of the
endless loops of `runtime.inbox_loops`, each run moves one message to each inbox.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.batch.examples import share_of, take
from autodist.capture.function import CapturedFunction, capture_function
from autodist.compressors import Compressor
from autodist.compressors.values import ValueCode
from autodist.graph.imported import ImportedGraph
from autodist.graph.names import node_of
from autodist.graph.step import ALL_EXAMPLES, EXAMPLES, Step
from autodist.kernels import Context, rewrite
from autodist.kernels.base import Kernel
from autodist.kernels.pipeline import KERNELS
from autodist.kernels.pipelined.place_stages import PlaceStages
from autodist.kernels.plan import CACHED_COPY, LOCAL_COPY
from autodist.kernels.registry import registered_kernels
from autodist.kernels.replicate.replicate import Replicate
from autodist.kernels.shard.holders import HoldInRows, HoldOnMesh
from autodist.kernels.shard.shard_tensors import ShardTensors
from autodist.placement.holder import Holder
from autodist.placement.partitioning import Partitioning, part_name, shard_name
from autodist.proto import strategy_pb2
from autodist.sharding import Axis, Mesh, Sharding
from autodist.strategies.mesh_data import nodes_in_slices, nodes_with_slots_in_slices, owners_in_rows
from autodist.synchronizers import LocalSteps, mesh_of
from tests.unit.kernels.in_one_session import in_one_session, task_of_device, transfers_of
from tests.unit.kernels.parts_of_values import Values, in_shards, joined, part_of, values_in_row
from tests.unit.kernels.without_stacks import without_stacks

Batch = Sequence[np.ndarray]


def capture(
    step: Callable[..., object],
    *examples: np.ndarray | tf.TensorSpec,
    jit_compile: bool = False,
    is_global: bool = False,
    is_whole: bool = False,
    is_split: bool = False,
) -> CapturedFunction:
    """Captures a step whose arguments of rank 1 and more are split along their first axis."""
    specs, axes = [], []
    for example in examples:
        shape = list(example.shape)
        axes.append(0 if shape else None)
        specs.append(tf.TensorSpec([None, *shape[1:]] if shape else [], example.dtype))
    captured = capture_function(step, tuple(specs), axes, jit_compile, is_split=is_split)
    return replace(captured, step=replace(captured.step, is_global=is_global, is_whole=is_whole))


def capture_one_weight() -> CapturedFunction:
    """Captures a step that trains one variable, "weight", for tests that do not depend on the model."""
    weight = tf.Variable(np.ones(2), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    return capture(step, np.ones((1, 2)))


def plan(
    step: Step,
    workers: int = 1,
    replicas: int = 1,
    owners: Mapping[str, int] | None = None,
    compressor: Compressor | None = None,
    servers: int = 0,
    *,
    one_machine: bool = False,
    local: Mapping[str, LocalSteps] | None = None,
    **options: Any,
) -> strategy_pb2.Strategy:
    """A strategy with `replicas` CPUs a worker: variables in `owners` by parameter server, the others by SHUFFLE.

    Behind these workers come `servers` more that run no replica; `options` are those of the parameter servers. The
    variables in `local` make local steps.
    """
    said = None if compressor is None else compressor.to_message()
    nodes = []
    for name in dict.fromkeys(g.variable for g in step.gradients):
        if owners and name in owners:
            server = strategy_pb2.ParameterServer(owner=owners[name], **options)
            nodes.append(strategy_pb2.VariableNode(variable=name, parameter_server=server))
        else:
            steps = local[name].to_message() if local and name in local else None
            shuffle = strategy_pb2.AllReduce(spec=strategy_pb2.AllReduce.SHUFFLE, compressor=said, local=steps)
            nodes.append(strategy_pb2.VariableNode(variable=name, all_reduce=shuffle))
    devices = [strategy_pb2.Replica(worker=w, device=f"cpu:{k}") for w in range(workers) for k in range(replicas)]
    config = strategy_pb2.GraphConfig(replicas=devices, workers=workers + servers, one_machine=one_machine)
    return strategy_pb2.Strategy(nodes=nodes, graph_config=config)


def on_mesh(
    step: Step,
    sizes: Mapping[str, int],
    layouts: Mapping[str, str],
    data: str = "data",
    devices: int = 1,
    slots: Collection[str] = (),
    **options: Any,
) -> strategy_pb2.Strategy:
    """A strategy for a mesh of workers with some devices; `layouts` are the text forms of the variables' shardings.

    The data axis divides the slots of the variables `slots`.
    """
    workers = math.prod(sizes.values()) // devices
    strategy = plan(step, workers, devices, **options)
    strategy.graph_config.workers = workers
    shardings = {name: Sharding.parse(text) for name, text in layouts.items()}
    if slots or any(data in sharding.used() for sharding in shardings.values()):
        places = [place.worker for place in strategy.graph_config.replicas]
        owners = owners_in_rows(Mesh(tuple(Axis(*one) for one in sizes.items())), places, data)
        owned = nodes_in_slices(step, shardings, data, owners) | nodes_with_slots_in_slices(step, slots, owners)
        for node in strategy.nodes:
            node.CopyFrom(owned.get(node.variable, node))
    strategy.mesh.CopyFrom(
        strategy_pb2.Mesh(
            axes=[strategy_pb2.MeshAxis(name=name, size=size) for name, size in sizes.items()],
            data=data if data in sizes else "",
            places=strategy.graph_config.replicas,
            variables=[
                strategy_pb2.VariableSharding(variable=name, sharding=text, origin="a test")
                for name, text in layouts.items()
            ],
        )
    )
    return strategy


def rewritten(
    captured: CapturedFunction, strategy: strategy_pb2.Strategy, kernels: Sequence[Kernel] = KERNELS
) -> list[Step]:
    """Returns the step of every worker, with the holders that variables have within it."""
    workers = range(Context(strategy, 0).workers)
    kernels = [one for one in kernels if not isinstance(one, HoldOnMesh)]
    return rewritten_by(captured.step, [Context(strategy, worker) for worker in workers], kernels)


def rewritten_by(step: Step, contexts: Sequence[Context], kernels: Sequence[Kernel]) -> list[Step]:
    """Returns the step of every worker.

    The steps of workers differ only from Replicate on, or from PlaceStages on in a pipeline, as the records in
    `tests/replay` show. The kernels before run once, which saves a third of the time, or two thirds. On a mesh, the
    holders of variables differ before, by row: ShardTensors, which takes most of the time, runs once for equal holders.
    """
    first = contexts[0]
    apart = PlaceStages if first.goes_through_stages(step) else Replicate
    if first.mesh is not None:
        apart = HoldInRows
    alike = () if registered_kernels() else tuple(itertools.takewhile(lambda k: not isinstance(k, apart), kernels))
    with without_stacks():
        step, rest = rewrite(step, first, kernels=alike), kernels[len(alike) :]
        if first.mesh is None or not alike:
            return [rewrite(step, context, kernels=rest) for context in contexts]
        last = next(k for k, kernel in enumerate(rest) if isinstance(kernel, ShardTensors))
        held = [rewrite(step, context, kernels=rest[:last]) for context in contexts]
        divided = _divided(held, contexts)
        return [rewrite(one, context, kernels=rest[last + 1 :]) for one, context in zip(divided, contexts, strict=True)]


def _divided(held: Sequence[Step], workers: Sequence[Context]) -> list[Step]:
    """Returns the results of ShardTensors for steps of workers that differ in their holders alone."""
    made: list[tuple[Mapping[str, Holder], Step]] = []
    for step, worker in zip(held, workers, strict=True):
        if all(step.holders != holders for holders, _ in made):
            made.append((step.holders, rewrite(step, worker, kernels=[ShardTensors()])))
    return [next(one for holders, one in made if holders == step.holders) for step in held]


@dataclass(frozen=True)
class Trained:
    """The results of several steps.

    Attributes:
        variables: by name, on each worker; a variable that one worker holds is only in that worker's.
        outputs: of each step, on each worker.
        partitionings: of partitioned variables.
    """

    variables: list[Values]
    outputs: list[list[list[np.ndarray]]]
    partitionings: Mapping[str, Partitioning] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    strategy: strategy_pb2.Strategy | None = None

    @property
    def bits(self) -> list[bytes]:
        """The bits of all variables and outputs."""
        held = [values[name].tobytes() for values in self.variables for name in sorted(values)]
        return held + [one.tobytes() for step in self.outputs for mine in step for one in mine]

    def variable(self, name: str) -> np.ndarray:
        """Returns the value of a variable; all workers that hold it have the same bits."""
        if name in self.partitionings:
            cut = self.partitionings[name]
            return np.concatenate([self.variable(shard_name(name, k)) for k in range(len(cut.sizes))], cut.axis)
        if name in self.shardings and self.strategy is not None:
            mesh, parts = mesh_of(self.strategy), self._at_places(name, self.strategy)
            whole = joined(parts, self.shardings[name], mesh)
            for place, mine in parts.items():
                own = part_of(whole, self.shardings[name], mesh, place)
                np.testing.assert_array_equal(mine, own, err_msg=name)
            return whole
        found = [values[name] for values in self.variables if name in values]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0], err_msg=name)
        return found[0]

    def _at_places(self, name: str, strategy: strategy_pb2.Strategy) -> dict[int, np.ndarray]:
        """The part of a divided variable at each place that has one; a worker may hold it for several places."""
        mesh, found = mesh_of(strategy), {}
        axes = [axis for along in self.shardings[name].axes for axis in along]
        for place, device in enumerate(strategy.mesh.places):
            coordinates = Context(strategy, device.worker).coordinates
            first = next(k for k, other in enumerate(coordinates) if mesh.index(other, axes) == mesh.index(place, axes))
            if (part := self.variables[device.worker].get(part_name(name, first))) is not None:
                found[place] = part
        return found


def train(captured: CapturedFunction, strategy: strategy_pb2.Strategy, batches: Sequence[Batch]) -> Trained:
    """Runs the steps of all workers, from the values that the script's variables have, on global batches."""
    session = Session(captured, strategy)
    with session.session:
        return session.train(batches)


class Session:
    """All workers of a run in one session."""

    def __init__(
        self,
        captured: CapturedFunction,
        strategy: strategy_pb2.Strategy,
        kernels: Sequence[Kernel] = KERNELS,
        is_optimized: bool = False,
    ) -> None:
        self.captured, self.strategy = captured, strategy
        self.steps = rewritten(captured, strategy, kernels)
        names = [v.name for v in captured.step.variables]
        whole = {name: source.numpy() for name, source in zip(names, captured.sources, strict=True)}
        first = self.steps[0]
        self.partitionings = {name: cut for name, cut in first.partitionings.items() if name in whole}
        initial = in_shards(whole, self.partitionings)
        if strategy.HasField("mesh"):  # `_part` divides whole values
            initial |= whole
        self.graph = ImportedGraph()
        self._transfers = [transfers_of(step) for step in self.steps]
        for worker, step in enumerate(self.steps):
            self.graph.import_nodes(in_one_session(step.graph_def), f"worker_{worker}")
        with self.graph.as_default(), without_stacks():
            self.handles = [self._handles(worker) for worker in range(len(self.steps))]
            self._assign = [
                tf.raw_ops.AssignVariableOp(resource=handle, value=self._part(worker, name, initial))
                for worker, handles in enumerate(self.handles)
                for name, handle in handles.items()
                if self._whole(worker, name) in initial
            ] + [
                tf.raw_ops.AssignVariableOp(resource=self.graph.get_tensor_by_name(copy), value=code.rounded(value))
                for copy, name, code in self.copies()
                for value in [tf.constant(initial[name])]
            ]
            self._initializers = [
                self.graph.get_operation_by_name(f"worker_{worker}/{name}")
                for worker, step in enumerate(self.steps)
                for name in step.initializers.values()
            ]
            self._read = [
                {
                    name: self._read_own(worker, name, handle)
                    for name, handle in handles.items()
                    if self._whole(worker, name) in initial
                }
                for worker, handles in enumerate(self.handles)
            ]
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4, intra_op_parallelism_threads=1)
        # It takes longer than these small steps.
        config.graph_options.rewrite_options.disable_meta_optimizer = not is_optimized
        self.session = tf.compat.v1.Session(graph=self.graph, config=config)

    def train(self, batches: Sequence[Batch], limit_ms: int = 60_000) -> Trained:
        """Sets all variables to the script's values and runs a step a batch; one that hangs fails.

        Called again, it begins again.
        """
        self.start()
        outputs = []
        for number, batch in enumerate(batches, 1):
            outputs.append(self.step(batch, limit_ms))
            self._run_outer_steps(number, limit_ms)
        values, shardings = self.session.run(self.reads), self.steps[0].shardings
        if not self.strategy.HasField("mesh"):
            return Trained(values, outputs, self.partitionings, shardings, self.strategy)
        in_rows = [values_in_row(values, Context(self.strategy, k), self.partitionings) for k in range(len(values))]
        return Trained(in_rows, outputs, {}, shardings, self.strategy)

    def fetch_once(self, batch: Batch, names: Sequence[str], limit_ms: int = 60_000) -> list[np.ndarray]:
        """Runs one step from the script's values; returns the tensors `names` of it ("worker_0/x:0")."""
        self.start()
        return self._run(batch, names, limit_ms)[2]

    def trace_once(self, batch: Batch, limit_ms: int = 60_000) -> dict[str, tuple[int, int]]:
        """Runs one step from the script's values; returns when each node began and ended ("worker_0/x"), in ns."""
        metadata = tf.compat.v1.RunMetadata()
        self.start()
        self._run(batch, (), limit_ms, metadata)
        return {
            node.node_name: (began, began + node.op_end_rel_nanos)
            for device in metadata.step_stats.dev_stats
            for node in device.node_stats
            for began in [node.all_start_nanos]
        }

    def start(self) -> None:
        """Sets all variables to the script's values."""
        self.session.run([self._assign, self._initializers])

    @property
    def reads(self) -> list[dict[str, tf.Tensor]]:
        """The tensors that read the variables, by name, on each worker that holds them."""
        return [{name: read for name, read in own.items() if read is not None} for own in self._read]

    def step(self, batch: Batch, limit_ms: int = 60_000) -> list[list[np.ndarray]]:
        """Runs one step; returns the outputs of each worker."""
        return self._run(batch, (), limit_ms)[0]

    def _run(
        self,
        batch: Batch,
        names: Sequence[str],
        limit_ms: int,
        metadata: tf.compat.v1.RunMetadata | None = None,
    ) -> list[list]:
        """The outputs of each worker's step, its targets, and the tensors `names`; a trace, if `metadata` takes it."""
        feeds = {}
        for worker, step in enumerate(self.steps):
            feeds.update(self._feeds(worker, step, batch))
        options = tf.compat.v1.RunOptions(timeout_in_ms=limit_ms)
        if metadata is not None:
            options.trace_level = tf.compat.v1.RunOptions.FULL_TRACE
        return self.session.run([*self._of_step, list(names)], feeds, options=options, run_metadata=metadata)

    @cached_property
    def _of_step(self) -> tuple[list[list[str]], list[tf.Operation]]:
        """The outputs of each worker's step, and the other nodes that a step runs."""
        fetches, targets = [], []
        for worker, step in enumerate(self.steps):
            fetches.append([f"worker_{worker}/{name}" for name in returned_by(step)])
            run = (*step.targets, *step.background_nodes, *step.standing_nodes, *self._transfers[worker])
            targets += [self.graph.get_operation_by_name(f"worker_{worker}/{name}") for name in run]
        return fetches, targets

    def _run_outer_steps(self, number: int, limit_ms: int) -> None:
        """Runs the outer steps that are due after `number` steps; all workers have the same ones."""
        for key, outer in self.steps[0].outer_steps.items():
            if number % outer.every == 0:
                targets = [
                    self.graph.get_operation_by_name(f"worker_{worker}/{name}")
                    for worker, step in enumerate(self.steps)
                    for name in (*step.outer_steps[key].nodes, *transfers_of(step, key))
                ]
                self.session.run(targets, options=tf.compat.v1.RunOptions(timeout_in_ms=limit_ms))

    def _feeds(self, worker: int, step: Step, batch: Batch) -> dict[str, object]:
        axes = self.captured.step.inputs
        count = next((len(value) for value, axis in zip(batch, axes.values(), strict=True) if axis is not None), 0)
        replicas = [r.worker for r in Context(self.strategy, worker).replicas]
        share = share_of(count, replicas, worker)
        present = step.graph_index.nodes
        fed: dict[str, object] = {
            f"worker_{worker}/{name}": value
            if axis is None
            else take(value, axis, share_of(value.shape[axis], replicas, worker))
            for (name, axis), value in zip(axes.items(), batch, strict=True)
        }
        if node_of(EXAMPLES) in present:
            fed[f"worker_{worker}/{EXAMPLES}"] = share.size
        if node_of(ALL_EXAMPLES) in present:
            fed[f"worker_{worker}/{ALL_EXAMPLES}"] = count
        return fed

    def _whole(self, worker: int, name: str) -> str:
        """The name of the variable of which a worker holds a part under a name, or the name."""
        step = self.steps[worker]
        _, handle = step.part_of(step.by_name[name].handle)
        return step.by_handle[handle].name

    def _part(self, worker: int, name: str, values: Values) -> np.ndarray:
        """The value of a variable, or of the part that a worker holds on a mesh under a name."""
        step, context, whole = self.steps[worker], Context(self.strategy, worker), self._whole(worker, name)
        coordinate, _ = step.part_of(step.by_name[name].handle)
        place = context.coordinates[coordinate] if context.mesh is not None else 0
        for variable, cut in self.partitionings.items() if context.mesh is not None else ():
            shards = [shard_name(variable, k) for k in range(len(cut.sizes))]
            if whole in shards:
                sharding, value = step.shardings.get(variable), values[variable]
                part = value if sharding is None else part_of(value, sharding, context.mesh, place)
                return np.split(part, cut.starts[1:], cut.axis)[shards.index(whole)]
        sharding = step.shardings.get(whole)
        if sharding is None or context.mesh is None:
            return values[whole]
        return part_of(values[whole], sharding, context.mesh, place)

    def _handles(self, worker: int) -> dict[str, tf.Tensor]:
        present = {node.name for node in self.steps[worker].graph_def.node}
        return {
            v.name: self.graph.get_tensor_by_name(f"worker_{worker}/{v.handle}:0")
            for v in self.steps[worker].variables
            if v.handle in present
        }

    def copies(self) -> Iterator[tuple[str, str, ValueCode]]:
        """The handle of each copy that a worker has, the variable's name, and the code of the copy's value."""
        for worker, step in enumerate(self.steps):
            present = {node.name for node in step.graph_def.node}
            for variable in step.variables:
                for suffix in (CACHED_COPY, LOCAL_COPY):
                    copy = f"autodist{suffix}/{variable.handle}"
                    if copy in present:
                        encoding = step.slices[variable.name].copy(suffix).encoding
                        code = ValueCode.of(encoding, variable.shape, variable.dtype)
                        yield f"worker_{worker}/{copy}:0", variable.name, code

    def _read_own(self, worker: int, name: str, handle: tf.Tensor) -> tf.Tensor | None:
        """The value of a variable, if this worker holds it."""
        variable = self.steps[worker].by_name[name]
        node = next(n for n in self.steps[worker].graph_def.node if n.name == variable.handle)
        if task_of_device(node.device) != worker:
            return None
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)


def returned_by(step: Step) -> list[str]:
    """The outputs that are the script's."""
    return list(step.outputs[:-1] if step.counts_examples else step.outputs)


def one_device(captured: CapturedFunction, step: Callable[..., object], batches: Sequence[Batch]) -> Trained:
    """Returns the results of the script itself with the same batches, run eagerly; then restores its variables."""
    before = [source.numpy() for source in captured.sources]
    outputs = [[[np.asarray(t) for t in tf.nest.flatten(step(*map(tf.constant, batch)))]] for batch in batches]
    values = {v.name: s.numpy() for v, s in zip(captured.step.variables, captured.sources, strict=True)}
    for source, value in zip(captured.sources, before, strict=True):
        source.assign(value)
    return Trained([values], outputs)


def assert_same(found: Trained, expected: Trained, rtol: float = 1e-12) -> None:
    """All variables, and the outputs of every step, agree; workers hold equal bits."""
    for name, value in expected.variables[0].items():
        scale = max(1.0, np.abs(value).max(initial=0.0))
        np.testing.assert_allclose(found.variable(name), value, rtol=rtol, atol=rtol * scale, err_msg=name)
    for number, (outputs, (wanted,)) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        for mine in outputs:
            for position, (one, other) in enumerate(zip(mine, wanted, strict=True)):
                np.testing.assert_allclose(
                    one, other, rtol=rtol, atol=rtol, err_msg=f"output {position} of step {number}"
                )
