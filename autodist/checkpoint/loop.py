"""Loop: where a script's own loop over its steps is, so that another run goes on there."""

from __future__ import annotations

import dis
import functools
import logging
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from autodist.checkpoint.script import DRAWS, resume_draws
from autodist.messages import ALIKE_EVERYWHERE
from autodist.runtime.dataset import DistributedDataset, Place
from autodist.runtime.draws import Draws

log = logging.getLogger("autodist")

_DATA, _HAS_DRAWN = "data", "has_drawn"


class Loop:
    """Notes with each step what the script has drawn and read, and finds that again where it goes on.

    A step is made after its batch was read and its noise drawn. So what is saved before it is where the script was when
    it asked for the step's first batch, or, where it asks no data set of ours, at the end of the step before.

    Args:
        saved: gives what a checkpoint has of the loop that this one goes on from; nothing where there is none.
    """

    def __init__(self, saved: Callable[[], Mapping[str, Any]]) -> None:
        self._saved = functools.cache(saved)
        self._data: list[DistributedDataset] = []
        self._has_begun = self._has_asked = self._has_resumed = self._has_told = self._has_late_data = False
        self._first: Draws | None = None
        self._noted: tuple[Draws, list[Place]] | None = None

    def add(self, dataset: DistributedDataset) -> None:
        """A data set is made, whose batches may be what steps are made of; one of an earlier run goes on where it was.

        They are known by their order. One that is made between two steps is another in each epoch, maybe.
        """
        if self._has_begun:
            dataset.on_request = self._on_late_request
            return
        dataset.on_request = self._on_request
        places = self._saved().get(_DATA, [])
        if len(self._data) < len(places):
            dataset.resume(Place.of(places[len(self._data)]), is_loop_over=True)
        self._data.append(dataset)

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
                "a data set that is made by ad.distribute_dataset after the first training step has no place in "
                "checkpoints: a run that goes on begins it with its first batch. Make it before the loop, or let it "
                "pass over what was trained on by itself: dataset.skip(…).", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        if self._noted is None:
            self._note()
        assert self._noted is not None and self._first is not None, "it was noted"
        draws, places = self._noted
        has_drawn = self._saved().get(_HAS_DRAWN, False) or len(self._first.unmoved()) < len(self._first.states)
        return {DRAWS: draws.told(), _HAS_DRAWN: has_drawn, _DATA: [place.told() for place in places]}

    # --------------------------------------------------------------------------------------------------------------

    def _on_request(self) -> None:
        """A data set is asked for a batch: with the first one since a step, the loop begins again."""
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
        self._noted = Draws.now(), [dataset.place for dataset in self._data]
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
