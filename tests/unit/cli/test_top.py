"""`autodist top`: the view of a recorded run, its sources, and errors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import rich.console
from typer.testing import CliRunner

from autodist.cli.app import app
from autodist.cli.command_errors import UsageError
from autodist.cli.metrics.history import History
from autodist.cli.metrics.live import sparkline, view_of
from autodist.cli.metrics.sources import LocalFolder, RemoteFolder, _folder_of_running, source_of
from autodist.runs.metrics.records import WorkerMetrics
from tests.unit.cli.metrics.recorded import NAMES, line, plan, write

RUNNER = CliRunner()


def shown(history: History, width: int = 100) -> str:
    text = io.StringIO()
    rich.console.Console(file=text, width=width).print(view_of(history, "here"))
    return text.getvalue()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in text.splitlines() if row.startswith("│")]


def test_the_view_has_the_latest_figures_of_each_step_and_worker() -> None:
    lines = [line(10, seconds=0.08), line(20, seconds=0.02)]
    text = shown(History(lines, [plan()]))
    assert text.startswith("here: step 20, 2 workers, 0 restarts; last line at ")
    (name, number, time, rate, sparks), (*_, rates), *workers = rows(text)
    assert (name, number, time, rate) == ("train", "20", "20 ms", "6,400")
    assert (sparks, rates) == ("█▂", "██")
    assert workers[:2] == [
        ["localhost:0", "20 ms", "6 ms", "3 ms", "0", "1 ms", "500 MB"],
        ["", "2 ms", "(60%)", "(30%)", "", "(10%)", "1.00 kB"],
    ]
    assert [row[0] for row in workers[2:]] == ["localhost:1", ""]


def test_a_line_without_a_trace_keeps_the_times_of_the_last_one_and_unknown_figures_are_dashes() -> None:
    untraced = tuple(WorkerMetrics(worker=name, seconds=0.03, outside=0.0) for name in NAMES)
    missing = (untraced[0], WorkerMetrics(worker=NAMES[1]))
    lines = [line(10), line(20, by_worker=untraced), line(30, by_worker=missing, examples_per_second=None)]
    text = rows(shown(History(lines)))
    assert text[0][3] == "–"
    workers = text[2:]
    assert workers[0] == ["localhost:0", "30 ms", "6 ms", "3 ms", "0", "1 ms", "–"]
    assert workers[2][:3] == ["localhost:1", "30 ms", "6 ms"]  # its latest, since its last report is late


def test_steps_of_several_names_have_a_table_each_and_those_of_earlier_starts_have_none() -> None:
    lines = [line(5, "old", started=1.0), line(10, "critic"), line(10, "generator")]
    text = shown(History(lines))
    assert "critic, by worker" in text and "generator, by worker" in text and "old, by worker" not in text


def test_a_restart_is_shown_with_its_reason() -> None:
    again = {"started": 1_700_000_100.0, "restarts": 1}
    history = History([line(10), line(10, **again)], [plan(), plan(fault="host2 was lost", step=8, **again)])
    assert "restart 1, after step 8: host2 was lost" in shown(history)


def test_a_run_without_lines_says_so() -> None:
    assert shown(History()).startswith("here: no line yet; the first one follows after `every_steps` steps")


def test_other_workers_after_a_restart_are_not_mixed_up() -> None:
    fewer = (WorkerMetrics(worker="b", seconds=0.5, outside=0.0),)
    lines = [line(10), line(20, started=2.0, restarts=1, workers=1, by_worker=fewer)]
    assert rows(shown(History(lines)))[2] == ["b", "500 ms", "–", "–", "–", "–", "–"]


@pytest.mark.parametrize(
    ("values", "sparks"), [([], ""), ([None], ""), ([0.0, 0.0], ""), ([1.0, None, 8.0], "▁ █"), ([9, 4, 8], "▄█")]
)
def test_sparks_are_relative_to_the_largest_value_shown(values: list[float | None], sparks: str) -> None:
    assert sparkline(values, width=3 if None in values else 2) == sparks


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_the_terminal(columns: int) -> None:
    text = shown(History([line(10), line(20)], [plan()]), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text


def test_the_command_shows_a_folder_once_if_there_is_no_terminal(tmp_path: Path) -> None:
    folder = write(tmp_path / "metrics", [line(10), line(20)], [plan()])
    done = RUNNER.invoke(app, ["top", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"{folder}:step20" in "".join(done.output.split())  # the line may be wrapped
    assert "train, by worker" in done.output


def test_a_yaml_file_names_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "metrics", [line(30)])
    yaml = tmp_path / "cluster.yml"
    yaml.write_text(f"nodes: [{{address: localhost}}]\nmetrics: {{folder: {tmp_path / 'metrics'}}}\n")
    done = RUNNER.invoke(app, ["top", "--cluster", str(yaml), "--once"])
    assert done.exit_code == 0, done.output
    assert "step 30" in done.output


@pytest.mark.parametrize(
    ("place", "title"), [("ann@10.0.0.1:~/metrics", "10.0.0.1:~/metrics"), ("host2:/data/m", "host2:/data/m")]
)
def test_a_place_with_a_host_is_read_over_ssh(place: str, title: str) -> None:
    source = source_of(place, None)
    assert isinstance(source, RemoteFolder)
    assert source.title == title
    group = source._spec.ssh_group(source._node)
    assert group is not None and group.username == ("ann" if "@" in place else None)


def test_the_yaml_of_a_chief_elsewhere_gives_its_ssh_settings(tmp_path: Path) -> None:
    yaml = tmp_path / "cluster.yml"
    yaml.write_text(
        "nodes:\n  - {address: 192.0.2.1, chief: true, ssh_config: lab}\n  - {address: 192.0.2.2, ssh_config: lab}\n"
        "ssh: {lab: {username: ann, python_venv: ~/venv}}\nsilence_timeout: 7\nmetrics: {folder: /data/m}\n"
    )
    source = source_of(None, yaml)
    assert isinstance(source, RemoteFolder)
    assert (source.title, source._spec.silence_timeout) == ("192.0.2.1:/data/m", 7)
    group = source._spec.ssh_group(source._node)
    assert group is not None and (group.username, group.python_venv) == ("ann", "~/venv")


def test_a_folder_whose_name_looks_like_a_host_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a:b", [line(10)])
    assert isinstance(source_of("a:b", None), LocalFolder)


def test_without_a_folder_the_only_run_of_this_machine_is_found(tmp_path: Path) -> None:
    for number, folder in (("12", "one"), ("13", "one"), ("x", "two")):
        files = tmp_path / "proc" / number / "fd"
        files.mkdir(parents=True)
        (files / "3").symlink_to(f"/runs/{folder}/metrics.jsonl")
        (files / "4").symlink_to("/dev/null")
    assert _folder_of_running(tmp_path / "proc") == Path("/runs/one")
    (tmp_path / "proc" / "14" / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "14" / "fd" / "9").symlink_to("/runs/two/metrics.jsonl")
    with pytest.raises(UsageError, match="several runs write metrics: /runs/one, /runs/two. Name one"):
        _folder_of_running(tmp_path / "proc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run on this machine writes metrics. Name its folder"):
        _folder_of_running(tmp_path / "empty")


NO_METRICS = "nodes: [{address: localhost}]\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{tmp}/absent"], "/absent is no folder"),
        (["{tmp}", "--cluster", "{tmp}/cluster.yml"], "name the folder, or the YAML file by --cluster, not both"),
        (["--cluster", "{tmp}/cluster.yml"], "cluster.yml has no section `metrics`"),
        (["{tmp}/broken"], "metrics.jsonl was not written by AutoDist's `metrics`"),
    ],
)
def test_unusable_input_is_reported_with_status_2(tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "cluster.yml").write_text(NO_METRICS)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"loss": 1}\n')
    done = RUNNER.invoke(app, ["top", *(word.format(tmp=tmp_path) for word in words)])
    assert done.exit_code == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
