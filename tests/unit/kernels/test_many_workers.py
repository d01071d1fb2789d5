"""Every optimizer under each synchronizer trains as on one device; random ones are in test_mixing.py.

Those whose update is part of another one's are left out.
"""

from __future__ import annotations

import pytest

from tests.unit.kernels.drawn_steps import OPTIMIZERS, Choices, on_one_device
from tests.unit.kernels.in_one_process import assert_same, plan, train
from tests.unit.kernels.pairs import pairs

VARIABLES = ["table", "kernel", "gain"]


OWNERS = {"all-reduce": {}, "server": dict.fromkeys(VARIABLES, 1), "mixed": {"table": 1, "gain": 0}}


@pytest.mark.parametrize(
    "optimizer, owners", pairs([name for name in OPTIMIZERS if name not in ("sgd", "adam")], OWNERS)
)
def test_every_optimizer_trains_under_every_way_to_synchronise(optimizer, owners):
    choices = Choices("mean", optimizer, is_tied=False, is_frozen=True, counts_steps=True)
    captured, batches, alone = on_one_device(choices, 3, (5, 1))
    strategy = plan(captured.step, 2, 1, OWNERS[owners])
    # Adam-like optimizers divide small gradients by their own size, which amplifies rounding beyond 1e-12.
    assert_same(train(captured, strategy, batches), alone, rtol=1e-9)
