"""The choice of what XLA compiles (`xla: auto`), by the duration of a step that is compiled and of one that is not.

Compiling pays or not depending on the model and on the threads of a replica: XLA fuses operations and removes the cost
of starting each, but its convolutions and products on CPUs can be slower than TensorFlow's.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autodist.graph.jit_scope import is_in_jit_scope
from autodist.graph.step import CapturedStep
from autodist.logs.formatting import readable_seconds
from autodist.proto.strategy_pb2 import Compilation
from autodist.runs.measuring.attempt import Values, attempt, begin_together
from autodist.runs.measuring.copied_step import CopiedStep, OneReplica, rewrite_for_one
from autodist.runs.measuring.measurable import Batch, CannotMeasure, first_part, require_measurable, require_memory

if TYPE_CHECKING:
    from autodist.runs.run import Run

log = logging.getLogger("autodist")

LIMIT = 3.0
"""Seconds for the steps that are timed, besides the compilation of each form and its first step."""

_LONGEST_STEP = 60.0
"""Seconds after which a step is cancelled; the first one of each form includes its compilation."""

_MOST_TURNS = 15

_LEAST_GAIN = 0.05
"""Part of a step's duration that compiling must save: less is within the error of the measurement."""

NOTHING, MARKED, WHOLE = Compilation.NOTHING, Compilation.MARKED, Compilation.WHOLE


@dataclass(frozen=True)
class CompilationTimes:
    """Seconds of a step on one replica, by what XLA compiles of it.

    Attributes:
        nothing: nothing is compiled.
        marked: only the functions that the script marks with `jit_compile`; None if there are none.
        whole: the computation up to the gradients, without the updates.
        updates: the updates of the variables, without the computation.
        took: seconds that the measurement took.
    """

    nothing: float
    marked: float | None
    whole: float
    updates: float
    took: float = 0.0


def measure_compilation(
    step: CapturedStep, batch: Mapping[str, Any], variables: Values, replica: OneReplica, seconds: float = LIMIT
) -> CompilationTimes:
    """Runs a training step in several forms, in turns, on copies of its variables.

    Args:
        step: the captured step.
        batch: the values of its inputs in this worker's part of the first batch, by name.
        variables: functions that return the present values of its variables, by name.
        replica: the replica that runs it.
        seconds: time limit for the steps that are timed; at least one of each form runs.

    Raises:
        CannotMeasure: the step has effects outside of its variables, needs too much memory or takes too long, or the
            batch does not fit it.
    """
    began = time.perf_counter()
    require_measurable(step)
    if not step.has_loops_for_xla:
        raise CannotMeasure("TensorFlow cannot build its loops for XLA")
    whole = first_part(step, batch, replica.replicas)
    require_memory(step, whole, replica.memory)
    forms = {"nothing": Compilation()}
    if any(map(is_in_jit_scope, step.graph_index.nodes)):
        forms["marked"] = Compilation(computation=MARKED)
    forms |= {"whole": Compilation(computation=WHOLE), "updates": Compilation(updates=True)}
    rewritten = {name: rewrite_for_one(step, replica.device, form) for name, form in forms.items()}
    plain = CopiedStep(rewritten["nothing"], (), replica, _LONGEST_STEP)
    with plain.on_copies(variables):
        others = {name: plain.in_another_form(one, name) for name, one in rewritten.items() if name != "nothing"}
        durations = _in_turns({"nothing": plain, **others}, whole, seconds)
    return CompilationTimes(
        nothing=durations["nothing"],
        marked=durations.get("marked"),
        whole=durations["whole"],
        updates=durations["updates"],
        took=time.perf_counter() - began,
    )


def _in_turns(runs: Mapping[str, CopiedStep], batch: Batch, seconds: float) -> dict[str, float]:
    """Returns the median duration of each form, which take turns: the load of a machine changes for all alike."""
    for run in runs.values():
        run(batch)  # XLA compiles it
    start = time.monotonic()
    durations: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_MOST_TURNS):
        if turn and time.monotonic() > start + seconds:
            break
        for name, run in runs.items():
            durations[name].append(run(batch).seconds)
    return {name: statistics.median(some) for name, some in durations.items()}


