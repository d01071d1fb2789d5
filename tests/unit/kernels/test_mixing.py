"""Any variable may have any synchronizer, whole or shard by shard: the step trains as one device does."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kernels.drawn_steps import CHOICES, make_batches, make_step
from tests.unit.kernels.drawn_strategies import kept, strategy_of
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, train

SHAPES = [(1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    choices=CHOICES,
    shape=st.sampled_from(SHAPES),
    servers=st.sampled_from([0, 0, 1]),
    kept_by_name=st.fixed_dictionaries({name: kept() for name in ("table", "kernel", "gain")}),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_random_assignments_train_as_one_device_does(choices, shape, servers, kept_by_name, sizes, seed):
    step, batches = make_step(choices), make_batches(seed, sizes)
    captured = capture(step, *batches[0])
    strategy = strategy_of(captured.step, *shape, kept_by_name=kept_by_name, servers=servers if shape[0] > 1 else 0)
    # Adam-like optimizers divide small gradients by their own size, which amplifies rounding beyond 1e-12.
    assert_same(train(captured, strategy, batches), one_device(captured, step, batches), rtol=1e-9)
