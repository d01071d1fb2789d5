"""Runs on this machine: the workers' arguments and output, and no leftovers after any kind of end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from autodist.cluster import transport
from autodist.cluster.command_line import Main
from autodist.cluster.ports import reserve_port
from autodist.cluster.start import ScriptStart
from tests.cluster.runs import Run, parent, survivors, within

pytestmark = pytest.mark.processes

TRAIN_UNTIL_STOPPED = """
note("training")
stop.wait(30)
coordinator.abort("stopped")
"""
FINISH = "coordinator.finish()"
WAIT = "worker_client.wait_for_end()"
SLEEP = 'note(f"asleep{index}"); time.sleep(60)'


@pytest.mark.busy
def test_workers_get_script_arguments_and_payload_and_their_lines_come_back_named(tmp_path: Path) -> None:
    worker = """
print(index, worker_client.name, worker_client.payload, len(worker_client.addresses), sys.argv[1:], directory)
print("to stderr \\N{BULLET}", file=sys.stderr)
sys.stdout.buffer.write(b"bad \\xff byte\\n" + b"no line end")
sys.stdout.flush()
worker_client.wait_for_end()
"""
    with Run(tmp_path, FINISH, worker, is_forked=False) as run:
        assert run.wait() == 0
        run.assert_gone(0)
    for index in (1, 2):
        arguments = ["argument with spaces", "$HOME", "'"]
        assert (
            f"[localhost:{index}] {index} localhost:{index} {b'payload ' + bytes([255])!r} 3 {arguments} {tmp_path}\n"
            in run.stdout
        )
        assert f"[localhost:{index}] bad \N{REPLACEMENT CHARACTER} byte\n" in run.stdout
        assert f"[localhost:{index}] no line end\n" in run.stdout
        assert f"[localhost:{index}] to stderr \N{BULLET}\n" in run.stderr


def test_workers_of_a_chief_in_a_debugger_run_the_script_alone(tmp_path: Path) -> None:
    worker = """
breakpoint()
print("traced", sys.gettrace(), "pdb" in sys.modules, sys.orig_argv[1:2], sys.flags.inspect, sys.argv[1])
worker_client.wait_for_end()
"""
    run = Run(tmp_path, FINISH, worker, via=lambda line: [line[0], "-m", "pdb", "-c", "continue", *line[1:]])
    run.environment |= {"PYTHONINSPECT": "1"}
    with run:
        run.wait()
        run.assert_gone(0)
    script = [str(tmp_path / "train.py")]
    for index in (1, 2):
        assert f"[localhost:{index}] traced None False {script} 0 argument with spaces\n" in run.stdout


def test_modules_are_found_where_the_script_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("print('found')")
    start = ScriptStart(str(tmp_path), Main(None, None, ""), None)
    monkeypatch.setattr(transport, "noted_start", lambda: start)
    monkeypatch.setenv("PYTHONPATH", ".")
    channel = transport.open_local("beside")
    assert channel.stdout.read() == b"found\n"
    assert channel.wait(20) == 0
    channel.close()
    channel.stdout.close()
    channel.stderr.close()


def test_lines_are_never_torn(tmp_path: Path) -> None:
    worker = """
for number in range(300):
    print(chr(ord("a") + index) * 200)
worker_client.wait_for_end()
"""
    chief = """
sys.stdout.reconfigure(line_buffering=True)
for number in range(300):
    print("a" * 200)
coordinator.finish()
"""
    with Run(tmp_path, chief, worker) as run:
        assert run.wait() == 0
    lines = run.stdout.splitlines()
    assert sorted(set(lines)) == sorted(["a" * 200, f"[localhost:1] {'b' * 200}", f"[localhost:2] {'c' * 200}"])
    assert len(lines) == 900


@pytest.mark.busy
def test_done_worker_waits_for_the_chief(tmp_path: Path) -> None:
    worker = """
note(f"done{index}")
worker_client.wait_for_end()
note(f"released{index}")
"""
    chief = """
while not os.path.exists(os.path.join(NOTES, "go")):
    time.sleep(0.02)
coordinator.finish()
note("finished")
"""
    notes = tmp_path / "notes"
    with Run(tmp_path, chief.replace("NOTES", repr(str(notes))), worker) as run:
        run.wait_for_note("done1")
        run.wait_for_note("done2")
        assert not run.has_note("released1")
        assert not run.has_note("released2")
        (notes / "go").touch()
        assert run.wait() == 0
        assert run.has_note("released1")
        assert run.has_note("released2")
        assert run.has_note("finished")
        run.assert_gone(0)


@pytest.mark.busy
def test_bad_exit_stops_the_others_and_is_named(tmp_path: Path) -> None:
    worker = """
if index == 1:
    print("last words")
    sys.exit(3)
