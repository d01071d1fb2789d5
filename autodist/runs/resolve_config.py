"""Config resolution: the machines and the strategy of a run, from the command's options or else from the script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autodist.cluster.environments.start_rendezvous import join_rendezvous, warn_if_alone
from autodist.errors import MisusedError, ResourceSpecError
from autodist.logs.terminal import log_to_the_terminal
from autodist.reading.file_sharding import reason_not_sharded
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import CliOverrides
from autodist.runs.dry_run import active_dry_run
from autodist.runs.joining_search import quorum_of
from autodist.runs.restarts import earlier_starts, require_can_restart
from autodist.runtime.gpus import count_gpus
from autodist.strategies import AllReduce, BuildsStrategy, arranged, chosen_builder, find_mesh, find_pipeline
from autodist.verify.recorder import recorder


def resolve(
    file: str | os.PathLike[str] | None,
    given: ResourceSpec | None,
    builder: BuildsStrategy | str | Mapping[str, Any] | None,
    default: BuildsStrategy | None,
    is_first: bool,
) -> tuple[ResourceSpec, BuildsStrategy]:
    """Returns machines and strategy on the chief.

    Args:
        file: the YAML that the script names.
        given: the machines that it passes instead of a file.
        builder: the strategy that it passes.
        default: the strategy if neither the script nor its YAML names one; None: that of builders.
        is_first: True if the script has made no AutoDist before.

    Raises:
        ResourceSpecError, StrategyError: the machines or the strategy are not valid.
        MisusedError: a command sets machines, and the script makes a second AutoDist.
        ClusterError: the rendezvous of processes that a scheduler has started fails.
    """
    dry_run = active_dry_run()
    overrides = CliOverrides.of_this_process() if dry_run is None else dry_run.overrides
    if overrides.is_set and not is_first and dry_run is None:
        raise MisusedError(
            "the script makes two AutoDist objects, but a command sets the machines of one. Keep one AutoDist, and "
            "open its scope() again."
        )
    spec = overrides.spec(lambda: _read_spec(file, given), count_gpus)
    given_builder = default if builder is None and spec.strategy is None else builder
    chosen = overrides.builder(lambda: chosen_builder(given_builder, spec.strategy))
    if dry_run is not None:
        return dry_run.choose(spec, chosen), chosen
    recording = recorder()
    if recording is None:
        require_can_restart(spec)
        spec = spec.without(earlier_starts().left_out)
    else:
        spec = spec.without_outputs()  # a comparison of steps neither saves nor resumes
        if recording.is_reference and (find_pipeline(chosen) or find_mesh(chosen)):
            chosen = AllReduce()  # a reference run has one device, and needs neither stages nor a mesh
    log_to_the_terminal(is_chief=True)
    reason = reason_not_sharded(is_compared=recording is not None, is_pipeline=find_pipeline(chosen) is not None)
    if spec.shard is not None and reason is not None:
        raise spec.shard_refused(reason)
    if spec.is_given:
        quorum = quorum_of(spec, chosen) if spec.is_elastic and recording is None else None
        spec = join_rendezvous(spec, overrides.replicas, count_gpus, quorum)
    else:
        warn_if_alone(len({node.address for node in spec.nodes}))
    return arranged(chosen, spec), chosen


def _read_spec(file: str | os.PathLike[str] | None, spec: ResourceSpec | None) -> ResourceSpec:
    if spec is not None and file is not None:
        raise ValueError("give resource_spec_file or resource_spec, not both.")
    if spec is not None:
        if not isinstance(spec, ResourceSpec):
            kind = type(spec).__name__
            raise ResourceSpecError(
                f"resource_spec is a {kind}; give a ResourceSpec, made by ResourceSpec.from_dict for example, or the "
                "path of a YAML file as resource_spec_file."
            )
        return spec
    if file is not None:
        if not isinstance(file, str | bytes | os.PathLike):
            raise ResourceSpecError(
                f"resource_spec_file is a {type(file).__name__}; give the path of a YAML file, or "
                "resource_spec=ResourceSpec.from_dict(...)."
            )
        return ResourceSpec.from_file(file)
    return ResourceSpec.local(count_gpus())
