"""Followers join, leave and wait at the rendezvous of an elastic run, over real sockets within this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autodist.cluster.environments.connect import connect
from autodist.cluster.environments.elastic_rendezvous import ElasticRendezvous
from autodist.cluster.environments.follower import Follower
from autodist.cluster.environments.handshake import Hello, Welcome
from autodist.cluster.environments.launcher_env import GivenCluster
from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.protocol import Stop, encode
from autodist.cluster.script import Script
from autodist.cluster.start import content_digest
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec
from tests.cluster.runs import within
from tests.ports import free_port

SECRET = {"AUTODIST_SECRET": "a secret of the run"}
SPEC = ResourceSpec.from_dict({"nodes": "given", "join_timeout": 20})
OWN = Hello(0, 3, "chief", None, (0, 1), None, ())


pytestmark = pytest.mark.processes


def script_in(folder: Path) -> Script:
    file = str(folder / "train.py")
    return Script(("train.py",), str(folder), file, content_digest(file))


class Process:
    """A follower without a script, in a thread of this process."""

    def __init__(self, given: GivenCluster, folder: Path) -> None:
        self.connection, welcome = connect(given, dict(SECRET), 20, lambda: 0)
        self.follower = Follower(self.connection, script_in(folder), welcome)
        self._thread = threading.Thread(target=self.follower.serve)
        self._thread.start()

    def leave(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.wait()

    def wait(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        with contextlib.suppress(OSError):  # the chief has closed it
            self.connection.shutdown(socket.SHUT_RDWR)  # `close` alone would wait for the follower's streams
        self.connection.close()
        self.follower.close()


@pytest.fixture
def given() -> GivenCluster:
    return GivenCluster("by hand", 0, 3, "127.0.0.1", free_port("127.0.0.1"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('trained')")
    return tmp_path


def process(given: GivenCluster, index: int, folder: Path) -> Process:
    return Process(replace(given, index=index), folder)


def has_closed(given: GivenCluster) -> bool:
    """Returns True if no server accepts processes any more."""
    try:
        socket.create_connection((given.chief, given.port)).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it closes
        pass
    return False


@pytest.fixture
def begun(given: GivenCluster, folder: Path) -> Iterator[tuple[ElasticRendezvous, Process]]:
    """A rendezvous that has begun with the processes 0 and 2, before process 1 came."""
    rendezvous = ElasticRendezvous(given, SPEC, dict(SECRET), Quorum(2, 0.0))
    followers: list[Process] = []
    joining = threading.Thread(target=lambda: followers.append(process(given, 2, folder)))
    joining.start()
    machines = rendezvous.wait(OWN)
    joining.join(20)
    assert machines.processes == (0, 2)
    yield rendezvous, followers[0]
    end(rendezvous, *followers)


def end(rendezvous: ElasticRendezvous, *followers: Process) -> None:
    """Ends a rendezvous whose run was not started."""
    rendezvous.leave("the test is over")
    for follower in followers:
        follower.wait()
        assert follower.follower.status == 1
    for channel in rendezvous.channels:  # the coordinator closes them otherwise
        channel.close()
        channel.stdout.close()
        channel.stderr.close()


def test_a_late_process_can_join_if_it_has_the_same_script(
    begun: tuple[ElasticRendezvous, Process], given: GivenCluster, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rendezvous, _ = begun
    script = script_in(folder)
    assert rendezvous.find_joining(script, 20) == ((), 2)
    differs = process(given, 1, folder)
    assert within(20, lambda: rendezvous.expected == (1, 2))
    assert rendezvous.find_joining(replace(script, digest="another"), 20) == ((), 2)
    differs.wait()
    assert (differs.follower.status, differs.follower.starts_again) == (1, False)
    assert within(20, lambda: rendezvous.expected == (2,))
    late = process(given, 1, folder)
    assert within(20, lambda: rendezvous.expected == (1, 2))
    joining, workers = rendezvous.find_joining(script, 20)
    assert ([arrival.hello.index for arrival in joining], workers) == ([1], 3)
    rendezvous.dismiss(starts_again=True)
    late.wait()
    assert late.follower.starts_again
    assert rendezvous.expected == (1, 2), "those that were there"
    assert [rendezvous.count_workers(processes) for processes in [(1, 2), (2,), ()]] == [3, 2, 1]
    printed = capfd.readouterr().err
    assert printed.count("process 1 is on standby: the run trains on 2 workers without it.") == 2
    assert printed.count("the run cannot use this process: the script") == 1
    assert printed.count("the run starts again, and this process joins it") == 1


def test_a_process_that_waits_until_the_end_of_the_run_ends_well(
    begun: tuple[ElasticRendezvous, Process], given: GivenCluster, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rendezvous, _ = begun
    late = process(given, 1, folder)
    assert within(20, lambda: rendezvous.expected == (1, 2))
    rendezvous.dismiss(starts_again=False)
    late.wait()
    assert (late.follower.status, late.follower.starts_again) == (0, False)
    assert "the run has ended, and this process took no part since its last start" in capfd.readouterr().err
    assert within(20, lambda: has_closed(given)), "the server, which is a process of its own, notices the end"
    with pytest.raises(ClusterError, match="found no chief"):
        connect(replace(given, index=1), dict(SECRET), 0.3, lambda: 0)


def test_a_process_that_waits_until_the_run_fails_fails_too(
    begun: tuple[ElasticRendezvous, Process], given: GivenCluster, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rendezvous, _ = begun
    late = process(given, 1, folder)
    assert within(20, lambda: rendezvous.expected == (1, 2))
    rendezvous.dismiss(starts_again=False, failure="the chief's script failed")
    late.wait()
    assert (late.follower.status, late.follower.starts_again) == (1, False)
    assert "the chief ends the run; see the chief's output" in capfd.readouterr().err


def test_a_process_that_leaves_before_the_start_may_come_again(given: GivenCluster, folder: Path) -> None:
    rendezvous = ElasticRendezvous(given, SPEC, dict(SECRET), Quorum(3, 60.0))
    followers: list[Process] = []

    def come() -> None:
        first = process(given, 1, folder)
        within(20, lambda: rendezvous.expected == (1,))
        first.leave()
        within(20, lambda: rendezvous.expected == ())
        followers.extend(process(given, index, folder) for index in (2, 1))

    coming = threading.Thread(target=come)
    coming.start()
    assert sorted(rendezvous.wait(OWN).processes) == [0, 1, 2]
    coming.join(20)
    end(rendezvous, *followers)


def test_a_process_without_which_the_run_goes_on_is_refused(given: GivenCluster, folder: Path) -> None:
    rendezvous = ElasticRendezvous(given, SPEC, dict(SECRET), Quorum(1, 0.0, left_out=(2,)))
    assert rendezvous.wait(OWN).processes == (0,)
    with pytest.raises(ClusterError, match="refuses process 2: the run goes on without it, since a start with it"):
        process(given, 2, folder)
    end(rendezvous)


def test_too_few_processes_do_not_start(given: GivenCluster, folder: Path) -> None:
    spec = SPEC.model_copy(update={"join_timeout": 1.0})
    rendezvous = ElasticRendezvous(given, spec, dict(SECRET), Quorum(2, 0.0))
    with pytest.raises(ClusterError, match="processes 1, 2 of 3 did not join within 1 s"):
        rendezvous.wait(OWN)
    rendezvous.leave("the run did not start")


def test_the_follower_of_an_elastic_run_stays_after_its_script_until_the_last_word(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        follower = Follower(theirs, script_in(folder), Welcome("", 25.0, 3.0, is_elastic=True))
        serving = threading.Thread(target=follower.serve)
        serving.start()
        ours.sendall(encode(Stop("another worker failed", is_last=False)))
        ours.sendall(encode(Stop("all start again", starts_again=True)))
        serving.join(20)
        assert not serving.is_alive()
        assert (follower.starts_again, follower.was_used) == (True, True)
