"""Measurements of a run's network and of a step's computation, from which `strategy: Auto` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MeasuredPair:
    """The link between two workers, measured through TensorFlow's transport while nothing else was sent.

    Attributes:
        one: index of the first worker.
        other: index of the second worker.
        round_trip: seconds for a tensor of one byte from one to the other and back.
        there: bytes per second from `one` to `other`.
        back: bytes per second from `other` to `one`.
    """

    one: int
    other: int
    round_trip: float
    there: float
    back: float


@dataclass(frozen=True)
class NetworkMeasurement:
    """The costs of transfers between the workers of a run.

    Attributes:
        pairs: the measured links: one of each pair of machines, and one within each machine that has several workers.
        message: seconds by which each additional small tensor, sent to one worker with others, prolongs a transfer.
        gathered: bytes per second that arrive at one worker while all others send to it; 0 with two workers.
        exchanged: bytes per second that each worker sends while all workers send to all others.
        call: seconds by which each additional worker that executes part of a run prolongs the run; 0 with two workers.
        at: date and time of the measurement (ISO 8601, UTC).
    """

    pairs: tuple[MeasuredPair, ...]
    message: float
    gathered: float
    exchanged: float
    call: float
    at: str


@dataclass(frozen=True)
class StepMeasurement:
    """The computation of a training step on one replica of the chief, for its part of the first batch.

    The replica has its threads' cores for itself.

    Attributes:
        seconds: duration of a step, without a trace, with the threads of a replica.
        fixed: the part of `seconds` that does not depend on the number of examples, from a second, smaller batch.
        updates: seconds of operations that only update a variable and its slots, by the variable's name.
        ready: seconds from the start of the step to the moment when the gradient of a variable exists, by its name.
        rows: distinct rows of a table that the batch touches, by the variable's name.
        took: seconds that the measurement took.
    """

    seconds: float
    fixed: float
    updates: Mapping[str, float] = field(default_factory=dict)
    ready: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    took: float = 0.0

    def with_own_cores(self, cores: float) -> StepMeasurement:
        """Returns the measurement of a worker that need not share a core, from one that has a part of a core."""
        part = min(cores, 1.0)
        return replace(
            self,
            seconds=self.seconds * part,
            fixed=self.fixed * part,
            updates={name: seconds * part for name, seconds in self.updates.items()},
            ready={name: at * part for name, at in self.ready.items()},
        )

    def with_more_computation(self, fraction: float) -> StepMeasurement:
        """Returns the measurement of a step whose forward and backward pass take longer by a fraction."""
        more = fraction * (self.seconds - sum(self.updates.values()))
        ready = {name: at * (1 + fraction) for name, at in self.ready.items()}
        return replace(self, seconds=self.seconds + more, ready=ready)


@dataclass(frozen=True)
class Recomputation:
    """The effect of computing the activations of a model's blocks again in the backward pass.

    Attributes:
        saved: bytes of activations that a worker need not keep.
        again: FLOPs that are computed again, as a fraction of those of the step.
    """

    saved: int
    again: float


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run.

    Attributes:
        network: None: not measured; with one worker there is none.
        step: None: the step could not be measured.
        why_not: reason why the step could not be measured; empty if it was.
        slots: bytes of the slots of a variable, by its name.
        activations: bytes that a worker keeps for the backward pass.
        recomputation: the effect of computing activations again; None: not known, or the model has no blocks for it.
        slowness: seconds of a step on each worker, as a multiple of the chief's; (): not known, as if they were equal.
        cores: number of cores of each worker; below 1 if its machine has more workers than cores. (): not known.
        chosen: the strategy of an earlier run that this run continues, as bytes; `Auto` returns it. b"": none.
        memory: bytes of memory of each worker; 0: not known; (): none is known.
    """

    network: NetworkMeasurement | None = None
    step: StepMeasurement | None = None
    why_not: str = ""
    slots: Mapping[str, int] = field(default_factory=dict)
    activations: int = 0
    recomputation: Recomputation | None = None
    slowness: tuple[float, ...] = ()
    cores: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()
    chosen: bytes = b""

    def recomputing(self) -> Measurements:
        """Returns the measurements of a step that computes its activations again, as far as the effect is known."""
        if self.recomputation is None:
            return self
        step = None if self.step is None else self.step.with_more_computation(self.recomputation.again)
        return replace(self, step=step, activations=max(self.activations - self.recomputation.saved, 0))
