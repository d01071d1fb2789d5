"""The times of transfers between the workers of a run: measured, or assumed where nothing was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autodist.resources import ResourceSpec
from autodist.resources.measurements import MeasuredPair, NetworkMeasurement

CALL, MESSAGE, HOP = 1.3e-3, 0.3e-3 / 8, 0.5e-3
"""Assumed seconds: for each other worker that executes part of a step; for a message, if eight are sent concurrently;
for each message that must wait for another one. Measured over TensorFlow's gRPC; repeat with
`scripts/bench.py --only growth`."""

LOCAL_RATE = 2e9
"""Assumed bytes per second between two processes of one machine, which both spend their processor time on it."""


@dataclass(frozen=True)
class NetworkModel:
    """The times of transfers.

    Attributes:
        machine_of: the number of each worker's machine.
        rates: bytes per second of the link of each machine, in each direction.
        hop: seconds for a small message that another one waits for.
        message: seconds that each message of a worker adds.
        call: seconds that each other worker adds that a worker's step exchanges messages with.
        byte: seconds of processor time for each byte that a worker sends or receives.
        measured_at: the date of the measurement; "" if the times are assumed.
    """

    machine_of: tuple[int, ...]
    rates: tuple[float, ...]
    hop: float = HOP
    message: float = MESSAGE
    call: float = CALL
    byte: float = 1 / (2 * LOCAL_RATE)
    measured_at: str = ""

    @classmethod
    def of(cls, spec: ResourceSpec) -> NetworkModel:
        """Returns the model of a run's network, from its measurements as far as there are any.

        The `network_bandwidth` that the YAML has for a machine replaces its measured rate.
        """
        machine_of = machines_of(spec)
        network = spec.measurements.network
        rates = _rates(spec, machine_of, {} if network is None else _measured_rates(network, machine_of))
        if network is None:
            return cls(machine_of, rates)
        hop = max((pair.round_trip / 2 for pair in network.pairs), default=HOP)
        local = [min(pair.there, pair.back) for pair in network.pairs if _is_local(pair, machine_of)]
        byte = 1 / (2 * min(local, default=LOCAL_RATE))
        return cls(machine_of, rates, hop, network.message, network.call or CALL, byte, network.at)


def machines_of(spec: ResourceSpec) -> tuple[int, ...]:
    """Returns the number of each worker's machine, from 0 in the order of the workers."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(worker.node.address, len(numbers)) for worker in spec.workers)


def _rates(spec: ResourceSpec, machine_of: tuple[int, ...], measured: Mapping[int, float]) -> tuple[float, ...]:
    rates: dict[int, float] = {}
    for worker, machine in zip(spec.workers, machine_of, strict=True):
        given = worker.node.network_bandwidth * 1e9 / 8
        is_given = "network_bandwidth" in worker.node.model_fields_set
        rates[machine] = given if is_given else measured.get(machine, given)
    return tuple(rates[machine] for machine in range(len(rates)))


def _measured_rates(network: NetworkMeasurement, machine_of: tuple[int, ...]) -> dict[int, float]:
    """Returns the rate of each machine's link: that of its fastest pair, or less if all workers at once get less.

    `exchanged` is that of a worker, to all others together; those on its machine are not behind the link.
    """
    rates: dict[int, float] = {}
    for pair in network.pairs:
        if not _is_local(pair, machine_of):
            for worker in (pair.one, pair.other):
                machine = machine_of[worker]
                rates[machine] = max(rates.get(machine, 0.0), min(pair.there, pair.back))
    if len(machine_of) > 2 and network.exchanged and rates:
        # All workers at once are as slow as the slowest link; faster ones get as many times more as they are faster.
        workers, slowest = Counter(machine_of), min(rates.values())
        for machine, rate in rates.items():
            away = workers[machine] * (len(machine_of) - workers[machine]) / (len(machine_of) - 1)
            rates[machine] = min(rate, network.exchanged * away * rate / slowest)
    return rates


def _is_local(pair: MeasuredPair, machine_of: tuple[int, ...]) -> bool:
    return machine_of[pair.one] == machine_of[pair.other]
