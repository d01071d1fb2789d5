"""Tables that Parallax and PSLoadBalancing partition, from four workers on, train as on one device."""

from __future__ import annotations

import pytest

from autodist.resources import ResourceSpec
from autodist.strategies import Parallax, PSLoadBalancing, check_strategy, resolve_specs
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device
from tests.unit.kernels.test_sums_in_subgroups import batches, make_step

SHARDS = {
    "parallax, in teams": (Parallax(min_partition_bytes=0, all_reduce_spec="HIERARCHICAL"), [4, 0]),
    "load balancing": (PSLoadBalancing(min_partition_bytes=0), [4, 4]),
    "load balancing, proxies": (
        PSLoadBalancing(max_shards=2, min_partition_bytes=0, local_proxy_variable=True),
        [2, 2],
    ),
}


@pytest.fixture(scope="module")
def step():
    return make_step()


@pytest.fixture(scope="module")
def captured(step):
    return capture(step, *batches(4)[0])


@pytest.mark.parametrize("name", SHARDS)
def test_a_step_trains_as_on_one_device(name, step, captured):
    builder, shards = SHARDS[name]
    spec = ResourceSpec.from_dict(
        {"nodes": [{"address": f"10.0.0.{k}", "cpus": [0], "chief": not k} for k in range(4)]}
    )
    strategy = builder.build(captured.step, spec)
    check_strategy(strategy, captured.step, spec)
    assert [len(node.shards) for node in strategy.nodes] == shards
    data = batches(11, 3)  # fewer examples than workers
    session = Session(captured, resolve_specs(strategy, captured.step, spec))
    assert_same(session.train(data), one_device(captured, step, data), rtol=1e-9)
