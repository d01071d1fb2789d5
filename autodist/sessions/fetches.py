"""Fetches of a session's run that are combined over all workers if all of them make the same run."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.names import node_of
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.layout import Joined, Unknown
from autodist.proto import strategy_pb2
from autodist.synchronizers import all_synchronizers


@dataclass(frozen=True)
class Fetches:
    """The outputs of a run that are neither rows of examples nor values that every worker has.

    Attributes:
        shared: outputs that depend on all workers fetching the same: they are combined over all workers, or sent by
            their owners. Equal on all workers.
        own: outputs computed from this worker's examples only, unless they are combined over all workers.
    """

    shared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: CapturedStep, strategy: strategy_pb2.Strategy) -> Fetches:
        """Finds the fetches of a run that all workers make."""
        if strategy.pipeline.stages:  # they hold all values of the run
            return cls(step.outputs)
        flows, stages = flows_of(step), find_stages(step)
        own = [
            name for name in step.outputs
            if node_of(name) not in stages.once and isinstance(flows.kind(name), Joined | Unknown)
        ]  # fmt: skip
        if not _is_in_lockstep(strategy):
            return cls(own=tuple(own))
        writes = {name for name, effect in step.graph_index.effects.items() if effect.writes}

        def depends(name: str) -> bool:
            node = node_of(name)
            return node in stages.once or any(
                name in writes for name in reach([node], step.graph_index.sources.__getitem__)
            )

        shared = [name for name in step.outputs if name in own or depends(name)]
        return cls(tuple(shared), tuple(own))


def _is_in_lockstep(strategy: strategy_pb2.Strategy) -> bool:
    """Returns True if some variable's update waits for all workers in every step."""
    variable_placements = [synchronizer.variable_placement for _, synchronizer in all_synchronizers(strategy)]
    return not variable_placements or any(
        variable_placement is None or not variable_placement.runs_ahead for variable_placement in variable_placements
    )
