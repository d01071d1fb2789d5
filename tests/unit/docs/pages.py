"""The pages of the documentation, and their code blocks."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[3]
PAGES = MappingProxyType(
    {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
)

BLOCK = re.compile(r"^(?P<indent> *)```(?P<kind>\w+)(?P<more> [^\n]*)?\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: str, kind: str) -> list[tuple[str, str]]:
    """Returns the code blocks of one kind on a page: the words after the kind, and the text."""
    found = BLOCK.finditer(PAGES[page])
    return [((b["more"] or "").strip(), textwrap.dedent(b["text"])) for b in found if b["kind"] == kind]


def is_patch(text: str) -> bool:
    """Returns True if a diff applies to files, not to a script shown on the page."""
    return text.startswith("--- ")


def is_included(text: str) -> bool:
    """Returns True if a block is a file of the repository, which the site includes."""
    return text.startswith("--8<-- ")


def patches(page: str) -> list[str]:
    """The diffs of files that a page shows."""
    return [text for _, text in blocks_of(page, "diff") if is_patch(text)]
