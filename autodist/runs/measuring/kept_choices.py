"""The strategies that `Auto` chose before a restart, or before the checkpoint that a run resumes from.

Measured times differ from run to run, so another choice could be made, whose sums round differently. A run that
continues another one therefore keeps its choices, if it has the same workers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from autodist.graph.step import CapturedStep
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies import Auto, graph_config, synced_variables

CHOICES = "choices"
"""Key of the strategies in the side file of a checkpoint: a list, in the order in which the steps were planned."""


class KeptChoices:
    """The strategies of the run that this one continues, and those of this run; on the chief.

    Args:
        resumed: the entries of the checkpoint from which this run resumes; empty: none.
        spec: the machines.
        auto: the builder; None: another one.
    """

    def __init__(self, resumed: Mapping[str, Any], spec: ResourceSpec, auto: Auto | None) -> None:
        self._earlier: Sequence[Mapping[str, Any]] = resumed.get(CHOICES, ())
        self._about = {"machines": str(graph_config(spec)), "builder": str(auto), "xla": spec.xla}
        if spec.encrypt:  # the links have other speeds then
            self._about["encrypt"] = spec.encrypt
        self._made: list[dict[str, Any]] = []

    def next_for(self, step: CapturedStep) -> bytes:
        """Returns the earlier strategy of the next step.

        b"" if there is none for these variables and workers, or if `Auto` had other options.
        """
        if len(self._earlier) <= len(self._made):
            return b""
        entry = self._earlier[len(self._made)]
        is_same = {**entry, "strategy": ""} == {**self._entry(step), "strategy": ""}
        return base64.b64decode(entry["strategy"]) if is_same else b""

    def add(self, step: CapturedStep, strategy: strategy_pb2.Strategy) -> None:
        """Adds the strategy of the next step."""
        content = base64.b64encode(strategy.SerializeToString(deterministic=True)).decode()
        self._made.append({**self._entry(step), "strategy": content})

    def about(self) -> dict[str, Any]:
        """Returns the entry of the side file; empty if `Auto` has chosen nothing."""
        return {CHOICES: self._made} if self._made else {}

    def _entry(self, step: CapturedStep) -> dict[str, Any]:
        variables = [f"{v.name} {v.shape} {v.dtype} {v.is_sparse}" for v in synced_variables(step)]
        return {**self._about, "variables": variables}
