"""Rules: each inspects nodes of some ops, and either rewrites a node or returns the reason for refusal."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

from autodist.graph.editor import NodeDef
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel

log = logging.getLogger("autodist")

T = TypeVar("T")

Rewrite = Callable[[], None]


@dataclass(frozen=True)
class Refusal:
    """The reason why a rule does not rewrite a node that resembles its pattern.

    Attributes:
        reason: names the node that prevents the rewrite; a clause that follows "since".
    """

    reason: str


@dataclass
class Facts:
    """A step that rules rewrite, and analyses of it.

    Attributes:
        step: the step, before any rewrite.
        editor: its graph in the current state.
        changes: new values of other fields of the step.
    """

    step: CapturedStep
    editor: StepEditor[CapturedStep]
    changes: dict[str, Any] = field(default_factory=dict)
    _found: dict[Callable[[Facts], object], object] = field(default_factory=dict)

    def once(self, find: Callable[[Facts], T]) -> T:
        """Returns the cached result of an analysis; it is repeated after the rewrites of a round."""
        if find not in self._found:
            self._found[find] = find(self)
        return cast(T, self._found[find])

    def current(self, name: str) -> Any:
        """Returns the value of a field of the step, after all rewrites so far."""
        return self.changes.get(name, getattr(self.step, name))

    def change(self, **fields: Any) -> None:
        """Sets fields of the step besides its graph, such as `annotations`, `variables` or `inputs`."""
        self.changes.update(fields)

    def after_round(self) -> Facts:
        """Returns the same step and editor, without the analyses."""
        return Facts(self.step, self.editor, self.changes)


class Rule(Kernel[CapturedStep, CapturedStep]):
    """A kernel that rewrites each node that matches a pattern.

    Attributes:
        ops: the op types of the nodes that it inspects.
    """

    ops: ClassVar[tuple[str, ...]]

    @abstractmethod
    def match(self, facts: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        """Returns a function that rewrites a node, or a refusal; None if the rule does not apply. Changes nothing."""

    def candidates(self, step: CapturedStep) -> Iterable[str]:
        """Returns the nodes that may match, in order; if there are none, the step is not analysed."""
        return [node.name for node in step.graph_index.of_op(*self.ops)]

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        names = list(self.candidates(step))
        if not names:
            return step
        facts, left = Facts(step, StepEditor(step)), names
        while rewrites := self._rewrites(facts, left):
            for rewrite in rewrites.values():
                rewrite()
            left = [name for name in left if name not in rewrites and name in facts.editor]
            facts = facts.after_round()
        return step if left == names else facts.editor.to_step(**facts.changes)

    def _rewrites(self, facts: Facts, names: Iterable[str]) -> dict[str, Rewrite]:
        """Returns the rewrites of matching nodes; if there are none, logs the refusals."""
        found = {name: self.match(facts, facts.editor[name]) for name in names}
        rewrites = {name: answer for name, answer in found.items() if callable(answer)}
        if not rewrites:
            for name, answer in found.items():
                if isinstance(answer, Refusal):
                    log.debug("%s leaves %s as it is, since %s", self.name, name, answer.reason)
        return rewrites
