"""`autodist diff`: comparison of two plans."""

from __future__ import annotations

from pathlib import Path

from autodist.cli.app import app
from tests.unit.cli.planning import CALLS, GAN, RUNNER, STEP, plan, write


def test_diff_compares_the_plans_of_each_step(tmp_path: Path) -> None:
    both = write(tmp_path, GAN + CALLS + "maker_step(ids, found['rows'])")
    words = ["--json", "--workers", "2", "--strategy"]
    files = [write(tmp_path, plan(*words, name, both).stdout, f"{name}.json") for name in ("PSLoadBalancing", "PS")]
    files.append(write(tmp_path, plan(*words, "PS", "--calls", "1", both).stdout, "first.json"))
    balanced = RUNNER.invoke(app, ["diff", files[0], files[1]])
    assert "1 variables differ, 1 are equal" in balanced.stdout and "maker" in balanced.stdout
    fewer = RUNNER.invoke(app, ["diff", files[1], files[2]])
    assert fewer.exit_code == 1 and f"maker_step is only in the plan {files[1]}" in fewer.stdout.replace("\n", " ")


def test_diff_names_the_variables_that_differ(tmp_path: Path) -> None:
    script, files = write(tmp_path, STEP), []
    for name in ("Parallax", "PS", "AllReduce"):
        files.append(
            write(tmp_path, plan("--json", "--workers", "2", "--strategy", name, script).stdout, f"{name}.json")
        )
    parallax, servers, shared = files
    result = RUNNER.invoke(app, ["diff", parallax, servers])
    assert result.exit_code == 1
    assert "1 variables differ, 1 are equal" in result.stdout and "weight" in result.stdout
    assert "table" not in result.stdout
    assert "2 variables differ, 0 are equal" in RUNNER.invoke(app, ["diff", servers, shared]).stdout
    alike = RUNNER.invoke(app, ["diff", servers, servers])
    assert (alike.exit_code, alike.stdout) == (0, "0 variables differ, 2 are equal\n")


def test_diff_refuses_what_is_no_plan_or_several(tmp_path: Path) -> None:
    script = write(tmp_path, STEP)
    several = write(tmp_path, plan("--json", "--strategy", "PS", "--strategy", "AllReduce", script).stdout, "both.json")
    for file, told in [(several, "holds 2 plans"), (script, "is not a plan")]:
        result = RUNNER.invoke(app, ["diff", file, file])
        assert result.exit_code == 2 and told in result.stderr
        assert f"> {file}" not in result.stderr, "who does as told would lose it"
