#!/usr/bin/env python3
"""Lists sentences of docstrings, pages and YAML comments that start with a relative clause ("What a step writes is …").

    python scripts/check_prose.py            # the whole repository
    python scripts/check_prose.py docs       # files and folders by name

A sentence that starts with What, Who, Whether, Which, Where or How has to be a question. The exit status is 1 if any
sentence is listed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("autodist", "kernels", "strategies", "scripts", "examples", "docs", "tests", "README.md", "CONTRIBUTING.md")

_START = re.compile(r"(?:What|Who|Whose|Whether|Which|Where|How)\b")
_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z])")
_LEFT_OUT = re.compile(r"^```.*?^```|^    .*?$|^\|.*?$|^#.*?$", re.MULTILINE | re.DOTALL)
"""Code, tables and headings of a page; headings may name a topic by a clause ("How a run ends")."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for before, after in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            is_first = before is None and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                if is_first or isinstance(before, (ast.Assign, ast.AnnAssign)):
                    yield after.lineno, after.value.value


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each paragraph of a page, without code, tables and headings."""
    page = path.read_text(encoding="utf-8")
    prose = _LEFT_OUT.sub(lambda found: "\n" * found.group().count("\n"), page)
    for found in re.finditer(r"(?:^.*\S.*\n?)+", prose, re.MULTILINE):
        yield prose.count("\n", 0, found.start()) + 1, re.sub(r"^\s*(?:[-*]|\d+\.) +", "", found.group())


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each block of comments of a YAML file."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^ *#.*\n)+", text, re.MULTILINE):
        yield text.count("\n", 0, found.start()) + 1, re.sub(r"^ *# *", "", found.group(), flags=re.MULTILINE)


READERS = {".py": docstrings, ".md": paragraphs, ".yml": comments}


def faults(path: Path) -> Iterator[str]:
    """Yields a line for each sentence that starts with a relative clause."""
    for line, text in READERS[path.suffix](path):
        for sentence in _SENTENCE.split(" ".join(text.split())):
            if _START.match(sentence) and "?" not in sentence:
                yield f"{path.relative_to(ROOT)}:{line}: {sentence[:100]}"


def main() -> int:
    named = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT / name for name in FOLDERS]
    files = [path for name in named for path in ([name] if name.is_file() else sorted(name.rglob("*")))]
    found = [fault for path in files if path.suffix in READERS for fault in faults(path)]
    print(*found, sep="\n") if found else None
    print(f"{len(found)} sentences start with a relative clause", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
