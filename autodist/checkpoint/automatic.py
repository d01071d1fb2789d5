"""Automatic checkpoints (`checkpoint` in the YAML): saves the state of a script's training steps, and restores it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from autodist.checkpoint.content import Content, Value
from autodist.checkpoint.extra_state import ExtraState
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.loop import Loop
from autodist.checkpoint.read import described, read_about, require_alike, require_seen, saved_values
from autodist.checkpoint.save import Saves
from autodist.checkpoint.save_schedule import SaveRequest, Schedule
from autodist.checkpoint.slices import KeyedVariable, read_into_process
from autodist.errors import CheckpointError
from autodist.graph.step import CapturedStep
from autodist.logs.formatting import some_of
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.resources import CheckpointSection
from autodist.runs.run import Run
from autodist.runs.step_observer import StepObserver
from autodist.runtime.eager_watch import unwatched
from autodist.runtime.variables import StoredVariable, TrackedVariable

log = logging.getLogger("autodist")

STEPS = "steps"
"""Value of `made_by` in the side file of a checkpoint that a script's own loop saved."""


_Trained = TrackedVariable | StoredVariable
"""A variable of the script, or of a session."""


class AutomaticCheckpoints(StepObserver):
    """Saves the variables of the training steps that a script calls, and restores them before their first step.

    Variables are identified by their names in the steps. The script itself must save variables that no training step
    reads or writes.

    Args:
        run: the run that trains the variables.
        section: the YAML section.
        requests: these request saves of the schedules, at SIGTERM for example.

    Attributes:
        schedule: decides when a loop of steps is saved.
        is_in_fit: True during a `fit`, which its callback saves.
        has_read_steps: True once the script has read the number of steps.
        loop: the position of the script between two steps.
    """

    def __init__(self, run: Run, section: CheckpointSection, requests: Sequence[SaveRequest] = ()) -> None:
        self._run, self._folder = run, Folder(section.folder)
        self._saves, self._requests = Saves(run, self._folder, section.keep), requests
        self.schedule = Schedule(
            run.index == 0,
            lambda decision: run.coordination.share_text(decision, "a training step"),
            section.every_steps,
            section.every_minutes,
            run.step,
        )
        self.is_in_fit = self.has_read_steps = False
        self._named: dict[str, _Trained] = {}
        self._restored: set[str] = set()
        self._steps: list[list[str]] = []
        self._round: set[int] = set()
        self._has_begun = False
        self._extra_state = ExtraState(run)
        self.loop = Loop(self._saved_loop)
        self.on_schedule(self.schedule)

    def on_steps_read(self, frame: FrameType) -> None:
        """Called when the script reads the number of steps, in this frame."""
        self.has_read_steps = True
        self.loop.on_begin_read(frame)

    def on_schedule(self, schedule: Schedule) -> None:
        for request in self._requests:
            request.watch(schedule)

    def after_step(self) -> None:
        if not self.is_in_fit:
            self.loop.after_step()

    def on_tracked(self, step: CapturedStep, variables: Mapping[str, TrackedVariable]) -> None:
        """Registers and restores the variables of a training step."""
        if self.is_in_fit or not step.gradients:
            return
        self._begin()
        names, new = self._take_in(variables)
        if names is None:
            return
        if saved := self._saved(names, new):
            with unwatched():
                restored = [KeyedVariable(name, variables[new[name]].source) for name in saved]
                read_into_process(self._run.resumed["prefix"], restored, self._run.divides_variables)
        if self._run.resumed:  # at the next step all workers take the chief's values
            for name in new.values():
                variables[name].is_ahead, variables[name].is_behind = True, False

    def on_session(self, variables: Mapping[str, StoredVariable]) -> Mapping[str, StoredVariable]:
        """Registers the variables of a session; returns those with a saved value."""
        if self.is_in_fit:
            return {}
        self._begin()
        names, new = self._take_in(variables)
        return {} if names is None else {name: variables[new[name]] for name in self._saved(names, new)}

    def before_step(self, step: object) -> None:
        """Saves if a save is due.

        A loop may have several steps, for example one for each network. It is saved at the start of a turn, which is
        before a step that has already run since.
        """
        if self.is_in_fit:
            return
        begins_again = id(step) in self._round
        if begins_again:
            self._round.clear()
        self._round.add(id(step))
        if begins_again and self.schedule.is_due(self._run.step):
            self.save()

    def save(self, background: bool = True) -> None:
        """Saves now; every worker calls it between two steps."""
        self._run.chief.save(
            lambda: self._saves.save(lambda _: self._content(), background),
            is_certain=True,
            script_state=self.loop.state,
        )
        self.schedule.saved(self._run.step)

    # --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._run.resumed and not self.has_read_steps:
            log.warning(
                "the variables are those after %d steps, but the script has not read ad.steps_done: a loop that counts "
                "its own steps repeats all of them. Start it there: range(ad.steps_done, …).",
                self._run.step, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        self.loop.before_first_step()
        if self._run.resumed:
            prefix = self._run.resumed["prefix"]
            require_seen(self._run.index, prefix)
            self._extra_state.resume(prefix, read_about(prefix), is_same=False)
        if self._run.index == 0:
            self._folder.claim()
        self._run.end.before.append(self._save_at_end)

    def _saved_loop(self) -> Mapping[str, Any]:
        """Returns this worker's loop state in the checkpoint to resume from; {} if there is none."""
        resumed = self._run.resumed
        if not resumed or resumed["made_by"] != STEPS:
            return {}
        require_seen(self._run.index, resumed["prefix"])
        return self._extra_state.script(resumed["prefix"], read_about(resumed["prefix"]))

    def _save_at_end(self) -> None:
        """Saves at the end of the script if it has trained since the last save."""
        if self._run.end.is_bad:
            return
        if self._run.index > 0:
            self._run.chief.leave_state(self.loop.state())
        elif self._run.step > self.schedule.saved_step:
            self._run.chief.read_states(self.loop.state())
            self._saves.save(lambda _: self._content())

    def _take_in(self, variables: Mapping[str, _Trained]) -> tuple[list[str] | None, dict[str, str]]:
        """Returns the checkpoint names of a step's variables, and for new variables a map to their names in the step.

        Returns:
            None instead of the names if a step with the same variables is registered.
        """
        known = {_identity(one): name for name, one in self._named.items()}
        new: dict[str, str] = {}
        for name, one in variables.items():
            if _identity(one) not in known:
                known[_identity(one)] = free = self._free(name)
                self._named[free], new[free] = one, name
        names = sorted(known[_identity(one)] for one in variables.values())
        if names in self._steps:
            return None, new
        self._steps.append(names)
        return names, new

    def _free(self, name: str) -> str:
        """Returns an unused name based on this one: steps may use one name for different variables."""
        counted = (f"{name}_{number}" for number in itertools.count(1))
        return next(one for one in itertools.chain([name], counted) if one not in self._named)

    def _content(self) -> Content:
        values = [
            Value.of_script(name, one) if isinstance(one, TrackedVariable) else Value.in_session(name, one)
            for name, one in self._named.items()
        ]
        return Content(values, {"made_by": STEPS, "step": self._run.step, "steps": self._steps})

    def _saved(self, names: Sequence[str], new: Iterable[str]) -> list[str]:
        """On the chief, returns the new variables of a step that have a value in the checkpoint.

        Raises:
            CheckpointError: the checkpoint is not from this script.
        """
        resumed = self._run.resumed
        if not resumed or self._run.index > 0:
            return []
        prefix = resumed["prefix"]
        if resumed["made_by"] != STEPS:
            raise CheckpointError(
                f"{prefix} was saved by {resumed['made_by']}, and the script now trains with its own steps. Name "
                "another folder in `checkpoint` of the YAML."
            )
        reader = tf.train.load_checkpoint(prefix)
        there = _require_same(prefix, reader, {name: _stored(self._named[name]) for name in names})
        self._restored |= there
        if not there:
            self._warn_of_initial_values(names)
        return [name for name in new if name in there]

    def _warn_of_initial_values(self, names: Sequence[str]) -> None:
        """Warns of a step without a saved variable, unless steps before it have restored all that is saved."""
        prefix = self._run.resumed["prefix"]
        if unused := sorted({name for step in read_about(prefix)["steps"] for name in step} - self._restored):
            log.warning(
                "%s has no value of a step with the variables %s, which begins with their initial values; it has "
                "values of %s, which no step has used yet. If this is another model, or other names, name another "
                "folder in `checkpoint` of the YAML, or use the names from before.",
                prefix, some_of(names), some_of(unused),
            )  # fmt: skip


def _stored(variable: _Trained) -> StoredVariable:
    return variable.stored if isinstance(variable, TrackedVariable) else variable


def _identity(variable: _Trained) -> object:
    """Returns a key that two objects have if and only if they stand for one variable."""
    return id(variable) if isinstance(variable, TrackedVariable) else variable.shared_name


def _require_same(prefix: str, reader: Any, step: Mapping[str, StoredVariable]) -> set[str]:
    """Returns the variables of a step in the checkpoint: all of them, or none if the step never ran.

    Raises:
        CheckpointMismatchError: the step had other variables.
    """
    names = step.keys()
    steps = [set(saved) for saved in read_about(prefix)["steps"]]
    saved = max(steps, key=lambda one: len(one & names) - len(one ^ names))
    if not saved & names:
        return set()
    values = saved_values(reader)
    now = {name: described(stored.shape, stored.dtype) for name, stored in step.items()}
    require_alike(prefix, now, {name: values[name] for name in saved})
    return saved
