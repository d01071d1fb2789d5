"""A small training run that suffers the faults of a schedule, and checks of its end."""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from autodist.checkpoint.folder import Folder
from autodist.checkpoint.read import read_whole
from tests.chaos.schedules import EVERY, LOSSES, MOST_RESTARTS, SHORT_CUT, STEPS, Fault, Schedule
from tests.cluster.hosts import Host, LoopbackHosts
from tests.cluster.runs import MARK, within
from tests.cluster.trainings import Training
from tests.forked_python.hosted import HostedPython

_LIMIT = 120.0
"""Time limit in seconds for one start, on an idle machine."""

_LIMITS = {"answer_timeout": 5, "silence_timeout": 8, "stop_timeout": 1}

_SURVIVES_SHORT_CUTS = {"silence_timeout": 25}

_SHORT_CUT = 3.0
"""Seconds of the clock."""

_SCRIPT = """
import json, resource, threading

FAULTS, STEPS, EVERY = json.loads({faults!r}), {steps}, {every}
start = next(n for n in range(9) if not has_note(f"start{{n}}.{{me}}"))
note(f"start{{start}}.{{me}}")

def happens(kind, step, worker=1):
    if kind == "raise":  # in this start and in the next
        return me == worker and any(f["kind"] == kind and f["step"] == step for f in FAULTS[: start + 1])
    fault = FAULTS[start] if start < len(FAULTS) else None
    return me == worker and fault is not None and (fault["kind"], fault["step"]) == (kind, step)

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def dies_soon():
    threading.Timer(FAULTS[start]["delay"], die).start()

def holds(kind):
    note(f"{{kind}}.{{start}}")
    wait_for(f"{{kind}} is done.{{start}}", 600)

with ad.scope():
    variable, beside = (tf.Variable(np.full(3, 0.1), name=name) for name in ("variable", "beside"))
    ballast = tf.Variable(np.zeros(100_000), name="ballast")

def made(variable):
    @ad.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.sin(x * variable), 1))
        variable.assign_sub(0.3 * tape.gradient(loss, variable))
        return loss
    return step

def batch(number):
    return np.random.default_rng([number, me]).normal(size=[2, 3])

def save(number):
    if happens("kill while saving", number):
        dies_soon()
    if happens("full disk", number, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    checkpoint.save(step=number + 1)
    if happens("kill while saving", number):
        wait_for("never", 600)

checkpoint = ad.checkpoint({folder!r}, variable=variable, ballast=ballast)
if any(happens("kill at start", number) for number in range(STEPS)):
    die()
done = checkpoint.restore() or 0
step = made(variable)
for number in range(done, STEPS):
    if happens("kill before step", number):
        die()
    if happens("stop", number):
        die(signal.SIGSTOP)
    if happens("raise", number):
        raise ValueError("of the script")
    for kind in ("cut", "short cut"):
        if happens(kind, number):
            holds(kind)
    if happens("kill in step", number):
        dies_soon()
    step(batch(number))
    if happens("kill in step", number):
        wait_for("never", 600)
    if number % EVERY == EVERY - 1:
        save(number)
step = made(beside)
for number in range(STEPS):
    step(batch(number))
keep(values=variable.numpy(), expected=beside.numpy())
"""


def play(schedule: Schedule, directory: Path) -> None:
    """Runs a training under a schedule of faults; raises AssertionError if it does not end as required.

    The run has to report each fault's own cause, to leave nothing behind, and to reach the values of a run without a
    fault, bit for bit. If it cannot recover, its last checkpoint has to be complete.

    Args:
        schedule: the faults.
        directory: empty.
    """
    (directory / "hosts").mkdir(parents=True)
    mark, folder = secrets.token_hex(8), directory / "checkpoints"
    faults = json.dumps([asdict(fault) for fault in schedule.faults])
    script = _SCRIPT.format(faults=faults, steps=STEPS, every=EVERY, folder=str(folder))
    with (
        LoopbackHosts(directory / "hosts", 1, {MARK: mark, "CUDA_VISIBLE_DEVICES": "-1"}) as hosts,
        HostedPython(directory / "python") as python,
    ):
        spec = hosts.spec(cpus=[0]) | {"max_restarts": MOST_RESTARTS, **_LIMITS}
        spec["ssh"][hosts.hosts[0].group]["python_venv"] = str(python.folder)
        if SHORT_CUT in {fault.kind for fault in schedule.faults}:
            spec |= _SURVIVES_SHORT_CUTS
        with Training(directory / "run", script, spec, mark=mark) as run:
            for start, fault in enumerate(schedule.faults):
                _act(run, hosts, start, fault)
            status = run.wait(_LIMIT * (schedule.restarts + 1))
            run.assert_gone()
            told = run.stderr
            assert (status == 0) is schedule.recovers, told
            if schedule.recovers:
                for worker in (0, 1):
                    kept = run.kept(worker)
                    np.testing.assert_array_equal(kept["values"], kept["expected"])
    _require_causes(schedule, hosts.hosts[0], told)
    latest = Folder(folder).latest()
    if latest is not None:
        read_whole(latest)


def _act(run: Training, hosts: LoopbackHosts, start: int, fault: Fault) -> None:
    """Applies a fault of a machine, as opposed to one of the script itself."""
    if fault.kind not in ("cut", SHORT_CUT):
        return
    (host,) = hosts.hosts
    run.wait_for_note(f"{fault.kind}.{start}", _LIMIT * (start + 1))
    hosts.cut(host)
    if fault.kind == SHORT_CUT:
        time.sleep(_SHORT_CUT)  # the duration of the fault, which does not depend on the load
    else:
        assert within(_LIMIT, lambda: f"restart {start + 1} of" in run.stderr), run.stderr
    hosts.mend(host)
    run.note(f"{fault.kind} is done.{start}")


def _require_causes(schedule: Schedule, host: Host, told: str) -> None:
    """Checks that each restart reports its own fault, and that the end of a failed run reports it."""
    said = re.findall(rf"restart (\d) of {MOST_RESTARTS}, in \d+ s\), since (.*)", told)
    assert [int(count) for count, _ in said] == list(range(1, schedule.restarts + 1)), told
    for fault, (_, cause) in zip(schedule.faults, said, strict=False):
        assert _cause(fault, host) in cause, (fault, cause)
    ending = schedule.faults[-1].kind if not schedule.recovers else ""
    if ending == "raise":
        assert "twice in a row" in told and "ValueError: of the script" in told, told
    if ending == "full disk":
        assert "CheckpointError: the checkpoint could not be written" in told, told


def _cause(fault: Fault, host: Host) -> str:
    """Returns the message that a fault has to cause."""
    stopped = f"has not answered for {_LIMITS['answer_timeout']} s"
    ways = {"stop": stopped, "cut": "was lost: nothing was heard", "raise": "ended with exit status 1"}
    return f"{host.address} {ways.get(fault.kind, 'was ended by SIGKILL' if fault.kind in LOSSES else '')}"
