"""`autodist report`: the page of a recorded run."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autodist.cli.app import app
from autodist.cli.metrics.history import History
from autodist.cli.metrics.page import MOST_POINTS, page_of
from autodist.runs.metrics.records import WorkerMetrics
from tests.unit.cli.metrics.recorded import NAMES, line, plan, write

RUNNER = CliRunner()
AGAIN = {"started": 1_700_000_100.0, "restarts": 1}
PREDICTED = {"builder": "Auto", "predicted": 0.012, "terms": {"computation": 0.009}, "basis": "measured links"}


class Page(HTMLParser):
    """The tags, the lines of plots, the links and the texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.points: list[int] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag == "polyline":
            self.points.append(len((dict(attrs)["points"] or "").split()))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_the_plots_the_times_of_each_worker_the_prediction_the_restarts_and_the_plan() -> None:
    history = History(
        [line(10), line(20), line(20, **AGAIN), line(30, **AGAIN), line(40, **AGAIN)],
        [plan(**PREDICTED), plan(fault="host2 was lost", step=10, **AGAIN, **PREDICTED)],
    )
    page = Page(page_of(history))
    assert page.tags.count("svg") == 3
    assert page.points == [2, 3, 2, 3]  # a line for each start, of the times and of the examples
    assert page.tags.count("rect") == 2 * 5 + 5  # five parts for each worker, and the parts' names
    for text in (
        "Metrics of train.py", "localhost:1, wait: 3 ms", "predicted 12 ms", "computation", "host2 was lost",
        "The prediction follows from: measured links.", "│ kernel │ AllReduce │", "500 MB", "1.00 kB",
    ):  # fmt: skip
        assert text in page.texts, text
    assert any(text.startswith("2 workers, 40 training steps, 2 starts of the script") for text in page.texts)
    assert page.links == [] and not {"script", "link", "img", "iframe"} & set(page.tags)


def test_unknown_figures_are_named_and_not_drawn() -> None:
    missing = tuple(WorkerMetrics(worker=name) for name in NAMES)
    page = Page(page_of(History([line(10, seconds=None, by_worker=missing, examples_per_second=None)])))
    assert page.texts.count("Not known.") == 2 and not page.points
    assert "The median of the lines is – a step. Nothing was predicted." in page.texts
    assert "Metrics of a script" in page.texts and "None." in page.texts


def test_of_a_long_run_means_are_drawn() -> None:
    page = Page(page_of(History([line(10 * number) for number in range(1, 2 * MOST_POINTS + 2)])))
    assert all(MOST_POINTS / 2 < count <= MOST_POINTS for count in page.points)


def test_names_in_the_page_are_text_whatever_they_hold() -> None:
    history = History([line(10, "<script>alert(1)</script>")], [plan("<b>", plan="<i>", script="<u>")])
    assert not {"<script>", "<b>", "<i>", "<u>"} & set(page_of(history).split("\n"))
    assert "script" not in Page(page_of(history)).tags


def test_the_command_writes_the_page_into_the_folder_or_where_it_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "metrics", [line(10)], [plan()])
    for words, file in (([], folder / "report.html"), (["-o", str(tmp_path / "p.html")], tmp_path / "p.html")):
        done = RUNNER.invoke(app, ["report", str(folder), *words])
        assert done.exit_code == 0, done.output
        assert f"{file}: 1 line, up to step 10" in done.output
        assert file.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{tmp}/absent"], "Invalid value for 'FOLDER'"),
        (["{tmp}"], "has no metrics. `metrics: {{folder: {tmp}}}` in the YAML file makes a run write them there"),
        (["{tmp}/good", "-o", "{tmp}/no/page.html"], "{tmp}/no/page.html cannot be written: No such file or directory"),
        (["{tmp}/bad"], "{tmp}/bad/plans.jsonl was not written by AutoDist's `metrics`"),
    ],
)
def test_unusable_input_is_reported_with_status_2(tmp_path: Path, words: list[str], told: str) -> None:
    write(tmp_path / "good", [line(10)])
    write(tmp_path / "bad", [line(10)])
    (tmp_path / "bad" / "plans.jsonl").write_text("[]\n")
    done = RUNNER.invoke(app, ["report", *(word.format(tmp=tmp_path) for word in words)])
    assert done.exit_code == 2
    assert told.format(tmp=tmp_path) in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
