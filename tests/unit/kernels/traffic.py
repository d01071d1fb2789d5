"""The tensors sent between the workers of a run, counted on their rewritten graphs while they run in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import Step
from tests.unit.kernels.in_one_process import Session
from tests.unit.kernels.in_one_session import readers_of, task_of_device


@dataclass(frozen=True)
class Sent:
    """A tensor that one worker's step sends to another worker.

    Attributes:
        worker: of the step.
        tensor: its name there.
        source: the worker that produces it.
        to: the worker that reads it.
    """

    worker: int
    tensor: str
    source: int
    to: int


def crossings(items: Sequence[Step]) -> list[Sent]:
    """Returns the tensors that are sent between workers: those of messages, and those that TensorFlow sends.

    TensorFlow sends a tensor once, regardless of its number of consumers there. Handles of variables and queues are
    left out, because they only name a location.
    """
    found: dict[Sent, None] = {}
    for worker, step in enumerate(items):
        nodes = {node.name: node for node in step.graph_def.node}
        for put, reader in readers_of(step).items():
            values = (tensor(i) for i in nodes[put].input[1:] if not is_control(i))
            found.update(dict.fromkeys(Sent(worker, name, worker, reader) for name in values if reader != worker))
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(step.graph_def, name="")
        for node in step.graph_def.node:
            to = task_of_device(node.device)
            for name in (tensor(i) for i in node.input if not is_control(i)):
                source = task_of_device(nodes[node_of(name)].device)
                if source != to and graph.get_tensor_by_name(name).dtype != tf.resource:
                    found[Sent(worker, name, source, to)] = None
    return list(found)


def bytes_sent(session: Session, batch: Sequence[np.ndarray]) -> Mapping[Sent, int]:
    """The size of each crossing in one step on a global batch, from the script's values of all variables."""
    sent = crossings(session.steps)
    values = session.fetch_once(batch, [f"worker_{one.worker}/{one.tensor}" for one in sent])
    return {one: np.asarray(value).nbytes for one, value in zip(sent, values, strict=True)}
