"""Launcher environment of TF_CONFIG, as in `tf.distribute` and Kubeflow's TFJob."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, ValidationError

from autodist.cluster.environments.launcher_env import Environment, Given, LauncherEnv, host_and_port_of, text_of
from autodist.errors import ResourceSpecError

_Addresses = Annotated[list[str], Field(default_factory=list)]

VARIABLE = "TF_CONFIG"


class _Cluster(BaseModel):
    chief: _Addresses
    master: _Addresses  # the chief's old name
    worker: _Addresses
    ps: _Addresses
    evaluator: _Addresses


class _Task(BaseModel):
    type: str
    index: Annotated[int, Field(ge=0)]


class _Config(BaseModel):
    cluster: _Cluster
    task: _Task


class TFConfig(LauncherEnv):
    """{"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type": "worker", "index": 0}}.

    The chief is the `chief` or, without one, worker 0. Its port is used by the rendezvous server, then by its server.
    """

    name: ClassVar[str] = VARIABLE

    def is_present(self, environment: Environment) -> bool:
        return bool(environment.get(VARIABLE))

    def read(self, environment: Environment) -> Given:
        config = _parse(text_of(environment, VARIABLE, "the cluster and this task, as JSON"))
        cluster, task = config.cluster, config.task
        _require_workers(cluster, task)
        chiefs = cluster.chief or cluster.master
        if len(chiefs) > 1:
            raise ResourceSpecError(f"{VARIABLE} names {len(chiefs)} chiefs; allowed: one, or none and only workers.")
        addresses = [*chiefs, *cluster.worker]
        if not addresses:
            raise ResourceSpecError(f"{VARIABLE} names no chief and no worker under cluster; allowed: one or more.")
        of_type = chiefs if task.type in ("chief", "master") else cluster.worker
        if task.index >= len(of_type):
            raise ResourceSpecError(
                f"{VARIABLE} has the task {task.type} {task.index}, but the cluster has {len(of_type)} of this type; "
                "allowed: an index below that."
            )
        index = task.index if of_type is chiefs else len(chiefs) + task.index
        hosts = [host_and_port_of(address, f"an address in {VARIABLE}", None) for address in addresses]
        if len(set(hosts)) < len(hosts):
            raise ResourceSpecError(f"{VARIABLE} names one address twice; allowed: each task's own.")
        return Given(self.name, index, len(addresses), *hosts[0], addresses=tuple(addresses))


def _parse(text: str) -> _Config:
    try:
        return _Config.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResourceSpecError(
            f"{VARIABLE} cannot be read{f' at {where}' if where else ''}: {first['msg']}; allowed: "
            '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": 0}}.'
        ) from None


def _require_workers(cluster: _Cluster, task: _Task) -> None:
    if task.type == "evaluator" or cluster.evaluator:
        raise ResourceSpecError(
            f"{VARIABLE} has an evaluator, which AutoDist does not support: run it separately, without {VARIABLE}, or "
            "remove it and evaluate in the script."
        )
    if task.type == "ps" or cluster.ps:
        raise ResourceSpecError(
            f"{VARIABLE} has parameter servers (ps), which AutoDist does not need: remove them and set `strategy: "
            "PS`; a worker then owns the variables."
        )
    if task.type not in ("chief", "master", "worker"):
        raise ResourceSpecError(f"{VARIABLE} has a task of type {task.type[:60]!r}; allowed: chief or worker.")
