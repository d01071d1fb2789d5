"""Outputs: reduces the values that a step returns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.loss_terms import loss_kind
from autodist.graph.names import data_inputs, is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.subgraph import subgraph
from autodist.kernels.replicate.recompute_after_reduce import RecomputedValue, find_recomputed, make_again
from autodist.kernels.replicate.reductions.global_state import GlobalState
from autodist.kernels.replicate.reductions.reducer import Reducer
from autodist.kernels.replicate.reductions.rows import concatenated
from autodist.kernels.replicate.reductions.statistics import Statistics
from autodist.layout import (
    Examples,
    Joined,
    Kind,
    Mean,
    PerExample,
    Reduced,
    ReducedBy,
    Replicated,
    Sum,
    Unknown,
)
from autodist.logs.terminal import ALIKE_EVERYWHERE, EXPLAINS_DIFFERENCES

log = logging.getLogger("autodist")


class OutputReductions:
    """Reduces the outputs of one replicated graph."""

    def __init__(self, reducer: Reducer, whole: GlobalState, statistics: Statistics) -> None:
        self._reducer, self._whole, self._statistics = reducer, whole, statistics

    def reduce_outputs(self) -> list[str]:
        """Reduces the outputs: rows over the local replicas, values of the whole batch over all workers."""
        if not self._reducer.step.is_whole:
            self._log_mixing()
        return [
            self._reduce_output(position, name) if node_of(name) in self._reducer.replica_dependent else name
            for position, name in enumerate(self._reducer.step.outputs)
        ]

    def reduce_texts(self) -> None:
        """Reduces values in text of the compute part that run-once nodes read, such as a loss shown with gradients."""
        graph_index, stages, editor = self._reducer.step.graph_index, self._reducer.stages, self._reducer.editor
        texts = [
            tensor(i)
            for name in sorted(stages.once, key=stages.order.__getitem__) if name in editor
            for i in graph_index.nodes[name].input
            if not is_control(i) and node_of(i) in self._reducer.replica_dependent
            and self._reducer.step.spec_of(tensor(i)).dtype == tf.string
        ]  # fmt: skip
        for position, name in enumerate(dict.fromkeys(texts)):
            readers = self._reducer.late_readers(name)
            editor.rewire(name, self._reduce_text(f"text/{position}", name), readers)

    def _log_mixing(self) -> None:
        """Logs scalars in which examples only see those of their own replica, unless the loss has the same issue."""
        flows = self._reducer.flows
        losses = [flows.kind(t) for call in self._reducer.step.gradient_calls for t in call.targets]
        if any(isinstance(kind, Mean | Sum | PerExample) and kind.mixed_at for kind in losses):
            return
        for name in self._reducer.step.outputs:
            if node_of(name) not in self._reducer.replica_dependent:
                continue
            made_of = [t for t in (self._whole.made_of(name) or [name]) if self._statistics.find(t) is None]
            kinds = [flows.kind(t) for t in made_of]
            node = next((kind.mixed_at for kind in kinds if isinstance(kind, Joined) and kind.mixed_at), None)
            if node is not None:
                of_all = ALIKE_EVERYWHERE if self._reducer.context.reduces_outputs else {}
                log.info(
                    "output %s is combined from each replica's value over its own examples, which see one another "
                    "there (first at node %r), as in a variance: it is not that of the whole batch.",
                    name, node, extra=EXPLAINS_DIFFERENCES | of_all,
                )  # fmt: skip

    def _reduce_output(self, position: int, name: str) -> str:
        kind, label = self._kind(name), f"output/{position}"
        if self._reducer.step.spec_of(name).dtype == tf.string and not isinstance(kind, Joined | PerExample):
            return self._reduce_text(label, name)
        if isinstance(kind, Unknown) and self._is_gradient(name):
            kind = Sum()
        if isinstance(kind, Unknown) and not isinstance(kind, Joined):
            made = self._made_of_reduced(label, name)
            if made is not None:
                return made
            kind = self._guess(name, kind)
        return self._reduced_as(label, name, kind)

    def _kind(self, name: str) -> Kind:
        """Returns an output's kind; Unknown for a sum that a constant may divide by the batch's length, as a loss."""
        flows = self._reducer.flows
        kind = flows.kind(name)
        return loss_kind(self._reducer.step, flows, name) if isinstance(kind, Sum) else kind

    def _is_sum(self, name: str) -> bool:
        return isinstance(self._reducer.flows.kind(name), Sum)

    def _is_gradient(self, name: str) -> bool:
        """Returns True if a tensor is a variable's gradient, even if its computation is unknown, as in a loop."""
        gradients = self._reducer.step.gradients
        return self._origin(name) in {self._origin(g.tensors[0]) for g in gradients if not g.is_sparse}

    def _origin(self, name: str) -> str:
        """Returns the tensor that `name` forwards through identity-like nodes."""
        nodes = self._reducer.step.graph_index.nodes
        while (node := nodes[node_of(name)]).op in having(Trait.IDENTITY):
            name = tensor(node.input[0])
        return name

    def _reduce_text(self, label: str, name: str) -> str:
        """Reduces the values shown in a text (a summary); in a merged summary, each part separately."""
        if node_of(name) not in self._reducer.replica_dependent:
            return name
        step = self._reducer.step
        node = step.graph_index.nodes[node_of(name)]
        if node.op == "MergeSummary":
            merged = data_inputs(node)
            parts = {t: self._reduce_text(f"{label}/{k}", t) for k, t in enumerate(merged)}
            return make_again(self._reducer.editor, label, name, RecomputedValue(tuple(parts), (node.name,)), parts)
        kind_of = self._kind
        made_of = find_recomputed(step, name, kind_of, _is_joined)
        if made_of is not None:
            local_only = [t for t in made_of.wholes if not self._is_of_all(t) or isinstance(kind_of(t), PerExample)]
            if self._reducer.context.computes or not local_only:
                self._warn_of_local_parts(name, local_only)
                return self._recomputed(label, name, made_of, None)
        kind = kind_of(name)
        return self._reduced_as(label, name, self._guess(name, kind) if isinstance(kind, Unknown) else kind)

    def _warn_of_local_parts(self, name: str, local_only: Sequence[str]) -> None:
        """Warns of values in a text that are computed from this worker's examples only, unlike the rest."""
        context = self._reducer.context
        if local_only and context.reduces_outputs and len(context.group.workers) > 1:
            text = "output %s shows %s of each worker's own examples, and not of the whole batch."
            log.warning(text, name, ", ".join(local_only), extra=ALIKE_EVERYWHERE)

    def _made_of_reduced(self, label: str, name: str) -> str | None:
        """Computes an output of unknown kind from reduced values; returns None if that is not known to be possible."""
        if self._reducer.step.rows is not None and any(map(self._is_sum, self._whole.made_of(name) or [name])):
            return None
        if self._is_of_all(name) or not self._reducer.group.spans_workers:
            return self._whole.of(label, name) if self._whole.has(name) else None  # for example the root of a mean
        return self._computed_here(label, name)

    def _computed_here(self, label: str, name: str) -> str | None:
        """Computes such an output from values reduced over this worker's replicas only."""
        if not self._reducer.context.computes or self._whole.is_of_written(name):
            return None
        made_of = find_recomputed(self._reducer.step, name, self._reducer.flows.kind, self._is_known)
        statistic = self._statistics.find(name) if made_of is None else None
        if self._reducer.count == 1:
            return name if made_of or statistic else None
        if made_of is not None:
            return self._recomputed(label, name, made_of, False)
        return self._statistics.make(label, statistic, self._reduce_locally) if statistic is not None else None

    def _is_known(self, name: str, kind: Kind) -> bool | None:
        if not isinstance(kind, Joined):
            return None
        return not isinstance(kind, Mean) or self._reducer.step.spec_of(name).dtype.is_floating

    def _reduced_as(self, label: str, name: str, kind: Kind) -> str:
        reducer = self._reducer
        if (
            reducer.step.in_step_all_reduces
            and reducer.group.receivers
            and self._is_of_all(name)
            and kind == Replicated()
        ):
            kind = Reduced("it is alike on all that compute", ReducedBy.MAX)  # sends it to workers without replicas
        if isinstance(kind, Joined) and (self._reducer.context.computes or self._is_of_all(name)):
            return self._reduced(label, name, kind, self._is_of_all(name))
        if isinstance(kind, PerExample) and self._reducer.step.is_whole:
            self._reducer.require_known(name, kind)
            return self._rows_of_all(label, name, kind.axis)
        if not self._reducer.context.computes:
            return self._placeholder(label, self._reducer.step.spec_of(name))
        return concatenated(self._reducer, label, name, kind.axis) if isinstance(kind, PerExample) else name

    def _recomputed(self, label: str, name: str, made_of: RecomputedValue, is_of_all: bool | None) -> str:
        """Recomputes arithmetic on reduced values, or text that shows them (a summary).

        Args:
            label: for the names of the new nodes.
            name: of the output.
            made_of: its computation.
            is_of_all: True if the values are reduced over all workers; None: if they would be as outputs.
        """
        reduced = {}
        for k, t in enumerate(made_of.wholes):
            kind = self._reducer.flows.kind(t)
            if isinstance(kind, PerExample):
                reduced[t] = concatenated(self._reducer, f"{label}/{k}", t, kind.axis)
                continue
            assert isinstance(kind, Joined), "all others are rows"
            reduced[t] = self._reduced(f"{label}/{k}", t, kind, self._is_of_all(t) if is_of_all is None else is_of_all)
        return make_again(
            self._reducer.editor, label, name, made_of, reduced | self._in_first_replica(made_of, reduced)
        )

    def _in_first_replica(self, made_of: RecomputedValue, reduced: Mapping[str, str]) -> dict[str, str]:
        """Maps the inputs of the first replica, whose nodes are copied, to their reduced values."""
        nodes, editor = self._reducer.step.graph_index.nodes, self._reducer.editor
        read = [pair for name in made_of.between for pair in zip(nodes[name].input, editor[name].input, strict=False)]
        return {tensor(now): reduced[tensor(was)] for was, now in read if tensor(was) in reduced}

    def _is_of_all(self, name: str) -> bool:
        """Returns True if a mean, sum or similar is reduced over all workers; its size must be known for that."""
        is_sized = self._reducer.step.is_whole or self._reducer.step.spec_of(name).shape.is_fully_defined()
        return self._reducer.context.reduces_outputs and is_sized

    def _reduced(self, label: str, name: str, kind: Joined, is_of_all: bool) -> str:
        """Reduces a mean, sum or similar over the local replicas, or over those of all workers."""
        reduce = self._reducer.reduce_value if is_of_all else self._reduce_locally
        statistic = None if self._whole.is_of_written(name) else self._statistics.find(name)
        return reduce(label, name, kind) if statistic is None else self._statistics.make(label, statistic, reduce)

    def _reduce_locally(
        self, label: str, name: str, kind: Joined, copies: Sequence[str] | None = None, depth: int = 0
    ) -> str:
        return self._reducer.reduce_locally(label, name, kind, copies)

    def _placeholder(self, label: str, spec: tf.TensorSpec) -> str:
        """Returns the value on a worker without replicas: no rows, or 0 for a mean or sum."""
        shape = [length or 0 for length in spec.shape.as_list()] if spec.shape.rank is not None else []
        with subgraph(self._reducer.editor, label) as f:
            nothing = tf.zeros(shape, spec.dtype)
        return f.name(nothing)

    def _guess(self, name: str, kind: Unknown) -> Kind:
        """Chooses a kind for an output of unknown kind: float scalars are averaged; of others, the first is taken."""
        self._reducer.require_known(name, kind)
        spec = self._reducer.step.spec_of(name)
        averaged = spec.dtype.is_floating and spec.shape.rank == 0
        over_all = self._reducer.context.reduces_outputs
        if self._reducer.count > 1 or (over_all and self._reducer.group.size > 1):
            how = "averaged over the replicas" if averaged else "taken from each worker's first replica"
            text = "output %s is %s: it is not known how it depends on the batch (%s)."
            log.warning(text, name, how, kind.reason, extra=ALIKE_EVERYWHERE if over_all else None)
        return Mean(Examples()) if averaged else Replicated()

    def _rows_of_all(self, label: str, name: str, axis: int) -> str:
        """Concatenates the rows of all workers, in order."""
        spec = self._reducer.step.spec_of(name)
        if spec.shape.rank is None:
            raise RewriteError(f"it is not known how many axes {name} has")
        local = concatenated(self._reducer, label, name, axis)
        with subgraph(self._reducer.editor, f"{label}/rows") as f:
            result = tf.identity(f.input(local, spec.dtype, spec.shape))
        shape = [None if a == axis else length for a, length in enumerate(spec.shape)]
        self._reducer.note(
            PendingReduction(
                name=label, kind=PendingReductionKind.STATE, local=(local,), result=(f.name(result),), weight=None,
                level=self._reducer.level(name), dtype=spec.dtype, shape=tf.TensorShape(shape),
                group=self._reducer.group, merge=ReduceOp.ROWS, axis=axis,
            )
        )  # fmt: skip
        return f.name(result)


def _is_joined(name: str, kind: Kind) -> bool | None:
    """Returns True if a value in a text has one value for all replicas of a worker."""
    return True if isinstance(kind, Joined | PerExample) else None
