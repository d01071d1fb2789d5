"""Own means: gradients of one worker's own examples, for updates that no other worker takes part in."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.parts import PendingReduction
from autodist.kernels.communicate.reduce_by_shuffle import own_rows, rows_of, weight_of
from autodist.kernels.communicate.results import Results


def use_own_mean(results: Results, pending: PendingReduction) -> list[str]:
    """Replaces the sum of a gradient by the mean over this worker's own examples; returns its tensors."""
    with results.editor.subgraph(f"own_mean/{pending.name}") as f:
        if pending.is_sparse:
            made = rows_of(pending, [own_rows(f, pending)])
        else:
            made = [f.input(pending.local[0], pending.dtype, pending.shape)]
            for weight in weight_of(f, pending):
                made = [tf.math.divide_no_nan(made[0], tf.cast(weight, pending.dtype))]
        made = [tf.identity(t) for t in made]
    names = [f.name(t) for t in made]
    results.set_result(pending, names)
    return names
