"""The mesh that a distribution of Keras requests of a run, and the settings of the run that distributions must fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autodist.capture.keras.distribution.checks import is_distribution
from autodist.capture.keras.distribution.layouts import layouts_of
from autodist.capture.keras.distribution.meshes import describe_mesh
from autodist.capture.keras.distribution.run_settings import RunSettings
from autodist.errors import StrategyError
from autodist.logs.formatting import capitalised
from autodist.options.fields import OptionError
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides
from autodist.runs.dry_run import active_dry_run
from autodist.runs.run import Run
from autodist.strategies import Mesh, find_mesh


def mesh_builder(distribution: Any) -> Mesh:
    """Returns the strategy of a `ModelParallel`; its layouts are annotations of the steps.

    Raises:
        StrategyError: its mesh or its layouts are not possible.
    """
    layouts = layouts_of(distribution)
    return Mesh(mesh=dict(layouts.mesh.axes), data=layouts.batch_axis)


@contextmanager
def errors_with_mesh(distribution: Any) -> Iterator[None]:
    """Adds the place of a distribution's mesh to errors about the mesh of a strategy; None: there is no distribution.

    Raises:
        StrategyError: the mesh does not fit the machines.
    """
    try:
        yield
    except OptionError as error:
        if distribution is None or error.option != "mesh":
            raise
        described = capitalised(describe_mesh(distribution.device_mesh))
        raise StrategyError(f"{described} does not fit the run: {error.problem}") from error


def settings_of(run: Run, spec: ResourceSpec, chosen: Any) -> RunSettings:
    """Returns the settings of a run.

    Args:
        run: the run.
        spec: the machines that the script is written for.
        chosen: the argument `strategy` of `AutoDist(…)`.
    """
    dry_run = active_dry_run()
    overrides = CliOverrides.of_this_process() if dry_run is None else dry_run.overrides
    mesh = None if run.builder is None else find_mesh(run.builder)
    return RunSettings(
        spec.places,
        overrides.machines or spec.file or "AutoDist(…)",
        len(spec.workers),
        spec.batch,
        _place_of_strategy(overrides, spec, chosen),
        None if mesh is None else mesh.of_places(spec),
        "" if mesh is None else mesh.data,
        is_chief=run.builder is not None,
        divides_variables=run.divides_variables,
        normalizes_whole_batches=(
            spec.batch_norm or ("whole" if spec.mesh_rows and not spec.micro_batches else "replica")
        )
        == "whole",
        is_reference=run.recorder is not None and run.recorder.is_reference,
    )


def _place_of_strategy(overrides: CliOverrides, spec: ResourceSpec, chosen: Any) -> str | None:
    """Returns the place that chooses the strategy, for messages; None: a distribution of Keras may choose it."""
    if overrides.strategy is not None:
        return f"the option --strategy {overrides.strategy}"
    if is_distribution(chosen):
        return None
    if chosen is not None:
        return "the argument `strategy` of AutoDist(…)"
    return None if spec.strategy is None else str(spec.strategy.place("builder") or spec.strategy.builder)
