"""`autodist.join`: makes the process of a function, which another program has started, a worker of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from autodist.api import AutoDist
from autodist.cluster import hosted_function
from autodist.cluster.environments.connect import connect
from autodist.cluster.environments.hosted_agent import HostedAgent
from autodist.cluster.environments.launcher_env import CHIEF, INDEX, WORKERS, GivenCluster
from autodist.cluster.environments.launchers import require
from autodist.cluster.environments.start_rendezvous import leave_rendezvous, meet
from autodist.cluster.hosted_function import HostedFunction
from autodist.cluster.script_client import ScriptClient
from autodist.errors import ClusterError, ResourceSpecError
from autodist.logs.formatting import summary_of
from autodist.logs.terminal import log_to_the_terminal
from autodist.resources import ResourceSpec
from autodist.runs.dry_run import active_dry_run
from autodist.runs.worker_launch import WorkerLaunch
from autodist.runtime.gpus import count_gpus

if TYPE_CHECKING:
    from autodist.strategies import BuildsStrategy

_FRESH = (
    "Use a new process for each run: a TensorFlow server cannot be stopped. Ray's trainers start new actors; call "
    "`client.restart()` of Dask, and set `maxtasksperchild=1` for a pool of `multiprocessing`."
)

_runs: list[str] = []
"""The function of the run in which this process takes or took part, if any."""


def join(
    cluster: str | os.PathLike[str] | ResourceSpec | Mapping[str, Any] | None = None,
    strategy: BuildsStrategy | str | Mapping[str, Any] | None = None,
    *,
    chief: str | None = None,
    index: int | None = None,
    workers: int | None = None,
    replicas: int | None = None,
) -> Joining:
    """Makes this process a worker for a `with` block; for a function that Ray, Dask or Spark runs in its processes.

    ```python
    def train(config):
        with autodist.join(strategy="AllReduce") as ad:
            with ad.scope():
                ...
    ```

    Every worker calls the same function. The workers find each other as under a scheduler, by TF_CONFIG (which Ray's
    `TensorflowTrainer` sets), by other environment variables, or by the arguments. The end of the block is the end of
    the worker. If the block or the run fails on one worker, the block raises an error that names the first cause on
    every worker. The process may go on, but takes part in no further run.

    Args:
        cluster: the YAML with `nodes: given`, or a mapping with its content; None: `{"nodes": "given"}`.
        strategy: as for `AutoDist`.
        chief: "host:port" of the worker with index 0, as the others reach it. None: the environment has it.
        index: index of this worker, counted from 0; belongs to `chief`.
        workers: number of workers; only the worker with index 0 needs it.
        replicas: replicas of each worker; None: one for each GPU, or one on its CPU. The chief's counts.

    Returns:
        A context manager that joins the run and returns its AutoDist.

    Raises:
        ResourceSpecError: the arguments, the YAML or the environment cannot be used.
        ClusterError: on entry: this process has taken part in a run before, or the run cannot start. At the end of the
            block: the run has failed elsewhere.
        WorkerFailedError: the function of another worker has failed, or its process has ended.
    """
    return Joining(
        HostedFunction(hosted_function.describe(sys._getframe(1))),
        _read_cluster(cluster),
        strategy,
        _environment(chief, index, workers),
        replicas,
    )


class Joining(AbstractContextManager[AutoDist]):
    """The context in which a function takes part in a run; the result of `join`.

    Args:
        function: the function.
        spec: the settings of the cluster.
        strategy: as for `AutoDist`.
        environment: environment variables that describe the cluster.
        replicas: replicas of each worker.
    """

    def __init__(
        self,
        function: HostedFunction,
        spec: ResourceSpec,
        strategy: BuildsStrategy | str | Mapping[str, Any] | None,
        environment: dict[str, str],
        replicas: int | None,
    ) -> None:
        self._function, self._spec, self._strategy = function, spec, strategy
        self._environment, self._replicas = environment, replicas
        self._agent: HostedAgent | None = None

    def __enter__(self) -> AutoDist:
        _require_free_process(self._function)
        given = require(self._environment)
        hosted_function.enter(self._function)
        try:
            spec = self._meet(given)
            _runs.append(self._function.script.function)
            ad = AutoDist(strategy=self._strategy, resource_spec=spec)
            WorkerLaunch.wait_for_current()  # on the chief, which compares the workers' code and versions
            return ad
        except BaseException as error:
            with contextlib.suppress(ClusterError):  # the function raises the first one
                self._leave(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"autodist.join(…) has no attribute {name!r}: write `with autodist.join(…) as ad:`, and use `ad`. The end "
            "of that block is the end of the worker."
        )

    def _meet(self, given: GivenCluster) -> ResourceSpec:
        """Waits for the other workers; returns the machines on the chief."""
        if given.index == 0:
            log_to_the_terminal(is_chief=True)
            return meet(given, self._spec, self._replicas, count_gpus, self._environment)
        connection, welcome = connect(given, self._environment, self._spec.join_timeout, count_gpus)
        self._agent = HostedAgent(connection, welcome, self._function)
        self._function.client = self._agent.wait_for_start()
        return self._spec

    def _leave(self, error: BaseException | None) -> None:
        """Ends the worker.

        Raises:
            ClusterError: another worker has ended the run, and `error` is not about that.
        """
        function = self._function
        first = function.end.raised
        if error is not None:
            function.end.note(error)
        try:
            function.at_the_end()
            if first is not None and (error is None or _may_be_a_consequence(error)):
                raise first from error
        except BaseException as failure:
            function.end.note(failure)
            raise
        finally:
            self._leave_run(None if first is not None else function.end.raised)
            hosted_function.leave()

    def _leave_run(self, error: BaseException | None) -> None:
        """Ends the connections of this worker.

        Args:
            error: the error of this worker's function; None if there is none, or another worker has ended the run.
        """
        if self._agent is not None:
            self._agent.end_function(error)
            return
        reason = f"the run did not start: {summary_of(error)}" if error is not None else "the run has ended"
        WorkerLaunch.abort_unused(reason)
        leave_rendezvous(reason)


def _may_be_a_consequence(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, ClusterError)


def _require_free_process(function: HostedFunction) -> None:
    if active_dry_run() is not None:
        raise ClusterError(
            "autodist.join() needs the processes of an engine, which `autodist plan` and `autodist verify` do not "
            "start. Pass them a script with `AutoDist()` that trains the same model."
        )
    running = hosted_function.hosted_function()
    if running is not None:
        raise ClusterError(
            f"The function {function.script.function} calls autodist.join in a process that is a worker already, by "
            f"{running.script.function}. {_FRESH}"
        )
    if _runs:
        raise ClusterError(
            f"Process {os.getpid()} has been a worker before, by the function {_runs[-1]}, and cannot join another "
            f"run. {_FRESH}"
        )
    ScriptClient.from_environment()  # raises in a process that a worker's script has started


def _read_cluster(cluster: str | os.PathLike[str] | ResourceSpec | Mapping[str, Any] | None) -> ResourceSpec:
    if isinstance(cluster, ResourceSpec):
        spec = cluster
    elif cluster is None or isinstance(cluster, Mapping):
        spec = ResourceSpec.from_dict({"nodes": "given"} | dict(cluster or {}))
    elif isinstance(cluster, str | os.PathLike):
        spec = ResourceSpec.from_file(cluster)
    else:
        raise ResourceSpecError(
            f"cluster is a {type(cluster).__name__}; pass the path of a YAML file, a mapping or a ResourceSpec."
        )
    if not spec.is_given:
        raise ResourceSpecError(
            "autodist.join takes no machines, since its processes run already, and the cluster names some. Write "
            "`nodes: given`, or start the machines by `AutoDist(…)` in a script."
        )
    if spec.min_nodes is not None:
        raise ResourceSpecError(
            f"min_nodes is {spec.min_nodes}, but the process of a function takes part in one start only, since a "
            "TensorFlow server cannot be stopped. Leave it out; the program that runs the function may call it again "
            "in new processes, which continue from the last checkpoint."
        )
    if spec.checkpoint is not None and spec.checkpoint.on_preempt:
        raise ResourceSpecError(
            "checkpoint.on_preempt needs SIGTERM, which belongs to the program that runs the function. Leave it out, "
            "and save by every_steps or every_minutes."
        )
    return spec


def _environment(chief: str | None, index: int | None, workers: int | None) -> dict[str, str]:
    """Returns a copy of the environment variables, in which the arguments replace those of the cluster."""
    if (chief is None) != (index is None) or (workers is not None and chief is None):
        raise ResourceSpecError(
            "chief and index belong together, and workers to them: the chief's address, this worker's index, and the "
            "number of workers. Pass all, or none if the environment has them."
        )
    if chief is None or index is None:
        return dict(os.environ)
    own = {CHIEF: chief, INDEX: str(index)} | ({} if workers is None else {WORKERS: str(workers)})
    return {name: value for name, value in os.environ.items() if name not in (CHIEF, INDEX, WORKERS)} | own
