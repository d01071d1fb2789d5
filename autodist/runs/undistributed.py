"""Warns if a script that requests several devices trains on one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autodist.capture.local_steps import LocalStep, TrainingKind
from autodist.capture.local_training import LocalTraining
from autodist.capture.scope_training import ScopeTraining
from autodist.errors import CaptureError
from autodist.logs.formatting import some_of
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.resources import ResourceSpec

log = logging.getLogger("autodist")

_NAMED = 3
"""Variables that a warning names."""

_FIXES = {
    TrainingKind.FIT: "Build the model in `with ad.scope():`, or call fit in it",
    TrainingKind.FUNCTION: (
        "Put @ad.function in place of @tf.function on the training step, and build model and optimizer in "
        "`with ad.scope():`"
    ),
    TrainingKind.EAGER: (
        "Put the training step into a function under @ad.function, and build model and optimizer in `with ad.scope():`"
    ),
    TrainingKind.SESSION: (
        "Build the graph in `with ad.scope():` and make the session there by ad.create_distributed_session(), in place "
        "of tf.compat.v1.Session() or MonitoredTrainingSession"
    ),
}
_DOINGS = {
    TrainingKind.FIT: "fit of a model that was built, compiled and fitted outside of ad.scope()",
    TrainingKind.FUNCTION: "a training step that is no @ad.function",
    TrainingKind.EAGER: "a training step that is no @ad.function",
    TrainingKind.SESSION: "a session that ad.create_distributed_session() did not make",
}


_watching: list[UndistributedScript] = []
"""The active watchers: only the last one made, so that running a notebook cell again warns once."""


class UndistributedScript:
    """Watches a script whose AutoDist has several replicas for steps that train on one device.

    - A first step that this worker trains alone may be intended, if distributed ones follow: it is logged. If none
      follows, a warning is logged at the end.
    - A step that trains variables of the scope in addition to distributed steps is logged as a warning.
    - A plain session that trains a graph of the scope is an error if the script divides its data among the workers.

    Args:
        spec: the machines.
        is_chief: True if this worker logs the warnings.
        is_in_scope: returns True if a graph was built in the scope.
        is_trained: returns True if a distributed step uses a variable.
        pull: updates the script's variables.

    Attributes:
        divides_data: True if the script has read a value by which it divides its data.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        is_chief: bool,
        is_in_scope: Callable[[object], bool],
        is_trained: Callable[[Any], bool] = lambda variable: False,
        pull: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec, self._is_chief, self._is_in_scope = spec, is_chief, is_in_scope
        self.divides_data = False
        while _watching:
            _watching.pop().stop()
        self._training: LocalTraining | None = None
        self._second: ScopeTraining | None = None
        if spec.shares_batches:
            self._training = LocalTraining(self._on_step)
            self._second = ScopeTraining(self._on_second, is_trained, pull, is_in_scope)
            _watching.append(self)

    def stop(self) -> None:
        """Stops watching."""
        self._stop_first()
        if self._second is not None:
            self._second.stop()
            self._second = None

    def begin_distributed(self) -> None:
        """Called when a distributed step trains: from now on, only training in addition to it is reported."""
        self._stop_first()
        if self._second is not None:
            self._second.begin()

    def before_training(self) -> None:
        """Called before a distributed training step."""
        if self._second is not None:
            self._second.before_step()

    def noting_variables(self) -> AbstractContextManager[None]:
        """Context in which new variables are recorded as the scope's."""
        return nullcontext() if self._second is None else self._second.noting_variables()

    def _stop_first(self) -> None:
        if self._training is not None:
            self._training.stop()
            self._training = None

    def leave_state(self, has_idle_workers: bool) -> None:
        """Logs a warning if the script trained on one device and no distributed step followed.

        Args:
            has_idle_workers: True if other workers were started and not used.
        """
        step = None if self._training is None else self._training.look_again()
        was_alone = self._training is not None
        self.stop()
        if not was_alone or not self._is_chief:
            return
        if step is not None:
            self._warn(step)
        if has_idle_workers:
            log.warning("The other workers were started for nothing: no step ran on them.")

    def _on_step(self, step: LocalStep) -> None:
        has_part = self.divides_data and len(self._spec.workers) > 1
        if has_part and step.kind is TrainingKind.SESSION and self._is_in_scope(step.graph):
            raise CaptureError(
                "a graph that was built in ad.scope() is trained by a plain session, on this worker's part of the data "
                f"alone: the script divides it among {len(self._spec.workers)} workers, and each would train its own "
                "model. Make the session with ad.create_distributed_session(), in place of tf.compat.v1.Session() or "
                "MonitoredTrainingSession. If each worker is to train its own model, build the graph outside the scope."
            )
        if self._is_chief:
            log.info("so far on one device alone: %s%s", _DOINGS[step.kind], _at(step))

    def _on_second(self, step: LocalStep, variables: list[str]) -> None:
        if not self._is_chief:
            return
        workers = len(self._spec.workers)
        each = "each worker separately, on the data that it passes there" if workers > 1 else "one device alone"
        log.warning(
            "in addition to the steps that are distributed, %s%s trains %s on %s. %s. If that is intended, build the "
            "model outside of ad.scope().",
            _DOINGS[step.kind], _at(step), some_of(variables, _NAMED), each, _fix_of(step),
            extra=ALIKE_EVERYWHERE,
        )  # fmt: skip

    def _warn(self, step: LocalStep) -> None:
        workers, replicas = len(self._spec.workers), len(self._spec.replicas)
        sentences = [
            f"No training step was distributed: this script made an AutoDist for {replicas} replicas on {workers} "
            f"worker{'s' if workers > 1 else ''} and trained on one device alone, by {_DOINGS[step.kind]}{_at(step)}."
        ]
        if self.divides_data and workers > 1:
            sentences.append(
                "If it divides its data by ad.num_workers or ad.distribute_dataset, a part of the data was not used."
            )
        log.warning("%s %s.", " ".join(sentences), _fix_of(step))


def _fix_of(step: LocalStep) -> str:
    if step.library:
        return (
            f"The step is made by {step.library}: wrap it in ad.function instead of the library's tf.function (see "
            "docs/libraries.md), and build model and optimizer in `with ad.scope():`"
        )
    return _FIXES[step.kind]


def _at(step: LocalStep) -> str:
    return f" ({step.line})" if step.line else ""
