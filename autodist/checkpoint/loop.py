"""Loop: the position of a script's own training loop, so that another run resumes there."""

from __future__ import annotations

import dis
import functools
import logging
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Protocol

from autodist.checkpoint.extra_state import DRAWS, resume_draws
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.runtime.dataset import DistributedDataset
from autodist.runtime.draws import Draws
from autodist.runtime.sampler import Sampler

log = logging.getLogger("autodist")

_KINDS: dict[type, str] = {DistributedDataset: "data", Sampler: "samplers"}
"""Objects with a position in a loop, and the name of their positions in a checkpoint."""

_HAS_DRAWN = "has_drawn"


class PositionedSource(Protocol):
    """A source of a loop's batches.

    Attributes:
        on_request: called before a batch is requested; None: no call.
    """

    on_request: Callable[[], None] | None

    def place_in_loop(self) -> Callable[[], Any]:
        """Returns a function that returns the current position as JSON; its result is None if there is no position."""

    def resume_in_loop(self, place: Any) -> None:
        """Resumes at such a position, with the next iteration."""


class Loop:
    """Records at each step the random state and the data positions of the script, and restores them in a resumed run.

    A step runs after its batch was read and its noise was drawn. So the state saved before a step is the state at the
    request for the step's first batch. Without data sets of AutoDist, it is the state at the end of the previous step.

    Args:
        saved: returns the loop's state in the checkpoint to resume from; {} if there is none.
    """

    def __init__(self, saved: Callable[[], Mapping[str, Any]]) -> None:
        self._saved = functools.cache(saved)
        self._data: dict[str, list[PositionedSource]] = {kind: [] for kind in _KINDS.values()}
        self._has_begun = self._has_requested = self._has_resumed = self._has_warned = self._has_late_data = False
        self._first: Draws | None = None
        self._noted: tuple[Draws, dict[str, list[Callable[[], Any]]]] | None = None

    def add(self, data: PositionedSource) -> None:
        """Registers a new data set or sampler, and resumes it at the position of the earlier run.

        Data sets and samplers of two runs are matched by order of creation. One that is created after the first step
        may be new in each epoch, so it has no position.
        """
        if self._has_begun:
            data.on_request = self._on_late_request
            return
        data.on_request = self._on_request
        kind = _KINDS[type(data)]
        places, before = self._saved().get(kind, []), self._data[kind]
        if len(before) < len(places):
            data.resume_in_loop(places[len(before)])
        before.append(data)

    def on_begin_read(self, frame: FrameType) -> None:
        """Called when the script reads the number of steps; in the head of its loop, this restores the random state."""
        if not self._has_begun and not self._has_requested and _is_in_head(frame):
            self._resume_draws()

    def before_first_step(self) -> None:
        """Called before the first training step; the script has already read its batch and drawn its noise."""
        self._has_begun = True
        if not self._has_resumed and self._saved().get(_HAS_DRAWN):
            log.warning(
                "NumPy's or Python's generator was used between steps of the earlier run. It continues with other "
                "numbers here, since the start of the loop cannot be detected. Read ad.steps_done in its head, "
                "`for step in range(ad.steps_done, …)`, or read the batches from ad.distribute_dataset(…).",
                extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def after_step(self) -> None:
        """Called after a training step."""
        self._has_requested = self._has_late_data = False
        self._note()

    def state(self) -> dict[str, Any]:
        """Returns the state to be saved as JSON, before a step or at the end."""
        if self._has_late_data and not self._has_warned:
            self._has_warned = True
            log.warning(
                "data sets and samplers created by ad.distribute_dataset or ad.sampler after the first training step "
                "have no position in checkpoints: a resumed run starts them at their first batch. Create them before "
                "the loop, or skip the batches that were trained on: dataset.skip(…).", extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        if self._noted is None:
            self._note()
        assert self._noted is not None and self._first is not None, "noted above"
        draws, places = self._noted
        has_drawn = self._saved().get(_HAS_DRAWN, False) or len(self._first.unmoved()) < len(self._first.states)
        positions = {kind: [place() for place in getters] for kind, getters in places.items()}
        return {DRAWS: draws.to_json(), _HAS_DRAWN: has_drawn, **positions}

    # --------------------------------------------------------------------------------------------------------------

    def _on_request(self) -> None:
        """Called at each request for a batch; the first request after a step starts the next iteration of the loop."""
        if self._has_requested:
            return
        self._has_requested = True
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
    """Returns True if the value that a frame is about to get is part of the iterable of a `for`."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            if instruction.opname == "GET_ITER":
                return True
            if instruction.opname.startswith(("STORE", "POP", "RETURN", "JUMP")):
                return False
    return False
