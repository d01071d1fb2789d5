"""The file beside the YAML with the measurement of the network, so that later runs need not measure again."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pydantic
import tensorflow as tf

from autodist.logs.formatting import counted
from autodist.resources import ResourceSpec
from autodist.resources.measurements import NetworkMeasurement
from autodist.versions import VERSION

DAYS = 30
"""Days for which a measurement is used."""

log = logging.getLogger("autodist")

_ABOUT = "Measured by AutoDist for the strategy Auto. Remove this file to measure again."


@dataclass(frozen=True)
class MachineIdentity:
    """A machine of a measurement.

    Attributes:
        address: its address in the YAML.
        workers: the number of its workers.
    """

    address: str
    workers: int


@dataclass(frozen=True)
class ClusterIdentity:
    """The properties of a run on which a measurement of its network depends.

    Attributes:
        machines: the machines, in the order of their first workers.
        tensorflow: version of TensorFlow.
        autodist: version of AutoDist.
    """

    machines: tuple[MachineIdentity, ...]
    tensorflow: str = tf.__version__
    autodist: str = VERSION

    @classmethod
    def of(cls, spec: ResourceSpec) -> ClusterIdentity:
        """Returns the identity of the machines of a run, with the versions of this process."""
        addresses = [worker.node.address for worker in spec.workers]
        return cls(tuple(MachineIdentity(one, addresses.count(one)) for one in dict.fromkeys(addresses)))

    @property
    def workers(self) -> int:
        return sum(machine.workers for machine in self.machines)

    def difference(self, measured: ClusterIdentity) -> str:
        """Returns the difference of another identity, for a message; "" if both are equal."""
        for theirs, ours in zip(measured.machines, self.machines, strict=False):
            if theirs.address != ours.address:
                return f"of other machines ({theirs.address} instead of {ours.address})"
            if theirs.workers != ours.workers:
                workers = counted(theirs.workers, "worker")
                return f"of another number of workers ({workers} instead of {ours.workers} on {ours.address})"
        if len(measured.machines) != len(self.machines):
            machines = counted(len(measured.machines), "machine")
            return f"of other machines ({machines} instead of {len(self.machines)})"
        if measured.tensorflow != self.tensorflow:
            return f"of another version of TensorFlow ({measured.tensorflow} instead of {self.tensorflow})"
        if measured.autodist != self.autodist:
            return f"of another version of AutoDist ({measured.autodist} instead of {self.autodist})"
        return ""


@dataclass(frozen=True)
class StoredMeasurement:
    """The result of reading a file.

    Attributes:
        network: the measurement; None: there is none that can be used.
        why_not: the reason why the one in the file cannot be used, in a sentence without a full stop; "" if it can be
            used, or if there is no file.
    """

    network: NetworkMeasurement | None = None
    why_not: str = ""


@dataclass(frozen=True)
class MeasurementFile:
    """A file with the measurement of a cluster's network.

    Attributes:
        path: its path; None: there is no file to read or write, because the machines come from no file.
        days: days for which a measurement is used.
    """

    path: Path | None
    days: float = DAYS

    @classmethod
    def beside(cls, source_file: str | None, days: float = DAYS) -> MeasurementFile:
        """Returns the file of the machines that a YAML file describes; None: they come from no file.

        >>> str(MeasurementFile.beside("conf/cluster.yml").path)
        'conf/cluster.measured.json'
        """
        return cls(None if source_file is None else Path(source_file).with_suffix(".measured.json"), days)

    def read(self, identity: ClusterIdentity) -> StoredMeasurement:
        """Returns the measurement, if it is of these machines, workers and versions, and recent.

        A file that cannot be read or has a wrong form is reported by a warning.
        """
        if self.path is None:
            return StoredMeasurement()
        try:
            text = self.path.read_bytes()
            header = _Header.model_validate_json(text)
            difference = identity.difference(header.identity)  # other versions may have another form
            content = None if difference else _Content.model_validate_json(text)
        except FileNotFoundError:
            return StoredMeasurement()
        except OSError as error:
            return self._unusable(f"cannot be read ({error.strerror})")
        except pydantic.ValidationError as error:
            return self._unusable(f"is not a measurement of AutoDist ({_first_fault(error)})")
        if content is None:
            return self._not_used(difference)
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(content.network.at)
        if age > datetime.timedelta(days=self.days):
            return self._not_used(f"{age.days} days old (the limit is {self.days:g})")
        return StoredMeasurement(content.network)

    def write(self, identity: ClusterIdentity, network: NetworkMeasurement) -> None:
        """Replaces the file; logs a warning if it cannot be written."""
        if self.path is None:
            return
        content = _Content(
            tensorflow=identity.tensorflow,
            autodist=identity.autodist,
            machines=identity.machines,
            network=network,
        )
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            with _removed_after_failure(new):
                new.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")
                os.replace(new, self.path)
        except OSError as error:
            _report_unwritable(self.path, error.strerror or str(error))

    def _not_used(self, what: str) -> StoredMeasurement:
        assert self.path is not None, "it was read"
        return StoredMeasurement(why_not=f"{self.path.name} is {what}; measured again")

    def _unusable(self, fault: str) -> StoredMeasurement:
        log.warning("%s %s: the network is measured again, and the file replaced.", self.path, fault)
        return StoredMeasurement()


@contextlib.contextmanager
def _removed_after_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


@functools.cache
def _report_unwritable(path: Path, reason: str) -> None:
    log.warning(
        "%s cannot be written (%s): each run measures the network again. Make the folder writable to keep the "
        "measurement.", path, reason,
    )  # fmt: skip


def _first_fault(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


class _Header(pydantic.BaseModel):
    """The part of the file that all versions have."""

    about: str = _ABOUT
    tensorflow: str
    autodist: str
    machines: tuple[MachineIdentity, ...]

    @property
    def identity(self) -> ClusterIdentity:
        return ClusterIdentity(self.machines, self.tensorflow, self.autodist)


class _Content(_Header):
    """The whole file."""

    network: NetworkMeasurement

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> _Content:
        network, workers = self.network, self.identity.workers
        rates = [rate for pair in network.pairs for rate in (pair.there, pair.back)]
        costs = [network.message, network.gathered, network.exchanged, network.call, *rates]
        costs += [pair.round_trip for pair in network.pairs]
        if not all(0 <= cost < math.inf for cost in costs) or not all(rates):
            raise ValueError("a number is negative, not finite or a rate of 0")
        if not all(0 <= worker < workers for pair in network.pairs for worker in (pair.one, pair.other)):
            raise ValueError(f"a pair has a worker that is none of the {workers}")
        if datetime.datetime.fromisoformat(network.at).tzinfo is None:
            raise ValueError("the date has no time zone")
        return self
