"""Clusters started by a scheduler: the processes meet, train and end, in each supported environment."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import HOST_KINDS, Hosts
from tests.cluster.runs import MARK, Run, halt, parent, within

pytestmark = [pytest.mark.processes]

FINISH = "coordinator.finish()"
TRAIN_UNTIL_STOPPED = 'note("training")\nstop.wait(40)\ncoordinator.abort("stopped")'
WAIT = 'print("worker", index, worker_client.payload, sys.argv[1:])\nworker_client.wait_for_end()'
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'
PORT = 15017
GIVEN = {"nodes": "given", "silence_timeout": 5, "join_timeout": 30}
SECRET = secrets.token_hex(16)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with HOST_KINDS[0](tmp_path_factory.mktemp("hosts")) as made:
        yield made


class GivenRun(Run):
    """A run whose processes are started separately, each on a host of its own.

    Args:
        hosts: hosts of the processes.
        directory: empty.
        environments: environment variables of the processes; the chief's come first.
        chief: code of the chief, as for `Run`.
        worker: code of the others, as for `Run`.
        spec: the cluster, as for `Run`.
    """

    def __init__(
        self,
        hosts: Hosts,
        directory: Path,
        environments: Sequence[Mapping[str, str]],
        chief: str = FINISH,
        worker: str = WAIT,
        spec: Mapping[str, object] = GIVEN,
    ) -> None:
        super().__init__(directory / "run", chief, worker, dict(spec), hosts.chief_command)
        self._hosts, self._own = hosts, environments
        home = {"HOME": str(directory)}  # shared, as in a cluster
        clean = {name: value for name, value in self.environment.items() if not name.startswith("AUTODIST_")}
        self._environments = [clean | home | {MARK: self.mark} | dict(own) for own in environments]
        self.environment = self._environments[0]
        self.others: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> GivenRun:
        super().__enter__()
        for number in range(1, len(self._own)):
            self.start_other(number)
        return self

    def __exit__(self, *about: object) -> None:
        super().__exit__(*about)
        for other in self.others:
            with contextlib.suppress(ProcessLookupError):
                other.kill()
            other.wait()

    def start_other(self, number: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts one that is not the chief."""
        own = [sys.executable, str(self.directory / "train.py"), "argument with spaces", "$HOME", "'"]
        with open(self.output_of(len(self.others) + 1), "wb") as out:
            other = subprocess.Popen(
                self._hosts.command_on(number, own),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.directory, start_new_session=True,
                env=self._environments[number] | dict(environment or {}),
            )  # fmt: skip
        self.others.append(other)
        return other

    def output_of(self, number: int) -> Path:
        return self.directory / f"output{number}"

    def said_by(self, number: int) -> str:
        return self.output_of(number).read_text()

    def wait_for_others(self, limit: float = 20) -> list[int]:
        """Waits for the exit statuses of all but the chief."""
        done = within(limit, lambda: all(other.poll() is not None for other in self.others))
        assert done, [self.said_by(number) for number in range(1, len(self.others) + 1)]
        return [other.wait() for other in self.others]


def by_hand(hosts: Hosts, index: int) -> dict[str, str]:
    chief = f"{hosts.chief_address}:{PORT}"
    return {
        "AUTODIST_INDEX": str(index),
        "AUTODIST_WORKERS": "3",
        "AUTODIST_CHIEF": chief,
        "AUTODIST_SECRET": SECRET,
    }


def tf_config(hosts: Hosts, index: int) -> dict[str, str]:
    addresses = [hosts.chief_address, *(host.address for host in hosts.hosts)]
    cluster = {"worker": [f"{address}:{21000 + at}" for at, address in enumerate(addresses)]}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), "AUTODIST_SECRET": SECRET}


def slurm(hosts: Hosts, index: int) -> dict[str, str]:
    addresses = [hosts.chief_address, *(host.address for host in hosts.hosts)]
    return {
        "SLURM_PROCID": str(index),
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": ",".join(addresses),
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }


def kubernetes(hosts: Hosts, index: int) -> dict[str, str]:
    own = without(by_hand(hosts, index), "AUTODIST_INDEX", "AUTODIST_SECRET")
    return {**own, "JOB_COMPLETION_INDEX": str(index), "AUTODIST_SECRET_FILE": str(hosts.directory / "secret")}


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


