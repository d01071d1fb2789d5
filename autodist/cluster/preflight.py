"""What must hold on every machine before anything starts; all faults of all machines in one table."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from autodist.cluster.agent import tensorflow_version
from autodist.cluster.protocol import Facts, Lost
from autodist.errors import ClusterError
from autodist.versions import VERSION


def check_all(answers: Mapping[str, Facts | Lost]) -> None:
    """Checks what the agents found against this process.

    Args:
        answers: of each worker's agent, by the worker's name, the chief's own included.

    Raises:
        ClusterError: with every fault of every worker.
    """
    rows = [(name, fault) for name, answer in answers.items() for fault in faults(answer)]
    if rows:
        raise ClusterError("The run cannot start:\n" + table(rows))


def faults(answer: Facts | Lost) -> list[str]:
    """What keeps one worker from taking part, each with its mend."""
    if isinstance(answer, Lost):
        return [answer.problem]
    return [*_version_faults(answer), *answer.problems]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Aligned text: a name once, its texts beside it.

    >>> print(table([("a", "first\\nsecond"), ("a", "third"), ("bcd", "fourth")]))
      a    first
           second
           third
      bcd  fourth
    """
    width = max(len(name) for name, _ in rows)
    lines, before = [], None
    for name, text in rows:
        for part in text.splitlines() or [""]:
            lines.append(f"  {name if name != before else '':{width}}  {part}".rstrip())
            before = name
    return "\n".join(lines)


def _version_faults(facts: Facts) -> list[str]:
    found = []
    if facts.autodist != VERSION:
        found.append(
            f"AutoDist is {facts.autodist or 'of another version'}, on the chief {VERSION}; install "
            f"{VERSION} there, or give its SSH group a `python_venv` that has it"
        )
    own_python = platform.python_version()
    if _minor(facts.python) != _minor(own_python):
        mend = f"give its SSH group a `python_venv` with Python {_minor(own_python)}"
        found.append(f"Python is {facts.python}, on the chief {own_python}; {mend}")
    own = tensorflow_version()
    if facts.tensorflow is None and own is not None:
        found.append(f"TensorFlow is not installed; run `pip install tensorflow=={own}` there")
    elif facts.tensorflow != own:
        found.append(f"TensorFlow is {facts.tensorflow}, on the chief {own}; run `pip install tensorflow=={own}` there")
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
