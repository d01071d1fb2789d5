"""ChiefOnly: what the chief does for all workers between two steps, while they wait for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from autodist.errors import CheckpointError

if TYPE_CHECKING:
    from autodist.runs.run import Run

log = logging.getLogger("autodist")

_SAVE, _WRITE = "checkpoint", "write"
"""What the calls are named by which workers ask one another whether they come to the same."""


class ChiefOnly:
    """The chief's acts in one run.

    Args:
        run: in which it acts.

    Attributes:
        memories: by worker, what kernels keep there from step to step; for the chief, while it acts.
        scripts: by worker, what `tell` has given there; likewise.
        all_wait: whether no worker makes steps while it acts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.memories: Mapping[int, Mapping[str, tf.TensorSpec]] = {}
        self.scripts: Mapping[int, Any] = {}
        self.all_wait = run.workers == 1

    def save(
        self, save: Callable[[], str], is_certain: bool = False, tell: Callable[[], Any] = lambda: None
    ) -> str | None:
        """Lets the chief save between two steps, while workers that come to this call wait; returns what `save` gives.

        Args:
            save: what the chief calls.
            is_certain: whether all workers that still make steps are known to come to this call, however late.
            tell: gives what a worker says of its script, a value that JSON can hold; called on each that comes to this
                call.

        Raises:
            CheckpointError: on another worker, that the chief could not do it.
        """
        others_wait = self._run.have_joined and self._run.workers > 1
        if not (others_wait and self._run.coordination.all_make(lambda: (_SAVE, ""), is_certain)):
            return self._does_alone(save, tell) if self._run.index == 0 else None
        return self.do_while_all_wait(save, tell)

    def write(self, what: str, write: Callable[[], Any]) -> Any:
        """Lets the chief alone write what all workers are about to write alike, and others what they alone do.

        Args:
            what: is written, and where.
            write: does it.

        Returns:
            What `write` gives; None on other workers, where the chief has written.

        Raises:
            CheckpointError: on another worker, that the chief could not do it.
        """
        if not self._run.have_joined or not self._run.coordination.all_make(lambda: (_WRITE, what), is_certain=False):
            return write()
        found: list[Any] = [None]

        def act() -> str:
            found[0] = write()
            return ""

        self.do_while_all_wait(act)
        return found[0]

    def do_while_all_wait(self, act: Callable[[], str], tell: Callable[[], Any] = lambda: None) -> str | None:
        """Lets the chief act while all other workers wait, which are known to come to this call; as `save`.

        Raises:
            CheckpointError: on another worker, that the chief could not do it.
        """
        with self._run.turn:
            self._run.coordination.meet()
            self._hear(dict(enumerate(self._run.coordination.gather(self._told(tell())))))
            if self._run.index > 0:
                fault = self._run.coordination.exchange().decode()
                if fault:
                    raise CheckpointError(fault)
                return None
            self.all_wait = True
            try:
                found = act()
            except Exception as error:
                self._run.coordination.exchange((str(error) or type(error).__name__).encode())
                raise
            finally:
                self.all_wait = self._run.workers == 1
            self._run.coordination.exchange()
            return found

    def tell_at_end(self, script: Any) -> None:
        """At the end of another worker's script, tells the chief what it hears at the end of its own."""
        if self._run.have_joined:
            self._run.coordination.leave_final_message(
                json.dumps([self._run.index, self._told(script).decode()]).encode()
            )

    def hear_at_end(self, script: Any) -> None:
        """On the chief, at the end of its script: takes in what all others told at theirs, if all have come there."""
        others = {worker: told.encode() for worker, told in map(json.loads, self._run.coordination.final_messages())}
        if self._run.workers == 1 or others:
            self._hear({0: self._told(script), **others})
        else:
            self._hear_itself(script)

    def _does_alone(self, act: Callable[[], str], tell: Callable[[], Any]) -> str:
        self._hear_itself(tell())
        return act()

    def _hear_itself(self, script: Any) -> None:
        """Takes in what the chief knows by itself, where the others do not come to the call."""
        own = self._run.graph_runners.memories.specs if self._run.have_joined else {}
        if own and self._run.workers > 1:
            log.warning(
                "the chief saves without the other workers: what compressors keep from step to step is on each of "
                "them, and not saved. Let all workers call save."
            )
            own = {}
        self.memories, self.scripts = {0: own}, {0: script}

    def _told(self, script: Any) -> bytes:
        """What this worker tells the chief: what kernels keep on it, and where its script is."""
        own = {
            name: (spec.dtype.name, spec.shape.as_list())
            for name, spec in self._run.graph_runners.memories.specs.items()
        }
        return json.dumps([own, script]).encode()

    def _hear(self, parts: Mapping[int, bytes]) -> None:
        """On the chief, takes in what workers have told."""
        told = {worker: json.loads(part) for worker, part in parts.items()}
        self.memories = {
            worker: {name: tf.TensorSpec(shape, dtype) for name, (dtype, shape) in own.items()}
            for worker, (own, _) in told.items()
        }
        self.scripts = {worker: script for worker, (_, script) in told.items()}
