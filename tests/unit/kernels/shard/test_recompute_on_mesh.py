"""Blocks recompute their activations on a mesh: the same bits, and no transfer is repeated."""

from __future__ import annotations

import pytest

from autodist.graph.blocks import find_blocks
from autodist.graph.recomputation import RESHARD, copied_for
from autodist.kernels import Context, rewrite
from autodist.kernels.pipeline import KERNELS
from autodist.kernels.replicate.recompute_blocks import RecomputeBlocks
from tests.unit.kernels.in_one_process import Session, on_mesh
from tests.unit.kernels.replicate.test_recompute_blocks import MODELS, Attention, captured, ops

LAYOUTS = {(6, 2, 3): "[–, model, –]", (2, 3, 6): "[model, –, –]", (6, 12): "[–, model]", (12, 6): "[model, –]"}
"""By the shapes of the kernels of an `Attention`."""


@pytest.fixture(scope="module")
def attention():
    """A captured step of two blocks, and its batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "attention", ((4, 6), lambda: [Attention(6, seed) for seed in range(2)]))
        return captured("attention")


def planned(step, sizes, is_recomputed):
    layouts = {one.name: LAYOUTS[one.shape] for one in step.variables if one.trainable and one.shape in LAYOUTS}
    assert len(layouts) == 2 * 6
    strategy = on_mesh(step, sizes, layouts)
    for block in find_blocks(step, True) if is_recomputed else ():
        strategy.recomputed_blocks.add(name=block.name, scopes=block.scopes)
    return strategy


def test_no_bit_is_another(attention):
    function, batches = attention
    sizes = {"model": 2}
    keeping, again = (
        Session(function, planned(function.step, sizes, is_recomputed)) for is_recomputed in (False, True)
    )
    assert all(ops(step, is_copy=True) for step in again.steps)
    assert again.train(batches).bits == keeping.train(batches).bits


def test_a_block_computes_its_products_again_and_keeps_the_results_of_transfers(attention):
    function, _ = attention
    last = next(k for k, kernel in enumerate(KERNELS) if isinstance(kernel, RecomputeBlocks))
    context = Context(planned(function.step, {"model": 2}, True), 0)
    step = rewrite(function.step, context, kernels=KERNELS[: last + 1])
    copies = [node for node in step.graph_def.node if copied_for(node.name)]
    assert any(RESHARD in node.attr for node in step.graph_def.node)
    assert not any(RESHARD in node.attr for node in copies)
    assert any("MatMul" in node.op or node.op == "Einsum" for node in copies)
