"""What the section `checkpoint` of the YAML asks for: from where a run goes on, and what saves it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autodist.checkpoint.automatic import Automatic
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.checkpoint.preemption import Preemption
from autodist.checkpoint.read import read_about, require_whole
from autodist.errors import CheckpointError
from autodist.resources import CheckpointSection, ResourceSpec
from autodist.runs.dry_run import look
from autodist.runs.run import Run

log = logging.getLogger("autodist")


def find_resumed(spec: ResourceSpec) -> Mapping[str, Any]:
    """On the chief, the checkpoint that the run goes on from: its path, step and seed; nothing where there is none.

    Raises:
        CheckpointError: it is damaged, or was not made so.
    """
    section = _section_of(spec)
    prefix = None if section is None else Folder(section.folder).latest()
    if prefix is None:
        return {}
    about = read_about(prefix)
    require_whole(prefix, about)
    if "made_by" not in about:
        raise CheckpointError(
            f"{prefix} was saved by a script of its own, which alone knows what to do with it, and `checkpoint` in the "
            "YAML goes on from what it has saved itself. Name another folder there."
        )
    log.info("going on from step %d, which was saved as %s.", about["step"], prefix)
    return {"prefix": prefix, "step": about["step"], "seed": about["seed"], "made_by": about["made_by"]}


def save_automatically(run: Run) -> Automatic | None:
    """What saves the steps of a run from now on, at a SIGTERM too; None: it is not asked for.

    Raises:
        ResourceSpecError: SIGTERM is the script's own, or cannot be heeded here.
    """
    section = _section_of(run.spec)
    if section is None:
        return None
    preemption = Preemption(run) if section.on_preempt and run.index == 0 else None
    if preemption is not None:
        preemption.begin()
    run.observer = automatic = Automatic(run, section, preemption)
    return automatic


def saving_callback(run: Run) -> CheckpointCallback | None:
    """The callback by which each `fit` of a run is saved; None: it is not asked for."""
    section = _section_of(run.spec)
    if section is None:
        return None
    return CheckpointCallback(
        run, section.folder, section.keep, section.every_steps, section.every_minutes, section.on_preempt
    )


def _section_of(spec: ResourceSpec) -> CheckpointSection | None:
    """What the YAML says; None also where a command only looks at the script."""
    return spec.checkpoint if look() is None else None
