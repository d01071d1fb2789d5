"""Which compressor a strategy asks for, for one join."""

from __future__ import annotations

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.parts import Join
from autodist.kernels.communicate.compressors.base import Compression
from autodist.kernels.communicate.compressors.power_sgd import PowerSGD
from autodist.kernels.communicate.compressors.sixteen_bits import SixteenBits
from autodist.kernels.communicate.compressors.top_k import TopK
from autodist.kernels.plan import Plan
from autodist.proto import strategy_pb2

CompressorKind = strategy_pb2.Compressor.Kind


def compressor_of(plan: Plan, join: Join) -> Compression | None:
    """What makes a join smaller before it travels; None if it travels as it is.

    Raises:
        StrategyError: the strategy asks for a compressor that this gradient, or no gradient, can have.
    """
    asked = plan.compressor(join)
    if asked is None:
        return None
    name = CompressorKind.Name(asked.kind)
    if join.is_sparse or not join.dtype.is_floating:
        what = "sparse" if join.is_sparse else join.dtype.name
        raise StrategyError(
            f"{join.variable} has the compressor {name} and a gradient that is {what}: compressors are for dense "
            "gradients of real numbers. Take the compressor NONE for this variable."
        )
    made = _made(asked, f"{join.variable} has the compressor {name}")
    return made if made.saves_bytes(join) else None


def require_no_compressor(plan: Plan, join: Join, spec: str) -> None:
    """Passes if a join that a collective reduces has no compressor.

    Raises:
        StrategyError: it has one.
    """
    asked = plan.compressor(join)
    if asked is not None:
        raise StrategyError(
            f"{join.variable} has the compressor {CompressorKind.Name(asked.kind)} and all_reduce_spec {spec}, whose "
            "sums TensorFlow makes of the gradients as they are. Take all_reduce_spec SHUFFLE for all variables."
        )


def _made(asked: strategy_pb2.Compressor, told: str) -> Compression:
    match asked.kind:
        case CompressorKind.FLOAT16 | CompressorKind.BFLOAT16:
            dtype = tf.float16 if asked.kind == CompressorKind.FLOAT16 else tf.bfloat16
            return SixteenBits(dtype, asked.error_feedback)
        case CompressorKind.POWER_SGD if asked.rank >= 1:
            return PowerSGD(asked.rank)
        case CompressorKind.POWER_SGD:
            raise StrategyError(f"{told} of rank {asked.rank}; give it a rank of 1 or more.")
        case CompressorKind.TOP_K if 0 < asked.fraction <= 1:
            return TopK(asked.fraction)
        case CompressorKind.TOP_K:
            raise StrategyError(f"{told} with the fraction {asked.fraction}; give one above 0 and at most 1.")
    raise StrategyError(f"{told}, which this version of AutoDist does not know.")
