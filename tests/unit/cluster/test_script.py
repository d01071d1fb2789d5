from __future__ import annotations

import code
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autodist.cluster import script as script_module
from autodist.cluster.script import Script, require_script
from autodist.cluster.start import ScriptStart, content_digest
from autodist.errors import ClusterError

Started = Callable[..., Script]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """The script of a process that was started in `tmp_path`, imported AutoDist there and has gone elsewhere since."""

    def start(
        line: list[str],
        file: Path | str | None = None,
        module: str | None = None,
        arguments: list[str] | None = None,
    ) -> Script:
        spec = None if module is None else type("Spec", (), {"name": module})
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "orig_argv", ["python", *line])
        monkeypatch.setattr(sys, "argv", arguments or list(line))
        monkeypatch.setattr(sys.modules["__main__"], "__file__", None if file is None else str(file), raising=False)
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)
        noted = ScriptStart.of_now()
        monkeypatch.setattr(script_module, "noted_start", lambda: noted)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        monkeypatch.setattr(sys, "argv", ["changed"])
        return Script.of_this_process()

    return start


def test_script_is_that_of_the_start_wherever_it_has_gone_since(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "train model.py"
    file.write_text("print()")
    monkeypatch.setenv("AUTODIST_DUMP", "/d")
    script = started(["-u", "train model.py", "--steps", "3"], file)
    assert script.arguments == ("-u", str(file), "--steps", "3")
    assert (script.file, script.directory) == (str(file), str(tmp_path))
    assert script.digest == content_digest(str(file)) is not None
    assert ("AUTODIST_DUMP", "/d") in script.environment
    assert all(name.startswith("AUTODIST_") for name, _ in script.environment)


def test_script_that_is_changed_after_its_start_keeps_its_digest(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print(1)")
    before = content_digest(str(file))
    started(["train.py"], file)
    file.write_text("print(2)")
    assert Script.of_this_process().digest == before != content_digest(str(file))


def test_link_is_run_as_a_link(started: Started, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text("print()")
    link = tmp_path / "link.py"
    link.symlink_to("real/train.py")
    assert started(["./link.py"], link).arguments == (str(link),)


def test_script_that_left_its_directory_before_the_import_is_found(started: Started, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / "train.py"
    file.write_text("")
    assert started(["train.py", "x"], file).arguments == (str(file), "x")


def test_folder_and_archive_are_run_whole(started: Started, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    inner = tmp_path / "app" / "__main__.py"
    inner.write_text("")
    folder = started(["app", "x"], inner, "__main__")
    assert (folder.arguments, folder.file) == ((str(tmp_path / "app"), "x"), str(inner))
    archive = tmp_path / "app.pyz"
    archive.write_bytes(b"PK")
    script = started(["app.pyz", "x"], archive / "__main__.py", "__main__")
    assert (script.arguments, script.file) == ((str(archive), "x"), str(archive))
    assert script.digest == content_digest(str(archive))


def test_module_keeps_its_name_and_is_compared_if_it_stands_below_the_directory(
    started: Started, tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "train.py"
    file.write_text("")
    script = started(["-m", "package.train", "x"], file, "package.train")
    assert script.arguments == ("-m", "package.train", "x")
    assert (script.file, script.digest) == (str(file), content_digest(str(file)))
    assert started(["-m", "json.tool"], os.path.join(sys.base_prefix, "json", "tool.py"), "json.tool").file is None


def test_script_that_runs_another_one_is_started_itself(started: Started, tmp_path: Path) -> None:
    for name in ("launch.py", "train.py"):
        (tmp_path / name).write_text("")
    script = started(["launch.py", "train.py"], tmp_path / "train.py")
    assert script.arguments == (str(tmp_path / "launch.py"), "train.py")


def test_of_a_debugger_the_script_alone_is_started(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    script = started(["-u", "-m", "pdb", "train.py", "x"], file)
    assert (script.arguments, script.file) == (("-u", str(file), "x"), str(file))


def test_what_a_profiler_calls_the_script_counts_though_the_script_changes_it(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    line = ["-m", "cProfile", "-s", "time", "train.py", "x"]
    script = started(line, "/usr/lib/python3.11/cProfile.py", "cProfile", arguments=["train.py", "x"])
    assert script.arguments == (str(file), "x")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "runs no script"),
        (["-i"], "runs no script"),
        (["-", "x"], "runs no script"),
        (["/dev/stdin"], "/dev/stdin is a script that only this process can read"),
        (["/dev/fd/63"], "/dev/fd/63 is a script that only this process can read"),
        (["-m", "ipykernel_launcher", "-f", "kernel.json"], "ipykernel_launcher runs here, and no script"),
        (["-m", "ipykernel", "-f", "kernel.json"], "ipykernel runs here, and no script"),
        (["-m", "code"], "code runs here, and no script"),
        (["/venv/bin/ipython"], "ipython runs here, and no script"),
    ],
)
def test_what_no_other_worker_could_run_is_refused_with_the_fix(started: Started, line: list[str], said: str) -> None:
    with pytest.raises(ClusterError, match=said) as caught:
        started(line)
    assert "`autodist.launch(function, workers=2)`" in str(caught.value)
    assert "`python file.py`; or use one worker" in str(caught.value)


def test_script_in_shared_memory_is_one_as_any_other(started: Started) -> None:
    assert started(["/dev/shm/train.py"], "/dev/shm/train.py").arguments == ("/dev/shm/train.py",)


def test_child_of_multiprocessing_and_frozen_program_are_refused(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match="started by multiprocessing"):
        started(["-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"])
    with pytest.raises(ClusterError, match=r"started by Ray to run functions.*with autodist.join\(…\) as ad:"):
        started(["/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py", "--node-ip-address=::1"])
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ClusterError, match="was frozen"):
        started(["train.py"])


def test_kernel_that_is_started_by_another_name_is_known(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert started(["launcher.py", "-f", "kernel.json"]).arguments  # IPython's shell, without a kernel
    shell.kernel = object()
    with pytest.raises(ClusterError, match="This process is a notebook's kernel and runs no script.*`autodist.launch"):
        started(["launcher.py", "-f", "kernel.json"])


def test_directory_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    noted = ScriptStart.of_now()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script_module, "noted_start", lambda: noted)
    with pytest.raises(ClusterError, match="working directory had been removed"):
        Script.of_this_process()


@pytest.mark.parametrize("file", ["<console>", "<stdin>", "<ipython-input-3-0a1b>", "<python-input-0>", "<pyshell#2>"])
def test_what_is_typed_at_a_prompt_is_refused(started: Started, tmp_path: Path, file: str) -> None:
    (tmp_path / "train.py").write_text("")
    started(["-i", "train.py"], tmp_path / "train.py")
    found: dict[str, Any] = {"require_script": require_script}
    console = code.InteractiveConsole(found, file)
    console.push("try: require_script()")
    console.push("except Exception as error: caught = error")
    console.push("")
    assert isinstance(found["caught"], ClusterError)
    assert "is created at a prompt" in str(found["caught"])


def test_what_a_script_compiles_itself_is_no_prompt(started: Started, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    started(["train.py"], tmp_path / "train.py")
    for file in ("<string>", "<template>", str(tmp_path / "train.py")):
        eval(compile("require_script()", file, "eval"), {"require_script": require_script})
