"""MkDocs hook that adds the repository files linked from pages to the site, so that no link is dead.

A page links to such a file by its relative path, `../examples/cluster.yml`, which also works on a code host. A page
that includes a file of the repository's root, such as CONTRIBUTING.md, gets its text with links between pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
"""Folder of the site for files that are not pages."""

_LINK = re.compile(r"\]\(\.\./(?P<path>[\w./-]+)\)")
_INCLUDED = re.compile(r'^--8<-- "(?P<path>[A-Z]+\.md)"$', re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to; text that a browser would save or run is shown as text."""
    pages = [Path(config.docs_dir, file.src_uri).read_text() for file in files.documentation_pages()]
    for path in sorted({link["path"] for page in pages for link in _LINK.finditer(page)}):
        if not (ROOT / path).is_file():
            raise FileNotFoundError(f"a page of docs/ links to {path}, which is not a file of the repository")
        files.append(File.generated(config, _place(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points the links of a page to the added files, and those of an included file to the pages."""
    markdown = _INCLUDED.sub(lambda found: (ROOT / found["path"]).read_text().replace("](docs/", "]("), markdown)
    return _LINK.sub(lambda link: f"]({_place(link['path'])})", markdown)


def _place(path: str) -> str:
    return posixpath.join(FOLDER, f"{path}.txt")
