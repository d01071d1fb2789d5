"""Forks of a process that has imported TensorFlow behave like newly started processes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.runs import MARK, Run, all_gone, parent, survivors
from tests.forked_python.hosted import HostedPython
from tests.forked_python.start import ON_CPU, forked_python

pytestmark = pytest.mark.processes

# Variables left out: those of the run itself, numbers of descriptors, and those set by a shell.
FACTS = """
def tell_facts(name):
    import gc, resource, stat
    SHELL_S = {"_", "PWD", "OLDPWD", "SHLVL"}
    main = sys.modules["__main__"]
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    streams = [sys.stdin, sys.stdout, sys.stderr]
    environment = {name: value for name, value in os.environ.items() if "AUTODIST" not in name and name not in SHELL_S}
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "directory": os.getcwd(),
        "main": {name: str(vars(main).get(name)) for name in ("__file__", "__spec__", "__package__", "__doc__")},
        "names": sorted(name for name in vars(main) if name.startswith("__")),
        "environment": environment, "ours": sorted(set(os.environ) - set(environment)),
        "signals": {number: getattr(handler, "__qualname__", str(handler)) for number, handler in signals.items()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
        "descriptors": [stat.S_IFMT(os.fstat(number).st_mode) for number in range(3)],
        "more descriptors": len(os.listdir("/proc/self/fd")),
        "streams": [[s.encoding, s.errors, s.isatty(), s.line_buffering, s.fileno()] for s in streams],
        "written through": [[s.write_through, type(s.buffer).__name__] for s in streams[1:]],
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "umask": os.umask(0o22), "priority": os.nice(0), "gc": gc.isenabled(), "traced": sys.gettrace() is None,
        "hooks": [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__],
    }
    import numpy as np, random
    facts |= {"random": [random.random(), float(np.random.uniform())], "tensorflow": "tensorflow" in sys.modules}
    import keras  # a forked process has imported it, and AutoDist completes it
    facts["modules"] = sorted(name for name in sys.modules if name.split(".")[0] == "autodist")
    with open(os.path.join(directory, name + "~"), "w") as file:
        json.dump(facts, file)
    os.rename(os.path.join(directory, name + "~"), os.path.join(directory, name))
