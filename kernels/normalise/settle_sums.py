"""Removes the in-step all-reduces whose inputs do not differ between replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.errors import RewriteError, StrategyError
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.in_step_all_reduce import SUM_NAME, InStepAllReduce, InStepAllReduceKind
from autodist.graph.names import tensor
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.unused import remove_unused
from autodist.layout import Mean, PerExample, Propagation, Replicated, Sum, Unknown


@dataclass(frozen=True)
class SettleSums(Kernel[CapturedStep, CapturedStep]):
    """Removes in-step all-reduces of values that are equal on all replicas or computed once, and their gradients.

    total = sum_of_all(Σ x),  count = sum_of_all(16)      becomes      total = sum_of_all(Σ x),  count = 16
    """

    name: ClassVar[str] = "settle-sums"
    after: ClassVar[Mapping[str, str]] = {
        "settle-losses": "it removes the nodes that capture inserted into losses, before arithmetic is analysed",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if not context.single_replica:
            _require_top_level(step)
        if not step.in_step_all_reduces:
            return step
        kept = () if context.single_replica else _differing(step, _runs_ahead(step, context))
        editor = StepEditor(step)
        out = [s.node for s in step.in_step_all_reduces if s not in kept]
        for node in out:
            editor.rewire(tensor(node), editor[node].input[0])
            editor.replace_control(node, [])
        remove_unused(editor, editor.named(in_step_all_reduces=kept), out)
        return editor.to_step(in_step_all_reduces=kept)


def _differing(step: CapturedStep, runs_ahead: bool) -> tuple[InStepAllReduce, ...]:
    """Returns the reductions of values that differ between replicas; if steps run ahead, those that the script asks."""
    flows, once = flows_of(step), find_stages(step).once
    kept = {
        s.node
        for s in step.in_step_all_reduces
        if s.of is None and s.node not in once and _differs(step, flows, s, runs_ahead)
    }
    found = (s for s in step.in_step_all_reduces if (s.of or s.node) in kept and s.node not in once)
    return tuple(s for s in found if s.is_asked or not runs_ahead)


def _runs_ahead(step: CapturedStep, context: Context) -> bool:
    """Returns True if no variable makes a step wait for another worker."""
    synchronies = [context.plan.synchrony(g.variable) for g in step.gradients]
    return context.workers > 1 and bool(synchronies) and all(k is not None and k.runs_ahead for k in synchronies)


def _differs(step: CapturedStep, flows: Propagation, reduction: InStepAllReduce, runs_ahead: bool) -> bool:
    """Returns True if the values of the replicas differ, and add up to the value on one device.

    A mean over the replicas of a mean over their examples needs no sum of its own: it stays the mean that it is.

    Raises:
        RewriteError: the replicas' values do not add up to the value on one device.
        StrategyError: the script asks for a mean over replicas whose steps do not wait for each other.
    """
    name = tensor(step.graph_index.nodes[reduction.node].input[0])
    kind = flows.kind(name)
    if isinstance(kind, Replicated):
        return False
    if reduction.is_mean and isinstance(kind, Mean):
        if reduction.is_asked and runs_ahead:
            raise StrategyError(
                f"the step asks for the mean over all replicas of {name} (tf.distribute's all_reduce), and all "
                "variables have sync: false, staleness or local steps: no step waits for another worker. Leave "
                "all_reduce out, so that each worker has the mean of its own examples, or set sync: true."
            )
        return False
    if reduction.how is InStepAllReduceKind.ROWS:
        _require_rows(flows, name, reduction.axis)
        return True
    if not reduction.is_asked and not isinstance(kind, Sum):
        raise RewriteError(
            f"a loss combines a sum or mean of the batch with values of single examples ({name}). The batch was "
            "assumed to lie along the first axis that its placeholder leaves open, and it does not. Leave only that "
            "axis open (None), or feed batches whose first axis is the batch axis."
        )
    if reduction.is_mean or not isinstance(kind, Sum | Unknown):
        raise RewriteError(
            f"the step asks for the {'mean' if reduction.is_mean else 'sum'} over all replicas of {name}, and the "
            "parts of a batch may differ in length: only a sum over the examples adds up to the value on one device. "
            "Call tf.distribute's all_reduce with sums (ReduceOp.SUM), numbers of examples included, and divide "
            "after it. A mean over the examples needs ReduceOp.MEAN, or no all_reduce: it is that of the whole batch."
        )
    if not step.spec_of(name).shape.is_fully_defined():
        raise RewriteError(
            f"the step asks for the sum over all replicas of {name}, whose shape {step.spec_of(name).shape} is not "
            "known before it runs. Sum over the batch first, and give the result a known shape (tf.ensure_shape)."
        )
    return True


def _require_rows(flows: Propagation, name: str, axis: int) -> None:
    """Checks that the concatenated rows of all replicas are the rows that one device has.

    Raises:
        RewriteError: they are not, or it is unknown.
    """
    kind = flows.kind(name)
    if isinstance(kind, PerExample) and kind.axis == axis:
        return
    reason = kind.reason if isinstance(kind, Unknown) else "they have no row for each example"
    raise RewriteError(
        f"the step gathers the rows of all replicas of {name} along axis {axis}, and these rows are not known to "
        f"belong to examples in batch order ({reason}). Gather what the model computes for each example, before "
        "examples are reordered or combined."
    )


def _require_top_level(step: CapturedStep) -> None:
    """Checks that all in-step all-reduces are at the top level of the graph.

    Raises:
        RewriteError: one is in the body of a loop or of a conditional.
    """
    registered = {s.node for s in step.in_step_all_reduces}
    inner = (node.name for function in step.graph_def.library.function for node in function.node_def)
    outer = (node.name for node in step.graph_index.of_op("PlaceholderWithDefault") if node.name not in registered)
    hidden = next(_named_as_sums((*outer, *inner)), None)
    if hidden is not None:
        raise RewriteError(
            f"{hidden} is to be reduced over all replicas (by synchronized batch normalisation) or gathered, within a "
            "loop or a condition of the step (tf.while_loop, tf.map_fn, tf.cond): replicas may run different "
            "iterations or branches there. Call the layer outside of it, or set synchronized=False; gather "
            "outside of it."
        )


def _named_as_sums(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name.rpartition("/")[2].startswith(SUM_NAME))
