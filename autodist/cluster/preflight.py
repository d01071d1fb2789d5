"""Checks of every machine before a run starts; reports all faults of all machines in one table."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from autodist.cluster.protocol import Facts, Lost
from autodist.errors import ClusterError, MachinesAwayError


def check_all(answers: Mapping[str, Facts | Lost], chief: Facts, script: str = "") -> None:
    """Compares the facts of all agents with those of the chief.

    Args:
        answers: answer of each worker's agent, by the worker's name; includes the chief.
        chief: facts that every worker has to match; its digest is that of the script when it was started.
        script: name of the script or the function, if it has a digest.

    Raises:
        MachinesAwayError: the only faults are machines that do not answer.
        ClusterError: lists every fault of every worker.
    """
    away = tuple(name for name, answer in answers.items() if isinstance(answer, Lost) and answer.is_away)
    gone = {name.rpartition(":")[0] for name in away}  # their names may not resolve any more
    rows = [(name, fault) for name, answer in answers.items() for fault in faults(answer, chief, script, gone)]
    _raise_faults(rows, away)


def raise_lost(answers: Mapping[str, Lost]) -> None:
    """Raises the errors of `check_all` for workers that could not be reached, by their names, if there are any."""
    away = tuple(name for name, lost in answers.items() if lost.is_away)
    _raise_faults([(name, lost.problem) for name, lost in answers.items()], away)


def _raise_faults(rows: Sequence[tuple[str, str]], away: tuple[str, ...]) -> None:
    if not rows:
        return
    problem = "The run cannot start:\n" + table(rows)
    if {name for name, _ in rows} == set(away):
        raise MachinesAwayError(problem, away)
    raise ClusterError(problem)


def compared_packages() -> tuple[str, ...]:
    """Returns the packages to compare in addition to TensorFlow: Keras, and tf_keras if the script uses it."""
    return ("keras", *(["tf_keras"] if "tf_keras" in sys.modules else []))


def faults(answer: Facts | Lost, chief: Facts, script: str = "", gone: Collection[str] = ()) -> list[str]:
    """Returns the faults of one worker, each with its fix; names of machines in `gone` need not resolve."""
    if isinstance(answer, Lost):
        return [answer.problem]
    names = [
        f"the name {host} cannot be resolved there: {reason}; add it to its DNS or /etc/hosts, or give the node "
        "an IP address"
        for host, reason in answer.unresolved.items()
        if host not in gone
    ]
    return [*_version_faults(answer, chief), *_script_faults(answer, chief, script), *answer.problems, *names]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Formats rows as aligned text, with each name in its first row only.

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


def _version_faults(facts: Facts, chief: Facts) -> list[str]:
    problems = []
    if facts.autodist != chief.autodist:
        problems.append(
            f"AutoDist is {facts.autodist or 'of another version'}, on the chief {chief.autodist}; install "
            f"{chief.autodist} there, or give its SSH group a `python_venv` that has it"
        )
    if _minor(facts.python) != _minor(chief.python):
        fix = f"give its SSH group a `python_venv` with Python {_minor(chief.python)}"
        problems.append(f"Python is {facts.python}, on the chief {chief.python}; {fix}")
    problems += _package_faults("TensorFlow", "tensorflow", facts.tensorflow, chief.tensorflow)
    for package, chief_version in chief.packages.items():
        problems += _package_faults(package.capitalize(), package, facts.packages.get(package), chief_version)
    return problems


def _package_faults(name: str, package: str, there: str | None, chief_version: str | None) -> list[str]:
    if there == chief_version:
        return []
    state = f"is {there}, on the chief {chief_version}" if there is not None else "is not installed"
    return [f"{name} {state}; run `pip install {package}=={chief_version}` there"]


def _script_faults(facts: Facts, chief: Facts, script: str) -> list[str]:
    if facts.digest is None or facts.digest == chief.digest:  # the agent reports a missing script among its problems
        return []
    return [
        f"{script} differs from the one that the chief runs; copy that there, or share its folder (if it "
        "was changed after the start, start it again)"
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