"""


def facts_of(directory: Path, forked_workers: int | None) -> list[dict[str, Any]]:
    """Returns the facts that the chief and each worker report."""
    run = Run(directory, FACTS + "tell_facts('facts0')\ncoordinator.finish()", WORKER)
    run.forked_workers = forked_workers
    with run:
        assert run.wait(60) == 0, run.stderr
        run.assert_gone(0)
    found = [(directory / f"facts{index}").read_text().replace(str(directory), "HERE") for index in range(3)]
    return [json.loads(text) for text in found]


WORKER = FACTS + "tell_facts(f'facts{index}')\nworker_client.wait_for_end()"


def test_a_chief_and_its_workers_find_all_as_if_they_had_been_started(tmp_path: Path) -> None:
    started, forked = facts_of(tmp_path / "started", None), facts_of(tmp_path / "forked", 2)
    assert [facts.pop("tensorflow") for facts in started] == [False] * 3
    assert [facts.pop("tensorflow") for facts in forked] == [True] * 3
    drawn = [number for facts in started + forked for number in facts.pop("random")]
    assert len(set(drawn)) == len(drawn)
    for facts in (started[0], forked[0]):  # links are being closed
        del facts["more descriptors"]
    assert forked == started


# What stands in the environment is another one's than that in which the modules were imported, and so is the directory.
# The script imports Keras first: the process from which it is forked has imported it, and AutoDist completes Keras.
IMPORTS = """
import json, logging, os, signal, sys, threading
import keras
os.chdir("/tmp")
os.environ["AUTODIST_RESTARTS"] = '{"count": 3}'
import autodist
modules = [sorted(name for name in sys.modules if name.split(".")[0] == "autodist")]
from autodist import AutoDist, errors
from autodist.cluster.start import noted_start
from autodist.runs.restarts import earlier_starts
modules.append(sorted(name for name in sys.modules if name.split(".")[0] == "autodist"))
handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
print(json.dumps({
    "modules": modules,
    "loaders": [type(sys.modules[name].__spec__.loader).__name__ for name in modules[1]],
    "the same": AutoDist is sys.modules["autodist.api"].AutoDist and errors is autodist.errors,
    "start": str(noted_start()), "before": str(earlier_starts()), "left": "AUTODIST_RESTARTS" in os.environ,
    "hooks": [hook.__qualname__ for hook in (sys.excepthook, threading.excepthook, sys.exit)],
    "signals": {number: getattr(handler, "__qualname__", str(handler)) for number, handler in handlers.items()},
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "log": [str(logging.getLogger("autodist").handlers), logging.getLogger("autodist").level],
}))
"""


def test_it_imports_what_it_would_have_imported_and_sets_up_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS)
    environment = os.environ | ON_CPU | {MARK: "of imports      "}
    started = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=True
    )
    with open(tmp_path / "out", "w+b") as out, open(os.devnull) as nothing:
        process = forked_python.start([str(script)], (nothing.fileno(), out, out), environment, tmp_path, 0)
        assert process is not None
        status = process.wait()
        out.seek(0)
        reported = out.read()
    assert status == 0, reported
    facts = json.loads(reported)
    assert facts == json.loads(started.stdout)
    assert "autodist.resources" in set(facts["modules"][1]) - set(facts["modules"][0])
    assert "directory='/tmp'" in facts["start"] and "count=3" in facts["before"]


ENDS = {
    "well": "print('said')",
    "raises": "print('said'); raise ValueError('why')",
    "exits": "import atexit, sys; atexit.register(print, 'left'); sys.exit(3)",
    "exits with words": "import sys; sys.exit('why')",
    "at once": "import os; print('never'); os._exit(4)",
    "aborts": "import os; print('never'); os.abort()",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "import os, signal; signal.signal(2, signal.default_int_handler); os.kill(os.getpid(), 2)",
    "with what it holds": "held = type('Held', (), {'__del__': lambda self: print('gone')})()",
    "in a thread": "import threading; threading.Thread(target=lambda: 1 / 0).start(); print('said')",
    "starts Python": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.path[0])'])",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_if_it_had_been_started(tmp_path: Path, code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\nopen('pids', 'a').write(f'{{os.getpid()}} ')\n{code}\n")
    environment = os.environ | ON_CPU | {MARK: "of an ending    "}
    ended = []
    for is_forked in (False, True):
        with open(tmp_path / "out", "w+b") as out, open(tmp_path / "err", "w+b") as err, open(os.devnull) as nothing:
            streams = (nothing.fileno(), out, err)
            process: Any = None
            if is_forked:
                process = forked_python.start([str(script)], streams, environment, tmp_path, 0)
            else:
                line = [sys.executable, str(script)]
                process = subprocess.Popen(
                    line, stdin=nothing, stdout=out, stderr=err, cwd=tmp_path, env=environment, start_new_session=True
                )
            status = process.wait()
            err.seek(0), out.seek(0)
            reported = [
                line for line in err.read().decode().splitlines() if line != '  File "<string>", line 1, in <module>'
            ]
            ended.append((status, out.read(), reported))
        assert (tmp_path / "pids").read_text().split()[-1] == str(process.pid)
    assert ended[0] == ended[1]


def test_all_ends_with_its_chief_also_who_still_waits_to_be_a_worker(tmp_path: Path) -> None:
    run = Run(tmp_path, "time.sleep(60)", "time.sleep(60)")
    run.forked_workers = 3
    with run:
        workers = [run.wait_for_note(f"worker{index}", 60) for index in (1, 2)]
        guards = [parent(worker) for worker in workers]
        agents = [parent(guard) for guard in guards]
        assert [parent(agent) for agent in agents] == [run.chief.pid] * 2
        assert {run.chief.pid, *workers, *guards, *agents} < set(survivors(run.mark))
        assert len(survivors(run.mark)) == 1 + 3 * 3
        os.kill(run.chief.pid, signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        run.assert_gone()


def test_a_host_s_python_is_given_all_that_was_handed_to_it_and_ends_as_it_was_ended(tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(
        "import os, signal, sys\n"
        "print('tensorflow' in sys.modules, sys.argv[1:], os.getcwd(), os.environ['SAID'], sys.stdin.read())\n"
        "print('beside', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == 'dies' else sys.exit(7)\n"
    )
    mark = secrets.token_hex(8)
    environment = {**os.environ, **ON_CPU, MARK: mark, "SAID": "x\udcff"}
    with HostedPython(tmp_path / "python") as python:
        for word, status in (("ends", 7), ("dies", -signal.SIGKILL)):
            command = [str(python.folder / "bin" / "python"), "-m", "said", word, "a b"]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, input=b"given", capture_output=True, timeout=60, check=False
            )
            reported = done.stdout.decode(errors="surrogateescape")
            assert reported == f"True {[word, 'a b']} {tmp_path} x\udcff given\n", done
            assert (done.returncode, done.stderr) == (status, b"beside\n")
    assert all_gone(mark)
