"""Auto: chooses the synchronizer of each variable by the predicted time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.auto_search import choose
from autodist.strategies.base import BuildsStrategy, StrategyBuilder
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.placed import PlacedBuilder
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike

Lossy = Literal["compressor", "INT8", "FLOAT8", "local_steps", "staleness"]


@register
@dataclass(frozen=True)
class Auto(StrategyBuilder):
    """Predicts the time of a step under many plans, and uses the fastest one that fits into the memory.

    The prediction uses measurements of this run: the links between the machines, one step of the model on one device,
    and the rows that a batch touches. Without measurements, as in `autodist plan` before a first run, it uses the
    `network_bandwidth` of the machines and assumed times, and says so.

    First, whole plans are compared: each builder for dense variables with each for sparse ones, and FSDP. Then the
    largest variables are changed one at a time as long as the predicted time falls (`auto_search`). If no plan fits
    into the memory of a worker, activations may be computed again, as with `recompute: true`. Pipelines and meshes are
    not among the plans, since their processes must know them when they start. One worker always gets AllReduce.

    Cost: that of the chosen plan. The choice takes seconds for 10 000 variables on 64 workers.

    Sources: H. Zhang et al., "AutoSync: Learning to Synchronize for Data-Parallel Distributed Deep Learning",
    NeurIPS 2020, for the choice by variable; Z. Jia et al., "Beyond Data and Model Parallelism for Deep Neural
    Networks" (FlexFlow), MLSys 2019, for the choice by a simulated step.

    Attributes:
        allow: kinds of plans that change the result of training: "compressor" (gradients in bfloat16), "INT8" and
            "FLOAT8" (gradients, or the gathered values of ShardedAllReduce), "local_steps" (DiLoCo), "staleness"
            (values that are one step old). Default: only plans with the result of one device.
        builders: names of further builders to compare, such as a script's own.
        save_as: path of a YAML file for the chosen strategy, with a pattern for each variable. The chief writes it when
            the first training step is planned. It can be edited and used as `strategy` of later runs.
    """

    allow: tuple[Lossy, ...] = ()
    builders: tuple[str, ...] = ()
    save_as: str | None = None

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        if resource_spec.measurements.chosen:  # by an earlier run with the same variables and workers
            chosen = strategy_pb2.Strategy.FromString(resource_spec.measurements.chosen)
            chosen.builder = type(self).__name__  # without what overrides have added, which they add again
            if self.recompute:
                chosen.ClearField("recomputed_blocks")  # `call_builder` adds them
            return chosen
        return choose(graph_item, resource_spec, self.allow, self.builders, bool(self.recompute))


def find_auto(builder: BuildsStrategy | None) -> Auto | None:
    """Returns the builder that chooses by cost; None if another one decides."""
    while isinstance(builder, PlacedBuilder | OverrideVariables):
        builder = builder.builder
    return builder if isinstance(builder, Auto) else None
