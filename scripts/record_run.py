#!/usr/bin/env python3
"""Records the terminal output of a command as a picture.

    python scripts/record_run.py docs/pictures/run.svg autodist run --workers 2 examples/digits_keras.py --epochs 2

The command runs in a terminal of its own, 110 columns wide; the picture shows the terminal at the end.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 110, 50

# Escape sequences that move the cursor or clear, except colours: only the last state of a line is shown.
_UP = re.compile(r"\x1b\[(\d*)A")
_CLEARS = re.compile(r"\x1b\[[\d;?]*[JKhlG]|\x1b\][^\x07]*\x07")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="an SVG file")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    shown, status = record(arguments.command)
    if status:
        sys.exit(f"{shown}\n{shlex.join(arguments.command)} ended with status {status}; no picture was made")
    draw(arguments.picture, arguments.command, lines_at_the_end(shown))


def record(command: list[str]) -> tuple[str, int]:
    """Returns the terminal output of a command, and its exit status."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "TF_CPP_MIN_LOG_LEVEL": "2"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    with os.fdopen(ours, "rb", buffering=0) as screen:
        parts = []
        try:
            while part := screen.read(65536):
                parts.append(part)
        except OSError:
            pass  # a terminal's signal that no writer is left
    return b"".join(parts).decode(errors="replace"), process.wait()


def lines_at_the_end(shown: str) -> list[str]:
    """Returns the final text of each terminal line: text that was overwritten is dropped."""
    lines, row = [""], 0
    for part in re.split(r"(\r?\n|\r|\x1b\[\d*A)", _CLEARS.sub("", shown)):
        if up := _UP.fullmatch(part):
            row = max(0, row - int(up[1] or 1))
        elif part.endswith("\n"):
            row += 1
        elif part and part != "\r":
            lines.extend([""] * (row + 1 - len(lines)))
            *_, lines[row] = part.rsplit("\b", 1)
    return lines


def draw(picture: Path, command: list[str], lines: list[str]) -> None:
    """Writes the picture of a terminal in which the command was typed."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=COLUMNS, record=True, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {shlex.join(command)}", style="bold"))
        for line in lines:
            console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    drawn = console.export_svg(title="AutoDist", unique_id="run")
    picture.write_text(re.sub(r"@font-face {.*?}\s*", "", drawn, flags=re.DOTALL))  # a viewer would download it


if __name__ == "__main__":
    main()
