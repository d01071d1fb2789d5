"""CompileStep: what the script asks to compile becomes functions of XLA."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.jit_scope import is_in_jit_scope
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.split import Subgraph
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import free_constants
from autodist.kernels.base import Context, Kernel
from autodist.kernels.finish.called_function import compiled_function, put_call
from autodist.kernels.finish.compilable import Compilable
from autodist.kernels.finish.compiled_regions import PartOf, find_regions, may_need_compiler, work_in
from autodist.kernels.finish.prune import Prune

log = logging.getLogger("autodist")

_NEEDS_NO_COMPILER = having(Trait.SOURCE | Trait.FED | Trait.QUERY)


@dataclass(frozen=True)
class CompileStep(Kernel):
    """Where the script asks for `jit_compile`, a replica's compute part is one function of XLA, and so is the update.

    Each takes in what XLA can compile of the captured nodes that wait for the same communication. The rest stays
    between the functions: what the kernels made (joins, sends, queues), rows of variables, shapes that depend on data,
    random draws from seeds that XLA does not know, assertions, Python functions, and the loops of nested functions,
    which TensorFlow builds as XLA wants them under a whole step alone. `tf.function(jit_compile=True)` refuses such
    ops; here they run as without XLA, and the log names them once.

    A function begins when all its arguments are there and gives its results all at once: gradients are sent after the
    whole backward pass, not during it.

        x → f → g → send,  receive → h → write      becomes      x → call(f, g) → send,  receive → call(h, write)

    Workers that make the same update side by side stay alike in every bit: that update is compiled only where all have
    the same code for it, on one machine and if no worker owns variables besides. What a replica computes is compiled
    in any case, since its gradients are summed in one order for all.

    Attributes:
        min_work: nodes with fewer than so many that compute something are left as they are, but for convolutions.
    """

    min_work: int = 2
    name: ClassVar[str] = "compile-step"

    def apply(self, item: Step, context: Context) -> Step:
        asked = _asked_of(item)
        if not any(map(asked, item.graph_index.nodes)):
            return item
        item = _with_free_constants(item)
        regions = [
            part for part in find_regions(item, context, asked).values()
            if work_in(item.graph_index, part.nodes) >= self.min_work or may_need_compiler(item.graph_index, part.nodes)
        ]  # fmt: skip
        _tell_what_is_left(item, context, asked)
        if not regions:
            return item
        return Prune().apply(_with_calls(item, regions), context)


def _with_free_constants(item: Step) -> Step:
    """Each region has constants of its own, which stand for nothing that has to be waited for."""
    editor = StepEditor(item)
    freed = free_constants(editor, item.graph_index, {*map(node_of, item.outputs), *item.targets})
    return editor.to_item() if freed else item


def _asked_of(item: Step) -> Callable[[str], bool]:
    return (lambda _: True) if item.jit_compile else is_in_jit_scope


def _with_calls(item: Step, regions: Iterable[Subgraph]) -> Step:
    editor = StepEditor(item)

    def short(_: int, name: str) -> str:
        return item.replica_of(name)[1]

    for k, region in enumerate(regions):
        nodes = [editor[name] for name in (*region.copies, *region.nodes)]
        function = compiled_function(nodes, region.gives, short)
        put_call(editor, f"autodist/compiled_step/{k}", region.nodes, function)
    return editor.to_item()


def _tell_what_is_left(item: Step, context: Context, asked: Callable[[str], bool]) -> None:
    """Names the ops that run without XLA although it is asked for; the chief tells it once for a step."""
    part_of, compilable = PartOf(item), Compilable(item.graph_def, allows_loops=item.jit_compile)
    left = Counter(
        node.op for name, node in item.graph_index.nodes.items()
        if node.op not in _NEEDS_NO_COMPILER and asked(name) and part_of(name) is not None
        and not item.replica_of(name)[0] and not compilable.can_compile(node)
    )  # fmt: skip
    if left and context.worker == 0:
        told = ", ".join(f"{op} ({count})" if count > 1 else op for op, count in sorted(left.items()))
        log.info("jit_compile: these ops of the step run without XLA: %s.", told)
