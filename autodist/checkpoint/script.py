"""The state of each worker's script in a checkpoint: NumPy's and Python's generators, and positions in data sets."""

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
"""Key of the generators in a script's state."""

_SUFFIX = ".scripts.json"


def draws_now() -> dict[str, Any]:
    """Returns the state of a script of which only the generators are known."""
    return {DRAWS: Draws.now().to_json()}


def files_of(scripts: Mapping[int, Any]) -> dict[str, Callable[[str], None]]:
    """Returns the extra file of the workers' script states, as `Content.files`; equal states are written once."""
    workers: dict[str, list[int]] = {}
    for worker, state in scripts.items():
        if state is not None:
            workers.setdefault(json.dumps(state), []).append(worker)

    def write(path: str) -> None:
        with open(path, "w") as opened:
            json.dump([{"workers": who, "state": json.loads(state)} for state, who in workers.items()], opened)

    return {_SUFFIX: write} if workers else {}


def saved_script(run: Run, path: str, workers: int | None) -> Mapping[str, Any]:
    """Returns this worker's script state in a checkpoint; logs a warning if none fits this worker.

    Args:
        run: of the script.
        path: of the checkpoint.
        workers: number of workers that saved it.
    """
    try:
        with open(f"{path}{_SUFFIX}") as opened:
            states = {worker: entry["state"] for entry in json.load(opened) for worker in entry["workers"]}
    except FileNotFoundError:
        return {}  # for example, TensorFlow alone has written it
    if run.index in states:
        return states[run.index]
    chiefs = states.get(0, {})
    if len(states) == workers and all(state.get(DRAWS) == chiefs.get(DRAWS) for state in states.values()):
        return chiefs
    log.warning(
        "%s: NumPy's and Python's generators start over on worker %d, since %s. If workers must draw the same numbers, "
        "set one seed on all of them.", path, run.index,
        "only the chief has saved its script" if len(states) == 1 and workers != 1 else
        f"{workers} workers have saved it, which drew different numbers", extra=ALIKE_EVERYWHERE,
    )  # fmt: skip
    return {**chiefs, DRAWS: {}}


def resume_draws(state: Mapping[str, Any]) -> None:
    """Sets NumPy's and Python's generators to a saved state of a script."""
    fault = Draws.from_json(state.get(DRAWS, {})).resume()
    if fault:
        log.warning("%s, and starts over. Set its seed at the start of the script.", fault, extra=ALIKE_EVERYWHERE)
