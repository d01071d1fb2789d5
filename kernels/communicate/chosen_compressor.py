"""Which compressor a strategy asks for, for one join."""

from __future__ import annotations

from autodist.compressors import NO_COMPRESSOR, Compressor, Dense
from autodist.errors import StrategyError
from autodist.graph.parts import PendingReduction
from autodist.kernels.plan import Plan


def compressor_of(plan: Plan, join: PendingReduction) -> Compressor | None:
    """What makes a join smaller before it travels; None if it travels as it is.

    Raises:
        StrategyError: the strategy asks for a compressor that this gradient, or no gradient, can have.
    """
    asked = plan.compressor(join)
    if asked == NO_COMPRESSOR:
        return None
    problem = asked.misfit(str(join.variable), join.is_sparse, join.dtype.name, join.dtype.is_floating)
    if problem is not None:
        raise StrategyError(problem)
    return asked if asked.saves_bytes(Dense.of(join)) else None
