"""Loss terms: seeds losses whose terms differ in weight, and replaces their values by those of the whole batch."""

from __future__ import annotations

import logging

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.loss_terms import loss_kind
from autodist.graph.names import node_of, tensor
from autodist.graph.parts import PendingReductionKind, Term
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels.replicate.reductions.reducer import LocalPart, Reducer
from autodist.layout import Examples, Kind, Mean, PerExample, Replicated, Sum, Unknown, Weight
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

EXACT = tf.float64
"""The common dtype in which sums of possibly different dtypes are sent."""


Sums = dict[Weight | Term, tuple[str, tf.TensorShape]]
"""By weight or term: the tensor with its sum, and the shape."""


class TermSeeds:
    """Seeds each term of a loss so that the replicas' gradients only need to be summed to equal one device's.

    A mean is seeded with the replica's share of the whole batch, a sum with 1, and a replica-independent term with an
    equal share per replica. The arithmetic that combines the terms may read their values (the denominator of a ratio).
    It then reads those of the whole batch, so that each replica computes with one device's numbers.

    Args:
        reducer: of the replicated graph.
        call: position of the call of `gradient`.
    """

    def __init__(self, reducer: Reducer, call: int) -> None:
        self._reducer, self._call = reducer, call
        self._terms = reducer.step.gradient_calls[call].terms
        self._replicas = self._find_replicas()
        self._kinds = {term: self._kind(term) for term in self._terms}
        self._read = [t for t in self._terms if self._is_read(t)]

    def seed(self) -> None:
        """Replaces the seeds, and the values that are read."""
        sums = self._local_sums()
        known = self._known(sums)
        sums = {key: value for key, value in sums.items() if key not in known}
        wholes = known | (self._whole(sums) if sums else {})
        for term in self._terms:
            if term.seed in self._reducer.editor:
                self._seed_term(term, wholes)
        for term in self._terms:
            if term.value in self._reducer.editor:
                self._replace_value(term, wholes)

    def _find_replicas(self) -> int:
        """Returns the number of replicas that contribute to one update.

        Raises:
            StrategyError: some variables are updated by all workers jointly, others by each worker separately.
        """
        plan, stages = self._reducer.context.plan, self._reducer.stages
        synchrony_of = {g.variable: plan.synchrony(g.variable) for g in stages.gradients if g.call == self._call}
        alone = [name for name, synchrony in synchrony_of.items() if synchrony is not None and synchrony.mode.is_alone]
        together = sorted(synchrony_of.keys() - set(alone))
        if alone and together:
            raise StrategyError(
                f"the loss {self._terms[-1].tensor} adds values of different weights (a mean and a sum, a ratio of "
                f"sums), and {alone[0]} is updated by each worker alone, {together[0]} by all workers together. Set "
                "`sync` and `local_steps` to the same values for all variables."
            )
        return self._reducer.count if alone else self._reducer.group.size

    def _kind(self, term: Term) -> Kind:
        kind = loss_kind(self._reducer.step, self._reducer.flows, term.tensor)
        if isinstance(kind, PerExample):
            return Sum(kind.mixed_at)
        if isinstance(kind, Replicated) and self._reducer.step.in_step_all_reduces:
            return Mean(Examples())  # drops the gradient of the all-reduce on a replica without examples
        if not isinstance(kind, Unknown):
            return kind
        log.warning(
            "%s: it is not known how this part of the loss depends on the batch (%s); it is treated as a mean over "
            "examples, and batches that do not divide evenly raise an error.", term.tensor, kind.reason,
            extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
        self._reducer.require_even_parts(term.tensor, kind.reason)
        return Mean(Examples())

    def _is_read(self, term: Term) -> bool:
        """Returns True if the value of the whole batch is needed. Rows are read for their shape alone."""
        if isinstance(self._kinds[term], Replicated) or isinstance(self._reducer.flows.kind(term.tensor), PerExample):
            return False
        return term.value in self._reducer.editor and bool(self._reducer.editor.consumers(term.value))

    # -- sums over all replicas ------------------------------------------------------------------------------------

    def _local_sums(self) -> Sums:
        """Returns this worker's part of the sums, by weight or term: names and shapes."""
        means = [k.weight for t, k in self._kinds.items() if isinstance(k, Mean) and t.seed in self._reducer.editor]
        means += [k.weight for t in self._read if isinstance(k := self._kinds[t], Mean)]
        found: Sums = {
            weight: (self._reducer.weights_of(weight, EXACT)[1], tf.TensorShape([])) for weight in dict.fromkeys(means)
        }
        if self._read:
            with subgraph(self._reducer.editor, f"loss/{self._call}/sums") as f:
                made = [(term, self._local_sum(f, term)) for term in self._read]
            found |= {term: (f.name(value), value.shape) for term, value in made}
        return found

    def _local_sum(self, f: SubgraphBuilder, term: Term) -> tf.Tensor:
        kind = self._kinds[term]
        values = [self._reducer.parts.tensor(f, term.tensor, k) for k in range(self._reducer.count)]
        exact = [tf.cast(value, EXACT) for value in values]
        return self._reducer.weighted_sum(f, exact, kind.weight if isinstance(kind, Mean) else None)[0]

    def _known(self, sums: Sums) -> Sums:
        """Returns the weights of the whole batch that every worker knows without communication."""
        found: Sums = {}
        replicas = self._reducer.group.size
        if not self._reducer.group.spans_workers or self._replicas < replicas:
            return found
        with subgraph(self._reducer.editor, f"loss/{self._call}/known") as f:
            for key in sums:
                whole = None if isinstance(key, Term) else self._reducer.parts.whole(f, key, replicas, EXACT)
                if whole is not None:
                    found[key] = f.name(whole), tf.TensorShape([])
        return found

    def _whole(self, sums: Sums) -> Sums:
        """Returns the same sums over all workers; they are sent as one message."""
        if not self._reducer.group.spans_workers:
            return sums
        label = f"loss/{self._call}"
        with subgraph(self._reducer.editor, f"{label}/packed") as f:
            flat = [tf.reshape(f.input(name, EXACT, shape), [-1]) for name, shape in sums.values()]
            local = tf.concat(flat, 0) if len(flat) > 1 else flat[0]
            result = tf.identity(local)
        level = self._reducer.level(self._terms[0].tensor)
        reduced = self._reducer.noted(f, label, PendingReductionKind.LOSS, LocalPart(local), result, level)
        with subgraph(self._reducer.editor, f"{label}/unpacked") as g:
            pieces = tf.split(
                g.input(reduced, EXACT, local.shape), [shape.num_elements() for _, shape in sums.values()]
            )
            wholes = [tf.reshape(p, shape) for p, (_, shape) in zip(pieces, sums.values(), strict=True)]
        return {key: (g.name(whole), whole.shape) for key, whole in zip(sums, wholes, strict=True)}

    # -- replacement -----------------------------------------------------------------------------------------------

    def _seed_term(self, term: Term, wholes: Sums) -> None:
        dtype = self._reducer.step.spec_of(tensor(term.seed)).dtype
        with subgraph(self._reducer.editor, f"loss_weight/{self._call}/{self._terms.index(term)}") as f:
            made = [self._share(f, self._kinds[term], k, wholes, dtype) for k in range(self._reducer.count)]
        for k, seed in enumerate(made):
            self._replace(term.seed, k, f.name(seed))

    def _share(
        self,
        f: SubgraphBuilder,
        kind: Kind,
        k: int,
        wholes: Sums,
        dtype: tf.DType,
    ) -> tf.Tensor:
        if isinstance(kind, Mean):
            weight = f.input(self._reducer.weights_of(kind.weight, EXACT)[0][k], EXACT, [])
            return tf.cast(tf.math.divide_no_nan(weight, f.input(wholes[kind.weight][0], EXACT, [])), dtype)
        if isinstance(kind, Replicated):
            return tf.constant(1 / self._replicas, dtype)
        return tf.cast(self._reducer.parts.is_used(f, k), dtype)

    def _replace_value(self, term: Term, wholes: Sums) -> None:
        """Replaces a term's value by that of the whole batch, the same in all replicas."""
        kind = self._kinds[term]
        if term not in self._read:
            for k in range(self._reducer.count):
                self._replace(term.value, k, self._reducer.parts.named(term.tensor, k))
            return
        spec = self._reducer.step.spec_of(term.tensor)
        with subgraph(self._reducer.editor, f"loss_value/{self._call}/{self._terms.index(term)}") as f:
            whole = f.input(wholes[term][0], EXACT, spec.shape)
            if isinstance(kind, Mean):
                whole = tf.math.divide_no_nan(whole, f.input(wholes[kind.weight][0], EXACT, []))
            value = tf.cast(whole, spec.dtype)
        for k in range(self._reducer.count):
            self._replace(term.value, k, f.name(value))

    def _replace(self, node: str, k: int, new: str) -> None:
        local = self._reducer.parts.named(tensor(node), k)
        self._reducer.editor.rewire(local, new, sorted(self._reducer.editor.consumers(node_of(local))))
