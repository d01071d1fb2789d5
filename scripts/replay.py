#!/usr/bin/env python3
"""Makes the texts of tests/replay again (rewritten steps, layouts of tensors) and shows the differences to the record.

    python scripts/replay.py                        # the changes of this tree, for reading
    python scripts/replay.py jit_step keras_*-ps-*  # cases by name; * stands for anything
    python scripts/replay.py "layouts/*"            # the layouts of the stored steps alone
    python scripts/replay.py --since main           # against the record of a git revision
    python scripts/replay.py --since main --renamed map.txt   # the old texts under a map of names ("old new" a line)
    python scripts/replay.py --record               # records the current texts
    python scripts/replay.py --text jit_step-*      # prints the current text
    python scripts/replay.py --capture jit_step     # captures steps again, with the installed TensorFlow and Keras

The exit status is 1 if something has changed and is not recorded.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.replay.cases import CASES
from tests.replay.layouts import PREFIX, layouts_of
from tests.replay.names import differ_by_names_alone, under_names, without_digests
from tests.replay.recorded import difference, forget, record, recorded, recorded_names
from tests.replay.rewriting import replay
from tests.replay.stored import stored_names

NAMES = [*CASES, *(PREFIX + step for step in stored_names())]


def main() -> int:
    arguments = _arguments()
    if arguments.capture:
        return _capture(arguments.capture)
    names = [name for name in NAMES if _is_selected(name, arguments.cases)]
    if not names:
        print(f"no case has that name; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    changed = [name for name in names if not _shown(name, arguments)]
    lost = [name for name in recorded_names() if name not in NAMES]
    for name in lost if arguments.record else ():
        forget(name)
    how = "recorded" if arguments.record else "changed"
    print(f"{len(names)} cases, {len(changed)} {how}" + (f"; of no case: {', '.join(lost)}" if lost else ""))
    return 1 if (changed or lost) and not (arguments.record or arguments.text) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases (all)")
    parser.add_argument("--since", metavar="REVISION", help="compare with the record of a git revision")
    parser.add_argument(
        "--renamed", metavar="FILE", type=Path,
        help="compare with the record after these renames of words and parts of node names; digests of names are equal",
    )  # fmt: skip
    parser.add_argument("--lines", type=int, default=40, help="lines to show of each difference (default 40)")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--record", action="store_true", help="record the current texts")
    does.add_argument("--text", action="store_true", help="print the current texts")
    does.add_argument("--capture", nargs="+", metavar="STEP", help="capture steps again, by their names in capture.py")
    return parser.parse_args()


def _is_selected(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _shown(name: str, arguments: argparse.Namespace) -> bool:
    """Returns True if a case equals its record; otherwise shows the difference or records it."""
    text = replay(CASES[name]).text if name in CASES else layouts_of(name.removeprefix(PREFIX))
    if arguments.text:
        print(f"{name}\n{text}")
        return True
    before = recorded(name, arguments.since)
    if arguments.renamed:
        before, text = under_names(before, arguments.renamed.read_text()), without_digests(text)
    found = (
        "" if arguments.renamed and differ_by_names_alone(before, text) else difference(before, text, arguments.lines)
    )
    if found:
        print(f"{name}\n{found}", flush=True)
        if arguments.record:
            record(name, text)
    return not found


def _capture(names: list[str]) -> int:
    from tests.replay.capture import OF_PROGRAMS, OF_TESTS, capture

    unknown = [name for name in names if name not in OF_PROGRAMS and name not in OF_TESTS]
    if unknown:
        print(
            f"nothing captures {', '.join(unknown)}; there are {', '.join((*OF_PROGRAMS, *OF_TESTS))}", file=sys.stderr
        )
        return 2
    for name in names:
        for own, step in capture(name).items():
            step.save(own)
            print(own)
    return 0


if __name__ == "__main__":
    sys.exit(main())
