"""Calls builders, which may be user-defined, and reports errors in them as StrategyError with their position."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from autodist.errors import AutoDistError, StrategyError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import BuildsStrategy, StrategyBuilder
from autodist.strategies.recompute import recomputed_blocks
from autodist.strategies.variables import GraphLike

_OURS = "autodist."


def require_builder(builder: Any) -> BuildsStrategy:
    """Returns the argument if it is a builder.

    Raises:
        StrategyError: it is a class, or something else without `build`.
    """
    if isinstance(builder, type):
        raise StrategyError(f"strategy is the class {builder.__name__}; pass an instance, {builder.__name__}().")
    if not callable(getattr(builder, "build", None)):
        raise StrategyError(
            f"strategy is {builder!r}, of type {type(builder).__name__}; pass an object that has "
            "build(graph_item, resource_spec), such as autodist.strategies.PS(), or a builder's name, such as 'PS'."
        )
    return builder


def call_builder(builder: BuildsStrategy, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
    """Returns the strategy that a builder builds.

    Raises:
        StrategyError: raised by the builder itself; or the builder raised another exception (the cause), returned no
            strategy, or changed the step.
    """
    name = type(builder).__name__
    is_ours = type(builder).__module__.startswith(_OURS)
    before = None if is_ours else _content(graph_item)
    try:
        strategy: Any = builder.build(graph_item, resource_spec)
    except AutoDistError:
        raise
    except Exception as error:
        raise StrategyError(
            f"The builder {name} failed: {type(error).__name__}: {error} ({_where(error, builder)}). Correct "
            "its build method, or use another builder."
        ) from error
    if not isinstance(strategy, strategy_pb2.Strategy):
        result = "None" if strategy is None else f"a {type(strategy).__name__}"
        raise StrategyError(
            f"The builder {name} returned {result} from build ({_place(builder)}) instead of a strategy; end it with "
            "`return make_strategy(...)`, or return the strategy of another builder."
        )
    if before is not None and before != _content(graph_item):
        raise StrategyError(
            f"The builder {name} changed the graph of the step in build ({_place(builder)}). A builder must only read "
            "the graph; its decisions belong in the strategy that it returns. Modify a copy instead."
        )
    if isinstance(builder, StrategyBuilder):
        strategy.recomputed_blocks.extend(recomputed_blocks(builder.recompute, strategy, graph_item))
    return strategy


def describe_failure(maker: type, error: Exception) -> str:
    """Describes an exception raised by a user-defined class during inspection or construction, with its position."""
    return f"{type(error).__name__}: {error} ({_where(error, maker)})"


def _content(graph_item: Any) -> bytes | None:
    graph_def = getattr(graph_item, "graph_def", None)
    return None if graph_def is None else bytes(graph_def.SerializeToString(deterministic=True))


def _where(error: Exception, builder: object) -> str:
    """Returns file and line of the failing frame in the builder's own code, or else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    file = _file(builder)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1] if frames else None)
    return _place(builder) if frame is None else f"{frame.filename}:{frame.lineno}"


def _place(builder: object) -> str:
    """Returns the position of a builder's definition."""
    kind = builder if isinstance(builder, type) else type(builder)
    code = getattr(getattr(kind, "build", None), "__code__", None)
    return f"{kind.__module__}.{kind.__qualname__}" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _file(builder: object) -> str | None:
    try:
        return inspect.getfile(builder if isinstance(builder, type) else type(builder))
    except (TypeError, OSError):  # a class of a notebook or of an interactive session
        return None