note(f"asleep{index}"); time.sleep(60)
"""
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        run.wait_for_note("worker1")
        run.assert_gone(10)
        run.wait()
        assert run.has_note("failed")
    assert run.failures == ["localhost:1 | ended with exit status 3 | ['last words']"]


def test_exit_status_at_the_end_is_seen_though_exit_handlers_wait(tmp_path: Path) -> None:
    worker = """
import atexit
atexit.register(worker_client.wait_for_end)
if index == 1:
    sys.exit(4)
"""
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        run.wait_for_note("failed")
        run.wait(10)
        run.assert_gone()
    assert run.failures[0].startswith("localhost:1 | ended with exit status 4")


def test_uncaught_exception_is_seen_though_exit_handlers_wait(tmp_path: Path) -> None:
    worker = """
import atexit
atexit.register(worker_client.wait_for_end)
if index == 2:
    raise RuntimeError("the cause")
"""
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        run.wait_for_note("failed")
        run.wait(10)
        run.assert_gone()
    (failure,) = run.failures
    assert failure.startswith("localhost:2 | ended with exit status 1 | ")
    assert failure.endswith("'RuntimeError: the cause']")


@pytest.mark.busy
def test_finish_raises_the_failure_of_a_worker(tmp_path: Path) -> None:
    chief = """
try:
    coordinator.finish()
except WorkerFailedError as error:
    print("RAISED", error.worker, error.reason)
"""
    with Run(tmp_path, chief, "if index == 1: sys.exit(5)\nworker_client.wait_for_end()") as run:
        assert run.wait() == 0
        run.assert_gone(0)
    assert "RAISED localhost:1 ended with exit status 5" in run.stdout


def test_worker_that_fails_after_its_release_is_reported(tmp_path: Path) -> None:
    chief = """
try:
    coordinator.finish()
except WorkerFailedError as error:
    print("RAISED", error.worker, error.reason)
"""
    with Run(tmp_path, chief, "worker_client.wait_for_end()\nif index == 2: raise SystemExit(6)") as run:
        assert run.wait() == 0
        run.assert_gone(0)
    assert "RAISED localhost:2 ended with exit status 6" in run.stdout


def test_script_that_leaves_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, "os._exit(0)") as run:
        run.wait_for_note("failed")
        run.wait(10)
        run.assert_gone()
    assert "| ended, with exit status 0, in the middle of the run" in run.stdout


@pytest.mark.parametrize("victim", ["worker", "guard", "agent"])
def test_killed_process_ends_the_run(tmp_path: Path, victim: str) -> None:
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, SLEEP) as run:
        worker = run.wait_for_note("asleep1")
        run.wait_for_note("asleep2")
        guard = parent(worker)
        os.kill({"worker": worker, "guard": guard, "agent": parent(guard)}[victim], signal.SIGKILL)
        run.assert_gone(10)
        run.wait()
        assert run.has_note("failed")
    reason = "was lost: its agent ended without any output" if victim == "agent" else "was ended by SIGKILL"
    assert run.failures[0].startswith(f"localhost:1 | {reason}")


def test_worker_whose_agent_and_guard_are_killed_ends_itself(tmp_path: Path) -> None:
    """Though it ignores SIGTERM, and though its main thread is inside C code."""
    worker = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        script = run.wait_for_note("asleep1")
        guard = parent(script)
        agent = parent(guard)
        # Stopped first: the agent must not see the guard's end and act on it.
        for pid, number in ((agent, signal.SIGSTOP), (guard, signal.SIGKILL), (agent, signal.SIGKILL)):
            os.kill(pid, number)
        run.wait(12)
        run.assert_gone(10)


def test_worker_whose_agent_and_guard_are_stopped_ends_itself_when_the_run_is_over(tmp_path: Path) -> None:
    spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "silence_timeout": 4}
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, SLEEP, spec) as run:
        script = run.wait_for_note("asleep1")
        guard = parent(script)
        stopped = [parent(guard), guard]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        run.chief.kill()
        run.chief.wait()
        assert within(20, lambda: script not in survivors(run.mark))
        assert survivors(run.mark) == sorted(stopped)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        run.assert_gone(10)


@pytest.mark.parametrize("worker", [SLEEP, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP])
def test_killed_chief_ends_the_run(tmp_path: Path, worker: str) -> None:
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        run.wait_for_note("asleep1")
        run.wait_for_note("asleep2")
        assert len(survivors(run.mark)) == 7  # the chief, and for each worker its agent, guard and script
        run.chief.kill()
        run.chief.wait()
        run.assert_gone(10)


def test_chief_that_raises_ends_the_run(tmp_path: Path) -> None:
    chief = 'time.sleep(0.5)\nraise RuntimeError("in the chief")'
    with Run(tmp_path, chief, SLEEP) as run:
        assert run.wait() == 1
        run.assert_gone(10)


def test_interrupted_chief_ends_the_run(tmp_path: Path) -> None:
    # A shell's background jobs ignore Ctrl-C.
    chief = "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + TRAIN_UNTIL_STOPPED
    with Run(tmp_path, chief, SLEEP) as run:
        run.wait_for_note("asleep1")
        run.wait_for_note("asleep2")
        os.killpg(run.chief.pid, signal.SIGINT)
        run.wait(10)
        run.assert_gone(10)
    assert "KeyboardInterrupt" in run.stderr


@pytest.mark.busy
def test_abort_stops_all_and_may_be_repeated(tmp_path: Path) -> None:
    chief = """
