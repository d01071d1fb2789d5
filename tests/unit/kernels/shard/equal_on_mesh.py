"""Comparison of a model on a mesh with one device, and the reshards of its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from autodist.kernels import Context, rewrite
from autodist.kernels.pipeline import KERNELS
from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.kernels.shard.shard_tensors import ShardTensors
from tests.unit.kernels.in_one_process import Session, assert_same, on_mesh, one_device
from tests.unit.kernels.shard.mesh_models import Model


def assert_equal_on_mesh(
    model: Model,
    sizes: dict[str, int],
    layouts: dict[str, str],
    rtol: float = 1e-12,
    devices: int = 1,
    slots: Collection[str] = (),
) -> None:
    strategy = on_mesh(model.captured.step, sizes, layouts, devices=devices, slots=slots)
    expected = one_device(model.captured, model.step, model.batches)
    assert_same(Session(model.captured, strategy).train(model.batches), expected, rtol)


UNTIL_DIVIDED = KERNELS[: 1 + next(k for k, kernel in enumerate(KERNELS) if isinstance(kernel, ShardTensors))]


def reshards_of(model: Model, sizes: dict[str, int], layouts: dict[str, str]) -> Counter[ReshardKind]:
    context = Context(on_mesh(model.captured.step, sizes, layouts), 0)
    step = rewrite(model.captured.step, context, kernels=UNTIL_DIVIDED)
    return Counter(one.kind for node in step.graph_def.node if (one := Reshard.of(node)))
