"""Chooses the rule that combines the rows of each sparse gradient over the replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.errors import RewriteError
from autodist.graph.editor import GraphEditor
from autodist.graph.flows import flows_of
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import RowJoin, VariableGradient
from autodist.graph.step import CapturedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.rows.merge_rows import is_summed
from autodist.layout import PerExample, Propagation, Replicated

_UNIQUE = {
    **dict.fromkeys(having(Trait.UNIQUE | Trait.UNIQUE_COUNTED), 0),
    **dict.fromkeys(having(Trait.SEGMENT_ROWS), 1),
}
"""Maps each op to the index of its output that contains no value twice."""

_PASS = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS)


@dataclass(frozen=True)
class ChooseRowJoins(Kernel[CapturedStep, CapturedStep]):
    """Ensures that an update receives the same rows as on one device.

    On one device, a sparse gradient has one row for each id that the step looks up. If each example has its own ids,
    the rows of all replicas are concatenated. If all replicas look up the same ids (positions), or each looks up its
    distinct ids (`tf.unique`), they are added by position or by id. An optimizer that squares or clips rows treats two
    rows differently from their sum; for one that only sums rows, the rule does not matter.
    """

    name: ClassVar[str] = "choose-row-joins"
    after: ClassVar[Mapping[str, str]] = {
        "rewrite-rows": "it creates the gradients that are rows",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if context.single_replica or not any(g.is_sparse for g in step.gradients):
            return step
        editor, flows = StepEditor(step), step.flows or flows_of(step)
        in_rows = frozenset(variable for variable, cut in context.placement.partitionings.items() if cut.axis == 0)
        chosen = [_chosen(editor, flows, step, g, in_rows) if g.is_sparse else g for g in step.gradients]
        return replace(step, gradients=tuple(chosen))


def _chosen(
    editor: StepEditor[Step], flows: Propagation, step: CapturedStep, gradient: VariableGradient, cut: Collection[str]
) -> VariableGradient:
    """Returns the gradient with its row join; `cut` names the variables whose rows are split over several shards.

    Raises:
        RewriteError: no rule passes the same rows to the optimizer as one device would.
    """
    ids, rows = gradient.tensors
    found = [(name, _join_of_source(editor, flows, name)) for name in _sources(editor, ids)]
    if {how for _, how in found} == {RowJoin.ALIGNED}:
        return replace(gradient, row_join=RowJoin.ALIGNED)
    differing = [name for name, how in found if how is not RowJoin.IN_TURN]
    if not differing or is_summed(editor, ids, rows):
        return replace(gradient, row_join=RowJoin.IN_TURN)
    if len(found) == 1:
        return replace(gradient, row_join=RowJoin.BY_INDEX)
    aligned = _aligned_end(step, found)
    if aligned and gradient.variable not in cut:
        return replace(gradient, row_join=RowJoin.ENDS_ALIGNED, aligned=aligned)
    raise RewriteError(
        f"{gradient.variable} is looked up in several ways in one step; the indices {differing[0]} do not belong to "
        "separate examples, and its optimizer does more with the rows of the gradient than sum them: replicas would "
        "pass other rows to it than one device. Make its gradient dense (tf.convert_to_tensor) before it is applied, "
        f"or look up a separate variable{', or leave it in one piece' if aligned else ''}."
    )


def _aligned_end(step: CapturedStep, found: Sequence[tuple[str, RowJoin]]) -> int | None:
    """Returns the number of trailing rows whose indices all replicas share, if rows of examples precede them."""
    joins = [how for _, how in found]
    first = joins.index(RowJoin.ALIGNED) if RowJoin.ALIGNED in joins else 0
    if set(joins[:first]) != {RowJoin.IN_TURN} or set(joins[first:]) != {RowJoin.ALIGNED}:
        return None
    counts = [step.spec_of(name).shape.num_elements() for name, _ in found[first:]]
    return sum(count for count in counts if count is not None) if None not in counts else None


def _sources(editor: GraphEditor, ids: str) -> Iterator[str]:
    """Yields the tensors whose concatenation is `ids`."""
    node = editor[node_of(ids)]
    if node.op == "ConcatV2":
        for part in [i for i in node.input if not is_control(i)][:-1]:
            yield from _sources(editor, part)
    elif node.op in _PASS:
        yield from _sources(editor, node.input[0])
    else:
        yield tensor(ids)


def _join_of_source(editor: GraphEditor, flows: Propagation, name: str) -> RowJoin:
    kind = flows.kind(name)
    if isinstance(kind, Replicated):
        return RowJoin.ALIGNED
    if isinstance(kind, PerExample):
        return RowJoin.IN_TURN
    is_unique = _UNIQUE.get(editor[node_of(name)].op) == output_index(name)
    return RowJoin.BY_INDEX if is_unique else RowJoin.IN_TURN
