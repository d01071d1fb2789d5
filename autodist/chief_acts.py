"""ChiefActs: what the chief does for all workers between two steps, while they wait for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from autodist.errors import CheckpointError

if TYPE_CHECKING:
    from autodist.run import Run

log = logging.getLogger("autodist")

_WRITE = "write"


class ChiefActs:
    """The chief's acts in one run.

    Args:
        run: in which it acts.

    Attributes:
        memories: by worker, what kernels keep there from step to step; known to the chief in what it does.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.memories: Mapping[int, Mapping[str, tf.TensorSpec]] = {}

    def do(self, what: str, act: Callable[[], str], is_certain: bool = False) -> str | None:
        """Lets the chief do something between two steps, and what it gives; the others wait where they come to it too.

        Args:
            what: by which workers know that they come to the same.
            act: what the chief does.
            is_certain: whether all that still make steps are known to come to it, however long that takes them.

        Raises:
            CheckpointError: on another worker, that the chief could not do it.
        """
        others_wait = self._run.have_joined and self._run.workers > 1
        if not (others_wait and self._run.makes_together(lambda: (what, ""), is_certain)):
            return self._does_alone(act) if self._run.index == 0 else None
        return self.do_while_all_wait(act)

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
        if not self._run.have_joined or not self._run.makes_together(lambda: (_WRITE, what), is_certain=False):
            return write()
        found: list[Any] = [None]

        def act() -> str:
            found[0] = write()
            return ""

        self.do_while_all_wait(act)
        return found[0]

    def do_while_all_wait(self, act: Callable[[], str]) -> str | None:
        """Lets the chief do something while all others wait for it, which are known to come to it.

        Raises:
            CheckpointError: on another worker, that the chief could not do it.
        """
        with self._run.turn:
            self._run.meet()
            self.memories = dict(enumerate(self._tell_memories()))
            if self._run.index > 0:
                fault = self._run.exchange().decode()
                if fault:
                    raise CheckpointError(fault)
                return None
            try:
                found = act()
            except Exception as error:
                self._run.exchange((str(error) or type(error).__name__).encode())
                raise
            self._run.exchange()
            return found

    def _does_alone(self, act: Callable[[], str]) -> str:
        own = self._run.hosts.memories.specs if self._run.have_joined else {}
        if own and self._run.workers > 1:
            log.warning(
                "the chief saves without the other workers: what compressors keep from step to step is on each of "
                "them, and not saved. Let all workers call save."
            )
            own = {}
        self.memories = {0: own}
        return act()

    def _tell_memories(self) -> list[dict[str, tf.TensorSpec]]:
        """On the chief, what kernels keep on each worker."""
        own = {name: (spec.dtype.name, spec.shape.as_list()) for name, spec in self._run.hosts.memories.specs.items()}
        parts = self._run.gather(json.dumps(own).encode())
        return [{name: tf.TensorSpec(s, dtype) for name, (dtype, s) in json.loads(part).items()} for part in parts]
