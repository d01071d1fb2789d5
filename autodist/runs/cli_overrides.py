"""Machines and strategy that a command sets for the script that it runs, in place of the script's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autodist.errors import ResourceSpecError, StrategyError
from autodist.json_record import JSONRecord
from autodist.resources import ResourceSpec, StrategySection, Timeouts

if TYPE_CHECKING:
    from autodist.strategies import BuildsStrategy

VARIABLE = "AUTODIST_ASKED"
"""Environment variable in which a command passes its options to the script's process, as JSON."""


@dataclass(frozen=True)
class CliOverrides(JSONRecord):
    """Options of a command.

    Attributes:
        cluster: path of the YAML of the machines; None: the script decides.
        workers: number of workers, all on this machine; None: the script decides.
        replicas: per worker; None: one on the CPU, else as many as there are GPUs for.
        strategy: name of a builder, or path of a YAML file with a `strategy` section; None: the YAML of the machines or
            the script decides.
        given: True if a scheduler has started this process and those of the other workers.
        max_restarts: number of restarts of all workers after a worker was lost; None if the YAML decides.
        min_nodes: number of processes that suffice for a start, if `given`; None if the YAML decides.
        traceback: True to show AutoDist's own errors with a traceback.
    """

    cluster: str | None = None
    workers: int | None = None
    replicas: int | None = None
    strategy: str | None = None
    given: bool = False
    max_restarts: int | None = None
    min_nodes: int | None = None
    traceback: bool = False

    def __post_init__(self) -> None:
        if self.cluster is not None and not self.given and (self.workers, self.replicas) != (None, None):
            raise ResourceSpecError(
                f"--cluster {self.cluster} already sets the workers and replicas; leave out --workers and --replicas, "
                "which are for workers on this machine."
            )
        for option, count in (("--workers", self.workers), ("--replicas", self.replicas)):
            if count is not None and count < 1:
                raise ResourceSpecError(f"{option} is {count}; give 1 or more.")

    @staticmethod
    def of_this_process() -> CliOverrides:
        """Returns the options of the command that started this process; empty options if no command did."""
        content = os.environ.get(VARIABLE)
        if content is not None:
            return CliOverrides.decode(content)
        return _taken_over[-1] if _taken_over else CliOverrides()

    @property
    def is_set(self) -> bool:
        """True if the command sets machines or a strategy."""
        return replace(self, traceback=False) != CliOverrides()

    @property
    def machines(self) -> str | None:
        """The options that set the machines, for messages; None: no option does."""
        options = {"--cluster": self.cluster, "--workers": self.workers, "--replicas": self.replicas}
        return " ".join(f"{name} {value}" for name, value in options.items() if value is not None) or None

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that pass these options to another process."""
        return {VARIABLE: self.encode().decode()}

    def spec(self, from_script: Callable[[], ResourceSpec], gpus: Callable[[], int] = lambda: 0) -> ResourceSpec:
        """Returns the machines; local ones keep the other settings of the script's YAML (strategy, batch, timeouts).

        Args:
            from_script: returns the script's machines.
            gpus: counts the GPUs of this machine; local workers run their replicas on them if there are enough.

        Raises:
            ResourceSpecError: the machines cannot be used.
        """
        set_here = {"max_restarts": self.max_restarts, "min_nodes": self.min_nodes}
        update = {key: value for key, value in set_here.items() if value is not None}
        spec = self._machines(from_script, gpus)
        return spec.model_copy(update=update) if update else spec

    def _machines(self, from_script: Callable[[], ResourceSpec], gpus: Callable[[], int]) -> ResourceSpec:
        if self.cluster is not None:
            return ResourceSpec.from_file(self.cluster)
        if self.given:
            return from_script().as_given()
        if self.workers is None and self.replicas is None:
            return from_script()
        local, own = local_workers(self.workers or 1, self.replicas, gpus()), from_script()
        settings = {
            name: getattr(own, name) for name in ("strategy", "batch", "max_restarts", "source", *Timeouts.model_fields)
        }
        return local.model_copy(update=settings)

    def builder(self, from_script: Callable[[], BuildsStrategy]) -> BuildsStrategy:
        """Returns the builder that decides the strategy.

        Args:
            from_script: returns the builder of the script, or of the YAML of its machines.

        Raises:
            StrategyError, ResourceSpecError: it cannot be used; names the line if it comes from a file.
        """
        return from_script() if self.strategy is None else named_builder(self.strategy)


_taken_over: list[CliOverrides] = []


def take_over() -> CliOverrides:
    """Moves this process's options out of the environment: processes that the script starts must not inherit them."""
    options = CliOverrides.of_this_process()
    _taken_over.append(options)
    os.environ.pop(VARIABLE, None)
    return options


def local_workers(workers: int, replicas: int | None, gpus: int = 0) -> ResourceSpec:
    """Returns `workers` workers on this machine, on its GPUs if it has any, else on its CPU.

    Args:
        workers: number of workers.
        replicas: per worker; None: one on the CPU, else as many as each worker has GPUs for.
        gpus: number of GPUs of the machine.

    Raises:
        ResourceSpecError: the machine has GPUs, but too few.
    """
    devices = workers * (replicas or max(gpus // workers, 1))
    if gpus and devices > gpus:
        raise ResourceSpecError(
            f"{workers} workers need {devices} GPUs, one for each replica, and TensorFlow sees {gpus} here. Use fewer "
            "workers or replicas, or list `cpus` in a YAML file."
        )
    kind = "gpus" if gpus else "cpus"
    return ResourceSpec.from_dict({"nodes": [{"address": "localhost", kind: list(range(devices)), "workers": workers}]})


def named_builder(name: str) -> BuildsStrategy:
    """Returns the builder with a name, or the builder of the `strategy` section of a YAML file.

    Raises:
        StrategyError, ResourceSpecError: it does not exist or cannot be used.
    """
    # Imported here: a named builder or compressor may need TensorFlow, and faults in options are reported before that.
    from autodist.strategies import builder_from_section, registered_names

    is_file = name.endswith((".yml", ".yaml")) or os.sep in name
    if not is_file and os.path.isfile(name) and name not in registered_names():
        is_file = True
    if not is_file:
        return builder_from_section(StrategySection.from_script(name))
    section = StrategySection.from_file(name)
    if section is None:
        raise StrategyError(f"{name} has no section `strategy`; add one, for example `strategy: AllReduce`.")
    return builder_from_section(section)
