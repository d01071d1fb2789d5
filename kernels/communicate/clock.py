"""Clock: workers tell each other that a step has ended, so that none runs too far ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context
from autodist.kernels.communicate.communicator import Communicator


@dataclass(frozen=True)
class Clock:
    """Ticks between the workers that compute.

    In each step a worker puts a tick into a queue of every other one and takes one from each. The queues start with
    `staleness` ticks, so that a worker which has ended n steps has had n - staleness ticks from the slowest.

    Attributes:
        context: for whom it is built.
        key: the same on all workers.
        staleness: how many steps a worker may be ahead.
    """

    context: Context
    key: str
    staleness: int

    def tick(self, editor: StepEditor, after: Iterable[str]) -> None:
        """Builds one step's ticks, put once all of `after` ran, and this worker's first ones, before all steps."""
        others = [w for w in self.context.computing if w != self.context.worker]
        initializers: dict[str, str] = {}
        with subgraph(editor, self.key) as f, tf.device(self.context.cpu(self.context.worker)):
            # The fastest has put staleness more than the slowest has taken, which started with as many.
            exchange = Communicator(f, self.context, self.key, 2 * self.staleness + 2)
            ended = tf.constant(True)
            for other in others:
                exchange.send(other, "tick", [ended], [f.after(after)])
                exchange.receive(other, "tick", [ended])
            for other in others:
                first = exchange.fill(other, "tick", [ended], self.staleness)
                initializers[f"{self.key}/{other}"] = f.name(first)
        editor.run(exchange.effects)
        editor.initialize(initializers)
