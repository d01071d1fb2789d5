#!/usr/bin/env python3
"""Makes build/mapped/autodist: the layout of the installed package, made of links to the folders at the top.

    python scripts/mapped_package.py

Tools that read files without importing them (mypy, import-linter) do not see that an installed `autodist.strategies` is
the folder `strategies`. They read build/mapped instead. Each call replaces the links.
"""

from __future__ import annotations

import pathlib
import runpy
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The installation's own file lists the mapped folders.
FOLDERS: tuple[str, ...] = runpy.run_path(str(ROOT / "setup.py"))["FOLDERS"]


def make_mapped_package(target: pathlib.Path) -> None:
    """Makes `target`/autodist, and replaces an existing one."""
    package = target / "autodist"
    if package.exists():
        shutil.rmtree(package)  # removes links, not their targets
    package.mkdir(parents=True)
    inside = [path for path in (ROOT / "autodist").iterdir() if path.name != "__pycache__"]
    for source in [*inside, *(ROOT / folder for folder in FOLDERS)]:
        (package / source.name).symlink_to(source)


if __name__ == "__main__":
    make_mapped_package(ROOT / "build" / "mapped")
