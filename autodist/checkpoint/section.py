"""Implements the YAML section `checkpoint`: finds the checkpoint to resume from, and sets up automatic saving."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from autodist.checkpoint.automatic import AutomaticCheckpoints
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.checkpoint.read import read_whole
from autodist.checkpoint.save_schedule import Growth, Preemption, SaveRequest
from autodist.errors import CheckpointError
from autodist.resources import CheckpointSection, ResourceSpec
from autodist.runs.dry_run import active_dry_run
from autodist.runs.measuring.kept_choices import CHOICES
from autodist.runs.run import Run

log = logging.getLogger("autodist")


def find_resumed(spec: ResourceSpec) -> Mapping[str, Any]:
    """On the chief, returns the path, step and seed of the checkpoint to resume from; {} if there is none.

    Raises:
        CheckpointError: it is damaged, or was not saved automatically.
    """
    section = _section_of(spec)
    prefix = None if section is None else Folder(section.folder).latest()
    if prefix is None:
        return {}
    about = read_whole(prefix)
    if "made_by" not in about:
        raise CheckpointError(
            f"{prefix} was saved by a script's own call, so only that script can restore it; `checkpoint` in the YAML "
            "resumes only from checkpoints that it has saved. Name another folder there."
        )
    log.info("resuming from step %d, saved as %s.", about["step"], prefix)
    entries = ("step", "seed", "made_by", CHOICES)
    return {"prefix": prefix, **{entry: about[entry] for entry in entries if entry in about}}


def save_automatically(run: Run) -> AutomaticCheckpoints | None:
    """Sets up the saving of a run's steps, and of SIGTERM if requested; returns None without a `checkpoint` section.

    Raises:
        ResourceSpecError: the script handles SIGTERM, or it cannot be handled here.
    """
    section = _section_of(run.spec)
    if section is None:
        return None
    requests: list[SaveRequest] = []
    if section.on_preempt and run.index == 0:
        preemption = Preemption(run)
        preemption.begin()
        requests.append(preemption)
    if run.spec.takes_machines_in and run.index == 0 and run.recorder is None:
        growth = Growth(run)
        growth.begin()
        requests.append(growth)
    run.observer = automatic = AutomaticCheckpoints(run, section, requests)
    return automatic


def saving_callback(run: Run) -> CheckpointCallback | None:
    """Returns the callback that saves each `fit` of a run; None without a `checkpoint` section."""
    section = _section_of(run.spec)
    if section is None:
        return None
    return CheckpointCallback(
        run, section.folder, section.keep, section.every_steps, section.every_minutes, section.on_preempt
    )


def _section_of(spec: ResourceSpec) -> CheckpointSection | None:
    """Returns the YAML section; None also in a dry run."""
    return spec.checkpoint if active_dry_run() is None else None
