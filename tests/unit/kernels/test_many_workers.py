"""Any strategy on any number of workers and replicas trains as one device does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kernels.drawn_steps import CHOICES, OPTIMIZERS, Choices, on_one_device
from tests.unit.kernels.in_one_process import assert_same, plan, train
from tests.unit.kernels.pairs import pairs

SHAPES = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
VARIABLES = ["table", "kernel", "gain"]


def check(choices, shape, owners, seed, sizes):
    captured, batches, alone = on_one_device(choices, seed, tuple(sizes))
    workers, replicas = shape
    owners = {name: owner % workers for name, owner in owners.items()} if workers > 1 else {}
    strategy = plan(captured.item, workers, replicas, owners)
    # Adam and its kin divide small gradients by their own size, which makes more of a rounding than 1e-12.
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=CHOICES,
    shape=st.sampled_from(SHAPES),
    owners=st.dictionaries(st.sampled_from(VARIABLES), st.integers(0, 2)),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_any_strategy_trains_as_one_device_does(choices, shape, owners, sizes, seed):
    check(choices, shape, owners, seed, sizes)


OWNERS = {"all-reduce": {}, "server": dict.fromkeys(VARIABLES, 1), "mixed": {"table": 1, "gain": 0}}


@pytest.mark.parametrize("optimizer, owners", pairs(sorted(OPTIMIZERS), OWNERS))
def test_every_optimizer_trains_under_every_way_to_synchronise(optimizer, owners):
    choices = Choices("mean", optimizer, is_tied=False, is_frozen=True, counts_steps=True)
    check(choices, (2, 1), OWNERS[owners], 3, [5, 1])
