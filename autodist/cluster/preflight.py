"""What must hold on every machine before anything starts; all faults of all machines in one table."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from autodist.cluster.protocol import Facts, Lost
from autodist.errors import ClusterError, MachinesAwayError


def check_all(answers: Mapping[str, Facts | Lost], chief: Facts, script: str | None = None) -> None:
    """Checks what the agents found against the chief.

    Args:
        answers: of each worker's agent, by the worker's name, the chief's own included.
        chief: what every worker has to equal; its digest is that of the script when it was started.
        script: its path, if it has one.

    Raises:
        MachinesAwayError: all that is wrong is that machines do not answer.
        ClusterError: with every fault of every worker.
    """
    away = tuple(name for name, answer in answers.items() if isinstance(answer, Lost) and answer.is_away)
    gone = {name.rpartition(":")[0] for name in away}  # whose names may have gone with them
    rows = [(name, fault) for name, answer in answers.items() for fault in faults(answer, chief, script, gone)]
    if not rows:
        return
    problem = "The run cannot start:\n" + table(rows)
    if {name for name, _ in rows} == set(away):
        raise MachinesAwayError(problem, away)
    raise ClusterError(problem)


def compared_packages() -> tuple[str, ...]:
    """Beside TensorFlow: Keras, and the older one if the script uses that."""
    return ("keras", *(["tf_keras"] if "tf_keras" in sys.modules else []))


def faults(answer: Facts | Lost, chief: Facts, script: str | None = None, gone: Collection[str] = ()) -> list[str]:
    """What keeps one worker from taking part, each with its mend; machines that are gone need no names."""
    if isinstance(answer, Lost):
        return [answer.problem]
    names = [
        f"the name {host} cannot be resolved there: {reason}; let its DNS or /etc/hosts know it, or give the node an "
        "IP address"
        for host, reason in answer.unresolved.items()
        if host not in gone
    ]
    return [*_version_faults(answer, chief), *_script_faults(answer, chief, script), *answer.problems, *names]


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


def _version_faults(facts: Facts, chief: Facts) -> list[str]:
    found = []
    if facts.autodist != chief.autodist:
        found.append(
            f"AutoDist is {facts.autodist or 'of another version'}, on the chief {chief.autodist}; install "
            f"{chief.autodist} there, or give its SSH group a `python_venv` that has it"
        )
    if _minor(facts.python) != _minor(chief.python):
        mend = f"give its SSH group a `python_venv` with Python {_minor(chief.python)}"
        found.append(f"Python is {facts.python}, on the chief {chief.python}; {mend}")
    found += _package_faults("TensorFlow", "tensorflow", facts.tensorflow, chief.tensorflow)
    for package, own in chief.packages.items():
        found += _package_faults(package.capitalize(), package, facts.packages.get(package), own)
    return found


def _package_faults(name: str, package: str, there: str | None, own: str | None) -> list[str]:
    if there == own:
        return []
    state = f"is {there}, on the chief {own}" if there is not None else "is not installed"
    return [f"{name} {state}; run `pip install {package}=={own}` there"]


def _script_faults(facts: Facts, chief: Facts, script: str | None) -> list[str]:
    if facts.digest is None or facts.digest == chief.digest:  # whether it is there is among the agent's problems
        return []
    return [
        f"the script {script} is another than the one that the chief runs; copy that there, or share its folder (if it "
        "was changed after the start, start it again)"
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
