"""CompileStep: compiles parts of a step as XLA functions, as the script or the YAML requests."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.split import Subgraph
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import free_constants
from autodist.kernels.base import Context, Kernel
from autodist.kernels.finish.called_function import compiled_function, replace_by_call
from autodist.kernels.finish.compiled_regions import Marks, PartOf, find_regions, may_need_compiler, work_in
from autodist.kernels.finish.prune import Prune

log = logging.getLogger("autodist")

_NEEDS_NO_COMPILER = having(Trait.SOURCE | Trait.FED | Trait.QUERY)


@dataclass(frozen=True)
class CompileStep(Kernel[ReplicatedStep, ReplicatedStep]):
    """Turns each replica's compute part, and the update, into one XLA function, if requested.

    Each function holds the captured nodes that XLA can compile and that wait for the same communication. The rest stays
    between the functions: nodes that kernels created (reductions, sends, queues), rows of variables, data-dependent
    shapes, random draws from seeds that XLA ignores, assertions, and Python functions. So do the loops of nested
    functions, which TensorFlow only builds for XLA if the whole step is compiled. `tf.function(jit_compile=True)`
    rejects such ops; here they run without XLA and are logged once.

    A function starts once all its arguments are available and returns all results at once: gradients are sent after
    the whole backward pass, not during it.

        x → f → g → send,  receive → h → write      becomes      x → call(f, g) → send,  receive → call(h, write)

    Workers that compute the same update in parallel must stay bit-identical. That update is compiled only if all use
    the same code for it: on one machine, and if no worker owns variables. The compute part is always compiled, since
    gradients are summed in the same order everywhere.

    Attributes:
        min_work: the minimum number of computing nodes in a function; regions with convolutions need no minimum.
    """

    min_work: int = 2
    name: ClassVar[str] = "compile-step"
    after: ClassVar[Mapping[str, str]] = {
        "place-on-devices": "a compiled region is on one device, and no kernel looks into its function",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        marks = Marks(step, context.compilation(step))
        if not any(name in marks for name in step.graph_index.nodes):
            return step
        marks = replace(marks, step=(step := _with_free_constants(step)))
        regions = [
            part for part in find_regions(marks, context).values()
            if work_in(step.graph_index, part.nodes) >= self.min_work or may_need_compiler(step.graph_index, part.nodes)
        ]  # fmt: skip
        _log_uncompiled(marks, context)
        if not regions:
            return step
        return Prune().apply(_with_calls(step, regions), context)


def _with_free_constants(step: ReplicatedStep) -> ReplicatedStep:
    """Removes control inputs of constants: each region has its own copies, which need not wait."""
    editor = StepEditor(step)
    freed = free_constants(editor, step.graph_index, {*map(node_of, step.outputs), *step.targets})
    return editor.to_step() if freed else step


def _with_calls(step: ReplicatedStep, regions: Iterable[Subgraph]) -> ReplicatedStep:
    editor = StepEditor(step)

    def name_in_function(_: int, name: str) -> str:
        return step.replica_of(name)[1]

    for k, region in enumerate(regions):
        nodes = [editor[name] for name in (*region.copies, *region.nodes)]
        function = compiled_function(nodes, region.gives, name_in_function)
        replace_by_call(editor, f"autodist/compiled_step/{k}", region.nodes, function)
    return editor.to_step()


def _log_uncompiled(marks: Marks, context: Context) -> None:
    """Logs the ops marked for XLA that run without it, on the chief and once per step."""
    step, part_of, compilable = marks.step, PartOf(marks.step), marks.compilable()
    left = Counter(
        node.op for name, node in step.graph_index.nodes.items()
        if node.op not in _NEEDS_NO_COMPILER and name in marks and part_of(name) is not None
        and not step.replica_of(name)[0] and not compilable.can_compile(node)
    )  # fmt: skip
    if left and context.worker == 0:
        ops = ", ".join(f"{op} ({count})" if count > 1 else op for op, count in sorted(left.items()))
        log.info("XLA: these ops of the step run without it: %s.", ops)
