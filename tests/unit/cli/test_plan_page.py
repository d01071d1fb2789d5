"""`autodist plan --html`: the page of a plan."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from autodist.cli.plan_views import page_of
from autodist.cli.plans import Plans
from tests.unit.cli.planning import STEP, plan, write


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_a_bar_for_each_link_and_worker_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    result = plan("--workers", "3", "--strategy", "PS", "--html", str(path), write(tmp_path, STEP))
    assert result.exit_code == 0, result.stderr
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert (page.tags.count("svg"), page.tags.count("rect")) == (2, 3 + 4)
    assert "localhost:1 → localhost:0" in page.text and "moment (48 B)" in page.text
    assert page.links == [] and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in path.read_text() and "@import" not in path.read_text()


def test_a_page_that_is_not_written_is_not_begun_either(tmp_path: Path) -> None:
    path, script = tmp_path / "plan.html", write(tmp_path, "print('no training')")
    assert plan("--html", str(path), script).exit_code == 2
    assert not path.exists()
    path.write_text("of yesterday")
    assert plan("--html", str(path), script).exit_code == 2
    assert path.read_text() == "of yesterday"
    full = plan("--html", "/dev/full", write(tmp_path, STEP))
    assert full.exit_code == 2
    assert full.stderr.endswith("autodist: error: /dev/full cannot be written: No space left on device.\n")


def test_names_in_the_page_are_text_whatever_they_hold() -> None:
    assert "<script>" not in page_of(Plans(script="<script>alert(1)</script>", plans=()))
