"""Rules for rows: each inspects nodes of some ops, and either rewrites a node or returns the reason for refusal."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from autodist.graph.editor import NodeDef
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.rows.signs import Signs
from autodist.kernels.rows.zero_rows import ZeroTables

log = logging.getLogger("autodist")

Rewrite = Callable[[], None]


@dataclass(frozen=True)
class Refusal:
    """The reason why a rule does not rewrite a node that resembles its pattern.

    Attributes:
        reason: names the node that prevents the rewrite; a clause that follows "since".
    """

    reason: str


@dataclass
class RowFacts:
    """Facts about a step that rules share; valid until the editor changes the step.

    Args:
        step: the step, before any rewrite.
        editor: the editor of the step.
    """

    step: CapturedStep
    editor: StepEditor[Step]
    leads: dict[tuple[str, bool], bool] = field(default_factory=dict)
    """Cached results of `gather-before-arithmetic`."""

    @cached_property
    def signs(self) -> Signs:
        return Signs(self.editor)

    @cached_property
    def tables(self) -> ZeroTables:
        return ZeroTables(self.editor, self.signs)


class RowRule(Kernel[CapturedStep, CapturedStep]):
    """A kernel that rewrites each node that matches a rule.

    Attributes:
        ops: the op types of the nodes that it inspects.
    """

    ops: ClassVar[tuple[str, ...]]

    @abstractmethod
    def match(self, rows: RowFacts, node: NodeDef) -> Rewrite | Refusal | None:
        """Returns a function that rewrites a node, or a refusal; None if the rule does not apply. Changes nothing."""

    def candidates(self, step: CapturedStep) -> Iterable[str]:
        """Returns the nodes that may match, in order; if there are none, the step is not analysed."""
        return [node.name for node in step.graph_index.of_op(*self.ops)]

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        names = list(self.candidates(step))
        if not names:
            return step
        editor, left = StepEditor(step), names
        while rewrites := self._rewrites(RowFacts(step, editor), left):
            for rewrite in rewrites.values():
                rewrite()
            left = [name for name in left if name not in rewrites and name in editor]
        return step if left == names else editor.to_step()

    def _rewrites(self, rows: RowFacts, names: Iterable[str]) -> dict[str, Rewrite]:
        """Returns the rewrites of matching nodes; if there are none, logs the refusals."""
        found = {name: self.match(rows, rows.editor[name]) for name in names}
        rewrites = {name: answer for name, answer in found.items() if callable(answer)}
        if not rewrites:
            for name, answer in found.items():
                if isinstance(answer, Refusal):
                    log.debug("%s leaves %s as it is, since %s", self.name, name, answer.reason)
        return rewrites
