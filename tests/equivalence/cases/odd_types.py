"""A step of one's own with variables of many types, scalars, empty ones and unused ones."""

from __future__ import annotations

import tensorflow as tf

from tests.equivalence.cases.base import Results, Trainer, own, program
from tests.unit.kernels.odd_variables import make_odd_step, odd_batches


@program
def step_odd_types(ad: Trainer) -> Results:
    with ad.scope():
        function, variables = make_odd_step()
        step = ad.function(function)
        for (batch,) in odd_batches():
            step(own(ad, batch))
    # NumPy's files know no bfloat16, every value of which is one of float32.
    return {
        v.name: (tf.cast(v, tf.float32) if v.dtype == tf.bfloat16 else tf.convert_to_tensor(v)).numpy()
        for v in variables
    }
