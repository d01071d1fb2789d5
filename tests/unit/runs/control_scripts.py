"""Control scripts: drawn scripts of simulated workers, and the results that a run of one process would have."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from autodist.errors import CaptureError
from autodist.runs.coordination import RESTORE
from tests.unit.runs.simulated_cluster import WORKERS
from tests.unit.runs.simulated_workers import CONSTANT, TRAINED, Setting, SimulatedWorker

ALL = tuple(range(WORKERS))


class ScriptError(Exception):
    """Error raised by the code of a script."""


class Kind(enum.StrEnum):
    """The action of a line of a script."""

    TRAIN = "train"
    ASSIGN = "assign"  # each worker writes another value
    RESET = "reset"  # all workers write zero, as Keras does with metrics
    READ = "read"
    EVALUATE = "evaluate"
    VALIDATE = "validate"  # an evaluation that all workers are known to make
    SAVE = "save"
    WRITE = "write"
    REDUCE = "reduce"
    DECIDE = "decide"
    FLUSH = "flush"
    SHARE = "share"
    RESTORE = "restore"
    REFUSE = "refuse"  # an error of the script before a step
    REJECT = "reject"  # an error of the library in a step, before it has begun
    FAIL = "fail"  # an error in a step that has begun
    LEAVE = "leave"  # the script ends


TOGETHER = frozenset({Kind.VALIDATE, Kind.REDUCE, Kind.DECIDE, Kind.FLUSH, Kind.SHARE, Kind.RESTORE})
"""Actions of all workers; a worker waits in them for the others."""


STEPS = frozenset({Kind.TRAIN})
"""Actions before which all workers take over the chief's values."""


@dataclass(frozen=True)
class Line:
    """A line of a script, under `if ad.worker_index in …`.

    Attributes:
        kind: the action.
        by: the workers that execute it; in a failing line, those that fail, while the others make the step.
        variable: the variable that it reads or writes.
        survives: True if the script catches the error of the line.
    """

    kind: Kind
    by: tuple[int, ...] = ALL
    variable: str = TRAINED
    survives: bool = True

    @property
    def is_fault(self) -> bool:
        """True if the line ends the run, or may end it."""
        if self.kind in (Kind.REFUSE, Kind.REJECT):
            return self.by != ALL or not self.survives
        return self.kind in (Kind.FAIL, Kind.LEAVE)


def assigned(number: int, worker: int) -> float:
    """Returns the value that a worker writes in a line."""
    return 1000.0 * (number + 1) + 100 * worker


