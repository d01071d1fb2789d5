"""Predicts the seconds of a step under a plan: computation, updates, and transfers by a network model.

The time of a step is that of the busiest worker (forward and backward pass, updates, and the processor time of
transfers), or of all workers of a machine on its cores; then the part of the transfers that the backward pass does not
hide. (Source of the form: A. Jayarajan et al., "Priority-based Parameter Propagation", MLSys 2019, for gradients that
are sent while the backward pass goes on.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

import numpy as np

from autodist.resources import ResourceSpec
from autodist.strategies.network_model import NetworkModel
from autodist.strategies.plan_loads import BINS, PACK_BYTES, Column, Load, Loads, Row
from autodist.strategies.step_facts import StepFacts
from autodist.strategies.subgroups import BUCKET_BYTES, choose_subgroups, group_of, sum_cost
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Subgroups

HANDLING = 0.9e-3
"""Assumed seconds from the arrival of a message to the operation that uses it, and on to the next message. The model
`tiny` of `scripts/bench.py --only auto` shows it: a step that waits for two messages takes as much longer."""


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step, and the memory that it needs.

    Attributes:
        computation: seconds of the forward and backward pass.
        updates: seconds of updates and sums of the busiest worker.
        processor: seconds that the busiest worker spends on messages.
        network: seconds of transfers that no computation hides.
        waits: seconds of messages that wait for each other.
        cores: seconds that workers wait for cores, if their machine has more workers than cores.
        sent: bytes that the busiest worker sends or receives.
        held: bytes of variables, slots and gradients of each worker.
    """

    computation: float
    updates: float
    processor: float
    network: float
    waits: float
    cores: float
    sent: int
    held: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.computation + self.updates + self.processor + self.network + self.waits + self.cores

    @property
    def terms(self) -> dict[str, float]:
        """The parts of `seconds`, by name."""
        return {
            "computation": self.computation,
            "updates": self.updates,
            "processor time of transfers": self.processor,
            "network": self.network,
            "waits": self.waits,
            "shared cores": self.cores,
        }


@dataclass(frozen=True)
class _Sums:
    """The costs of all-reduced gradients for one worker.

    Attributes:
        messages: the messages that it sends and receives.
        calls: the workers that it exchanges them with.
        hops: the messages that wait for each other.
        network: the time of the busiest link, as a part of that without subgroups.
    """

    messages: int
    calls: int
    hops: int
    network: float


