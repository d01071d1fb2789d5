"""Mesh: the places, the layouts of variables, and the rejected ones."""

from __future__ import annotations

import pytest

from autodist.compressors import Float16
from autodist.errors import StrategyError
from autodist.resources import ResourceSpec
from autodist.strategies import (
    Mesh,
    Override,
    OverrideVariables,
    UseAllReduce,
    UseParameterServer,
    arranged,
    builder_from_section,
    check_strategy,
    strategy_table,
)

SHAPES = {"up/kernel": (4, 8), "up/bias": (8,), "down/kernel": (8, 4), "head/kernel": (4, 3)}
MEGATRON = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}


def read(tmp_path, options, workers=2):
    """Reads a file with a Mesh whose options begin in line 4."""
    path = tmp_path / "cluster.yml"
    path.write_text(
        f"nodes: [{{address: localhost, cpus: {list(range(workers))}, workers: {workers}}}]\n"
        f"strategy:\n  builder: Mesh\n  {options}\n"
    )
    return ResourceSpec.from_file(path)


def layouts_of(strategy):
    return {one.variable: one.sharding for one in strategy.mesh.variables}


def built(step, machines, **options):
    builder = Mesh(**options)
    spec = arranged(builder, machines)
    strategy = builder.build(step, spec)
    check_strategy(strategy, step, spec)
    return strategy


def test_the_last_axis_varies_fastest(step, cluster):
    strategy = built(step(SHAPES), cluster(4), mesh={"data": 2, "model": 2}, layouts=MEGATRON)
    assert [place.worker for place in strategy.mesh.places] == [0, 1, 2, 3]
    assert [replica.worker for replica in strategy.graph_config.replicas] == [0, 2]
    assert strategy.graph_config.workers == 4
    assert layouts_of(strategy) == {"up/kernel": "[–, model]", "down/kernel": "[model, –]"}


def test_each_worker_sees_its_own_row(cluster):
    spec = arranged(Mesh(mesh={"data": 2, "model": 2}), cluster(4))
    assert [spec.seen_by(worker).replica_workers for worker in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert arranged(Mesh(mesh={"model": 4}), cluster(4)).shares_batches
    sent = ResourceSpec.from_payload(spec.to_payload())
    assert sent.seen_by(1).replica_workers == (1, 3)


def test_one_size_may_be_that_of_all_places_that_are_left(step, cluster):
    strategy = built(step(SHAPES), cluster(6), mesh={"data": -1, "model": 2})
    assert [(axis.name, axis.size) for axis in strategy.mesh.axes] == [("data", 3), ("model", 2)]


def test_without_a_data_axis_all_places_have_the_whole_batch(step, cluster):
    strategy = built(step(SHAPES), cluster(2), mesh={"model": 2}, layouts=MEGATRON)
    assert [replica.worker for replica in strategy.graph_config.replicas] == [0]
    assert strategy.mesh.data == ""


def test_layouts_in_a_file(tmp_path, step):
    spec = read(
        tmp_path,
        "mesh: {model: 2}\n  variables:\n    up/.*: {sharding: ['?', model]}\n    down/kernel: {sharding: [model]}",
    )
    wanted = dict(list(SHAPES.items())[::2])
    builder = builder_from_section(spec.strategy)
    strategy = builder.build(step(wanted), arranged(builder, spec))
    assert layouts_of(strategy) == {"up/kernel": "[?, model]", "down/kernel": "[model, –]"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("mesh: {model: 3}", "has 3 places, but the workers have 2 devices"),
        ("mesh: {model: 0}", "size of at least 1"),
        ("mesh: {a: -1, b: -1}", "One may be -1"),
        ("mesh: {model: 2}\n  variables: {up/kernel: {sharding: [modle]}}", "the mesh has the axes model"),
        ("mesh: {model: 2}\n  variables: {up/kernel: {sharding: [model, model]}}", "'model' twice"),
        ("mesh: {data: 2}\n  prefetch: 2", "prefetch"),
        (
            "mesh: {model: 2}\n  variables: {up/kernel: {synchronizer: PS}}",
            "the settings of a pattern are sharding .*, slots",
        ),
        ("mesh: {data: 2}\n  variables: {up/kernel: {}}", "has no settings"),
        (
            "mesh: {data: 2}\n  variables: {up/kernel: {slots: model}}",
            "slots of 'up/kernel' name the axis 'model', but",
        ),
        ("mesh: {data: 1, model: 2}\n  variables: {up/kernel: {slots: model}}", "only the axis of the batch, 'data'"),
        ("mesh: {data: 2}\n  variables: {'[': {slots: data}}", "is no regular expression"),
        ("mesh: {data: 2}\n  variables: {up/kernel: {slots: [data]}}", "slots"),
        ("mesh: {data: 2}\n  variables: {up/kernel: {priority: [1]}}", "has a priority and no layout"),
        ("mesh: {model: 2}\n  variables: {up/kernel: {sharding: [model], priority: [-1]}}", "numbers begin with 0"),
        ("mesh: {model: 2}\n  tensors: {h: [model]}", r"'h' under `tensors` has \['model'\]. Write \{sharding"),
        ("mesh: {model: 2}\n  tensors: {h: {sharding: [modle]}}", "the mesh has the axes model"),
        ("mesh: {model: 2}\n  alike: [[up/kernel, '[']]", "is no regular expression"),
        ("mesh: {data: 2}\n  slots: {up/kernel: data}", "write `slots` of patterns under `variables`"),
    ],
)
def test_a_wrong_option_is_refused_with_its_line(tmp_path, options, problem):
    spec = read(tmp_path, options)
    with pytest.raises(StrategyError, match=rf"cluster.yml:\d.*{problem}"):
        arranged(builder_from_section(spec.strategy), spec)


