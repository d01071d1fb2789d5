"""PyTorch: one process, or several processes under DistributedDataParallel over gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from bench.models import CHARACTERS, TASKS, Task
from bench.turns import Training, parts


class Recurrent(torch.nn.Module):
    """The model of "lstm" in PyTorch's own layers: Keras's LSTM on PyTorch calls the ops of each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CHARACTERS, 64)
        self.lstm = torch.nn.LSTM(64, 256, batch_first=True)
        self.dense = torch.nn.Linear(256, CHARACTERS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.lstm(self.embedding(ids))[0])


def train(task: Task, index: int, addresses: Sequence[str], threads: int) -> Training:
    """Trains eagerly, as PyTorch's tutorials do.

    Args:
        task: the model and its data.
        index: the number of this process.
        addresses: of all processes; empty for a single one.
        threads: within an operation.
    """
    torch.set_num_threads(threads)
    model, update = _own(task) if task is TASKS["lstm"] else _of_keras(task)
    if addresses:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = addresses[0].split(":")
        torch.distributed.init_process_group("gloo", rank=index, world_size=len(addresses))
        model = DistributedDataParallel(model)
    count = max(1, len(addresses))
    batches = parts(task, index, count)

    def step() -> float:
        x, y = map(torch.from_numpy, next(batches))
        model.zero_grad()
        loss = task.loss(y, model(x), task.batch // count)  # the mean over processes is that of the global batch
        loss.backward()
        update()
        return float(loss)

    return Training(step, index == 0)


def _own(task: Task) -> tuple[torch.nn.Module, Any]:
    model = Recurrent()
    return model, torch.optim.Adam(model.parameters(), lr=float(np.asarray(task.optimizer().learning_rate.value))).step


def _of_keras(task: Task) -> tuple[torch.nn.Module, Any]:
    model, optimizer = task.make_model(), task.optimizer()
    variables = model.trainable_variables
    optimizer.build(variables)

    def update() -> None:
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in variables], variables)

    return model, update


assert keras.backend.backend() == "torch", "started by bench.jobs, which sets KERAS_BACKEND"