@dataclass(frozen=True)
class CostModel:
    """Predicts the time of a step from the sum of its variables' loads.

    Attributes:
        loads: computes the loads.
        network: the network.
    """

    loads: Loads
    network: NetworkModel
    _known_sums: dict[int, _Sums] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spec: ResourceSpec, variables: Sequence[SyncedVariable]) -> CostModel:
        """Returns the model for a step with these variables."""
        return cls(Loads(spec, StepFacts.of(spec, variables)), NetworkModel.of(spec))

    @property
    def spec(self) -> ResourceSpec:
        """The machines, with the measurements."""
        return self.loads.spec

    @property
    def facts(self) -> StepFacts:
        """The step's computation."""
        return self.loads.facts

    @cached_property
    def _machines(self) -> np.ndarray:
        """Matrix of machines and workers: 1.0 for the workers of a machine."""
        numbers = np.array(self.network.machine_of)
        return (numbers == np.arange(len(self.network.rates))[:, None]).astype(float)

    def predict(self, sums: Load) -> Prediction:
        """Returns the prediction for a step with the sum of its variables' loads."""
        load = sums[:, Column.FIRST :] + sums[:, [Column.ALL]] + sums[:, [Column.COMPUTING]] * self.loads.computes
        sent, received = self._bytes(load)
        messages, calls, hops = self._messages(load)
        processor = self.network.byte * (sent + received) + self.network.message * messages + self.network.call * calls
        computation = self.loads.computes * self.facts.seconds * self.facts.slowness
        updates = load[Row.WORK] * self.facts.slowness
        busy = computation + updates + processor
        busiest = int(np.argmax(busy))
        return Prediction(
            computation=float(computation[busiest]),
            updates=float(updates[busiest]),
            processor=float(processor[busiest]),
            network=self._exposed(load),
            waits=hops * (self.network.hop + HANDLING),
            cores=self._waits_for_cores(busy),
            sent=int(max(sent.max(), received.max())),
            held=tuple(int(held) for held in load[Row.HELD] + self.loads.computes * self.spec.measurements.activations),
        )

    def _waits_for_cores(self, busy: np.ndarray) -> float:
        """Returns the seconds by which a machine takes longer for all its workers than the busiest worker alone."""
        if not self.spec.measurements.cores:
            return 0.0
        cores = np.array(self.spec.measurements.cores)
        of_machines = self._machines @ (busy * np.maximum(cores, 1.0)) / (self._machines @ cores)
        return float(max(of_machines.max() - busy.max(), 0.0))

    def _bytes(self, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes that each worker sends and receives in a step."""
        to_owner, computes = load[Row.PUSHED] + load[Row.ASKED], self.loads.computes
        from_owner = load[Row.PULLED] + load[Row.READ] + load[Row.GATHERED]
        others = self.loads.count - computes
        to_all = load[Row.TO_ALL] + load[Row.OUTER_SENT]
        sent = to_all + computes * (to_owner.sum() - to_owner) + from_owner * others
        received = to_all + computes * (from_owner.sum() - from_owner) + to_owner * others
        return sent, received

    def _messages(self, load: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns the messages and the peers of each worker, and the number of messages that wait for each other."""
        computes, count = self.loads.computes, self.loads.count
        own = load[Row.LARGE] + np.ceil(load[Row.SMALL] / PACK_BYTES)
        messages = 2 * (computes * (own.sum() - own) + own * (count - computes))
        owners = (own > 0).astype(float)
        calls = np.maximum(computes * (owners.sum() - owners), owners * (count - computes))
        messages += 2 * load[Row.TABLES] * (count - 1)
        hops = 0.0
        if owners.any():
            hops = 4 if load[Row.READ].any() else 2
        if load[Row.SUMMED].any() or load[Row.TO_ALL].any():
            sums = self._sums(int(load[Row.SUMMED].max()))
            messages = messages + computes * sums.messages
            calls, hops = np.maximum(calls, computes * sums.calls), max(hops, sums.hops)
        if load[Row.OUTER].any():  # once in some steps
            outer, share = self._sums(int(load[Row.OUTER].max())), load[Row.OUTER].max() / load[Row.OUTER_TIMES].max()
            messages = messages + computes * outer.messages * share
            calls, hops = calls + computes * outer.calls * share, hops + outer.hops * share
        return messages, calls, hops

    def _sums(self, byte_size: int) -> _Sums:
        """Returns the costs of the sums of so many bytes of dense gradients."""
        buckets = ceil(byte_size / BUCKET_BYTES)
        if buckets not in self._known_sums:
            numbers = choose_subgroups(self.spec, byte_size)
            at_once = sum_cost(None, self.spec, byte_size)
            cost = sum_cost(Subgroups.of(numbers, group_of(self.spec)), self.spec, byte_size) if numbers else at_once
            is_pair = self.loads.count == 2
            self._known_sums[buckets] = _Sums(
                messages=(2 if is_pair else 2 * cost.messages) * buckets,
                calls=cost.calls,
                hops=1 if is_pair else cost.hops,
                network=cost.transfer / at_once.transfer if at_once.transfer else 1.0,
            )
        return self._known_sums[buckets]

    def _exposed(self, load: np.ndarray) -> float:
        """Returns the seconds of transfers between machines that no computation hides."""
        rates = np.array(self.network.rates)
        if len(rates) < 2:
            return 0.0
        early = self._wire(self._to_all(load), load[Row.PUSHED], np.zeros_like(load[0]))
        late = self._wire(None, None, load[Row.PULLED])
        before = self._wire(None, load[Row.ASKED], load[Row.READ])
        gathered = self._wire(None, None, load[Row.GATHERED])
        hidden = max(gathered - self.facts.seconds, 0.0)
        outer = self._wire(load[Row.OUTER_SENT], None, np.zeros_like(load[0]))
        return self._after_backward(load, early) + late + before + hidden + outer

    def _to_all(self, load: np.ndarray) -> np.ndarray:
        """Returns the bytes that workers send to all others; in subgroups, fewer of a sum's bytes leave a machine."""
        dense = load[Row.SUMMED] * (2 * (self.loads.count - 1) / max(self.loads.count, 1))
        saved = 1 - self._sums(int(load[Row.SUMMED].max())).network
        return np.maximum(load[Row.TO_ALL] - dense * saved, 0.0)

    def _wire(self, to_all: np.ndarray | None, to_owner: np.ndarray | None, from_owner: np.ndarray) -> float:
        """Returns the seconds that the busiest link between machines needs for some of the transfers."""
        machines, computing, count = self._machines, self._machines @ self.loads.computes, self.loads.count
        away = count - computing
        out = inward = np.zeros(len(self.network.rates))
        if to_all is not None and count > 1:
            out = inward = machines @ to_all * away / (count - 1)
        if to_owner is not None:
            own = machines @ to_owner
            out, inward = out + computing * (own.sum() - own), inward + own * away
        own = machines @ from_owner
        out, inward = out + own * away, inward + computing * (own.sum() - own)
        return float((np.maximum(out, inward) / np.array(self.network.rates)).max())

    def _after_backward(self, load: np.ndarray, wire: float) -> float:
        """Returns the seconds from the end of the backward pass to the arrival of the last gradient."""
        sent = load[len(Row) :].sum(axis=1)
        total = sent.sum()
        if not total or not wire:
            return 0.0
        ready = self.facts.seconds * (np.arange(BINS) + 1) / BINS
        left = np.cumsum(sent[::-1])[::-1] / total * wire
        end = (ready + left)[sent > 0].max()
        return float(max(end - self.facts.seconds, 0.0))
