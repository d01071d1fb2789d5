"""Rules for rows: each looks at nodes of some ops, and rewrites a node or says why it does not."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from autodist.graph.editor import NodeDef
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.rows.signs import Signs
from autodist.kernels.rows.zero_rows import ZeroTables

log = logging.getLogger("autodist")

Rewrite = Callable[[], None]


@dataclass(frozen=True)
class Refusal:
    """Why a rule leaves a node as it is that looked like one of its own.

    Attributes:
        reason: names the node that is in the way, to go behind "since".
    """

    reason: str


@dataclass
class RowFacts:
    """What rules know of a step; holds for as long as its editor does not change it.

    Args:
        item: the step, before any rewrite.
        editor: of the step.
    """

    item: Step
    editor: StepEditor
    leads: dict[tuple[str, bool], bool] = field(default_factory=dict)
    """Answers of `gather-before-arithmetic`."""

    @cached_property
    def signs(self) -> Signs:
        return Signs(self.editor)

    @cached_property
    def tables(self) -> ZeroTables:
        return ZeroTables(self.editor, self.signs)


class RowRule(Kernel):
    """A kernel that rewrites nodes one by one, each where a rule fits it.

    Attributes:
        ops: of the nodes that it looks at.
    """

    ops: ClassVar[tuple[str, ...]]

    @abstractmethod
    def match(self, rows: RowFacts, node: NodeDef) -> Rewrite | Refusal | None:
        """What is to be done with a node, and changes nothing yet; None: it is none of this rule's."""

    def candidates(self, item: Step) -> Iterable[str]:
        """The nodes that may match, in the order in which they are looked at; none: the step is not looked into."""
        return [node.name for node in item.graph_index.of_op(*self.ops)]

    def apply(self, item: Step, context: Context) -> Step:
        names = list(self.candidates(item))
        if not names:
            return item
        editor, left = StepEditor(item), names
        while rewrites := self._rewrites(RowFacts(item, editor), left):
            for rewrite in rewrites.values():
                rewrite()
            left = [name for name in left if name not in rewrites and name in editor]
        return item if left == names else editor.to_item()

    def _rewrites(self, rows: RowFacts, names: Iterable[str]) -> dict[str, Rewrite]:
        """By node, those that fit; if there are none, it is told why not."""
        found = {name: self.match(rows, rows.editor[name]) for name in names}
        rewrites = {name: answer for name, answer in found.items() if callable(answer)}
        if not rewrites:
            for name, answer in found.items():
                if isinstance(answer, Refusal):
                    log.debug("%s leaves %s as it is, since %s", self.name, name, answer.reason)
        return rewrites
