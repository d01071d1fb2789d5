"""The import passes change no bit of what a step computes on one device, whatever is annotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.capture.function import CapturedFunction
from autodist.graph.imported import ImportedGraph
from autodist.graph.step import CapturedStep
from autodist.graph.verify import verify
from autodist.kernels import Context, run_pipeline
from autodist.kernels.pipeline import IMPORT_PASSES
from autodist.sharding import (
    OPEN,
    WHOLE,
    Annotations,
    Constraint,
    Dim,
    ManualRegion,
    Mesh,
    Origin,
    Sharding,
    ShardingGroup,
)
from tests.unit.kernels.in_one_process import capture, plan

SIZE = 4
MESHES = (Mesh.of({"a": 2, "b": 2}), Mesh.of({"a": 2, "b": 1, "c": 2}), Mesh.of({"a": 4}))


@dataclass(frozen=True)
class Line:
    """One line of a drawn step: an operation, and the positions of the values that it takes, from the last one."""

    does: str
    first: int
    second: int


def _loop(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h) + b), (0, a))[1]


OPERATIONS: dict[str, Callable[[tf.Tensor, tf.Tensor, Mapping[str, tf.Tensor]], tf.Tensor]] = {
    "sum": lambda a, b, _: 0.5 * (a + b),
    "product": lambda a, b, _: tf.tanh(a) @ tf.tanh(b),
    "constant": lambda a, _, shared: a + shared["constant"],
    "mask": lambda a, _, shared: tf.where(shared["mask"], a, shared["filled"]),
    "scaled": lambda a, b, shared: a * tf.fill([SIZE, SIZE], tf.reduce_mean(b)) + shared["constant"],
    "constraint": lambda a, _, __: tf.identity(a, name="constraint"),
    "chain": lambda a, _, __: tf.identity(tf.identity(a, name="constraint"), name="constraint"),
    "loop": lambda a, b, _: _loop(a, b),
    "cond": lambda a, b, _: tf.cond(tf.reduce_sum(a) > 0, lambda: a + 1.0, lambda: b * 0.5),
    "weight": lambda a, _, shared: a @ shared["weight"],
    "assign": lambda a, _, shared: shared["state"].assign(0.5 * shared["state"] + 0.1 * tf.tanh(a)) * 1.0,
}

LINES = st.lists(
    st.builds(Line, st.sampled_from(sorted(OPERATIONS)), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6
)


def captured_step(lines: Sequence[Line]) -> CapturedFunction:
    weight = tf.Variable(np.linspace(-0.5, 0.5, SIZE * SIZE).reshape(SIZE, SIZE), name="weight")
    state = tf.Variable(np.linspace(0.1, 0.4, SIZE * SIZE).reshape(SIZE, SIZE), name="state", trainable=False)
    momentum = tf.Variable(np.zeros([SIZE, SIZE]), name="momentum", trainable=False)

    @tf.autograph.experimental.do_not_convert
    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        positions = tf.range(SIZE)
        shared = {
            "constant": tf.constant(np.linspace(0.1, 0.9, SIZE * SIZE).reshape(SIZE, SIZE)),
            "mask": positions[:, None] >= positions,
            "filled": tf.fill([SIZE, SIZE], tf.constant(-1.0, tf.float64)),
            "weight": weight,
            "state": state,
        }
        with tf.GradientTape() as tape:
            values = [tf.reshape(x, [SIZE, SIZE]), weight * 2.0]
            for line in lines:
                first, second = (values[-1 - k % len(values)] for k in (line.first, line.second))
                values.append(OPERATIONS[line.does](first, second, shared))
            loss = tf.reduce_sum(values[-1]) + tf.reduce_mean(values[1] @ values[0])
        momentum.assign(0.9 * momentum + tape.gradient(loss, weight))
        weight.assign_sub(0.01 * momentum)
        return loss, values[-1]

    return capture(step, np.zeros([SIZE, SIZE]))


@st.composite
def shardings(draw: st.DrawFn, mesh: Mesh) -> Sharding:
    """A sharding of a matrix: each axis divides one dimension, or none."""
    at = {name: draw(st.sampled_from([0, 1, None])) for name in mesh.names}
    dims = []
    for k in range(2):
        axes = tuple(name for name in draw(st.permutations(mesh.names)) if at[name] == k)
        dims.append(Dim(axes, draw(st.booleans())) if axes else draw(st.sampled_from([OPEN, WHOLE])))
    free = [name for name, k in at.items() if k is None]
    return Sharding(tuple(dims), tuple(free[: draw(st.integers(0, 1))]))


@st.composite
def drawn_annotations(draw: st.DrawFn, step: CapturedStep) -> Annotations:
    """Annotations of variables, of Identity nodes and of tensors of a step, on a drawn mesh that some of them carry."""
    mesh = draw(st.sampled_from(MESHES))

    def constraint(line: int) -> Constraint:
        return Constraint(draw(shardings(mesh)), Origin(f"train.py:{line}"), draw(st.sampled_from([None, mesh])))

    matrices = [v.name for v in step.variables if v.shape == (SIZE, SIZE)]
    marked = [node.name for node in step.graph_index.of_op("Identity") if node.name.startswith("constraint")]
    square = [f"{name}:0" for name, node in step.graph_index.nodes.items() if node.op in ("AddV2", "MatMul", "Mul")]
    square = [name for name in square if step.spec_of(name).shape == (SIZE, SIZE)]
    groups = {k: tuple(draw(st.lists(st.sampled_from([*matrices, *square]), min_size=1, max_size=3))) for k in range(2)}
    variables = {name: constraint(1) for name in matrices if draw(st.booleans())}
    return Annotations(
        {"mesh": mesh, "other": mesh},
        variables=variables,
        constraints={name: constraint(k) for k, name in enumerate(marked) if draw(st.integers(0, 3))},
        groups={k: ShardingGroup(members, (Origin("cluster.yml"),)) for k, members in groups.items()},
    )


def run(captured: CapturedFunction, step: CapturedStep, batches: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Runs a step on one device, from the values of the script's variables; returns its outputs, then the variables."""
    values = [source.numpy() for source in captured.sources]
    graph = ImportedGraph()
    graph.import_nodes(step.graph_def)
    with graph.as_default(), tf.name_scope("around"):
        handles = [graph.get_tensor_by_name(f"{v.handle}:0") for v in step.variables]
        writes = [tf.raw_ops.AssignVariableOp(resource=h, value=v) for h, v in zip(handles, values, strict=True)]
        dtypes = [v.dtype for v in step.variables]
        reads = [tf.raw_ops.ReadVariableOp(resource=h, dtype=d) for h, d in zip(handles, dtypes, strict=True)]
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # half of the time of a small step
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(writes)
        fed = next(iter(step.inputs))
        targets = [graph.get_operation_by_name(name) for name in step.targets]
        found = [session.run([list(step.outputs), targets], {fed: batch})[0] for batch in batches]
        return [*found, session.run(reads)]


PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(LINES, st.data())
def test_imported_steps_compute_the_same_bits(part, lines, data):
    captured = captured_step([Line(sorted(OPERATIONS)[part], 0, 1), *lines])
    step = replace(captured.step, annotations=data.draw(drawn_annotations(captured.step)))
    context = Context(plan(step, 1, 4), 0)
    imported = run_pipeline(IMPORT_PASSES, step, context)
    verify(imported, step)
    assert run_pipeline(IMPORT_PASSES[:5], imported, context).graph_def == imported.graph_def
    batches = [np.random.default_rng(0).normal(size=(SIZE, SIZE))]
    for found, expected in zip(run(captured, imported, batches), run(captured, step, batches), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_region_is_imported_without_a_change_of_values():
    captured = captured_step([Line("chain", 0, 0), Line("constant", 0, 0), Line("constraint", 0, 0)])
    names = [node.name for node in captured.step.graph_index.of_op("Identity") if node.name.startswith("constraint")]
    entry, exit_ = names[1], names[2]
    body = [name for name in captured.step.graph_index.consumers[entry] if name != exit_]
    mesh = MESHES[0]
    own = {name: Constraint(Sharding.parse("[a, –]"), Origin("train.py:7")) for name in (entry, exit_)}
    region = ManualRegion(("a",), {entry: own[entry]}, {exit_: own[exit_]}, frozenset(body), Origin("train.py:7"))
    step = replace(captured.step, annotations=Annotations({"mesh": mesh}, regions={"f": region}))
    imported = run_pipeline(IMPORT_PASSES, step, Context(plan(step, 1, 4), 0))
    batch = np.random.default_rng(0).normal(size=(SIZE, SIZE))
    for found, expected in zip(run(captured, imported, [batch]), run(captured, step, [batch]), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
