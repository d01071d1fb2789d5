"""Times every builder's planning of a synthetic step, in a separate process whose memory is measured."""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import rich.console

from autodist.resources import ResourceSpec
from autodist.strategies import (
    call_builder,
    check_strategy,
    find_builder,
    registered_names,
    resolve_specs,
    strategy_table,
)

T = TypeVar("T")
DEVICES = 8
LARGE = 50
"""One in this many variables is large enough to be partitioned; every second of these is a table with a sparse
gradient.
"""


@dataclass(frozen=True)
class _Type:
    name: str = "float32"
    is_floating: bool = True


@dataclass(frozen=True)
class _Variable:
    name: str
    shape: tuple[int, ...]
    dtype: _Type = field(default_factory=_Type)

    @property
    def byte_size(self) -> int:
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class _Gradient:
    variable: str
    is_sparse: bool


@dataclass(frozen=True)
class _Step:
    variables: tuple[_Variable, ...]
    gradients: tuple[_Gradient, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int)
    parser.add_argument("variables", type=int)
    parser.add_argument("--builder", action="append", help="a builder; default: all but Auto, which calls the others")
    arguments = parser.parse_args()
    step, spec = _step(arguments.variables), _machines(arguments.workers)
    names = [worker.name for worker in spec.workers]
    idle = _peak()
    found = {}
    # Pipeline needs one device per worker, and at most one worker per variable.
    for name in arguments.builder or [one for one in registered_names() if one not in ("Auto", "Pipeline")]:
        strategy, planning = _timed(lambda name=name: _plan(name, step, spec))
        _, table = _timed(lambda strategy=strategy: _show(strategy, step, names))
        shards = sum(len(node.shards) for node in strategy.nodes)
        found[name] = {"planning": planning, "table": table, "shards": shards, "bytes": _peak() - idle}
    print(json.dumps(found))


def _plan(name, step, spec):
    strategy = call_builder(find_builder(name)(), step, spec)
    check_strategy(strategy, step, spec)
    return resolve_specs(strategy, step, spec)


def _show(strategy, step, names) -> None:
    rich.console.Console(file=io.StringIO(), width=150).print(strategy_table(strategy, step, names, 150))


def _timed(do: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    start = time.process_time()
    made = do()
    return made, time.process_time() - start


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _step(count: int) -> _Step:
    variables = tuple(_Variable(f"layer_{k}/weight", _shape(k)) for k in range(count))
    return _Step(variables, tuple(_Gradient(v.name, v.shape[0] == TABLE[0]) for v in variables))


TABLE = (20000, 64)


def _shape(k: int) -> tuple[int, ...]:
    if k % LARGE:
        return (64, 128) if k % 2 else (256,)
    return TABLE if k % (2 * LARGE) else (1024, 256)


def _machines(workers: int) -> ResourceSpec:
    """Returns nodes of one worker each; every second has a faster link."""
    return ResourceSpec.from_dict(
        {
            "nodes": [
                {
                    "address": f"10.0.{k // 256}.{k % 256}",
                    "gpus": list(range(DEVICES)),
                    "chief": k == 0,
                    "network_bandwidth": (10, 25)[k % 2],
                }
                for k in range(workers)
            ]
        }
    )


if __name__ == "__main__":
    main()
