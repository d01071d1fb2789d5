"""Says that a script which asks for several devices trains on one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from autodist.capture.local_training import LocalStep, LocalTraining, Way
from autodist.errors import CaptureError
from autodist.resources import ResourceSpec

log = logging.getLogger("autodist")

_MENDS = {
    Way.FIT: "Build the model in `with ad.scope():`, or call fit in it",
    Way.FUNCTION: "Put @ad.function in place of @tf.function on the training step, and build model and optimizer in "
    "`with ad.scope():`",
    Way.EAGER: "Put the training step into a function under @ad.function, and build model and optimizer in "
    "`with ad.scope():`",
    Way.SESSION: "Build the graph in `with ad.scope():` and make the session there by ad.create_distributed_session(), "
    "in place of tf.compat.v1.Session() or MonitoredTrainingSession",
}
_DOINGS = {
    Way.FIT: "fit of a model that was built, compiled and fitted outside of ad.scope()",
    Way.FUNCTION: "a training step that is no @ad.function",
    Way.EAGER: "a training step that is no @ad.function",
    Way.SESSION: "a session that ad.create_distributed_session() did not make",
}


_watching: list[TrainsAlone] = []
"""Who watches: the last that was made, so that a notebook in which a cell is run again is told once."""


class TrainsAlone:
    """Watches a script whose AutoDist has several replicas.

    A first step that this worker trains alone may be meant so, with distributed ones to follow: the log notes it. If
    none follows, a warning says so at the end. Refused is the one that cannot be meant: a plain session that trains a
    graph of the scope, where the script takes a part of its data for each worker.

    Args:
        spec: the machines.
        is_chief: whether this worker says so.
        is_in_scope: whether a graph was built in the scope.

    Attributes:
        divides_data: whether the script has asked for what it divides its data by.
    """

    def __init__(self, spec: ResourceSpec, is_chief: bool, is_in_scope: Callable[[object], bool]) -> None:
        self._spec, self._is_chief, self._is_in_scope = spec, is_chief, is_in_scope
        self.divides_data = False
        while _watching:
            _watching.pop().stop()
        self._training = LocalTraining(self._on_step) if spec.shares_batches else None
        if self._training is not None:
            _watching.append(self)

    def stop(self) -> None:
        """Nothing is to be said any more: a distributed step has trained."""
        if self._training is not None:
            self._training.stop()
            self._training = None

    def tell_at_end(self, has_idle_workers: bool) -> None:
        """Warns of what no distributed step has followed.

        Args:
            has_idle_workers: whether other workers were started for nothing.
        """
        training, self._training = self._training, None
        if training is None or not self._is_chief:
            return
        step = training.look_again()
        training.stop()
        if step is not None:
            self._warn(step)
        if has_idle_workers:
            log.warning("The other workers were started for nothing: no step ran on them.")

    def _on_step(self, step: LocalStep) -> None:
        has_part = self.divides_data and len(self._spec.workers) > 1
        if has_part and step.way is Way.SESSION and self._is_in_scope(step.graph):
            raise CaptureError(
                "a graph that was built in ad.scope() is trained by a plain session, on this worker's part of the data "
                f"alone: the script divides it by {len(self._spec.workers)} workers, and each would train a model of "
                "its own. Make the session by ad.create_distributed_session(), in place of tf.compat.v1.Session() or "
                "MonitoredTrainingSession; or, if each is to train its own, build that graph outside of the scope."
            )
        if self._is_chief:
            log.info("so far on one device alone: %s%s", _DOINGS[step.way], _at(step))

    def _warn(self, step: LocalStep) -> None:
        workers, replicas = len(self._spec.workers), len(self._spec.replicas)
        said = [
            f"No training step was distributed: this script made an AutoDist for {replicas} replicas on {workers} "
            f"worker{'s' if workers > 1 else ''} and trained on one device alone, by {_DOINGS[step.way]}{_at(step)}."
        ]
        if self.divides_data and workers > 1:
            said.append(
                "If it divides its data by ad.num_workers or ad.distribute_dataset, a part of them was not seen at all."
            )
        log.warning("%s %s.", " ".join(said), _MENDS[step.way])


def _at(step: LocalStep) -> str:
    return f" ({step.line})" if step.line else ""
