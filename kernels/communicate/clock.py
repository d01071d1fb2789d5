"""Clock: workers tell each other that a step has ended, so that none runs too far ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.fragment import fragment
from autodist.kernels.base import Context
from autodist.kernels.communicate.exchange import Exchange


@dataclass
class Clock:
    """Ticks between the workers that compute.

    In each step a worker puts a tick into a queue of every other one and takes one from each. The queues start with
    `staleness` ticks, so that a worker which has ended n steps has had n - staleness ticks from the slowest.

    Attributes:
        context: for whom it is built.
        key: the same on all workers.
        staleness: how many steps a worker may be ahead.
        initializers: filled with the nodes that put the first ticks into this worker's queues.
    """

    context: Context
    key: str
    staleness: int
    initializers: dict[str, str] = field(default_factory=dict)

    def tick(self, editor: GraphEditor, after: Iterable[str]) -> list[str]:
        """Builds one step's ticks, put once all of `after` ran; returns the nodes that have to run in every step."""
        # The fastest has put staleness more than the slowest has taken, which started with as many.
        exchange = Exchange(self.context, self.key, 2 * self.staleness + 2)
        others = [w for w in self.context.computing if w != self.context.worker]
        with fragment(editor, self.key) as f, tf.device(self.context.cpu(self.context.worker)):
            ended = tf.constant(True)
            for other in others:
                exchange.send(other, "tick", [ended], [f.after(after)])
                exchange.receive(other, "tick", [ended])
            for other in others:
                first = exchange.fill(other, "tick", [ended], self.staleness)
                self.initializers[f"{self.key}/{other}"] = f.name(first)
        return [f.name(op) for op in exchange.effects]
