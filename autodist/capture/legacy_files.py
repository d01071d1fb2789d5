"""Backups that callbacks of tf_keras write, as `keras_callbacks` has it for those of Keras 3."""

from __future__ import annotations

import functools
from typing import Any

from autodist.capture.keras_libraries import legacy_keras
from autodist.capture.patches import Patch

_VERSIONS = ("tf_keras", "2.18")


def silencing_table() -> list[Patch]:
    """What is replaced on a worker that leaves backups to the chief; empty without tf_keras."""
    if legacy_keras() is None:
        return []
    from tf_keras.src.distribute.worker_training_state import WorkerTrainingState  # only where the script has tf_keras

    names = ("back_up", "restore", "delete_backup", "backup_if_preempted")
    return [Patch(WorkerTrainingState, name, _silent, _VERSIONS) for name in names]


def _silent(plain: Any) -> Any:
    @functools.wraps(plain)
    def nothing(*args: Any, **kwargs: Any) -> None:
        """Stands in place of a method that writes files."""

    return nothing
