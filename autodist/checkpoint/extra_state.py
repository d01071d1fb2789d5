"""The state that a run needs to resume exactly, in addition to the values of the script's objects.

ExtraState saves the state of the run. The functions below save the state of each worker's script: NumPy's and Python's
generators, and positions in data sets.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state  # holds Keras's default generator
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops  # holds TensorFlow's default generator

from autodist.checkpoint.content import OURS, Value
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.placement.partitioning import listed
from autodist.proto import strategy_pb2
from autodist.runs.run import Run
from autodist.runtime.draws import Draws
from autodist.runtime.persistent_buffers import Saved
from autodist.runtime.seeds import resume_seeds, seeds_now
from autodist.runtime.variables import StoredVariable
from autodist.synchronizers import all_synchronizers

log = logging.getLogger("autodist")

DRAWS = "draws"
"""Key of NumPy's and Python's generators in the state of a script."""

_SCRIPTS_SUFFIX = ".scripts.json"
_GENERATORS, _BUFFERS = f"{OURS}generators/", f"{OURS}memories/"


class ExtraState:
    """Saves and restores the state of a run outside the script's objects.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def values(self) -> Iterator[Value]:
        """Yields the states of generators and the kernels' persistent buffers on each worker; on the chief only."""
        for name, tracked in self._run.tracker.generators.items():
            yield Value.of_script(_GENERATORS + name, tracked)
        for name, variable in _global_generators().items():
            if self._run.tracker.of(variable) is None:
                yield Value(_GENERATORS + name, variable.read_value)
        for worker, specs in self._run.chief.buffer_specs.items():
            for name, spec in specs.items():
                holder = Holder.whole(tuple(spec.shape), Group.of_workers([worker]))
                stored = StoredVariable(name, spec.dtype, tuple(spec.shape), holder, on_cpu=True)
                yield Value.in_session(f"{_BUFFERS}{worker}/{name}", stored)

    def files(self) -> Mapping[str, Callable[[str], None]]:
        """Returns the extra file with the states of the workers' scripts, each state once; on the chief only."""
        workers: dict[str, list[int]] = {}
        for worker, state in self._run.chief.scripts.items():
            if state is not None:
                workers.setdefault(json.dumps(state), []).append(worker)

        def write(path: str) -> None:
            with open(path, "w") as opened:
                json.dump([{"workers": who, "state": json.loads(state)} for state, who in workers.items()], opened)

        return {_SCRIPTS_SUFFIX: write} if workers else {}

    def about(self) -> dict[str, Any]:
        """Returns the entries of the side file."""
        strategy = self._run.steps.strategy
        nodes = [] if strategy is None else all_synchronizers(strategy)
        return {
            "seeds": seeds_now(),
            "draws": sorted(self._run.steps.draws),
            "inexact": sorted({name for name, synchronizer in nodes if synchronizer.inexact is not None}),
        }

    def script(self, prefix: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the state of this worker's script in a checkpoint; logs a warning if none fits this worker.

        Args:
            prefix: the prefix of the checkpoint.
            about: the content of its side file.
        """
        run, workers = self._run, about.get("workers")
        try:
            with open(f"{prefix}{_SCRIPTS_SUFFIX}") as opened:
                states = {worker: entry["state"] for entry in json.load(opened) for worker in entry["workers"]}
        except FileNotFoundError:
            return {}  # for example, TensorFlow alone has written it
        if run.index in states:
            own: Mapping[str, Any] = states[run.index]
            return own
        chiefs = states.get(0, {})
        if len(states) == workers and all(state.get(DRAWS) == chiefs.get(DRAWS) for state in states.values()):
            return dict(chiefs)
        log.warning(
            "%s: NumPy's and Python's generators start over on worker %d, since %s. If workers must draw the same "
            "numbers, set one seed on all of them.", prefix, run.index,
            "only the chief has saved its script" if len(states) == 1 and workers != 1 else
            f"{workers} workers have saved it, which drew different numbers", extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
        return {**chiefs, DRAWS: {}}

    def resume(self, prefix: str, about: Mapping[str, Any], is_same: bool) -> None:
        """Restores generators, seeds and the kernels' persistent buffers; every worker calls it.

        Args:
            prefix: the prefix of the checkpoint.
            about: the content of its side file; {} if TensorFlow alone has written it.
            is_same: True if this run has saved it and continued since.
        """
        reader = tf.train.load_checkpoint(prefix)
        keys = [key for key in reader.get_variable_to_shape_map() if key.startswith(OURS)]
        self._resume_generators({k.removeprefix(_GENERATORS): k for k in keys if k.startswith(_GENERATORS)}, reader)
        self._resume_buffers(prefix, about, [k for k in keys if k.startswith(_BUFFERS)])
        fault = resume_seeds(about.get("seeds", {}))
        if fault:
            log.warning(
                "%s: shuffles and draws without a seed of their own continue differently from the earlier run.", fault,
                extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        draws = about.get("draws", [])
        if draws:
            log.warning(
                "%s draw from a TensorFlow-internal state that no checkpoint holds: they %s. Draw from a "
                "tf.random.Generator or keras.random.SeedGenerator, or with tf.random.stateless_uniform, for example.",
                listed(draws), "continue as they are" if is_same else "start over", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def _resume_generators(self, keys: Mapping[str, str], reader: Any) -> None:
        states = {name: np.asarray(reader.get_tensor(key)) for name, key in keys.items()}
        with context.eager_mode():  # while a script builds a graph, an assignment would be a node that is never run
            for name, variable in _global_generators(make=frozenset(states)).items():
                if name in states:
                    variable.assign(states.pop(name))
            self._run.tracker.resume(states)

    def _resume_buffers(self, prefix: str, about: Mapping[str, Any], keys: list[str]) -> None:
        own = f"{_BUFFERS}{self._run.index}/"
        fits = about.get("workers") == self._run.workers
        saved = {key.removeprefix(own): key for key in keys if key.startswith(own)} if fits else {}
        lost = "" if fits or not keys else f"{about['workers']} workers have saved it, and {self._run.workers} resume"
        if lost:
            _log_lost(about, lost)
        self._run.restore_buffers(Saved(prefix, saved))
        then = (about.get("strategy") or {}).get("sha256")

        def check_unused() -> None:
            """Checks for unused buffers after the first training step; later steps of this strategy may use some."""
            strategy = self._run.steps.strategy
            if (
                strategy is not None
                and self._run.graph_runners.persistent_buffers.awaited
                and digest_of_strategy(strategy) != then
            ):
                _log_lost(about, "this strategy has no place for it")

        if self._run.steps.strategy is None:
            self._run.steps.on_first_program = check_unused
        else:
            check_unused()


def digest_of_strategy(strategy: strategy_pb2.Strategy) -> str:
    """Returns a hash that is equal for equal strategies."""
    return hashlib.sha256(strategy.SerializeToString(deterministic=True)).hexdigest()


def _log_lost(about: Mapping[str, Any], why: str) -> None:
    log.warning(
        "the residuals of compressors, or the copies and momentum of local steps, for the gradients of %s are not "
        "restored: %s. They start at zero, or at the saved values, which loses what one step had left out, or the "
        "steps since the last outer step.", listed(about.get("inexact", [])), why, extra=ALIKE_EVERYWHERE,
    )  # fmt: skip


def _global_generators(make: frozenset[str] = frozenset()) -> dict[str, tf.Variable]:
    """Returns the states of Keras's and TensorFlow's global generators, if they exist; creates those in `make`."""
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


def draws_now() -> dict[str, Any]:
    """Returns the state of a script without known positions in data sets: only the random generators."""
    return {DRAWS: Draws.now().to_json()}


def resume_draws(state: Mapping[str, Any]) -> None:
    """Sets NumPy's and Python's generators to a saved state of a script."""
    fault = Draws.from_json(state.get(DRAWS, {})).resume()
    if fault:
        log.warning("%s, and starts over. Set its seed at the start of the script.", fault, extra=ALIKE_EVERYWHERE)
