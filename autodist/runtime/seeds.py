"""Applies the run's seed to random operations without one, so that all workers shuffle and initialize alike."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from autodist.tf_compat.patches import OPERATION_SEED, install

_Seeds = tuple[int | None, int | None]

_MOST = 2**31 - 1  # TensorFlow keeps the seeds of operations below this

_set_here: set[int] = set()
"""The seeds that were set here, not by the script."""


def set_default_seed(seed: int) -> None:
    """Sets TensorFlow's global seed (the default graph's in graph mode), unless the script has set it.

    An operation with its own seed keeps drawing what it draws without a global seed. TensorFlow would combine the two,
    and `shuffle(seed=1)` would have another order than without AutoDist.
    """
    if global_seed() is not None:  # requesting an operation's seeds would also show this, but consumes one
        return
    (tf.random.set_seed if tf.executing_eagerly() else tf.compat.v1.set_random_seed)(seed)
    if not _set_here:
        install(OPERATION_SEED, _keep_own_seed)
    _set_here.add(seed)


def _keep_own_seed(plain: Callable[[int | None], _Seeds], op_seed: int | None) -> _Seeds:
    if op_seed is not None and global_seed() in _set_here:
        return random_seed.DEFAULT_GRAPH_SEED, op_seed % _MOST
    return plain(op_seed)


def global_seed() -> int | None:
    """Returns TensorFlow's global seed, of the graph that is being built or of the process."""
    return context.global_seed() if tf.executing_eagerly() else tf.compat.v1.get_default_graph().seed


def is_seeded_by_script() -> bool:
    """Returns True if the script has set TensorFlow's seed or NumPy's, as `keras.utils.set_random_seed` does."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined, unused-ignore]
    seed = global_seed()
    return (seed is not None and seed not in _set_here) or getattr(bits, "seed_seq", None) is None


def seeds_now() -> dict[str, Any]:
    """Returns the state from which TensorFlow derives seeds, as a JSON value; empty if its seeds are random."""
    if not tf.executing_eagerly() or context.global_seed() is None:
        return {}
    version, numbers, _ = context.context()._rng.getstate()
    packed = np.array(numbers, "<u4").tobytes()
    return {
        "for_all": context.global_seed(),
        "is_ours": context.global_seed() in _set_here,
        "dealt": {"version": version, "state": base64.b64encode(packed).decode()},
    }


def resume_seeds(state: Mapping[str, Any]) -> str:
    """Restores the state from which TensorFlow derives seeds to that of `seeds_now`.

    Returns:
        An error message if the script has set another seed; "" on success.
    """
    if not state or not tf.executing_eagerly():
        return ""
    now, then = context.global_seed(), state["for_all"]
    if state["is_ours"] and (now is None or now in _set_here):
        set_default_seed(then)
        tf.random.set_seed(then)
        _set_here.add(then)
    elif now != then or state["is_ours"]:
        return (
            f"the script has set the seed {now}, and {'none' if state['is_ours'] else then} in the run that has saved"
        )
    numbers = np.frombuffer(base64.b64decode(state["dealt"]["state"]), "<u4").tolist()
    context.context()._rng.setstate((state["dealt"]["version"], tuple(numbers), None))
    return ""
