"""Restores a session's variables from the checkpoint that the YAML names."""

from __future__ import annotations

from collections.abc import Mapping

from autodist.checkpoint.slices import read_into_session
from autodist.graph.devices import cpu_of
from autodist.runs.run import Run
from autodist.runtime.variables import StoredVariable


def resume(run: Run, variables: Mapping[str, StoredVariable]) -> None:
    """Restores a session's variables from the checkpoint that the run resumes from, before the first training run.

    All workers call it; each reads the slices of variables that it holds.

    Args:
        run: the run.
        variables: all of the session's, by name.
    """
    restored = run.observer.on_session(variables)
    if not run.resumed:
        return
    run.coordination.meet()
    if run.index == 0:
        workers = run.workers
        run.guard(
            read_into_session, run.graph_runners.beside, run.pieces, lambda worker: cpu_of(worker, workers),
            run.resumed["prefix"], restored.items(),
        )  # fmt: skip
    run.coordination.wait_for_chief()
