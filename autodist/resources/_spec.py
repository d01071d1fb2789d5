"""ResourceSpec: the machines and settings of a run, and the workers and replicas that follow from them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from autodist.errors import ResourceSpecError, StrategyError
from autodist.resources._keys import GIVEN, YamlKeys
from autodist.resources._model import Source
from autodist.resources._node import Node, SSHGroup
from autodist.resources._plain import plain_copy
from autodist.resources._workers import Allotment, Replica, Worker, allot, assign_workers, list_replicas, name_places
from autodist.resources._yaml import read_text, read_yaml
from autodist.resources.measurements import Measurements

_OF_PROCESSES = ("min_nodes", "rejoin_interval")
"""The keys that are about processes, not about nodes, if a scheduler starts them."""


class ResourceSpec(YamlKeys):
    """The machines, the SSH access to them, and the user's settings for strategy, batches and timeouts.

    Created by `from_file`, `from_dict`, `local` or `from_payload`; their errors name the place and the allowed values.

    Examples:
        >>> spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 2}]})
        >>> [(worker.name, worker.devices) for worker in spec.workers]
        [('localhost:0', ('cpu:0', 'cpu:1')), ('localhost:1', ('cpu:0', 'cpu:1'))]

    Attributes:
        nodes: the machines, in the order of the file; exactly one is the chief's (a single node always is).
        ssh: SSH groups by name.
        transport: the SSH implementation for groups without one; None: paramiko.
        strategy: the section `strategy`; None: the script or a default chooses.
        batch: "global" if the script feeds the global batch, "per_worker" if it feeds one worker's part; None: the
            default of the front end.
        batch_norm: "whole" if Keras's batch normalization uses the examples of all replicas, "replica" if those of its
            own; None: all on a mesh, its own under other strategies.
        xla: True if XLA compiles all steps, False if it compiles none, "auto" if measurements decide; None: what the
            script requests.
        shard: "files" if each worker reads its own files, so that batches are not those of one device; None: all
            workers read all files.
        encrypt: "ssh" if SSH carries the traffic between the workers; None: it goes from server to server.
        firewall: "auto" if the run admits only its own machines to the ports of its servers; "none" or None: it sets
            no firewall.
        max_restarts: the number of times that all workers may restart after one of them was lost.
        min_nodes: number of nodes needed for a start; unreachable nodes are left out. None: all. With `nodes: given`,
            the number of processes.
        rejoin_interval: seconds between two attempts to reach the nodes that were left out; None: 60.
        sync: the folder that is copied to the machines; None: they already have the script.
        checkpoint: settings of automatic checkpoints; None: none are saved.
        metrics: settings of the metrics that the chief writes; None: it writes none.
        source: the file and the lines of the values, for messages.
        is_given: True if a scheduler starts the processes, which exchange their addresses.
        allotments: with `nodes: given`, the devices, cores and port of each worker. Empty until its processes have
            joined; until then `nodes` is this machine alone.
        listed: all nodes, if some of them were left out of this start; (): none was.
        mesh_rows: the places of rows of a mesh along the data axis, as positions among all places: for each group of
            workers that divide the batch among them, the row of their first coordinates; empty: no mesh. In a pipeline,
            rows along the axes of the stages and of the batch.
        micro_batches: the number of micro-batches of a pipeline, which are its replicas, all on the device of its first
            worker; 0: not a pipeline, and each device of each worker is a replica.
        owned_bytes: for each worker, the bytes of variables of earlier steps that it owns; (): no earlier step.
        measurements: the measurements of the network and of the step that a strategy is built for.
    """

    allotments: tuple[Allotment, ...] = Field(default=(), repr=False)
    listed: tuple[Node, ...] = Field(default=(), repr=False)
    micro_batches: int = Field(default=0, repr=False)
    mesh_rows: tuple[tuple[int, ...], ...] = Field(default=(), repr=False)
    owned_bytes: tuple[int, ...] = Field(default=(), repr=False)
    measurements: Measurements = Field(default=Measurements(), repr=False)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ResourceSpec:
        """Reads a YAML file.

        Raises:
            ResourceSpecError: it cannot be read or used; names the file, the line, the key and what is allowed.
        """
        file = os.fsdecode(path)
        return cls._parse(*read_yaml(read_text(file), file))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> ResourceSpec:
        """Reads a copy of a mapping with the content of a YAML file.

        Raises:
            ResourceSpecError: it cannot be used; names the key and what is allowed.
        """
        return cls._parse(plain_copy(mapping), Source())

    @classmethod
    def local(cls, gpus: int = 0) -> ResourceSpec:
        """Returns a spec of this machine: one worker on its GPUs, or else one replica on its CPU.

        Args:
            gpus: the number of GPUs that TensorFlow sees.
        """
        return cls.from_dict({"nodes": [{"address": "localhost", "gpus": list(range(gpus))}]})

    @classmethod
    def from_payload(cls, payload: str) -> ResourceSpec:
        """Returns a spec equal to the one that `to_payload` was called on, allotments included; reads no file."""
        content = json.loads(payload)
        counted = {name: content["spec"].pop(name) for name in _OF_PROCESSES if content["is_given"]}
        spec = cls._parse(content["spec"], Source(content["file"], content["lines"]))
        allotments = tuple(Allotment(tuple(devices), cores, port) for devices, cores, port in content["allotments"])
        made = spec.model_copy(update={"is_given": content["is_given"], "allotments": allotments} | counted)
        return made.with_micro_batches(content["micro_batches"]).with_mesh_rows(content["mesh_rows"])

    def as_given(self) -> ResourceSpec:
        """Returns this spec without its machines, for processes that a scheduler has started."""
        alone = {"nodes": (Node(address="localhost", chief=True),), "is_given": True, "allotments": ()}
        return self.model_copy(update=alone)

    def with_nodes(self, nodes: Sequence[Mapping[str, Any]], allotments: Sequence[Allotment]) -> ResourceSpec:
        """Returns this spec with the machines of a `nodes: given` cluster, once its processes have joined.

        Args:
            nodes: the nodes as mappings, as in the YAML; the chief's is the first.
            allotments: the allotments of their workers.
        """
        counted = {name: getattr(self, name) for name in _OF_PROCESSES}
        made = self.from_dict({**self.to_dict(), "nodes": nodes, **dict.fromkeys(_OF_PROCESSES)})
        kept = {"source": self.source, "strategy": self.strategy, "is_given": True, "allotments": tuple(allotments)}
        return made.model_copy(update=kept | counted)

    def without(self, addresses: Collection[str]) -> ResourceSpec:
        """Returns this spec without some of its nodes; the chief's must not be among them."""
        kept = tuple(node for node in self.nodes if node.address not in addresses)
        if len(kept) == len(self.nodes):
            return self
        return self._with_these(kept, listed=self.nodes)

    def complete(self) -> ResourceSpec:
        """Returns this spec with the nodes that were left out of it."""
        return self._with_these(self.listed) if self.listed else self

    def _with_these(self, nodes: Sequence[Node], **update: Any) -> ResourceSpec:
        """Returns this spec with other nodes."""
        made = self.from_dict({**self.to_dict(), "nodes": [node.model_dump(mode="json") for node in nodes]})
        return made.model_copy(update={"source": self.source, "strategy": self.strategy, **update})

    @property
    def missing(self) -> tuple[Node, ...]:
        """The nodes that were left out of this start."""
        return tuple(node for node in self.listed if node not in self.nodes)

    @property
    def is_elastic(self) -> bool:
        """True if a scheduler starts the processes, and some of them suffice for a start."""
        return self.is_given and self.min_nodes is not None

    @property
    def takes_machines_in(self) -> bool:
        """True if the run looks for missing machines, and starts again with those that it can use."""
        return self.min_nodes is not None and self.checkpoint is not None

    def without_outputs(self) -> ResourceSpec:
        """Returns this spec without checkpoints and metrics; SIGTERM then ends a worker at once. No machine joins."""
        return self.model_copy(update={"checkpoint": None, "metrics": None, "rejoin_interval": None})

    def with_micro_batches(self, count: int) -> ResourceSpec:
        """Returns this spec for a pipeline, whose replicas are `count` micro-batches; 0: not a pipeline."""
        return self._changed({"micro_batches": count})

    def with_mesh_rows(self, rows: Sequence[Sequence[int]]) -> ResourceSpec:
        """Returns this spec for a mesh, as the first row sees it.

        Args:
            rows: the places that share a batch, as positions among all places: for each worker, those of its first row
                along the data axis, once.
        """
        return self._changed({"mesh_rows": tuple(map(tuple, rows))})

    def seen_by(self, worker: int) -> ResourceSpec:
        """Returns this spec as a worker sees it: on a mesh, the replicas are the places of its own row."""
        workers = [replica.worker.index for replica in list_replicas(self.workers)]
        rows = [row for row in self.mesh_rows if worker in {workers[place] for place in row}]
        return self._changed({"mesh_rows": (*rows, *(r for r in self.mesh_rows if r not in rows))}) if rows else self

    def _changed(self, update: Mapping[str, Any]) -> ResourceSpec:
        made = self.model_copy(update=update)
        for name in ("replicas", "replica_workers"):  # cached values of the earlier spec
            made.__dict__.pop(name, None)
        return made

    def with_owned_bytes(self, owned: Sequence[int]) -> ResourceSpec:
        """Returns this spec with the bytes of variables of earlier steps that each worker owns."""
        return self.model_copy(update={"owned_bytes": tuple(owned) if any(owned) else ()})

    def with_measurements(self, measurements: Measurements) -> ResourceSpec:
        """Returns this spec with other measurements."""
        return self.model_copy(update={"measurements": measurements})

    def for_workers(self) -> ResourceSpec:
        """Returns the spec that other workers receive: without the SSH groups, which may hold the chief's secrets."""
        return self.model_copy(update={"ssh": {name: SSHGroup() for name in self.ssh}})

    def to_payload(self) -> str:
        """Returns JSON text that carries the spec to another process."""
        allotments = [[allotment.devices, allotment.cores, allotment.port] for allotment in self.allotments]
        given = {
            "is_given": self.is_given, "allotments": allotments, "micro_batches": self.micro_batches,
            "mesh_rows": self.mesh_rows,
        }  # fmt: skip
        content = self.model_dump(mode="json", include={"nodes"}) if self.is_given else {}
        spec = self.to_dict() | content
        return json.dumps({"spec": spec, "file": self.file, "lines": dict(self.source.lines), **given})

    def to_dict(self) -> dict[str, Any]:
        """Returns the spec as a YAML file would hold it, with defaults; `from_dict` reads it back."""
        content = self.model_dump(mode="json", include={*self._known_keys()} - {"strategy"})
        if self.strategy is not None:
            content["strategy"] = plain_copy(self.strategy.to_dict())
        if self.is_given:
            content["nodes"] = GIVEN
        return content

    def shard_refused(self, problem: str) -> ResourceSpecError:
        """Returns the error for a `shard` setting that is not possible."""
        return self.source.error(("shard",), problem)

    @property
    def file(self) -> str | None:
        """The file that the spec was read from."""
        return self.source.file

    @property
    def chief(self) -> Node:
        """The node where the user starts the script."""
        return next(node for node in self.nodes if node.chief)

    @functools.cached_property
    def workers(self) -> tuple[Worker, ...]:
        """The chief (index 0), the other workers of its node, then those of the other nodes in their order."""
        assigned = assign_workers(self.nodes)
        return allot(assigned, self.allotments) if self.allotments else assigned

    @functools.cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas, in the order of the workers and of their devices.

        Those of a pipeline are its micro-batches, on its first worker; those on a mesh are the places of one row along
        the data axis. Each row of a mesh may be a pipeline.
        """
        if self.micro_batches:
            row = self.mesh_rows[0] if self.mesh_rows else (0,)
            first = self.workers[row[0]]  # each worker of a pipeline has one device
            return tuple(Replica(index, first, first.devices[0]) for index in range(self.micro_batches))
        found = list(list_replicas(self.workers))
        if not self.mesh_rows:
            return tuple(found)
        return tuple(replace(found[place], index=index) for index, place in enumerate(self.mesh_rows[0]))

    @functools.cached_property
    def replica_workers(self) -> tuple[int, ...]:
        """For each replica, the index of its worker, in rising order."""
        return tuple(replica.worker.index for replica in self.replicas)

    @property
    def places(self) -> tuple[str, ...]:
        """A name for each device of each worker, in their order: "cpu:0", "cpu:1", … or "gpu:0", …."""
        return tuple(name_places(self.workers))

    @property
    def feeding_workers(self) -> tuple[int, ...]:
        """The workers whose parts make up a batch, in order: once per replica; in a pipeline or mesh, once each."""
        return tuple(range(len(self.workers))) if self.micro_batches or self.mesh_rows else self.replica_workers

    def require_own_batches(self) -> None:
        """Checks that each worker may feed its own part of a batch.

        Raises:
            StrategyError: on a mesh, several workers compute on the same part.
        """
        if len(self.mesh_rows) > 1:
            raise StrategyError(
                "Each worker feeds its own part of a batch, but on this mesh several workers compute on the same part. "
                "Feed the global batch on every worker: @ad.function(batch='global'), or `batch: global` in the YAML."
            )

    @property
    def gathers_batches(self) -> bool:
        """True in a pipeline of several workers: one worker gathers their parts and trains on all of them."""
        return self.micro_batches > 0 and len(self.workers) > 1

    @property
    def splits_batches(self) -> bool:
        """True if several replicas train on parts of a batch at the same time: not in a pipeline."""
        return len(self.replicas) > 1 and not self.micro_batches

    @property
    def shares_batches(self) -> bool:
        """True if all workers compute on a batch together: on parts of it, in a pipeline, or on a mesh."""
        return len(self.replicas) > 1 or self.micro_batches > 0 or (bool(self.mesh_rows) and len(self.places) > 1)

    def replicas_of(self, worker: int) -> int:
        """Returns the number of replicas of a worker."""
        return self.replica_workers.count(worker)

    def ssh_group(self, node: Node) -> SSHGroup | None:
        """Returns the SSH group of `node`; None if SSH is not used (`Node.is_local`).

        A remote node without a group gets a default one: the user's own SSH configuration, agent and keys, port 22,
        host keys checked.
        """
        if self.is_given or node.is_local:
            return None
        return SSHGroup() if node.ssh_config is None else self.ssh[node.ssh_config]

    def check_gpus(self, present: int, node: Node | None = None, why: Callable[[], str] = str) -> None:
        """Checks that the GPUs named by the spec exist.

        Args:
            present: the number of GPUs that TensorFlow sees in this process.
            node: the node of this process; None checks each local node.
            why: called if a GPU is missing; returns the reason, or "" if it is not known.

        Raises:
            ResourceSpecError: a GPU is missing.
        """
        if self.allotments:
            return  # each worker has already reported the GPUs that it sees
        for index, candidate in enumerate(self.nodes):
            # `is_local` may query DNS, so nodes without GPUs are skipped first.
            if not candidate.gpus or not (candidate.is_local if node is None else candidate == node):
                continue
            for position, gpu in enumerate(candidate.gpus):
                if gpu >= present:
                    path = ("nodes", index, "gpus", position)
                    raise self.source.error(path, _no_gpu(candidate.address, gpu, present, why()))


def _no_gpu(address: str, gpu: int, present: int, why: str) -> str:
    allowed = f"0 to {present - 1}" if present > 1 else "0" if present else "none, name cpus instead"
    reason = f": {why}" if why else ""
    return f"{address} has no GPU {gpu}, TensorFlow sees {present or 'none'} there{reason}; allowed: {allowed}"