while not all(os.path.exists(os.path.join(NOTES, f"asleep{number}")) for number in (1, 2)):
    time.sleep(0.02)
note("aborts")
coordinator.abort("enough")
coordinator.abort("enough")
coordinator.finish()
note("aborted")
stop.wait(30)
"""
    worker = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    with Run(tmp_path, chief.replace("NOTES", repr(str(tmp_path / "notes"))), worker) as run:
        run.wait_for_note("aborts")
        run.wait_for_note("aborted", limit=8)
        assert survivors(run.mark) == [run.chief.pid]
    assert run.failures == []


def test_grandchildren_end_too_even_in_sessions_of_their_own(tmp_path: Path) -> None:
    worker = """
for detached in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=detached)
note(f"parent{index}")
time.sleep(60)
"""
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        run.wait_for_note("parent1")
        run.wait_for_note("parent2")
        assert len(survivors(run.mark)) == 11
        run.chief.kill()
        run.chief.wait()
        run.assert_gone(10)


def test_grandchildren_of_a_script_that_ended_well_end_too(tmp_path: Path) -> None:
    worker = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
worker_client.wait_for_end()
"""
    with Run(tmp_path, FINISH, worker) as run:
        assert run.wait() == 0
        run.assert_gone(0)


def test_child_that_the_chief_forked_keeps_no_worker_alive(tmp_path: Path) -> None:
    chief = """
if os.fork() == 0:
    os.environ.clear()
    time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)
note("forked")
stop.wait(30)
"""
    with Run(tmp_path, chief, SLEEP) as run:
        run.wait_for_note("forked")
        run.wait_for_note("asleep1")
        worker = run.wait_for_note("asleep2")
        run.chief.kill()
        run.chief.wait()
        started = time.monotonic()
        while _alive(worker) and time.monotonic() - started < 10:
            time.sleep(0.02)
        assert not _alive(worker)


@pytest.mark.busy
def test_echo_of_a_lost_worker_is_not_the_cause(tmp_path: Path) -> None:
    worker = """
if index == 1:
    print("tensorflow.python.framework.errors_impl.UnavailableError: Socket closed", file=sys.stderr)
    sys.exit(1)
time.sleep(0.4)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Run(tmp_path, TRAIN_UNTIL_STOPPED, worker) as run:
        run.wait_for_note("failed")
        run.wait(10)
        run.assert_gone()
    assert run.failures[0].startswith("localhost:2 | was ended by SIGKILL")


@pytest.mark.busy
def test_chief_can_ask_for_the_first_cause(tmp_path: Path) -> None:
    chief = """
print("CAUSE", coordinator.first_cause(10))
coordinator.abort("failed")
"""
    with Run(tmp_path, chief, "if index == 2: sys.exit(9)\ntime.sleep(60)") as run:
        run.wait()
        run.assert_gone()
    assert "CAUSE localhost:2 ended with exit status 9; the other workers were stopped." in run.stdout


def test_process_started_by_a_worker_cannot_take_part_again(tmp_path: Path) -> None:
    worker = """
code = "from autodist.cluster.script_client import ScriptClient; ScriptClient.from_environment()"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
print(done.stderr.splitlines()[-1])
worker_client.wait_for_end()
"""
    with Run(tmp_path, FINISH, worker) as run:
        assert run.wait() == 0
    assert "ClusterError: AutoDist is used in a process that a worker's script started" in run.stdout


def test_preflight_names_all_faults_at_once(tmp_path: Path) -> None:
    with ExitStack() as held:
        port = _hold_two_neighbours(held)
        spec = {"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2, "port": port}]}
        with Run(tmp_path, FINISH, WAIT, spec) as run:
            assert run.wait() == 1
            run.assert_gone(0)
    assert f"  localhost:0  port {port} is taken by another process; free it, or choose another `port`" in run.stderr
    assert (
        f"  localhost:1  port {port + 1} is taken by another process; free it, or choose another `port`" in run.stderr
    )


def _hold_two_neighbours(held: ExitStack) -> int:
    """Holds two consecutive ports, and returns the first."""
    while True:
        first = reserve_port(None)
        try:
            second = reserve_port(first.port + 1)
        except OSError:
            first.release()
            continue
        held.callback(first.release)
        held.callback(second.release)
        return first.port


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
