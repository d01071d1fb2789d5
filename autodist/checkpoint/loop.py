"""Loop: where a script's own loop over its steps is, so that another run goes on there."""

from __future__ import annotations

import dis
import functools
import logging
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Protocol

from autodist.checkpoint.script import DRAWS, resume_draws
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.runtime.dataset import DistributedDataset
from autodist.runtime.draws import Draws
from autodist.runtime.sampler import Sampler

log = logging.getLogger("autodist")

_KINDS: dict[type, str] = {DistributedDataset: "data", Sampler: "samplers"}
"""What has a place in a loop, and how a checkpoint calls such places."""

_HAS_DRAWN = "has_drawn"


class Placed(Protocol):
    """What a loop's batches come from.

    Attributes:
        on_request: called before it is asked for a batch; None: nobody wants to know.
    """

    on_request: Callable[[], None] | None

    def place_in_loop(self) -> Callable[[], Any]:
        """Gives its place of now, as JSON has it; None: it has none."""

    def go_on_in_loop(self, place: Any) -> None:
        """Goes on, with the next iteration, at such a place."""


class Loop:
    """Notes with each step what the script has drawn and read so far, and restores that in a run that goes on.

    A step is made after its batch was read and its noise drawn. So what is saved before it is where the script was when
    it asked for the step's first batch, or, where it asks no data set of ours, at the end of the step before.

    Args:
        saved: gives what a checkpoint has of the loop that this one goes on from; nothing where there is none.
    """

    def __init__(self, saved: Callable[[], Mapping[str, Any]]) -> None:
        self._saved = functools.cache(saved)
        self._data: dict[str, list[Placed]] = {kind: [] for kind in _KINDS.values()}
        self._has_begun = self._has_asked = self._has_resumed = self._has_told = self._has_late_data = False
        self._first: Draws | None = None
        self._noted: tuple[Draws, dict[str, list[Callable[[], Any]]]] | None = None

    def add(self, data: Placed) -> None:
        """The script makes a data set or sampler, which goes on where that of the earlier run was.

        They are matched by their order. One that is made after the first step may be another one in each epoch, and has
        no place.
        """
        if self._has_begun:
            data.on_request = self._on_late_request
            return
        data.on_request = self._on_request
        kind = _KINDS[type(data)]
        places, before = self._saved().get(kind, []), self._data[kind]
        if len(before) < len(places):
            data.go_on_in_loop(places[len(before)])
        before.append(data)

    def asked_where_to_begin(self, frame: FrameType) -> None:
        """The script asks how many steps are done; in the head of its loop, all that it draws next belongs to that."""
        if not self._has_begun and not self._has_asked and _is_in_head(frame):
            self._resume_draws()

    def before_first_step(self) -> None:
        """The first training step comes, of whose batch the script has drawn and read what it needs."""
        self._has_begun = True
        if not self._has_resumed and self._saved().get(_HAS_DRAWN):
            log.warning(
                "NumPy's or Python's generator was drawn from between steps of the run that is gone on from, and goes "
                "on otherwise here, since it is not seen where the loop begins. Ask for ad.steps_done in its head, "
                "`for step in range(ad.steps_done, …)`, or let it read its batches from ad.distribute_dataset(…).",
                extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def after_step(self) -> None:
        """A training step was made."""
        self._has_asked = self._has_late_data = False
        self._note()

    def state(self) -> dict[str, Any]:
        """What is saved of it, as JSON has it, before a step or at the end."""
        if self._has_late_data and not self._has_told:
            self._has_told = True
            log.warning(
                "what is made by ad.distribute_dataset or ad.sampler after the first training step has no place in "
                "checkpoints: a run that goes on begins it with its first batch. Make it before the loop, or let it "
                "pass over what was trained on by itself: dataset.skip(…).", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        if self._noted is None:
            self._note()
        assert self._noted is not None and self._first is not None, "it was noted"
        draws, places = self._noted
        has_drawn = self._saved().get(_HAS_DRAWN, False) or len(self._first.unmoved()) < len(self._first.states)
        told = {kind: [place() for place in given] for kind, given in places.items()}
        return {DRAWS: draws.told(), _HAS_DRAWN: has_drawn, **told}

    # --------------------------------------------------------------------------------------------------------------

    def _on_request(self) -> None:
        """A data set or sampler is asked for a batch: with the first one since a step, the loop begins again."""
        if self._has_asked:
            return
        self._has_asked = True
        if self._has_begun:
            self._note()
        else:
            self._resume_draws()

    def _on_late_request(self) -> None:
        self._has_late_data = True
        self._on_request()

    def _resume_draws(self) -> None:
        self._has_resumed = True
        resume_draws(self._saved())

    def _note(self) -> None:
        places = {kind: [one.place_in_loop() for one in made] for kind, made in self._data.items()}
        self._noted = Draws.now(), places
        self._first = self._first or self._noted[0]


def _is_in_head(frame: FrameType) -> bool:
    """Whether what a frame is about to get is part of what a `for` goes over."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            if instruction.opname == "GET_ITER":
                return True
            if instruction.opname.startswith(("STORE", "POP", "RETURN", "JUMP")):
                return False
    return False
