"""Runs Keras's own tests, as they are installed with it, within `ad.scope()`.

    ./scripts/keras_tests                                       all of those named below
    ./scripts/keras_tests optimizers trainers/trainer_test.py   a folder of keras/src, and a file
    ./scripts/keras_tests saving -k h5                          tests whose names hold "h5"

Each test has an AutoDist of its own, of one worker with two replicas on the CPU. A test that fails, or that made a step
on the replicas, runs again without AutoDist. A failure there as well is not AutoDist's. The results of `fit`,
`evaluate` and `predict` and the final weights have to be the same (1e-5, float32). Each folder runs in processes of its
own. Of the tests of layers, only those that train run.

scripts/keras_suite/promises.toml lists the tests that are refused, and those whose numbers differ from those of one
device, each with the reason. A listed test that is neither is an error, too.

The exit status is 0 if all is well, 1 if a test fails or is listed wrongly, 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import itertools
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from keras_suite.files import Judged, Options, run_and_judge
from keras_suite.verdicts import Promises, Verdict

PROMISES = pathlib.Path(__file__).resolve().parent / "promises.toml"
FOLDERS = (
    "trainers",
    "callbacks",
    "models",
    "optimizers",
    "layers/rnn",
    "layers/normalization",
    "layers/attention",
    "layers/convolutional",
    "saving",
)
NOT_MODELS = ("trainers/data_adapters",)
"""Folders of these whose tests use no model, and so do not depend on the scope; not run unless named."""
SHOWN = 300
"""Number of characters of an error to show."""


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on SIGTERM, it still ends its processes
    root = keras_sources()
    try:
        files = list(find_files(root, arguments.files or FOLDERS, () if arguments.files else NOT_MODELS))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    promises = Promises.read(PROMISES)
    options = Options(arguments.replicas, arguments.names, arguments.limit, arguments.logs)
    all_tested: dict[str, Judged] = {}
    for folder, group in itertools.groupby(files, lambda file: str(pathlib.PurePath(file).parent)):
        began = time.monotonic()
        tested = run_and_judge(root, list(group), options, promises)
        all_tested.update(tested)
        print(f"{folder}: {summary(tested)}; {time.monotonic() - began:.0f} s", flush=True)
        for test, one in tested.items():
            if one.verdict.is_wrong:
                print(f"    {one.verdict.value}: {test}\n        {_short(one.text)}", flush=True)
    print(f"\nall {len(files)} files: {summary(all_tested)}")
    return 1 if not all_tested or any(one.verdict.is_wrong for one in all_tested.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/keras_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help=f"files or folders in keras/src; default: {', '.join(FOLDERS)}")
    parser.add_argument("-k", dest="names", default="", help="only tests whose names match, as for pytest")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the one worker (default 2)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a test may take (default 1800)")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for pytest's output on each folder")
    arguments = parser.parse_args()
    if arguments.replicas < 1:
        parser.error("--replicas is 1 or more")
    return arguments


def keras_sources() -> pathlib.Path:
    """Returns the folder of Keras's own modules, which contains its tests."""
    spec = importlib.util.find_spec("keras")
    assert spec is not None and spec.origin is not None, "AutoDist depends on Keras"
    return pathlib.Path(spec.origin).parent / "src"


def find_files(root: pathlib.Path, names: Iterable[str], without: Iterable[str] = ()) -> Iterator[str]:
    """Yields the requested test files, as paths in `root`, each once, those of a folder in sequence.

    Args:
        root: the folder keras/src.
        names: files and folders in it.
        without: folders in it whose files are left out.

    Raises:
        FileNotFoundError: a requested path has no test files.
    """
    found: dict[pathlib.PurePath, dict[str, None]] = {}
    left_out = [root / folder for folder in without]
    for name in names:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("*_test.py"))
        if not files:
            raise FileNotFoundError(f"{path} is neither a file nor a folder with *_test.py; use a path in {root}.")
        for file in files:
            if not any(file.is_relative_to(folder) for folder in left_out):
                found.setdefault(file.parent, {})[str(file.relative_to(root))] = None
    yield from itertools.chain.from_iterable(found.values())


def summary(tested: Mapping[str, Judged]) -> str:
    """Returns the number of tests of each verdict, the number that made steps on the replicas, and the comparison of
    values.
    """
    counts = collections.Counter(one.verdict for one in tested.values())
    steps = sum(bool(one.steps) for one in tested.values())
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
    found = [one.difference for one in tested.values() if one.difference is not None]
    alike = [each.largest for each in found if each.is_tolerable]
    numbers = f", numbers of {len(alike)} of {len(found)} within {max(alike, default=0.0):.0e}" if found else ""
    return f"{len(tested)} tests, {steps} with distributed steps: {', '.join(parts)}{numbers}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} …"


if __name__ == "__main__":
    sys.exit(main())
