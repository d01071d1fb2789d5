"""Peers: a worker whose call differs from the chief's detects it before all have joined, and does not wait."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tensorflow as tf

from autodist.errors import ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.peers import Peers
from autodist.runs.startup_progress import StartupProgress
from autodist.runtime.interruptible import InterruptibleExecutor

SPEC = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})


def worker(*said: tuple[str, str]) -> Peers:
    """A worker other than the chief that has sent these messages and then reached its first step."""
    left = [json.dumps(one) for one in said]
    worker_client = SimpleNamespace(
        let_chief_fail_first=lambda limit: None, receive_text=lambda: left.pop(0) if left else None
    )
    return Peers(SPEC, worker_client, b"", 0, StartupProgress(is_chief=False))


def test_workers_receive_the_value_of_the_chief_in_the_same_calls():
    peers = worker(("restore", "1"), ("fit", "2"))
    assert [peers.receive_text("restore"), peers.receive_text("fit")] == ["1", "2"]
    peers.note_missed_text()
    assert peers.call_mismatch is None


@pytest.mark.parametrize(
    "said, calls, apart",
    [
        ([], ["restore"], ("restore", "")),
        ([("fit", "")], ["restore"], ("restore", "fit")),
        ([("restore", "")], ["fit"], ("fit", "restore")),
        ([("restore", "")], [], ("", "restore")),
        ([("fit", ""), ("restore", ""), ("fit", "")], ["fit", "fit"], ("fit", "restore")),
    ],
)
def test_a_worker_in_another_call_than_the_chief_names_both_calls(said, calls, apart):
    peers = worker(*said)
    assert [peers.receive_text(call) for call in calls][-1:] in ([], [None])
    peers.note_missed_text()
    assert peers.call_mismatch == apart


CLOSED = (
    "Socket closed\nAdditional GRPC error information from remote target /job:worker/replica:0/task:{} while calling "
    '/tensorflow.WorkerService/RecvTensor:\n:UNKNOWN:Error received from peer  {{grpc_status:14, grpc_message:"Socket '
    'closed"}}'
)


class Coordinator:
    """The chief's coordinator; no worker has ended."""

    def __init__(self) -> None:
        self.cause: WorkerFailedError | None = None
        self.lines = 0

    def end_with_failure(self, worker: str, reason: str, is_lost: bool = False, waits: bool = True) -> None:
        assert is_lost or not waits
        self.cause = WorkerFailedError(worker, reason)

    def first_cause(self, timeout: float) -> WorkerFailedError | None:
        return self.cause


def of_two(is_chief: bool) -> Peers:
    """Peers that have joined and whose processes go on."""
    nothing = lambda limit: None  # noqa: E731
    waits = {"index": 1, "failure": None, "let_chief_fail_first": nothing, "wait_to_be_ended": nothing}
    peers = Peers(SPEC, None if is_chief else SimpleNamespace(**waits), b"", 0, StartupProgress(is_chief))
    peers._executor = InterruptibleExecutor()
    peers._launch = SimpleNamespace(coordinator=Coordinator()) if is_chief else None
    return peers


def fails(error: Exception) -> None:
    raise error


def test_a_worker_that_gives_up_is_blamed_without_waiting():
    peers = of_two(True)
    peers.give_up(1, "failed in a step")
    assert str(peers._launch.coordinator.cause.headline).startswith("localhost:1 failed in a step")


def test_a_broken_connection_to_a_worker_s_server_is_its_loss_on_the_chief():
    with pytest.raises(WorkerFailedError, match=r"^localhost:1 was lost: .* broke \(Socket closed\), and the script"):
        of_two(is_chief=True).guard(fails, tf.errors.UnavailableError(None, None, CLOSED.format(1)))


def test_a_broken_connection_to_a_server_is_named_on_another_worker_that_nobody_ends():
    with pytest.raises(ClusterError, match=r"^the connection to TensorFlow's server of localhost:0 broke \(Socket"):
        of_two(is_chief=False).guard(fails, tf.errors.UnavailableError(None, None, CLOSED.format(0)))


def test_a_connection_that_another_worker_reports_as_broken_is_that_to_this_worker():
    """For example in a loop of this worker, of whose nodes the other worker runs some."""
    reported = f"UNAVAILABLE: From /job:worker/replica:0/task:1:\n{CLOSED.format(0)}"
    with pytest.raises(
        WorkerFailedError, match=r"^localhost:1 was lost: the connection to its TensorFlow server broke"
    ):
        of_two(is_chief=True).guard(fails, tf.errors.UnavailableError(None, None, reported))


@pytest.mark.parametrize("is_chief", [True, False])
@pytest.mark.parametrize(
    "error",
    [tf.errors.UnavailableError(None, None, "of a service"), tf.errors.NotFoundError(None, None, CLOSED.format(1))],
)
def test_other_errors_are_raised_as_they_are(error: tf.errors.OpError, is_chief: bool):
    with pytest.raises(type(error)) as raised:
        of_two(is_chief).guard(fails, error)
    assert raised.value is error
