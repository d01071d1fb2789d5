"""Recorded texts, one compressed file each: of a case, or (in the folder `layouts`) of a stored step's layouts."""

from __future__ import annotations

import difflib
import lzma
import subprocess
from pathlib import Path

import tensorflow as tf

from tests.replay.names import differ_by_names_alone

FOLDER = Path(__file__).parent / "recorded"

_VERSION = "tensorflow.txt"
_SUFFIX = ".txt.xz"


def recorded_names() -> list[str]:
    return sorted(str(path.relative_to(FOLDER)).removesuffix(_SUFFIX) for path in FOLDER.rglob(f"*{_SUFFIX}"))


def recorded(name: str, revision: str | None = None) -> str:
    """Returns the text of that name, from this tree or from a git revision; empty if there is none."""
    path = FOLDER / f"{name}{_SUFFIX}"
    if revision is None:
        return lzma.decompress(path.read_bytes()).decode() if path.exists() else ""
    asked = ["git", "show", f"{revision}:./{name}{_SUFFIX}"]
    shown = subprocess.run(asked, cwd=FOLDER, capture_output=True, check=False)
    return lzma.decompress(shown.stdout).decode() if shown.returncode == 0 else ""


def record(name: str, text: str) -> None:
    """Records a text, with this TensorFlow; an equal one leaves the file as it is."""
    if recorded(name) != text:
        path = FOLDER / f"{name}{_SUFFIX}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress(text.encode(), preset=9))
    (FOLDER / _VERSION).write_text(f"{tensorflow_version()}\n")


def forget(name: str) -> None:
    """Deletes the text of a case, or of a stored step, that no longer exists."""
    (FOLDER / f"{name}{_SUFFIX}").unlink()


def tensorflow_version() -> str:
    """Without the patch level: TensorFlow's API makes the same nodes in all patches of a version."""
    return ".".join(tf.__version__.split(".")[:2])


def recorded_version() -> str:
    """Returns the version of TensorFlow that the texts were recorded with."""
    return (FOLDER / _VERSION).read_text().strip()


def difference(before: str, after: str, lines: int) -> str:
    """Returns a readable difference of two texts of a case; empty if they are equal.

    Args:
        before: the recorded text.
        after: the new text.
        lines: number of lines to show.
    """
    if before == after:
        return ""
    if not before:
        return "  was not recorded\n"
    changed = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]
    added, removed = (sum(line.startswith(sign) for line in changed) for sign in "+-")
    told = f"  {removed} lines go, {added} come"
    if differ_by_names_alone(before, after):
        told += "; nodes have other names, and all else is the same"
    shown = "".join(f"    {line}\n" for line in changed[:lines])
    return f"{told}\n{shown}" + (f"    … {len(changed) - lines} lines more\n" if len(changed) > lines else "")
