"""What a checkpoint has of each worker's script itself: NumPy's and Python's generators, and places in data sets."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.runs.run import Run
from autodist.runtime.draws import Draws

log = logging.getLogger("autodist")

DRAWS = "draws"
"""What a script's state calls its generators."""

_SUFFIX = ".scripts.json"


def draws_now() -> dict[str, Any]:
    """The state of a script of which nothing else is known."""
    return {DRAWS: Draws.now().told()}


def files_of(scripts: Mapping[int, Any]) -> dict[str, Callable[[str], None]]:
    """What is written beside a checkpoint of the workers' scripts, as `Content.files`; what is alike stands once."""
    workers: dict[str, list[int]] = {}
    for worker, state in scripts.items():
        if state is not None:
            workers.setdefault(json.dumps(state), []).append(worker)

    def write(path: str) -> None:
        with open(path, "w") as opened:
            json.dump([{"workers": who, "state": json.loads(state)} for state, who in workers.items()], opened)

    return {_SUFFIX: write} if workers else {}


def saved_script(run: Run, path: str, workers: int | None) -> Mapping[str, Any]:
    """What a checkpoint holds of this worker's script; warns where it holds nothing that fits this worker.

    Args:
        run: in which it is.
        path: of the checkpoint.
        workers: that have saved it.
    """
    try:
        with open(f"{path}{_SUFFIX}") as opened:
            states = {worker: told["state"] for told in json.load(opened) for worker in told["workers"]}
    except FileNotFoundError:
        return {}  # TensorFlow alone has written it, say
    if run.index in states:
        return states[run.index]
    chiefs = states.get(0, {})
    if len(states) == workers and all(state.get(DRAWS) == chiefs.get(DRAWS) for state in states.values()):
        return chiefs
    log.warning(
        "%s: NumPy's and Python's generators begin anew on worker %d, since %s. Where workers are to draw alike, let "
        "them set one seed.", path, run.index,
        "the chief has saved alone" if len(states) == 1 and workers != 1 else
        f"{workers} workers have saved it, which drew different numbers", extra=ALIKE_EVERYWHERE,
    )  # fmt: skip
    return {**chiefs, DRAWS: {}}


def resume_draws(state: Mapping[str, Any]) -> None:
    """Lets NumPy's and Python's generators draw what they would have drawn in a saved state of a script."""
    fault = Draws.of(state.get(DRAWS, {})).resume()
    if fault:
        log.warning("%s, and begins anew. Set it where the script begins.", fault, extra=ALIKE_EVERYWHERE)
