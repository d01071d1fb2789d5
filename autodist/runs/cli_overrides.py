"""What a command asks of the script that it runs: machines and strategy, in place of what the script says of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from autodist.errors import ResourceSpecError, StrategyError
from autodist.resources import ResourceSpec, StrategySection, Timeouts

if TYPE_CHECKING:
    from autodist.strategies import BuildsStrategy

VARIABLE = "AUTODIST_ASKED"
"""Environment variable by which a command tells the script's process, as JSON."""


@dataclass(frozen=True)
class CliOverrides:
    """Options of a command.

    Attributes:
        cluster: path of the YAML of the machines; None: what the script says.
        workers: on this machine alone; None: what the script says.
        replicas: of each of these workers; None: one, or as many as there are GPUs for.
        strategy: name of a builder, or path of a YAML file with a `strategy` section; None: what the YAML of the
            machines or the script says.
        given: whether a scheduler has started this process and those of the other workers.
        max_restarts: how often all workers start again after one of them was lost; None: what the YAML says.
        traceback: whether AutoDist's own errors are shown with where they come from.
    """

    cluster: str | None = None
    workers: int | None = None
    replicas: int | None = None
    strategy: str | None = None
    given: bool = False
    max_restarts: int | None = None
    traceback: bool = False

    def __post_init__(self) -> None:
        if self.cluster is not None and not self.given and (self.workers, self.replicas) != (None, None):
            raise ResourceSpecError(
                f"--cluster {self.cluster} says which workers and replicas there are; leave out --workers and "
                "--replicas, which are for workers on this machine."
            )
        for option, count in (("--workers", self.workers), ("--replicas", self.replicas)):
            if count is not None and count < 1:
                raise ResourceSpecError(f"{option} is {count}; give 1 or more.")

    @staticmethod
    def of_this_process() -> CliOverrides:
        """What the command has asked of this process; nothing where it was started by none."""
        told = os.environ.get(VARIABLE)
        return (
            CliOverrides(**json.loads(told)) if told is not None else _taken_over[-1] if _taken_over else CliOverrides()
        )

    @property
    def asks(self) -> bool:
        """Whether it asks for machines or a strategy."""
        return replace(self, traceback=False) != CliOverrides()

    def environment(self) -> dict[str, str]:
        """What a process finds in its environment, to which the same is asked."""
        return {VARIABLE: json.dumps(asdict(self))}

    def spec(self, said: Callable[[], ResourceSpec], gpus: Callable[[], int] = lambda: 0) -> ResourceSpec:
        """The machines; of local ones holds what the script's YAML says besides (strategy, batch, limits of time).

        Args:
            said: gives those of the script.
            gpus: counts those of this machine, on which local workers run their replicas where there are enough.

        Raises:
            ResourceSpecError: they cannot be used.
        """
        spec = self._machines(said, gpus)
        return spec if self.max_restarts is None else spec.model_copy(update={"max_restarts": self.max_restarts})

    def _machines(self, said: Callable[[], ResourceSpec], gpus: Callable[[], int]) -> ResourceSpec:
        if self.cluster is not None:
            return ResourceSpec.from_file(self.cluster)
        if self.given:
            return said().as_given()
        if self.workers is None and self.replicas is None:
            return said()
        local, own = local_workers(self.workers or 1, self.replicas, gpus()), said()
        kept = {
            name: getattr(own, name) for name in ("strategy", "batch", "max_restarts", "source", *Timeouts.model_fields)
        }
        return local.model_copy(update=kept)

    def builder(self, said: Callable[[], BuildsStrategy]) -> BuildsStrategy:
        """What decides the strategy.

        Args:
            said: gives that of the script, or of the YAML of its machines.

        Raises:
            StrategyError, ResourceSpecError: it cannot be used; with its place, where it comes from a file.
        """
        return said() if self.strategy is None else named_builder(self.strategy)


_taken_over: list[CliOverrides] = []


def take_over() -> CliOverrides:
    """Keeps what is asked of this process for it alone: processes that the script starts are none of the command's."""
    asked = CliOverrides.of_this_process()
    _taken_over.append(asked)
    os.environ.pop(VARIABLE, None)
    return asked


def local_workers(workers: int, replicas: int | None, gpus: int = 0) -> ResourceSpec:
    """So many workers on this machine, on its GPUs, or else on its CPU.

    Args:
        workers: how many.
        replicas: of each; None: one on the CPU, as many as each has GPUs for otherwise.
        gpus: of the machine.

    Raises:
        ResourceSpecError: there are GPUs, and not enough.
    """
    devices = workers * (replicas or max(gpus // workers, 1))
    if gpus and devices > gpus:
        raise ResourceSpecError(
            f"{workers} workers need {devices} GPUs, one for each replica, and TensorFlow sees {gpus} here. Ask for "
            "fewer workers or replicas, or name `cpus` in a YAML file."
        )
    kind = "gpus" if gpus else "cpus"
    return ResourceSpec.from_dict({"nodes": [{"address": "localhost", kind: list(range(devices)), "workers": workers}]})


def named_builder(name: str) -> BuildsStrategy:
    """The builder of a name, or of the `strategy` section of a YAML file.

    Raises:
        StrategyError, ResourceSpecError: there is none, or it cannot be used.
    """
    # Here: a builder or compressor that is named may need TensorFlow, and options are told before that is imported.
    from autodist.strategies import builder_from_section, registered_names

    is_file = name.endswith((".yml", ".yaml")) or os.sep in name
    if not is_file and os.path.isfile(name) and name not in registered_names():
        is_file = True
    if not is_file:
        return builder_from_section(StrategySection.from_script(name))
    section = StrategySection.from_file(name)
    if section is None:
        raise StrategyError(f"{name} has no section `strategy`; add one, such as `strategy: AllReduce`.")
    return builder_from_section(section)
