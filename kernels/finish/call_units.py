"""CallUnits: replaces the computation of a pipeline stage per micro-batch by calls of one shared function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.control_flow import find_maybe_dead
from autodist.graph.names import as_input
from autodist.graph.op_types import RESOURCE, VARIANT, is_stateless, types_of_inputs, types_of_outputs
from autodist.graph.ops import Trait, having
from autodist.graph.split import Subgraph, Subgraphs, split
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.finish.called_function import CalledFunction, replace_by_call, shared_function

_SINGLE_NODES = having(Trait.FED | Trait.CALL | Trait.BRANCH | Trait.LOOP)
"""Ops that already are a single node, and that TensorFlow may inline in its own way."""


@dataclass(frozen=True)
class CallUnits(Kernel[ReplicatedStep, ReplicatedStep]):
    """Replaces the copies of a pipeline stage's computation, one per micro-batch and direction, by function calls.

        x1 → f1 → g1 → send,  x2 → f2 → g2 → send      becomes      x1 → call(f, g) → send,  x2 → call(f, g) → send

    The graph that a worker imports, and that TensorFlow optimizes before its first run, then holds each stage once,
    whatever the number of micro-batches. Stateful nodes (variables and their readers, queues, random draws), control
    flow, and lists of tensors stay between the calls. A stage with such nodes in its middle becomes several functions.
    Recomputation is a separate function, since it waits for no gradient.

    A call starts once all its arguments are available, and returns all results at once. This adds no waiting between
    workers: the execution order was determined for whole units.

    Attributes:
        min_calls: the minimum number of calls of a function; fewer copies are cheap.
        min_nodes: the minimum number of nodes of a function.
    """

    min_calls: int = 4
    min_nodes: int = 4
    name: ClassVar[str] = "call-units"
    after: ClassVar[Mapping[str, str]] = {
        "compile-step": "XLA functions come first",
        "compile-updates": "XLA functions come first",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if not context.goes_through_stages(step) or len(context.replicas) < self.min_calls:
            return step
        parts = _find_parts(step)
        functions = {key: _function(part) for key, part in parts.items() if len(part.nodes) >= self.min_nodes}
        calls = Counter(function.name for function in functions.values())
        shared = {key: function for key, function in functions.items() if calls[function.name] >= self.min_calls}
        return _with_calls(step, parts, shared) if shared else step


def _find_parts(step: ReplicatedStep) -> Subgraphs:
    """Splits each unit into parts that can be called, separated by nodes that cannot."""
    graph_index = step.graph_index
    constants = frozenset(node.name for node in graph_index.of_op("Const") if not graph_index.sources[node.name])
    maybe_dead = find_maybe_dead(graph_index)

    def key(name: str) -> Hashable | None:
        unit = _unit_of(step, name)
        return unit if unit is not None and name not in maybe_dead and _can_be_called(step, name) else None

    return split(step, key, copied=constants, cut_cycles=True)


def _unit_of(step: ReplicatedStep, name: str) -> Hashable | None:
    """Returns the unit and the device that compute a node; None if it is in no unit."""
    if name not in step.copies:
        return None
    micro_batch, captured = step.copies[name]
    part = step.pipeline_parts.get(name, step.pipeline_parts.get(captured))
    return None if part is None or part.is_held else (micro_batch, part, step.graph_index.nodes[name].device)


def _can_be_called(step: ReplicatedStep, name: str) -> bool:
    node = step.graph_index.nodes[name]
    if not is_stateless(node.op) or node.op in _SINGLE_NODES:
        return False
    return {RESOURCE, VARIANT}.isdisjoint((*types_of_inputs(node), *types_of_outputs(node)))


def _function(part: Subgraph) -> CalledFunction:
    """Returns the function of a part; its nodes have their captured names, so that all micro-batches share it."""
    step = part.step
    nodes = [step.graph_index.nodes[name] for name in (*part.copies, *part.nodes)]
    return shared_function(nodes, part.gives, lambda _, name: step.replica_of(name)[1])


def _with_calls(step: ReplicatedStep, parts: Subgraphs, shared: dict[Hashable, CalledFunction]) -> ReplicatedStep:
    editor = StepEditor(step)
    called: dict[str, str] = {}
    """By tensor of a part, the output of the call that replaces it."""
    for k, key in enumerate(key for key in parts.order if key in shared):
        name = f"autodist/unit/{k}"
        replace_by_call(editor, name, parts[key].nodes, shared[key].on(called))
        called.update({as_input(result): f"{name}:{j}" for j, result in enumerate(shared[key].results)})
    return editor.to_step()