@dataclass
class Script:
    """A script that all workers run, and the results that it must have.

    Attributes:
        setting: the kind of training.
        lines: the lines.
        states: True if the workers leave their final states for the chief.
        met: for each worker, the lines of its evaluations that all workers have made together.
        final: the variables at the end of each worker's script.
    """

    setting: Setting
    lines: tuple[Line, ...]
    states: bool = False
    met: dict[int, list[int]] = field(default_factory=lambda: {worker: [] for worker in ALL})
    final: dict[int, dict[str, float]] = field(default_factory=dict)

    def run(self, worker: SimulatedWorker) -> None:
        """Executes the script on a worker."""
        for number, line in enumerate(self.lines):
            if line.kind is Kind.LEAVE and worker.index in line.by:
                return
            if worker.index in line.by or line.kind in (Kind.REFUSE, Kind.REJECT, Kind.FAIL):
                ACTIONS[line.kind](self, worker, number)
        worker.coordination.flush_together()
        self.final[worker.index] = {name: worker.read(name) for name in (TRAINED, CONSTANT)}
        if worker.index == 1:  # the chief may have ended
            worker.evaluate(False, lambda: None)
        self._leave_state(worker)

    def expected(self, before: int, worker: int) -> dict[str, float]:
        """Returns the values that a worker's script sees before a line.

        They are those of the chief at the worker's last step or common evaluation, with the worker's later writes. A
        worker may evaluate together with a later line of the chief.
        """
        meetings = [(line, line) for line in range(before) if self.lines[line].kind in STEPS]
        meetings += [one for one in zip(self.met[worker], self.met[0], strict=False) if one[0] < before]
        own, chiefs = max(meetings, default=(-1, -1))
        return self._follow(own + 1, before, worker, self._follow(0, chiefs + 1, 0, {TRAINED: 0.0, CONSTANT: 0.0}))

    def _follow(self, start: int, stop: int, worker: int, values: dict[str, float]) -> dict[str, float]:
        """Returns the values after some lines of one worker, as if there were no other."""
        for number, line in list(enumerate(self.lines))[start:stop]:
            if line.kind in (Kind.ASSIGN, Kind.RESET) and worker in line.by:
                values[line.variable] = assigned(number, worker) if line.kind is Kind.ASSIGN else 0.0
            elif line.kind is Kind.TRAIN:
                values[TRAINED] += WORKERS * (1 + values[CONSTANT])
        return values

    def _leave_state(self, worker: SimulatedWorker) -> None:
        if self.states and worker.index == 0:
            worker.chief.read_states("of 0")
            scripts = dict(worker.chief.scripts)
            assert scripts in ({0: "of 0"}, {w: f"of {w}" for w in ALL}), scripts
        elif self.states:
            worker.chief.leave_state(f"of {worker.index}")

    # -- actions ---------------------------------------------------------------------------------------------------

    def train(self, worker: SimulatedWorker, number: int) -> None:
        self._check(worker, number, worker.train(), self.expected(number, 0)[TRAINED])

    def assign(self, worker: SimulatedWorker, number: int) -> None:
        worker.variables[self.lines[number].variable].assign(assigned(number, worker.index))

    def reset(self, worker: SimulatedWorker, number: int) -> None:
        worker.variables[self.lines[number].variable].assign(0.0, is_alike=True)

    def read(self, worker: SimulatedWorker, number: int) -> None:
        name = self.lines[number].variable
        self._check(worker, number, worker.read(name), self.expected(number, worker.index)[name])

    def evaluate(self, worker: SimulatedWorker, number: int) -> None:
        met = self.met[worker.index]
        count = len(met)
        result = worker.evaluate(self.lines[number].kind is Kind.VALIDATE, lambda: met.append(number))
        is_together = len(met) > count
        values = self.expected(self.met[0][count], 0) if is_together else self.expected(number, worker.index)
        self._check(worker, number, result, values[TRAINED] + WORKERS * values[CONSTANT])

    def save(self, worker: SimulatedWorker, number: int) -> None:
        name, saved = self.lines[number].variable, []

        def save() -> str:
            saved.append(number)
            self._check(worker, number, worker.read(name), self.expected(number, 0)[name])
            return "path"

        result = worker.chief.save(save)
        assert (result, saved) == (("path", [number]) if worker.index == 0 else (None, [])), (result, saved)

    def write(self, worker: SimulatedWorker, number: int) -> None:
        result = worker.chief.write(f"line {number}", lambda: worker.index)
        assert result in (None, worker.index) if worker.index else result == 0, result

    def reduce(self, worker: SimulatedWorker, number: int) -> None:
        total = worker.coordination.reduce(10.0 * number + worker.index, "sum")
        assert float(np.asarray(total)) == 10.0 * number * WORKERS + sum(ALL), total

    def decide(self, worker: SimulatedWorker, number: int) -> None:
        message = f"{number} {worker.index}"
        decision = json.loads(worker.coordination.decide_by_chief(message, json.dumps))
        assert decision == [f"{number} {other}" for other in ALL], decision

    def flush(self, worker: SimulatedWorker, number: int) -> None:
        worker.coordination.flush_together()

    def share(self, worker: SimulatedWorker, number: int) -> None:
        is_restored = self.lines[number].kind is Kind.RESTORE
        text = f"{number} of {worker.index}"
        shared = worker.coordination.share_text(text, RESTORE if is_restored else "fit", not is_restored)
        assert shared == f"{number} of 0", shared

    def refuse(self, worker: SimulatedWorker, number: int) -> None:
        """Raises an error before a step, or while the library prepares it; the workers without error make the step."""
        line = self.lines[number]

        def fail() -> None:
            if worker.index in line.by:
                raise (
                    CaptureError("a step that cannot be captured") if line.kind is Kind.REJECT else ScriptError(number)
                )

        def refuse() -> None:
            if line.kind is Kind.REFUSE:
                with worker.failed_step.guarding(is_step=False, is_before=True):
                    fail()
            worker.train(before=fail)

        self._survive(line, refuse)

    def fail(self, worker: SimulatedWorker, number: int) -> None:
        """Raises an error in a step that has begun."""
        line = self.lines[number]

        def fail() -> None:
            if worker.index in line.by:
                raise ScriptError(number)

        self._survive(line, lambda: worker.train(within=fail))

    def _survive(self, line: Line, call: Callable[[], object]) -> None:
        with suppress(*(ScriptError, CaptureError) if line.survives else ()):
            call()

    def _check(self, worker: SimulatedWorker, number: int, found: float, expected: float) -> None:
        has_failed = any(line.is_fault for line in self.lines[:number])
        assert self.setting.is_asynchronous or has_failed or found == expected, (
            f"line {number} on worker {worker.index}: {found} instead of {expected}"
        )


ACTIONS: dict[Kind, Callable[[Script, SimulatedWorker, int], None]] = {
    **{kind: getattr(Script, kind.value) for kind in Kind if hasattr(Script, kind.value)},
    Kind.VALIDATE: Script.evaluate,
    Kind.RESTORE: Script.share,
    Kind.REJECT: Script.refuse,
}
