"""What `checkpoint` in the YAML does: saves what a script's training steps work on, and goes on from it."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import tensorflow as tf

from autodist.checkpoint.content import Content, Value
from autodist.checkpoint.extra_state import ExtraState
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.loop import Loop
from autodist.checkpoint.preemption import Preemption
from autodist.checkpoint.read import described, read_about, require_alike, require_seen, saved_values
from autodist.checkpoint.save import Saves
from autodist.checkpoint.save_schedule import Schedule
from autodist.checkpoint.slices import Here, read_here
from autodist.errors import CheckpointError
from autodist.graph.step import Step
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.resources import CheckpointSection
from autodist.runs.run import Run
from autodist.runs.step_observer import StepObserver
from autodist.runtime.eager_watch import unwatched
from autodist.runtime.variables import Kept, Tracked

log = logging.getLogger("autodist")

STEPS = "steps"
"""What the side file says has made a checkpoint: the steps of a script's own loop."""


@dataclass(frozen=True)
class _Named:
    """A variable that has a name in checkpoints.

    Attributes:
        identity: tells the variable from others.
        kept: gives how the session keeps it, or will.
        value: gives what is saved of it now.
    """

    identity: object
    kept: Callable[[], Kept]
    value: Callable[[], Value]


class Automatic(StepObserver):
    """Saves the variables of the training steps that a script calls, and restores them before each is made first.

    They are known by their names in the steps; variables that no training step reads or writes are the script's affair.

    Args:
        run: in which they are trained.
        section: what the YAML says.
        preemption: asks the schedules by which the run is saved to save at SIGTERM, too; None: nothing does.

    Attributes:
        schedule: decides when a loop of steps is saved.
        is_left_out: whether nothing is saved here at the moment, since a `fit` runs, which its callback saves.
        is_asked: whether the script has asked how many steps are done.
        loop: where the script is between two steps.
    """

    def __init__(self, run: Run, section: CheckpointSection, preemption: Preemption | None) -> None:
        self._run, self._folder = run, Folder(section.folder)
        self._saves, self._preemption = Saves(run, self._folder, section.keep), preemption
        self.schedule = Schedule(
            run.index == 0,
            lambda said: run.coordination.share(said, "a training step"),
            section.every_steps,
            section.every_minutes,
            run.step,
        )
        self.is_left_out = self.is_asked = False
        self._named: dict[str, _Named] = {}
        self._steps: list[list[str]] = []
        self._round: set[int] = set()
        self._has_begun = False
        self._beside = ExtraState(run)
        self.loop = Loop(self._saved_loop)
        self.on_schedule(self.schedule)

    def asked_for_steps(self, frame: FrameType) -> None:
        """The script asks how many steps are done, in this frame."""
        self.is_asked = True
        self.loop.asked_where_to_begin(frame)

    def on_schedule(self, schedule: Schedule) -> None:
        if self._preemption is not None:
            self._preemption.watch(schedule)

    def after_step(self) -> None:
        if not self.is_left_out:
            self.loop.after_step()

    def on_tracked(self, item: Step, variables: Mapping[str, Tracked]) -> None:
        """Takes in, and restores, the variables of a step that trains."""
        if self.is_left_out or not item.gradients:
            return
        self._begin()
        found = {
            name: _Named(id(tracked), functools.partial(_kept_of, tracked), functools.partial(_value_of, tracked))
            for name, tracked in variables.items()
        }
        names, new = self._take_in(found)
        if names is None:
            return
        if saved := self._saved(names, new):
            with unwatched():
                read_here(self._run.resumed["prefix"], [Here(name, variables[new[name]].source) for name in saved])
        if self._run.resumed:  # with the next step all take the chief's values
            for name in new.values():
                variables[name].is_ahead, variables[name].is_behind = True, False

    def on_session(self, variables: Mapping[str, Kept]) -> Mapping[str, Kept]:
        """Takes in the variables of a session."""
        if self.is_left_out:
            return {}
        self._begin()
        found = {
            name: _Named(
                kept.shared_name, functools.partial(_itself, kept), functools.partial(Value.in_session, "", kept)
            )
            for name, kept in variables.items()
        }
        names, new = self._take_in(found)
        return {} if names is None else {name: variables[new[name]] for name in self._saved(names, new)}

    def before_step(self, step: object) -> None:
        """Saves where it is time.

        A loop may have several steps, one for each network say. It is saved where the loop begins again, which is
        before a step that was made since.
        """
        if self.is_left_out:
            return
        begins_again = id(step) in self._round
        if begins_again:
            self._round.clear()
        self._round.add(id(step))
        if begins_again and self.schedule.is_due(self._run.step):
            self.save()

    def save(self, background: bool = True) -> None:
        """Saves now; all workers call it between two steps."""
        self._run.chief.save(
            lambda: self._saves.save(lambda _: self._content(), background),
            is_certain=True,
            tell=self.loop.state,
        )
        self.schedule.saved(self._run.step)

    # --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._run.resumed and not self.is_asked:
            log.warning(
                "the variables are those after %d steps, and the script has not asked for ad.steps_done: a loop that "
                "counts its steps itself makes all of them once more. Begin it there: range(ad.steps_done, …).",
                self._run.step, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        self.loop.before_first_step()
        if self._run.resumed:
            prefix = self._run.resumed["prefix"]
            require_seen(self._run.index, prefix)
            self._beside.resume(prefix, read_about(prefix), is_same=False)
        if self._run.index == 0:
            self._folder.claim()
        self._run.end.before.append(self._save_at_end)

    def _saved_loop(self) -> Mapping[str, Any]:
        """What the checkpoint that the run goes on from holds of this worker's loop; empty: nothing."""
        resumed = self._run.resumed
        if not resumed or resumed["made_by"] != STEPS:
            return {}
        require_seen(self._run.index, resumed["prefix"])
        return self._beside.script(resumed["prefix"], read_about(resumed["prefix"]))

    def _save_at_end(self) -> None:
        """Saves at the end of the script what was trained since the last save."""
        if self._run.end.is_bad:
            return
        if self._run.index > 0:
            self._run.chief.tell_at_end(self.loop.state())
        elif self._run.step > self.schedule.saved_step:
            self._run.chief.hear_at_end(self.loop.state())
            self._saves.save(lambda _: self._content())

    def _take_in(self, variables: Mapping[str, _Named]) -> tuple[list[str] | None, dict[str, str]]:
        """The names in checkpoints of a step's variables, and for new ones, by that name, their name in the step.

        Returns:
            None in place of the names where a step with the same variables is known.
        """
        known = {one.identity: name for name, one in self._named.items()}
        new: dict[str, str] = {}
        for name, one in variables.items():
            if one.identity not in known:
                known[one.identity] = free = self._free(name)
                self._named[free], new[free] = one, name
        names = sorted(known[one.identity] for one in variables.values())
        if names in self._steps:
            return None, new
        self._steps.append(names)
        return names, new

    def _free(self, name: str) -> str:
        """A name like this one that no variable has yet: steps may call different ones alike."""
        counted = (f"{name}_{number}" for number in itertools.count(1))
        return next(one for one in itertools.chain([name], counted) if one not in self._named)

    def _content(self) -> Content:
        values = [replace(one.value(), key=name) for name, one in self._named.items()]
        return Content(values, {"made_by": STEPS, "step": self._run.step, "steps": self._steps})

    def _saved(self, names: Sequence[str], new: Iterable[str]) -> list[str]:
        """On the chief, the new variables of a step of which the checkpoint has values.

        Raises:
            CheckpointError: the checkpoint is not of this script.
        """
        resumed = self._run.resumed
        if not resumed or self._run.index > 0:
            return []
        prefix = resumed["prefix"]
        if resumed["made_by"] != STEPS:
            raise CheckpointError(
                f"{prefix} was saved by {resumed['made_by']}, and the script trains by steps of its own now. Name "
                "another folder in `checkpoint` of the YAML."
            )
        reader = tf.train.load_checkpoint(prefix)
        there = _require_same(prefix, reader, {name: self._named[name].kept() for name in names})
        return [name for name in new if name in there]


def _itself(kept: Kept) -> Kept:
    return kept


def _kept_of(tracked: Tracked) -> Kept:
    return tracked.kept


def _value_of(tracked: Tracked) -> Value:
    return Value("", tracked.read, tracked.kept if tracked.may_be_behind else None)


def _require_same(prefix: str, reader: Any, step: Mapping[str, Kept]) -> set[str]:
    """Which variables of a step are in the checkpoint: all of them, or none, where that step was never made.

    Raises:
        CheckpointMismatchError: the step had other variables.
    """
    names = step.keys()
    steps = [set(saved) for saved in read_about(prefix)["steps"]]
    saved = max(steps, key=lambda one: len(one & names) - len(one ^ names))
    if not saved & names:
        return set()
    values = saved_values(reader)
    now = {name: described(kept.shape, kept.dtype) for name, kept in step.items()}
    require_alike(prefix, now, {name: values[name] for name in saved})
    return saved
