"""Actions of the chief for all workers between two steps, while the other workers wait."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from autodist.errors import CheckpointError
from autodist.logs.formatting import words_of

if TYPE_CHECKING:
    from autodist.runs.run import Run

log = logging.getLogger("autodist")

_SAVE, _WRITE = "checkpoint", "write"
"""Names under which workers match their save and write calls."""


class ChiefOnly:
    """The chief's actions in one run.

    Attributes:
        buffer_specs: specs of the persistent buffers of each worker; set on the chief during an action.
        scripts: value that `script_state` returned on each worker; set on the chief during an action.
        all_wait: True if no worker makes steps during the action.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.buffer_specs: Mapping[int, Mapping[str, tf.TensorSpec]] = {}
        self.scripts: Mapping[int, Any] = {}
        self.all_wait = run.workers == 1

    def save(
        self, save: Callable[[], str], is_certain: bool = False, script_state: Callable[[], Any] = lambda: None
    ) -> str | None:
        """Runs `save` on the chief between two steps, while workers that reach this call wait; returns its result.

        Args:
            save: called on the chief.
            is_certain: True if all workers that still make steps are known to reach this call, however late.
            script_state: returns the state of the script as a JSON value; called on each worker that reaches this call.

        Raises:
            CheckpointError: the chief's `save` failed; raised on the other workers.
        """
        others_wait = self._run.have_joined and self._run.workers > 1
        if not (others_wait and self._run.coordination.is_made_by_all(lambda: (_SAVE, ""), is_certain)):
            return self._save_alone(save, script_state) if self._run.index == 0 else None
        return self.do_while_all_wait(save, script_state)

    def write(self, what: str, write: Callable[[], Any]) -> Any:
        """Calls `write` on the chief only if all workers make the same call, else on this worker.

        Args:
            what: the content and the target of the write; used to match the workers' calls.
            write: writes the content.

        Returns:
            The result of `write`; None on other workers if the chief has written.

        Raises:
            CheckpointError: the chief's `write` failed; raised on the other workers.
        """
        if not self._run.have_joined or not self._run.coordination.is_made_by_all(
            lambda: (_WRITE, what), is_certain=False
        ):
            return write()
        result: list[Any] = [None]

        def act() -> str:
            result[0] = write()
            return ""

        self.do_while_all_wait(act)
        return result[0]

    def do_while_all_wait(self, act: Callable[[], str], script_state: Callable[[], Any] = lambda: None) -> str | None:
        """Calls `act` on the chief while all other workers, which are known to reach this call, wait; see `save`.

        Raises:
            CheckpointError: the chief's `act` failed; raised on the other workers.
        """
        with self._run.step_lock:
            self._run.coordination.flush_for_chief()
            self._record(dict(enumerate(self._run.coordination.gather(self._encode_state(script_state())))))
            if self._run.index > 0:
                fault = self._run.coordination.broadcast().decode()
                if fault:
                    raise CheckpointError(fault)
                return None
            self.all_wait = True
            try:
                result = act()
            except Exception as error:
                self._run.coordination.broadcast((words_of(error) or type(error).__name__).encode())
                raise
            finally:
                self.all_wait = self._run.workers == 1
            self._run.coordination.broadcast()
            return result

    def leave_state(self, script: Any) -> None:
        """At the end of another worker's script, leaves its state for the chief, which reads it in `read_states`."""
        if self._run.have_joined:
            self._run.coordination.leave_final_message(
                json.dumps([self._run.index, self._encode_state(script).decode()]).encode()
            )

    def read_states(self, script: Any) -> None:
        """On the chief, at the end of its script, reads the final states of all others, if all have left one."""
        others = {
            worker: message.encode() for worker, message in map(json.loads, self._run.coordination.final_messages())
        }
        if self._run.workers == 1 or others:
            self._record({0: self._encode_state(script), **others})
        else:
            self._record_own(script)

    def _save_alone(self, act: Callable[[], str], script_state: Callable[[], Any]) -> str:
        self._record_own(script_state())
        return act()

    def _record_own(self, script: Any) -> None:
        """Records the chief's own state, if the other workers do not reach the call."""
        buffers = self._run.graph_runners.persistent_buffers.specs if self._run.have_joined else {}
        if buffers and self._run.workers > 1:
            log.warning(
                "the chief saves without the other workers: the persistent buffers of compressors and local steps are "
                "on each of them, and are not saved. Let all workers call save."
            )
            buffers = {}
        self.buffer_specs, self.scripts = {0: buffers}, {0: script}

    def _encode_state(self, script: Any) -> bytes:
        """Returns this worker's message to the chief: the specs of its persistent buffers and its script's state."""
        buffers = {
            name: (spec.dtype.name, spec.shape.as_list())
            for name, spec in self._run.graph_runners.persistent_buffers.specs.items()
        }
        return json.dumps([buffers, script]).encode()

    def _record(self, parts: Mapping[int, bytes]) -> None:
        """On the chief, decodes the workers' messages."""
        states = {worker: json.loads(part) for worker, part in parts.items()}
        self.buffer_specs = {
            worker: {name: tf.TensorSpec(shape, dtype) for name, (dtype, shape) in buffers.items()}
            for worker, (buffers, _) in states.items()
        }
        self.scripts = {worker: script for worker, (_, script) in states.items()}
