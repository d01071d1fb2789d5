"""LoopKernel: the base class of kernels that take work out of loops."""

from __future__ import annotations

from abc import abstractmethod

from autodist.graph.loop_editor import LoopEditor
from autodist.graph.ops import Trait
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel


class LoopKernel(Kernel[ReplicatedStep, ReplicatedStep]):
    """A kernel that changes each loop of a step by itself.

    It sees the loops of the graph. Loops in functions, such as those that XLA compiles, stay as they are.
    """

    @abstractmethod
    def change(self, editor: StepEditor[Step], loop: LoopEditor) -> bool:
        """Takes work out of a loop; returns False if there is none to take out."""

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        loops = [node.name for node in step.graph_index.having(Trait.LOOP)]
        if not loops:
            return step
        editor = StepEditor(step)
        changed = [name for name in loops if self.change(editor, LoopEditor(editor, name))]
        return editor.to_step() if changed else step
