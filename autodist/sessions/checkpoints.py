"""How a session's variables are saved, and restored, where the YAML asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.checkpoint.slices import read_into_session
from autodist.graph.devices import cpu_of
from autodist.runs.run import Run
from autodist.runtime.variables import Kept


def resume(run: Run, variables: Mapping[str, Kept]) -> None:
    """Gives a session's variables the values that the run goes on from, before the first run that trains.

    All workers call it; each reads the slices of variables that it holds.

    Args:
        run: in which the session is.
        variables: all of the session's, by name.
    """
    found = run.observer.on_session(variables)
    if not run.resumed:
        return
    run.coordination.meet()
    if run.index == 0:
        workers = run.workers
        run.guard(
            read_into_session, run.graph_runners.beside, run.pieces, lambda worker: cpu_of(worker, workers),
            run.resumed["prefix"], found.items(),
        )  # fmt: skip
    run.coordination.wait_for_chief()
