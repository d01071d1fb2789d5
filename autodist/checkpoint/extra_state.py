"""Beside: what a run keeps besides the values of the script's objects, and needs to go on as if it had never ended."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state  # where Keras keeps the generator of draws that name none
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops  # likewise TensorFlow

from autodist.checkpoint.content import OURS, Value
from autodist.checkpoint.script import files_of, saved_script
from autodist.graph.placement import Placement, listed
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.proto import strategy_pb2
from autodist.runs.run import Run
from autodist.runtime.persistent_buffers import Saved
from autodist.runtime.seeds import resume_seeds, seeds_now
from autodist.runtime.variables import Kept
from autodist.synchronizers import all_synchronizers

log = logging.getLogger("autodist")

_GENERATORS, _MEMORIES = f"{OURS}generators/", f"{OURS}memories/"


class ExtraState:
    """What is saved and restored of one run, beside the script's objects.

    Args:
        run: whose it is.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def values(self) -> Iterator[Value]:
        """On the chief, in `ChiefOnly`: states of generators, and what kernels keep on each worker."""
        for name, tracked in self._run.tracker.generators.items():
            kept = tracked.kept if tracked.may_be_behind else None
            yield Value(_GENERATORS + name, tracked.read, kept)
        for name, variable in _global_generators().items():
            if self._run.tracker.of(variable) is None:
                yield Value(_GENERATORS + name, variable.read_value)
        for worker, specs in self._run.chief.memories.items():
            for name, spec in specs.items():
                kept = Kept(name, spec.dtype, tuple(spec.shape), Placement(None, (worker,)), on_cpu=True)
                yield Value.in_session(f"{_MEMORIES}{worker}/{name}", kept)

    def files(self) -> Mapping[str, Callable[[str], None]]:
        """Likewise, what is written beside of the workers' scripts."""
        return files_of(self._run.chief.scripts)

    def about(self) -> dict[str, Any]:
        """What the side file says of it."""
        strategy = self._run.strategy
        nodes = [] if strategy is None else all_synchronizers(strategy)
        return {
            "seeds": seeds_now(),
            "draws": sorted(self._run.draws),
            "inexact": sorted({name for name, synchronizer in nodes if synchronizer.inexact is not None}),
        }

    def script(self, prefix: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a checkpoint has of this worker's script; see `saved_script`."""
        return saved_script(self._run, prefix, about.get("workers"))

    def resume(self, prefix: str, about: Mapping[str, Any], is_same: bool) -> None:
        """Restores generators, seeds and what kernels keep; all workers call it.

        Args:
            prefix: of the checkpoint.
            about: what its side file says; nothing where TensorFlow alone has written it.
            is_same: whether the run that saved it is this one, which has gone on since.
        """
        reader = tf.train.load_checkpoint(prefix)
        keys = [key for key in reader.get_variable_to_shape_map() if key.startswith(OURS)]
        self._resume_generators({k.removeprefix(_GENERATORS): k for k in keys if k.startswith(_GENERATORS)}, reader)
        self._resume_memories(prefix, about, [k for k in keys if k.startswith(_MEMORIES)])
        fault = resume_seeds(about.get("seeds", {}))
        if fault:
            log.warning(
                "%s: shuffles and draws that have no seed of their own go on otherwise than there.", fault,
                extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        draws = about.get("draws", [])
        if draws:
            log.warning(
                "%s draw from a state that TensorFlow keeps to itself, which no checkpoint has: they %s. Draw from a "
                "tf.random.Generator, a keras.random.SeedGenerator or by tf.random.stateless_uniform and its like.",
                listed(draws), "go on as they are" if is_same else "begin anew", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def _resume_generators(self, keys: Mapping[str, str], reader: Any) -> None:
        states = {name: np.asarray(reader.get_tensor(key)) for name, key in keys.items()}
        with context.eager_mode():  # where a script builds a graph, an assignment would be a node that nobody runs
            for name, variable in _global_generators(make=frozenset(states)).items():
                if name in states:
                    variable.assign(states.pop(name))
            self._run.tracker.resume(states)

    def _resume_memories(self, prefix: str, about: Mapping[str, Any], keys: list[str]) -> None:
        own = f"{_MEMORIES}{self._run.index}/"
        fits = about.get("workers") == self._run.workers
        saved = {key.removeprefix(own): key for key in keys if key.startswith(own)} if fits else {}
        lost = "" if fits or not keys else f"{about['workers']} workers have saved it, and {self._run.workers} go on"
        if lost:
            _tell_lost(about, lost)
        self._run.resume_memories(Saved(prefix, saved))
        then = (about.get("strategy") or {}).get("sha256")

        def look() -> None:
            """Once the first step that trains is made; under the same strategy later ones may have the rest."""
            strategy = self._run.strategy
            if (
                strategy is not None
                and self._run.graph_runners.memories.awaited
                and digest_of_strategy(strategy) != then
            ):
                _tell_lost(about, "this strategy has no place for it")

        if self._run.strategy is None:
            self._run.on_first_program = look
        else:
            look()


def digest_of_strategy(strategy: strategy_pb2.Strategy) -> str:
    """A hash that is equal for equal strategies."""
    return hashlib.sha256(strategy.SerializeToString(deterministic=True)).hexdigest()


def _tell_lost(about: Mapping[str, Any], why: str) -> None:
    log.warning(
        "what compressors kept from step to step of the gradients of %s is not restored: %s. It begins anew, which "
        "costs what one step had left out.", listed(about.get("inexact", [])), why, extra=ALIKE_EVERYWHERE,
    )  # fmt: skip


def _global_generators(make: frozenset[str] = frozenset()) -> dict[str, tf.Variable]:
    """The states of Keras's and TensorFlow's global generators, where there are any; those in `make` are made."""
    found = {}
    keras_ones = global_state.get_global_attribute("global_seed_generator")
    if keras_ones is None and "keras" in make:
        import keras.src.random.seed_generator as module

        keras_ones = module.global_seed_generator()
    if keras_ones is not None:
        found["keras"] = keras_ones.state.value
    if stateful_random_ops.global_generator is not None or "tensorflow" in make:
        found["tensorflow"] = tf.random.get_global_generator().state
    return found
