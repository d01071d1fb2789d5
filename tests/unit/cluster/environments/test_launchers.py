"""The facts in each launcher's environment, and the variable that an error names if it is unreadable."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from autodist.cluster.environments.launcher_env import Environment, LauncherEnv, host_and_port_of
from autodist.cluster.environments.launchers import PMI, Kubernetes, Manual, OpenMPI, TFConfig, find, require
from autodist.cluster.environments.slurm import Slurm, first_host
from autodist.errors import ResourceSpecError

OWN = {"AUTODIST_INDEX": "1", "AUTODIST_WORKERS": "3", "AUTODIST_CHIEF": "node1:15000"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[007-009,12],login",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_CPUS_PER_TASK": "6",
}
MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
PMI_RANKS = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
POD = {"JOB_COMPLETION_INDEX": "2", "AUTODIST_WORKERS": "3"}


def tf_config(task: str = "worker", index: int = 0, **cluster: Any) -> dict[str, str]:
    cluster = cluster or {"chief": ["a:2222"], "worker": ["b:2223", "c:2224"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}


def without(environment: Environment, *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_own_variables() -> None:
    read = Manual().read(OWN)
    assert (read.index, read.count, read.chief, read.port) == (1, 3, "node1", 15000)
    assert Manual().read(without(OWN, "AUTODIST_WORKERS")).count is None
    assert Manual().read(OWN | {"AUTODIST_CHIEF": "node1"}).port == 15000


def test_slurm_has_the_first_host_a_port_of_its_job_and_cores() -> None:
    read = Slurm().read(SLURM)
    assert (read.index, read.count, read.chief, read.port) == (1, 4, "node007", 10017)
    assert (read.job, read.cores) == ("slurm-17-0", 6)
    reported = Slurm().read(SLURM | {"AUTODIST_CHIEF": "10.0.0.1:9000"})
    assert (reported.chief, reported.port) == ("10.0.0.1", 9000)


def test_steps_of_a_job_that_run_at_the_same_time_have_ports_of_their_own() -> None:
    ports = [Slurm().read(SLURM | {"SLURM_STEP_ID": step}).port for step in ("0", "1", "2", "4294967291")]
    assert ports[0] == Slurm().read(SLURM).port
    assert len(set(ports)) == len(ports)


def test_a_batch_script_is_no_step_of_slurm() -> None:
    assert find({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}) is None


NAMES = st.text("abz", min_size=1, max_size=5)
RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), min_size=1, max_size=3)


@st.composite
def parts(draw: st.DrawFn) -> str:
    width = draw(st.integers(1, 4))
    ranges = [f"{a:0{width}}-{b:0{width}}" if a < b else f"{a:0{width}}" for a, b in draw(RANGES)]
    return draw(NAMES) + draw(st.sampled_from(["", f"[{','.join(ranges)}]"]))


@for_all(st.lists(parts(), min_size=1, max_size=4).map(",".join))
def test_the_first_host_is_that_of_tensorflows_resolver(hosts: str) -> None:
    from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import expand_hostlist

    assert first_host({"SLURM_STEP_NODELIST": hosts}) == expand_hostlist(hosts)[0]


def test_tf_config_counts_the_chief_first_and_has_everyones_address() -> None:
    read = TFConfig().read(tf_config("worker", 1))
    assert (read.index, read.count, read.chief, read.port) == (2, 3, "a", 2222)
    assert read.addresses == ("a:2222", "b:2223", "c:2224")
    assert TFConfig().read(tf_config("chief")).index == 0


def test_without_a_chief_worker_0_of_tf_config_is_it() -> None:
    read = TFConfig().read(tf_config("worker", 1, worker=["[::1]:1", "b:2"]))
    assert (read.index, read.count, read.chief, read.port) == (1, 2, "::1", 1)


def test_the_chief_of_a_job_of_kubernetes_is_the_pod_with_index_0() -> None:
    read = Kubernetes(lambda: "train-2.pods.team.svc.cluster.local").read(POD)
    assert (read.index, read.count, read.chief, read.port) == (2, 3, "train-0.pods.team.svc.cluster.local", 15000)
    assert Kubernetes(str).read(POD | {"AUTODIST_CHIEF": "one:7"}).chief == "one"


@pytest.mark.parametrize("hosts, is_one", [(("127.0.0.1",) * 2, True), (("own", "own"), True), (("own", "b"), False)])
def test_processes_under_one_address_of_this_machine_need_no_secret(
    hosts: tuple[str, str], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autodist.cluster.environments.launcher_env.is_own_address", "own".__eq__)
    workers = [f"{host}:{port}" for port, host in enumerate(hosts, start=1)]
    assert TFConfig().read(tf_config("worker", worker=workers)).is_on_one_machine == is_one


@pytest.mark.parametrize("form, environment", [(OpenMPI(), MPI), (PMI(), PMI_RANKS)], ids=["Open MPI", "PMI"])
def test_ranks_are_reported_the_chief_unless_all_are_on_one_machine(
    form: LauncherEnv, environment: Environment
) -> None:
    read = form.read({**environment, "AUTODIST_CHIEF": "node1"})
    assert (read.index, read.count, read.chief, read.port) == (2, 4, "node1", 15000)
    local = next(name for name in environment if "LOCAL" in name)
    assert form.read({**environment, local: "4"}).is_on_one_machine
    with pytest.raises(ResourceSpecError, match="on which machine rank 0 runs; set AUTODIST_CHIEF to HOST:PORT"):
        form.read(environment)


MALFORMED = [
    (Manual(), OWN | {"AUTODIST_INDEX": "one"}, "AUTODIST_INDEX is 'one'; allowed: a whole number from 0"),
    (Manual(), OWN | {"AUTODIST_INDEX": "3"}, "AUTODIST_INDEX is 3, and AUTODIST_WORKERS is 3; allowed: 0 to 2"),
    (Manual(), without(OWN, "AUTODIST_CHIEF"), "AUTODIST_CHIEF is missing; set it to HOST:PORT"),
    (Manual(), OWN | {"AUTODIST_CHIEF": "node1:port"}, "AUTODIST_CHIEF is 'node1:port'; allowed: HOST or HOST:PORT"),
    (Manual(), without(OWN, "AUTODIST_WORKERS") | {"AUTODIST_INDEX": "0"}, "AUTODIST_WORKERS is missing"),
    (Slurm(), without(SLURM, "SLURM_JOB_ID"), "SLURM_JOB_ID is missing"),
    (Slurm(), without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is missing"),
    (Slurm(), SLURM | {"SLURM_STEP_NODELIST": "[1-2]"}, r"SLURM_STEP_NODELIST is '\[1-2\]'; allowed: a list of hosts"),
    (Slurm(), SLURM | {"SLURM_CPUS_PER_TASK": "0"}, "SLURM_CPUS_PER_TASK is '0'; allowed: a whole number from 1"),
    (Slurm(), SLURM | {"SLURM_STEP_NUM_TASKS": "²"}, "SLURM_STEP_NUM_TASKS is '²'; allowed"),
    (OpenMPI(), MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK is '-1'; allowed"),
    (PMI(), PMI_RANKS | {"PMI_SIZE": "0"}, "PMI_SIZE is '0'; allowed"),
    (Kubernetes(lambda: "host"), POD, "called .host., from which the chief.* headless service .* set AUTODIST_CHIEF"),
    (Kubernetes(lambda: "job-1.pods"), POD, "called 'job-1.pods', from which the chief"),
    (TFConfig(), {"TF_CONFIG": "{"}, "TF_CONFIG cannot be read: Invalid JSON"),
    (TFConfig(), {"TF_CONFIG": "{}"}, "TF_CONFIG cannot be read at cluster: Field required; allowed"),
    (TFConfig(), tf_config(worker="a:1"), "TF_CONFIG cannot be read at cluster.worker: Input should be a valid array"),
    (TFConfig(), tf_config("worker", 2), "has the task worker 2, but the cluster has 2 of this type"),
    (TFConfig(), tf_config("evaluator"), "has an evaluator, which AutoDist does not support: run it separately"),
    (TFConfig(), tf_config("ps", ps=["a:1"], worker=["b:1"]), "has parameter servers .* remove them and set"),
    (TFConfig(), tf_config("worker", ps=["a:1"], worker=["b:1"]), "has parameter servers"),
    (TFConfig(), tf_config("boss"), "a task of type 'boss'; allowed: chief or worker"),
    (TFConfig(), tf_config("worker", worker=["a", "b:2"]), "an address in TF_CONFIG is 'a'; allowed: HOST:PORT"),
    (TFConfig(), tf_config("worker", worker=["a:1", "a:1"]), "TF_CONFIG names one address twice"),
    (TFConfig(), tf_config("chief", chief=["a:1", "b:1"]), "TF_CONFIG names 2 chiefs"),
]  # fmt: skip


@pytest.mark.parametrize("form, environment, problem", MALFORMED, ids=[case[2][:50] for case in MALFORMED])
def test_a_variable_that_cannot_be_used_is_named(form: LauncherEnv, environment: Environment, problem: str) -> None:
    with pytest.raises(ResourceSpecError, match=problem):
        form.read(environment)


@pytest.mark.parametrize("text", ["", ":1", "a b:1", "a:0", "a:65536", "user@a:1", "[::1]:", "a:\u0661"])
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ResourceSpecError, match="allowed: HOST"):
        host_and_port_of(text, "--join", None)


@pytest.mark.parametrize("text, host", [("a", "a"), ("::1", "::1"), ("[::1]", "::1"), ("fd00::1:2", "fd00::1:2")])
def test_a_host_alone_has_the_default_port(text: str, host: str) -> None:
    assert host_and_port_of(text, "AUTODIST_CHIEF", 7) == (host, 7)


@pytest.mark.parametrize(
    "environment, winner",
    [
        (OWN | SLURM | tf_config(), "by hand"),
        (SLURM | tf_config(), "TF_CONFIG"),
        (SLURM | MPI | {"AUTODIST_CHIEF": "a:1"}, "Open MPI"),
        (SLURM | PMI_RANKS | {"AUTODIST_CHIEF": "a:1"}, "PMI"),  # mpiexec in a step
        (SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4"}, "SLURM"),  # srun --mpi=pmi2
    ],
)
def test_where_several_forms_are_there_the_one_that_counts_is_reported(
    environment: dict[str, str], winner: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "autodist"):
        found = find(environment)
    assert found is not None
    assert found.form == winner
    assert (f": {winner} takes precedence" in caplog.text) == ("PMI_RANK" not in environment or winner == "PMI")


def test_nothing_is_found_in_a_plain_environment_and_the_fix_is_reported() -> None:
    plain = {"HOME": "/root", "JOB_COMPLETION_INDEX": "1"}
    assert find(plain) is None
    with pytest.raises(ResourceSpecError, match="AUTODIST_WORKERS is missing; set it to the Job's `completions`"):
        require(plain)
    with pytest.raises(ResourceSpecError, match=r"environment is none of TF_CONFIG, Open MPI, PMI, SLURM, Kubernetes"):
        require({})