@pytest.mark.parametrize(
    ("layouts", "problem"),
    [
        ({"up/bias": (None, "model")}, "has 2 dimensions, but up/bias has the shape"),
        ({"head/kernel": (None, "model")}, "3 elements of head/kernel into 2 parts"),
        ({"up/.*": ("model",), "up/bias": (None,)}, "match up/bias and divide it differently"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(step, cluster, layouts, problem):
    with pytest.raises(StrategyError, match=problem):
        built(step(SHAPES), cluster(2), mesh={"model": 2}, layouts=layouts)


def test_layouts_of_tensors_groups_and_priorities_are_those_of_the_file(tmp_path, step):
    spec = read(
        tmp_path,
        "mesh: {data: 1, model: 2}\n  variables: {up/kernel: {sharding: [null, model], priority: [null, 1]}}\n"
        "  tensors: {'.*/add': {sharding: [data, '?', model]}}\n  alike: [[up/kernel, down/.*], [up/bias]]",
    )
    builder = builder_from_section(spec.strategy)
    strategy = builder.build(step(SHAPES), arranged(builder, spec))
    assert layouts_of(strategy) == {"up/kernel": "[–, model p1]"}
    assert [(one.pattern, one.sharding) for one in strategy.mesh.tensors] == [(".*/add", "[data, ?, model]")]
    assert [list(one.patterns) for one in strategy.mesh.alike] == [["up/kernel", "down/.*"], ["up/bias"]]


def test_a_priority_with_too_many_numbers_is_refused(step, cluster):
    layouts = {"up/bias": ("model",)}
    with pytest.raises(StrategyError, match=r"has 2 numbers, but up/bias has the shape \[8\]"):
        built(step(SHAPES), cluster(2), mesh={"model": 2}, layouts=layouts, priorities={"up/bias": (0, 1)})


def test_slots_alone_are_in_slices_as_under_sharded_all_reduce(tmp_path, step):
    spec = read(
        tmp_path,
        "mesh: {data: 2, model: 2}\n  variables:\n    up/.*: {slots: data}\n    head/kernel: {slots: data}\n"
        "    down/kernel: {sharding: [model, data]}",
        workers=4,
    )
    builder = builder_from_section(spec.strategy)
    strategy = builder.build(step(SHAPES), arranged(builder, spec))
    assert layouts_of(strategy) == {
        "up/kernel": "[–, –]", "up/bias": "[–]", "head/kernel": "[–, –]", "down/kernel": "[model, data]"
    }  # fmt: skip
    nodes = {node.variable: node for node in strategy.nodes}
    sizes = {name: (node.partition.axis, list(node.partition.sizes)) for name, node in nodes.items()}
    assert sizes == {
        "up/kernel": (0, [2, 2]),
        "up/bias": (0, [4, 4]),
        "head/kernel": (0, [2, 2]),
        "down/kernel": (1, [2, 2]),
    }
    owned = {name: [(s.parameter_server.owner, s.parameter_server.local_proxy, s.parameter_server.layer > 0)
                    for s in node.shards] for name, node in nodes.items()}  # fmt: skip
    copied, gathered = [(0, True, False), (1, True, False)], [(0, False, True), (1, False, True)]
    assert owned == {"up/kernel": copied, "up/bias": copied, "head/kernel": copied, "down/kernel": gathered}


def test_slots_of_a_mesh_without_rows_along_the_data_axis_stay_whole(step, cluster):
    strategy = built(step(SHAPES), cluster(2), mesh={"data": 1, "model": 2}, slots={"up/kernel": "data"})
    assert all(node.HasField("all_reduce") for node in strategy.nodes)


@pytest.mark.parametrize("layout", [(None, "model"), ("data",), ("?",)])
def test_slots_alone_of_a_divided_variable_are_refused(step, cluster, layout):
    options = {"mesh": {"data": 2, "model": 2}, "layouts": {"up/kernel": layout}, "slots": {"up/.*": "data"}}
    with pytest.raises(
        StrategyError, match="has slots: data, which keeps the whole value of up/kernel .* Remove slots"
    ):
        built(step(SHAPES), cluster(4), **options)


@pytest.mark.parametrize("use", [UseParameterServer(sync=False), UseAllReduce(compressor=Float16())])
def test_overrides_of_synchronizers_are_refused(step, cluster, use):
    builder = OverrideVariables(Mesh(mesh={"model": 2}, layouts=MEGATRON), (Override("up/.*", use),))
    with pytest.raises(StrategyError, match=r"overrides of 'up/\.\*'.*but Mesh divides variables over a mesh"):
        builder.build(step(SHAPES), arranged(builder, cluster(2)))


@pytest.mark.parametrize("way", ["RING", "NCCL"])
def test_collectives_beside_the_exchanges_of_a_mesh_are_refused(step, cluster, way):
    planned = step(SHAPES)
    spec = arranged(Mesh(mesh={"model": 2}), cluster(2))
    strategy = Mesh(mesh={"model": 2}, layouts=MEGATRON).build(planned, spec)
    for node in strategy.nodes:
        node.all_reduce.spec = way
    with pytest.raises(
        StrategyError, match=f"is reduced by {way}, and Mesh divides tensors.*Use all_reduce_spec SHUFF"
    ):
        check_strategy(strategy, planned, spec)


@pytest.mark.parametrize(
    ("sizes", "devices", "rows"),
    [
        ({"data": 2, "model": 2}, (1, 4), [(0, 0)]),
        ({"model": 2}, (1, 2), [(0,)]),
        ({"model": 4}, (2, 2), [(0,), (1,)]),
        ({"data": 2, "model": 2}, (2, 2), [(0, 1), (0, 1)]),
        ({"model": 2, "data": 2}, (1, 4), [(0, 0)]),
    ],
)
def test_a_worker_may_have_several_coordinates(cluster, sizes, devices, rows):
    spec = arranged(Mesh(mesh=sizes), cluster(*devices))
    assert [spec.seen_by(worker).replica_workers for worker in range(devices[0])] == rows
    assert spec.shares_batches


@pytest.mark.parametrize(
    ("sizes", "devices", "fix"),
    [
        ({"data": 3, "model": 2}, (2, 3), "Write `mesh: {model: 2, data: 3}`, in which they are blocks,"),
        ({"model": 2, "data": 3}, (3, 2), "Write `mesh: {data: 3, model: 2}`, in which they are blocks,"),
        ({"data": 5, "model": 3, "a": 2}, (6, 5), "Write `mesh: {model: 3, a: 2, data: 5}`, in which they are blocks,"),
        ({"data": 6, "model": 6}, (4, 9), "Change the sizes,"),
    ],
    ids=str,
)
def test_devices_of_a_worker_that_are_no_block_of_the_mesh_are_refused(cluster, sizes, devices, fix):
    with pytest.raises(StrategyError, match=f"are no block of the mesh.* {fix} or start a worker for each device"):
        arranged(Mesh(mesh=sizes), cluster(*devices))


def test_the_table_shows_shardings(step, cluster):
    planned = step(SHAPES)
    strategy = built(planned, cluster(2), mesh={"model": 2}, layouts=MEGATRON)
    table = strategy_table(strategy, planned)
    assert "mesh {model: 2}" in str(table.title)
    assert [str(cell) for cell in table.columns[3].cells] == ["[–, model]", "whole", "[model, –]", "whole"]


def test_a_worker_without_devices_is_refused(cluster):
    with pytest.raises(StrategyError, match="has no device"):
        arranged(Mesh(mesh={"model": 2}), cluster(3, servers=1))


def test_a_pattern_that_matches_nothing_is_logged_with_near_names(step, cluster, caplog):
    strategy = built(step(SHAPES), cluster(2), mesh={"model": 2}, layouts={**MEGATRON, "upp/kernel": ("model",)})
    assert len(strategy.mesh.variables) == 2
    assert "'upp/kernel' matches no variable" in caplog.text
    assert "up/kernel" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "devices", "left"),
    [
        ({"data": -1, "model": 2}, [1] * 5, 4),
        ({"data": -1, "model": 2}, [1] * 4, 4),
        ({"data": -1, "model": 2}, [3, 2, 3], 3),
        ({"data": -1, "model": 4}, [1] * 3, 0),
        ({"data": 2, "model": 2}, [1] * 5, 4),
        ({"data": 2, "model": 2}, [3, 2], 0),
        ({"data": -1}, [1], 1),
    ],
)
def test_machines_of_whole_rows(sizes, devices, left):
    assert Mesh(mesh=sizes).whole_rows(devices) == left