def choose_compilation(times: Sequence[CompilationTimes]) -> Compilation:
    """Returns what XLA should compile: each part where it makes the step of the slowest worker faster.

    Args:
        times: the measurements of all workers that compute.
    """
    plain = max(one.nothing for one in times)
    found = Compilation()
    best = (1 - _LEAST_GAIN) * plain
    for extent in (MARKED, WHOLE):
        seconds = [one.marked if extent == MARKED else one.whole for one in times]
        if None not in seconds and max(filter(None, seconds)) < best:
            found.computation, best = extent, max(filter(None, seconds))
    found.updates = max(one.updates for one in times) < (1 - _LEAST_GAIN) * plain
    return found


def agreed_compilation(
    run: Run, step: CapturedStep, names: Mapping[str, str], batch: Mapping[str, Any], name: str
) -> Compilation | None:
    """Returns what XLA compiles of a training step, by measurements on all workers; a collective call.

    Args:
        run: the run.
        step: the captured step.
        names: the session's name of each variable.
        batch: the values of its inputs in this worker's part of the first batch; empty: not known.
        name: name of the step, for the log.

    Returns:
        None if a worker cannot measure the step: then XLA compiles what the script requests.
    """
    begin_together(run)

    def measure(values: Values, replica: OneReplica) -> CompilationTimes:
        return measure_compilation(step, batch, values, replica)

    try:
        own = asdict(attempt(run, "the step with and without XLA", step, names, batch, measure))
    except CannotMeasure as error:
        own = {_WHY_NOT: str(error)}
    coordination = run.coordination
    coordination.reach_collective()
    parts = [json.loads(part) for part in coordination.gather(json.dumps(own).encode())]
    decided = _decide(run, parts, name or "the step") if parts else None
    message = coordination.broadcast(b"" if decided is None else _DECIDED + decided.SerializeToString())
    return Compilation.FromString(message.removeprefix(_DECIDED)) if message else None


_WHY_NOT = "why_not"
"""JSON key of the reason why a worker could not measure."""

_DECIDED = b"="
"""Begins the chief's message if the decision, whose bytes may be none, is by measurements."""


def _decide(run: Run, parts: Sequence[Mapping[str, Any]], name: str) -> Compilation | None:
    """On the chief, returns what XLA compiles, by the messages of all workers, and logs it."""
    computing = {worker.name: part for worker, part in zip(run.spec.workers, parts, strict=True) if worker.has_replicas}
    for worker, part in computing.items():
        if _WHY_NOT in part:
            log.info(
                "xla: auto could not measure %s on %s (%s), so XLA compiles what the script requests.",
                name, worker, part[_WHY_NOT],
            )  # fmt: skip
            return None
    times = [CompilationTimes(**part) for part in computing.values()]
    chosen = choose_compilation(times)
    log.info("xla: auto compiles %s of %s. %s.", in_words(chosen), name, _shown(times))
    return chosen


def in_words(compilation: Compilation) -> str:
    """Returns what XLA compiles.

    >>> in_words(Compilation(computation=WHOLE, updates=True))
    'the computation and the updates'
    """
    computation = {MARKED: "the marked functions", WHOLE: "the computation"}.get(compilation.computation)
    return " and ".join(filter(None, [computation, "the updates" if compilation.updates else None])) or "nothing"


def _shown(times: Sequence[CompilationTimes]) -> str:
    """Returns the measurements of the slowest worker in words."""
    slowest = max(times, key=lambda one: one.nothing)
    with_ = {
        "the marked functions": slowest.marked, "the computation": slowest.whole, "the updates": slowest.updates,
    }  # fmt: skip
    others = ", ".join(
        f"{readable_seconds(seconds)} with {what} compiled" for what, seconds in with_.items() if seconds is not None
    )
    return f"A step on one replica takes {readable_seconds(slowest.nothing)} without XLA, {others}"
