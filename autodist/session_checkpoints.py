"""How a session's variables are saved, and restored, where the YAML asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.run import Run
from autodist.runtime.variables import Kept


@dataclass(frozen=True)
class _Saved:
    """A value of a checkpoint, on its way to a session's variable."""

    kept: Kept
    give: Callable[[], Any]

    @property
    def byte_size(self) -> int:
        return int(tf.TensorShape(self.kept.shape).num_elements()) * self.kept.dtype.size

    def read(self) -> Any:
        return self.give()


def resume(run: Run, variables: Mapping[str, Kept]) -> None:
    """Before a session's first run that trains: its variables get the values that the run goes on from.

    All workers call it, since all come to such a run; the chief alone reads, and sets them everywhere.

    Args:
        run: in which the session is.
        variables: all of the session's, by name.
    """
    found = run.on_session(variables)
    if not run.resumed:
        return
    run.meet()
    if run.index == 0:
        run.guard(run.pieces.set, [_Saved(variables[name], give) for name, give in found.items()])
    run.wait_for_chief()
