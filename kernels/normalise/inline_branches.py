"""InlineBranches: inlines conditionals that write variables with different owners, or state that is reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autodist.errors import RewriteError, StrategyError
from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import NO_EFFECT
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.names import tensor
from autodist.graph.read_again import writes_read_again
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.normalise.both_branches import BothBranches, Taken, find_hindrance
from autodist.kernels.plan import Plan
from autodist.kernels.replica_dependent import find_replica_dependent, sources_of
from autodist.kernels.replicate.advance_generators import reads_to_offset
from autodist.kernels.replicate.recompute_after_reduce import find_recomputed
from autodist.layout import Kind, Mean, Propagation, Reduced, Replicated, Sum, Unknown
from autodist.placement.partitioning import listed
from autodist.placement.synchrony import SyncMode


@dataclass(frozen=True)
class InlineBranches(Kernel[CapturedStep, CapturedStep]):
    """Inlines the branches of a conditional whose writes cannot stay in one operation.

    This is the case if an optimizer writes variables of different owners (gradient accumulation, loss scaling). It is
    also the case if replicas write state whose values differ and must be reduced, or a trained variable of an owner
    before the step uses it: the owner writes it once all gradients have arrived. Both branches are then computed, and
    the condition selects the written values.

        If(p, v ← v - g, c ← c + g)      becomes      v ← where(p, v - g, v);  c ← where(p, c, c + g)
    """

    name: ClassVar[str] = "inline-branches"

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if context.single_replica:
            return step
        return inline_state(inline_shared_updates(step, context.plan), context.plan)


def inline_shared_updates(step: CapturedStep, plan: Plan) -> CapturedStep:
    """Inlines conditionals that update variables to which the strategy gives different owners.

    A conditional that updates an asynchronous variable is not inlined. Other workers write such a variable
    concurrently, so that a written value must not depend on an earlier read.

    Raises:
        StrategyError: such a conditional has side effects other than writes of variables.
    """
    updates = {variable: (plan.owner(variable), plan.synchrony(variable)) for variable in plan.placement.owners}
    chosen = []
    for node in step.graph_index.of_op("If"):
        names = _written(step, node)
        kinds = {updates[name] for name in names if name in updates}
        is_awaited = all(synchrony is None or synchrony.mode is not SyncMode.ASYNCHRONOUS for _, synchrony in kinds)
        if is_awaited and len(kinds) > 1:
            hindrance = find_hindrance(node, step.graph_def.library)
            if hindrance is not None:
                raise StrategyError(
                    f"{listed(names)} are written under one condition ({node.name}), and the strategy gives them "
                    "different owners, or one of them to all workers. Both branches cannot be computed, since one "
                    f"contains {hindrance}. Move it out of the condition, give the variables one owner (the PS builder "
                    "does), or use AllReduce for all of them."
                )
            chosen.append(node)
    return _inlined(step, chosen) if chosen else step


def inline_state(step: CapturedStep, plan: Plan) -> CapturedStep:
    """Inlines conditionals of the compute part that write values which differ between replicas, or owned variables.

    Raises:
        RewriteError: replicas may disagree on such a condition, or it has side effects other than writes of variables.
    """
    if not any(_written(step, node) for node in step.graph_index.of_op("If")):
        return step
    stages = find_stages(step)
    draws = [name for name, _ in reads_to_offset(GraphEditor(step.graph_def, step.graph_index), step)]
    seeds = [seed for call in step.gradient_calls for seed in call.seeds]
    replica_dependent = find_replica_dependent(step, sources_of(step, seeds, draws), stages)
    waited_for = _written_before_use(step, stages, plan)
    chosen = [
        step.graph_index.nodes[w]
        for w in stages.state_writes
        if step.graph_index.nodes[w].op == "If" and (w in replica_dependent or w in waited_for)
    ]
    if not chosen:
        return step
    flows = flows_of(step)
    for node in chosen:
        subject = f"{listed(_written(step, node))} is written under a condition ({node.name})"
        reason = _why_not_agreed(step, flows, node.input[0])
        if reason is not None:
            raise RewriteError(
                f"{subject} on which the replicas may disagree ({reason}), so that their values cannot be combined. "
                "Compute the condition from values that all replicas share (a counter, for example), or from means and "
                "sums over the batch; or write tf.where(condition, new, old) in every step, and set the variable's "
                "`aggregation` to the way in which its values are to be combined."
            )
        hindrance = find_hindrance(node, step.graph_def.library)
        if hindrance is not None:
            raise RewriteError(
                f"{subject} {waited_for.get(node.name, 'with values that differ between replicas')}. Both branches "
                f"cannot be computed, since one contains {hindrance}. Move it out of the condition."
            )
    inlined = _inlined(step, chosen)
    _require_not_read_again(step, inlined)
    return inlined


def _written_before_use(step: CapturedStep, stages: Stages, plan: Plan) -> Mapping[str, str]:
    """Maps the writes of owned trained variables that the step uses afterwards to the reason why they are replaced."""
    found = {}
    for gradient in stages.gradients:
        if plan.owner(gradient.variable) is None:
            continue
        handle = step.by_name[gradient.variable].handle
        writes = [w for w in stages.state_writes if handle in stages.effects[w].writes]
        if writes and stages.is_used_after(handle, writes):
            found.update(dict.fromkeys(writes, "before the step uses it, and one worker owns it"))
    return found


def _require_not_read_again(step: CapturedStep, inlined: CapturedStep) -> None:
    """Checks that replicas do not use, in the same step, their own values of a variable written under a condition.

    Raises:
        RewriteError: a loss depends on a read of such a variable after the write.
    """
    writes = [w for w in writes_read_again(inlined, flows_of(inlined)) if w not in step.graph_index.nodes]
    if writes:
        names = sorted({name for write in writes for name in _written(inlined, inlined.graph_index.nodes[write])})
        raise RewriteError(
            f"{listed(names)} is written under a condition with values of a replica's part of the batch, and read "
            "again for what is differentiated: each replica would continue with its own value. In a step of "
            "ad.function or fit, write it in every step, as v.assign(tf.where(condition, new, v)): sums and means of "
            "the batch are then those of the whole batch. Or set it before the first step."
        )


def _why_not_agreed(step: CapturedStep, flows: Propagation, condition: str) -> str | None:
    """Returns the reason why replicas may disagree on a condition whose inputs are reduced; None if they agree."""

    def is_whole(name: str, kind: Kind) -> bool | None:
        is_float = step.spec_of(name).dtype.is_floating
        return True if isinstance(kind, Sum | Reduced) else is_float if isinstance(kind, Mean) else None

    kind = flows.kind(condition)
    if isinstance(kind, Replicated) or find_recomputed(step, tensor(condition), flows.kind, is_whole):
        return None
    return kind.reason if isinstance(kind, Unknown) else f"{condition} differs between them"


def _written(step: CapturedStep, node: NodeDef) -> list[str]:
    """Returns the names of the variables that a node writes."""
    effect = step.graph_index.effects.get(node.name, NO_EFFECT)
    return sorted(step.by_handle[h].name for h in effect.writes if h in step.by_handle)


def _inlined(step: CapturedStep, nodes: Sequence[NodeDef]) -> CapturedStep:
    editor = StepEditor(step)
    branches = BothBranches(editor, step)
    places = {name: place for place, name in enumerate(step.graph_index.order)}
    for node in sorted(nodes, key=lambda node: places[node.name]):  # later ones are still in the graph
        _replace(editor, step, node.name, branches.take(editor[node.name]))
    editor.drop_lost_colocation()  # with nodes of the graph in which the script traced a branch
    return editor.to_step()


def _replace(editor: StepEditor[Step], step: CapturedStep, name: str, taken: Taken) -> None:
    """Replaces an `If` for its consumers and for nodes that wait for it.

    Nodes that write a variable which the `If` only read wait for that read. Its writes run even if no node waits for
    them. Every later access to one of these variables, on any path, comes after the write.
    """
    writes = [write for made in taken.writes.values() for write in made]
    for old, new in taken.outputs.items():
        editor.rewire(old, new)
    editor.replace_target(name, writes)
    if not editor.consumers(name):
        editor.run(writes)
    for consumer in editor.consumers(name):
        written = step.graph_index.effects.get(consumer, NO_EFFECT).writes
        reads = [read for handle, read in taken.reads.items() if handle in written and handle not in taken.writes]
        editor.replace_control(name, [*writes, *reads], [consumer])
    _come_after(editor, step, name, taken.writes)
    editor.remove([name])


def _come_after(editor: StepEditor[Step], step: CapturedStep, name: str, writes: Mapping[str, Sequence[str]]) -> None:
    """Orders accesses to a variable that an `If` wrote after the write, if the captured graph ordered them so."""
    after = reach(step.graph_index.consumers[name], step.graph_index.consumers.__getitem__)
    for later in sorted(after & step.graph_index.effects.keys()):
        effect = step.graph_index.effects[later]
        for handle in sorted(writes.keys() & (effect.reads | effect.writes)):
            editor.add_control(later, writes[handle])
