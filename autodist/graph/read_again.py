"""Sums and means over the batch that a step writes to a variable and reads again for its loss.

Examples are centres and running averages in a loss. On one device the step reads the result of the whole batch, so each
replica needs the contributions of the others before it can continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autodist.graph.batch_statistics import BatchSearch, NodeInput, Statistic, Statistics, met_at, met_mixing
from autodist.graph.branch_effects import first_effect
from autodist.graph.effects import NO_EFFECT, READS, group_by_handle
from autodist.graph.functions import functions_by_name
from autodist.graph.names import node_of
from autodist.graph.op_types import NodeDef
from autodist.graph.ops import Trait, assigns
from autodist.graph.seeds import live_calls, reduced_calls
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.layout import Propagation, Replicated


def find_behind(writes: Iterable[str], search: BatchSearch) -> Statistics:
    """Returns the sums and means that are read again, by input.

    The input is that of the write, or of an earlier node if several values are written.

    Args:
        writes: the result of `writes_read_again`.
        search: the step.
    """
    result: dict[NodeInput, Statistic] = {}
    for write in writes:
        if search.is_left(write):
            continue
        place, value = NodeInput(write, 1), search.inputs(write)[1]
        met = met_at(search, place, value)
        result |= met | met_mixing(search, [value]) if place in met else met
    return result


def writes_read_again(step: CapturedStep, flows: Propagation) -> Iterator[str]:
    """Yields writes of replica-dependent values to a variable that a differentiated tensor reads afterwards."""
    updates = _after_gradients(step)
    writes = [n.name for n in step.graph_index.having(Trait.ASSIGNMENT) if n.name not in updates]
    readers = _readers(step) if writes else {}
    for write in writes:
        is_dependent = not isinstance(flows.kind(step.graph_index.inputs(write)[1]), Replicated)
        if is_dependent and _is_read_again(step, readers, write):
            yield write


def branches_read_again(step: CapturedStep, flows: Propagation) -> Iterator[str]:
    """Yields conditionals with a replicated condition that write replica-dependent values which are read again.

    Both branches of these may be computed: they only compute and write, and return values of known shapes.
    """
    updates, effects = _after_gradients(step), step.graph_index.effects
    nodes = [n for n in step.graph_index.of_op("If") if n.name not in updates and effects.get(n.name, NO_EFFECT).writes]
    readers, functions = _readers(step) if nodes else {}, functions_by_name(step.graph_def.library)
    for node in nodes:
        if first_effect(node, functions, _is_access) is not None:
            continue
        condition, *given = step.graph_index.inputs(node.name)
        shapes = (step.spec_of(f"{node.name}:{k}").shape for k in range(len(node.attr["Tout"].list.type)))
        is_agreed = isinstance(flows.kind(condition), Replicated) and all(s.is_fully_defined() for s in shapes)
        is_dependent = not all(isinstance(flows.kind(name), Replicated) for name in given)
        if is_agreed and is_dependent and _is_read_again(step, readers, node.name):
            yield node.name


def _is_access(node: NodeDef) -> bool:
    return node.op in READS or assigns(node.op)


def _readers(step: CapturedStep) -> dict[str, list[str]]:
    """Maps each handle to the reads of its variable that differentiated tensors need, for reduced gradients."""
    reduced = reduced_calls(step)
    targets = [node_of(t) for k in live_calls(step) if k in reduced for t in step.gradient_calls[k].targets]
    names = reach(targets, step.graph_index.data.__getitem__)
    reads = (name for name in names if step.graph_index.nodes[name].op in READS)
    return group_by_handle((name, step.graph_index.effects.get(name, NO_EFFECT).reads) for name in reads)


def _is_read_again(step: CapturedStep, readers: Mapping[str, Sequence[str]], write: str) -> bool:
    """Returns True if one of the reads in `readers`, by handle, comes after a write of its variable."""
    handles = step.graph_index.effects.get(write, NO_EFFECT).writes
    reads = [reader for handle in handles for reader in readers.get(handle, ())]
    return bool(reads) and write in reach(reads, step.graph_index.sources.__getitem__)


def _after_gradients(step: CapturedStep) -> set[str]:
    """Returns the nodes that depend on gradients, which are reduced before the step uses them."""
    result = {node_of(t) for g in step.gradients for t in g.tensors}
    for name in step.graph_index.order:
        if not result.isdisjoint(step.graph_index.data[name]):
            result.add(name)
    return result
