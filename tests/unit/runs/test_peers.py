"""Peers: a worker whose call differs from the chief's detects it before all have joined, and does not wait."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from autodist.resources import ResourceSpec
from autodist.runs.peers import Peers
from autodist.runs.startup_progress import StartupProgress

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
