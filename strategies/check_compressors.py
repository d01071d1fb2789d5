"""Whether a gradient can be compressed as its node says."""

from __future__ import annotations

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies.check_nodes import PlaceOf
from autodist.strategies.compressor import ALWAYS_FED_BACK, compresses, compressor_text
from autodist.strategies.nearest import listed
from autodist.strategies.nodes import synchronized_parts
from autodist.strategies.variables import SyncedVariable

CompressorKind = strategy_pb2.Compressor.Kind


def check_compressors(variable: SyncedVariable, node: strategy_pb2.VariableNode, place_of: PlaceOf) -> None:
    """Passes a node of which each compressor suits the variable's gradient and has its options in range.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    for part in synchronized_parts(node):
        if part.HasField("all_reduce") and compresses(part.all_reduce):
            problem = _fault(variable, part.all_reduce.compressor)
            if problem is not None:
                raise StrategyError(problem, place_of(variable.name, "compressor"))


def _fault(variable: SyncedVariable, compressor: strategy_pb2.Compressor) -> str | None:
    """What is wrong with a compressor, with its mend; None if nothing is."""
    if compressor.kind not in CompressorKind.values():
        return (
            f"{variable.name} has a compressor of kind {compressor.kind}, which does not exist; "
            f"take one of {listed(CompressorKind.keys())}."
        )
    kind = CompressorKind.Name(compressor.kind)
    about = f"{variable.name} has the compressor {compressor_text(compressor)}"
    if variable.is_sparse:
        return (
            f"{about}, and its gradient is sparse: rows and their indices travel, which no compressor takes. Give it "
            "the compressor NONE with a pattern under `variables`, or let Parallax give it to a parameter server."
        )
    if not variable.is_floating:
        return f"{about}, and its elements are {variable.dtype}, no floating-point type; take the compressor NONE."
    if kind == "POWER_SGD" and compressor.rank < 1:
        return f"{about}, and its matrices would have {compressor.rank} columns; take a rank of at least 1."
    if kind == "TOP_K" and not 0 < compressor.fraction <= 1:
        return f"{about}, and its fraction is {compressor.fraction}; take one above 0 and at most 1."
    if kind in ALWAYS_FED_BACK and not compressor.error_feedback:
        return f"{about} without error feedback, and it does not converge without; set error_feedback."
    return None