# Other runs below are started manually, by Kubernetes and by SLURM; tests/unit/cluster/environments tests how each form
# is parsed.
def test_processes_meet_run_and_end(hosts: Hosts, tmp_path: Path) -> None:
    environments = [tf_config(hosts, index) for index in range(3)]
    with GivenRun(hosts, tmp_path, environments, "print(addresses)\n" + FINISH) as run:
        assert run.wait(40) == 0, run.stderr
        assert run.wait_for_others() == [0, 0]
        run.assert_gone(0)
    for index in (1, 2):
        arguments = ["argument with spaces", "$HOME", "'"]
        assert f"worker {index} {b'payload ' + bytes([255])!r} {arguments}\n" in run.said_by(index)
    assert "worker" not in run.stdout, "lines of the others are on their own outputs"
    assert all(f":{21000 + index}'" in run.stdout for index in range(3))
    assert not list(tmp_path.glob(".autodist/*"))


def bad_ends(statuses: Sequence[int]) -> bool:
    return all(status != 0 for status in statuses)


def test_a_worker_that_fails_ends_all_and_is_the_first_cause(hosts: Hosts, tmp_path: Path) -> None:
    worker = 'note(f"here{index}")\nif index == 2: print("its last line"); sys.exit(3)\n' + SLEEP
    (hosts.directory / "secret").write_text(SECRET)
    environments = [kubernetes(hosts, index) for index in range(3)]
    with GivenRun(hosts, tmp_path, environments, TRAIN_UNTIL_STOPPED, worker) as run:
        assert run.wait(40) == 0, run.stderr
        assert run.wait_for_others() == [128 + signal.SIGTERM, 3]
        run.assert_gone()
    (failure,) = run.failures
    assert "ended with exit status 3" in failure
    assert "its last line" in failure
    assert "autodist: the chief ends the run; see the chief's output\n" in run.said_by(1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_ends_the_run(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    """The chief is killed by the test of a requeued job."""
    environments = [by_hand(hosts, index) for index in range(3)]
    with GivenRun(hosts, tmp_path, environments, TRAIN_UNTIL_STOPPED, SLEEP) as run:
        follower = parent(parent(run.wait_for_note("asleep1", 40)))
        run.wait_for_note("asleep2")
        run.wait_for_note("training")
        os.kill(follower, number)
        run.wait()
        assert bad_ends(run.wait_for_others())
        run.assert_gone()
    (failure,) = run.failures
    assert "was lost" in failure
    assert ("its process was sent SIGTERM" in failure) == (number == signal.SIGTERM)


def test_a_worker_that_stands_does_not_answer_and_is_ended(hosts: Hosts, tmp_path: Path) -> None:
    chief = """
while not os.path.exists(os.path.join(directory, "notes", "halted")):
    time.sleep(0.05)
print("ASKED", {name: said is not None for name, said in coordinator.request_progress(3).items()})
coordinator.abort("asked")
"""
    with GivenRun(hosts, tmp_path, [by_hand(hosts, index) for index in range(3)], chief, SLEEP) as run:
        halted = run.wait_for_note("asleep1", 40)
        run.wait_for_note("asleep2")
        halt(halted)
        (run.directory / "notes" / "halted").touch()
        assert run.wait(40) == 0, run.stderr
        assert bad_ends(run.wait_for_others())
        run.assert_gone()
    first, second = ("10.200.0.2", "10.200.0.3") if "10.200" in run.stdout else ("127.0.0.1:1", "127.0.0.1:2")
    assert f"ASKED {{'{first}': False, '{second}': True}}" in run.stdout


def test_a_link_that_is_cut_ends_the_run_on_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    if HOST_KINDS[0].__name__ == "LoopbackHosts":
        pytest.skip("without root, links to processes on this machine cannot be cut")
    environments = [by_hand(hosts, index) for index in range(3)]
    with GivenRun(hosts, tmp_path, environments, TRAIN_UNTIL_STOPPED, SLEEP) as run:
        run.wait_for_note("asleep1", 40)
        run.wait_for_note("training")
        hosts.cut(hosts.hosts[0])
        try:
            run.wait(30)
            assert bad_ends(run.wait_for_others(30))
            run.assert_gone()
        finally:
            hosts.mend(hosts.hosts[0])
    (failure,) = run.failures
    assert "nothing was heard from process 1 on" in failure


def test_one_that_never_comes_is_named_and_the_others_are_reported(hosts: Hosts, tmp_path: Path) -> None:
    environments = [by_hand(hosts, index) for index in range(2)]
    with GivenRun(hosts, tmp_path, environments, spec=GIVEN | {"join_timeout": 3}) as run:
        assert run.wait(40) == 1
        assert run.wait_for_others() == [1]
        run.assert_gone()
    assert "ClusterError: process 2 of 3 did not join within 3 s. Check that the scheduler has started" in run.stderr
    assert "autodist: the run did not start: process 2 of 3 did not join within 3 s." in run.said_by(1)


def test_a_wrong_secret_and_a_twin_are_refused_and_do_no_harm(hosts: Hosts, tmp_path: Path) -> None:
    environments = [by_hand(hosts, index) for index in range(3)]
    other = {"AUTODIST_SECRET": "another secret of a run"}
    with GivenRun(hosts, tmp_path, environments[:1]) as run:
        run._environments = [run.environment | own for own in environments]
        run.start_other(1)
        stranger, twin = run.start_other(2, other), run.start_other(1)
        assert within(40, lambda: stranger.poll() is not None and (twin.poll() or run.others[0].poll()) is not None)
        run.start_other(2)
        assert run.wait(40) == 0, run.stderr
        assert sorted(run.wait_for_others()) == [0, 0, 2, 2]
        run.assert_gone()
    assert "refuses process 2: its secret differs from the chief's" in run.said_by(2)
    assert "is that of a process that joined before" in run.said_by(1) + run.said_by(3)


def trained() -> list[Any]:
    """Returns the weights of a model after nine steps."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(30, 4))
    model = keras.Sequential([keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(x, x.sum(1, keepdims=True), batch_size=10, epochs=3, verbose=0)
    return model.get_weights()


SCRIPT = f"""
import sys
from typing import Any
import keras, numpy as np
from autodist import AutoDist
keras.backend.set_floatx("float64")
{inspect.getsource(trained)}
ad = AutoDist()
with ad.scope():
    weights = trained()
if ad.is_chief:
    np.savez(sys.argv[1], *weights)
print("trained on", ad.num_workers)
"""


@pytest.mark.equivalence
def test_a_training_that_srun_starts_trains_as_one_device(hosts: Hosts, tmp_path: Path) -> None:
    import keras
    import numpy as np

    (tmp_path / "train.py").write_text(SCRIPT)
    base = without(os.environ, *(name for name in os.environ if name.startswith("AUTODIST_"))) | {"HOME": str(tmp_path)}
    run = [sys.executable, "-m", "autodist", "run"]
    steps = [
        subprocess.Popen(
            hosts.command_on(index, [*run, "train.py", "given.npz"]), cwd=tmp_path, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=base | slurm(hosts, index) | {"SLURM_STEP_NUM_TASKS": "2"},
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        said = [step.communicate(timeout=300)[0] for step in steps]
    finally:
        for step in steps:
            step.kill()
    assert [step.returncode for step in steps] == [0, 0], said
    assert all("trained on 2" in text for text in said)
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    expected = trained()
    keras.config.set_floatx(floatx)
    with np.load(tmp_path / "given.npz") as found:
        for name, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13)


def test_a_requeued_job_waits_until_its_earlier_run_has_left_the_port(hosts: Hosts, tmp_path: Path) -> None:
    environments = [by_hand(hosts, index) for index in range(3)]
    earlier = GivenRun(hosts, tmp_path / "earlier", environments, TRAIN_UNTIL_STOPPED, SLEEP)
    with earlier:
        earlier.wait_for_note("training", 40)
        with GivenRun(hosts, tmp_path / "again", environments[:1]) as run:
            run._environments = [run.environment | own for own in environments]
            for number in (1, 2):
                run.start_other(number)
            assert within(40, lambda: "waiting for up to 30 s: the rendezvous server cannot listen" in run.stderr)
            assert within(40, lambda: all("until that run has ended" in run.said_by(number) for number in (1, 2)))
            assert earlier.chief.poll() is None
            earlier.chief.kill()
            assert run.wait(40) == 0, run.stderr
            assert run.wait_for_others() == [0, 0]
            assert bad_ends(earlier.wait_for_others())
            for one in (earlier, run):
                one.assert_gone()
    assert "autodist: the chief went away" in earlier.said_by(1)
    assert earlier.stderr.count("was refused") <= 2, earlier.stderr
