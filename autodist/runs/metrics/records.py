"""The content of the files that a run writes under `metrics`, and the report that each worker sends to the chief."""

from __future__ import annotations

import pydantic

METRICS_FILE, PLANS_FILE = "metrics.jsonl", "plans.jsonl"


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)


class WorkerMetrics(_Record):
    """The part of a line that one worker has measured. All fields are None if its report has not arrived.

    Attributes:
        worker: its name.
        seconds: mean time of a step; steps that were traced do not count if there are others.
        outside: mean time between the end of a step and the begin of the next one.
        compute: time in the last traced step in which an operation computed; None: none was traced since the last line.
        wait: time in that step in which operations waited for messages of other workers, and none computed.
        send: time in that step in which the step itself transferred tensors, and none computed.
        traced: time of that step from its first operation to its last.
        peak_memory: largest resident memory of its process since its start, in bytes.
        bytes_sent: bytes that its process has sent to other workers since its start.
    """

    worker: str
    seconds: float | None = None
    outside: float | None = None
    compute: float | None = None
    wait: float | None = None
    send: float | None = None
    traced: float | None = None
    peak_memory: int | None = None
    bytes_sent: int | None = None


class MetricsLine(_Record):
    """One line of `metrics.jsonl`: the runs of one step since the line before.

    Attributes:
        time: seconds since 1970, by the chief's clock.
        started: time of the start of the chief's process, which lines of one start share.
        restarts: number of restarts so far.
        step: number of training steps so far, of all steps of the script.
        name: name of the step.
        steps: the number of its runs that the line describes.
        seconds: mean time of a step on the chief.
        examples_per_second: examples of all workers in the chief's time, with the time between steps; None if the step
            has no batch.
        workers: number of workers.
        by_worker: the measurements of each worker, by index.
    """

    time: float
    started: float
    restarts: int
    step: int
    name: str
    steps: int
    seconds: float | None
    examples_per_second: float | None
    workers: int
    by_worker: tuple[WorkerMetrics, ...]


class PlanRecord(_Record):
    """One line of `plans.jsonl`: the plan of one training step in one start of the script.

    Attributes:
        time: seconds since 1970, by the chief's clock.
        started: as in `MetricsLine`.
        restarts: number of restarts so far.
        fault: the reason of the last restart; "" before the first.
        step: number of training steps so far: those before the checkpoint that the start resumes from.
        name: name of the step.
        script: the script.
        workers: names of the workers.
        builder: name of the strategy's builder.
        predicted: predicted time of a step; None if nothing was predicted.
        terms: the parts of the prediction, in seconds, by name.
        basis: the measurements that the prediction follows from.
        plan: the strategy as the log shows it.
    """

    time: float
    started: float
    restarts: int
    fault: str
    step: int
    name: str
    script: str
    workers: tuple[str, ...]
    builder: str
    predicted: float | None = None
    terms: dict[str, float] = {}
    basis: str = ""
    plan: str = ""


class StepReport(_Record):
    """One worker's measurements of one step since its last report.

    Attributes:
        steps: number of its runs.
        timed: number of those that were not traced.
        inside: sum of the times of the timed runs, in seconds; without any, of all.
        period: sum of the times of all runs, and of the times between each and the run of a step before it.
        outside: sum of the latter.
        examples: sum of this worker's examples.
        traced: seconds of the last traced run: whole, compute, send, wait; None: none was traced.
    """

    steps: int = 0
    timed: int = 0
    inside: float = 0.0
    period: float = 0.0
    outside: float = 0.0
    examples: int = 0
    traced: tuple[float, float, float, float] | None = None

    @property
    def seconds(self) -> float:
        """Mean time of a run."""
        return self.inside / (self.timed or self.steps)


class WorkerReport(_Record):
    """One worker's measurements since its last report, sent to the chief after a step.

    Attributes:
        step: number of training steps that it has made so far.
        steps: the measurements of each step that has run, by the step's name.
        peak_memory: as in `WorkerMetrics`.
        bytes_sent: as in `WorkerMetrics`.
    """

    step: int
    steps: dict[str, StepReport]
    peak_memory: int | None = None
    bytes_sent: int | None = None
