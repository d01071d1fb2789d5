"""The YAML files of the examples match their comments."""

from __future__ import annotations

import pathlib
import re

import pytest
import tensorflow as tf

from autodist.graph.parts import Variable, VariableGradient
from autodist.graph.step import CapturedStep
from autodist.resources import ResourceSpec
from autodist.strategies import (
    Mesh,
    Pipeline,
    PlacedBuilder,
    all_reduce_node,
    arranged,
    builder_from_section,
    parameter_server_node,
)

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def test_each_file_is_tested_here() -> None:
    files = {path.name for path in EXAMPLES.glob("*.yml")}
    assert files == {
        "cluster.yml",
        "cluster_ps.yml",
        "cluster_parallax.yml",
        "cluster_own_builder.yml",
        "cluster_pipeline.yml",
        "cluster_mesh.yml",
        "cluster_layout_map.yml",
        "two_hosts.yml",
    }


@pytest.mark.parametrize(
    ("file", "builder"),
    [
        ("cluster.yml", "AllReduce"),
        ("cluster_ps.yml", "PS"),
        ("cluster_parallax.yml", "Parallax"),
        ("cluster_own_builder.yml", "EmbeddingsAtOne"),
    ],
)
def test_a_local_cluster_has_two_workers_of_two_replicas(
    file: str, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script that stands there
    spec = ResourceSpec.from_file(EXAMPLES / file)
    assert [worker.devices for worker in spec.workers] == [("cpu:0", "cpu:1")] * 2
    assert all(node.is_local for node in spec.nodes)
    placed = builder_from_section(spec.strategy)
    assert isinstance(placed, PlacedBuilder)
    assert type(placed.builder).__name__ == builder


def test_the_pipelines_cluster_has_a_worker_of_one_device_for_each_stage_of_each_pipeline() -> None:
    spec = ResourceSpec.from_file(EXAMPLES / "cluster_pipeline.yml")
    builder = builder_from_section(spec.strategy)
    assert [worker.devices for worker in spec.workers] == [("cpu:0",)] * 4
    assert arranged(builder, spec).replica_workers == (0,) * 8
    assert isinstance(builder, PlacedBuilder) and isinstance(builder.builder, Pipeline)
    assert len(builder.builder.stages) == builder.builder.pipelines == 2


def test_the_mesh_s_cluster_has_a_worker_for_each_device_and_divides_each_block_s_matrices() -> None:
    spec = ResourceSpec.from_file(EXAMPLES / "cluster_mesh.yml")
    builder = builder_from_section(spec.strategy)
    assert [worker.devices for worker in spec.workers] == [("cpu:0",)] * 4
    assert isinstance(builder, PlacedBuilder) and isinstance(builder.builder, Mesh)
    assert dict(builder.builder.mesh) == {"data": 2, "model": 2}
    patterns = builder.builder.layouts
    names = [f"block_{k}_{layer}/kernel" for k in (0, 1) for layer in ("attention/query", "up", "down")]
    assert all(any(re.fullmatch(pattern, name) for pattern in patterns) for name in names)


def test_the_layout_map_s_cluster_has_the_axes_that_keras_hub_names_and_no_layouts_of_its_own() -> None:
    spec = ResourceSpec.from_file(EXAMPLES / "cluster_layout_map.yml")
    builder = builder_from_section(spec.strategy)
    assert [worker.devices for worker in spec.workers] == [("cpu:0",)] * 4
    assert isinstance(builder, PlacedBuilder) and isinstance(builder.builder, Mesh)
    assert (dict(builder.builder.mesh), builder.builder.data) == ({"batch": 2, "model": 2}, "batch")
    assert not builder.builder.layouts


def test_two_hosts_are_two_workers_of_which_the_second_is_reached_over_ssh() -> None:
    spec = ResourceSpec.from_file(EXAMPLES / "two_hosts.yml")
    first, second = spec.nodes
    assert (first.is_local, second.is_local) == (True, False)
    assert [worker.node.address for worker in spec.workers] == [first.address, second.address]
    group = spec.ssh_group(second)
    assert group is not None and group.username == "ubuntu"


def test_the_builder_of_ones_own_builds_what_can_be_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = ResourceSpec.from_file(EXAMPLES / "cluster_own_builder.yml")
    variables = (
        Variable("vectors", "vectors", (1500, 64), tf.float32, trainable=True),
        Variable("kernel", "kernel", (64, 8), tf.float32, trainable=True),
    )
    gradients = (VariableGradient("vectors", ("indices:0", "values:0"), 0), VariableGradient("kernel", ("dense:0",), 0))
    step = CapturedStep(tf.compat.v1.GraphDef(), variables, gradients)
    vectors, kernel = builder_from_section(spec.strategy).build(step, spec).nodes
    assert vectors == parameter_server_node("vectors", 0)
    assert kernel == all_reduce_node("kernel")
