"""CallMatching: whether all workers make a call together that each can also make for itself, as an evaluation.

A script evaluates on every worker, or on one alone: `if ad.is_chief: model.evaluate(…)`. Who makes such a call says so,
and the chief decides. A worker that comes to something else first, to a step or to the end of its script, does not make
the call; the chief asks those of which it has not heard. Nobody waits for ever for a worker that neither calls nor goes
on: then who calls does so alone, which takes longer and gives the same.
"""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

PATIENCE = 30.0
"""Seconds to wait for workers that neither make the call nor come to something else, unless all are known to call."""

ASKS_AFTER = 0.02
"""Seconds in which the chief waits for the calls of others, which mostly make what it makes, before it asks them."""

_END = 1 << 62
"""The place that no worker goes beyond."""


class Word(enum.StrEnum):
    """What a note says."""

    CALLING = "calling"  # to the chief: I make a call
    GIVES_UP = "gives up"  # to the chief: I have waited for long, and make it alone unless you have decided
    ASKED = "asked"  # from the chief: do you make a call before what comes next?
    PASSED = "passed"  # to the chief: I do not, I am at something else; from the chief: I make no more calls
    TOGETHER = "together"  # from the chief: all make your call
    ALONE = "alone"  # from the chief: you make it alone


@dataclass(frozen=True)
class Call:
    """A call that workers may make together.

    Attributes:
        what: is called. A worker that makes another call may come to this one yet.
        data: with which it is called; only calls with the same are made together.
    """

    what: str
    data: str = ""


@dataclass(frozen=True)
class Note:
    """What one worker tells another of calls.

    Attributes:
        word: what the note says.
        worker: who says it.
        place: how many things that all workers do alike the worker had come to.
        call: that is made.
        number: of the call, counted on the worker that makes it.
    """

    word: Word
    worker: int
    place: int
    call: Call | None = None
    number: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Note:
        content = json.loads(message)
        call = None if content["call"] is None else Call(**content["call"])
        return cls(**{**content, "word": Word(content["word"]), "call": call})


class CallMatching:
    """One worker's side.

    Args:
        worker: its index; 0 is the chief.
        workers: how many there are.
        send: brings a note to some workers.
    """

    def __init__(self, worker: int, workers: int, send: Callable[[Sequence[int], Note], None]) -> None:
        self._worker, self._others, self._send = worker, [w for w in range(workers) if w != worker], send
        self._changed = threading.Condition()
        self._place = 0
        self._number = 0
        self._asked: int | None = None
        self._decided: dict[int, bool] = {}
        self._open: dict[int, Note] = {}
        self._passed: dict[int, int] = {}
        self._owed: list[tuple[int, Note]] = []

    def passes(self) -> bool:
        """This worker comes to what all do alike, a step say; a call that another made before that is not common.

        Returns:
            Whether others wait for `answer`.
        """
        self._go_to(self._place + 1)
        return bool(self._owed)

    def answer(self) -> None:
        """Tells those who wait for it that this worker has passed."""
        with self._changed:
            owed, self._owed = self._owed, []
        for to, note in owed:
            self._send([to], note)

    def leave(self) -> None:
        """This worker's script makes no more calls."""
        self._go_to(_END)
        self.answer()
        self._send(self._others if self._worker == 0 else [0], self._note(Word.PASSED))

    def are_made_together(self, call: Call, is_certain: bool = False) -> bool:
        """Whether all workers make this call; waits till that is clear.

        Args:
            call: this worker's.
            is_certain: whether all workers come to it, so that it pays to wait for them however long they take.
        """
        patience = None if is_certain else PATIENCE
        return self._gather(call, patience) if self._worker == 0 else self._ask(call, patience)

    def have_all_left(self) -> bool:
        """On the chief, whether no other worker makes any more calls; waits a while for those that say nothing."""
        with self._changed:
            silent, asked = self._yet_to_say(), self._note(Word.ASKED)
        if silent:
            self._send(silent, asked)
        with self._changed:
            self._changed.wait_for(lambda: not self._yet_to_say(), PATIENCE)
            return all(self._passed.get(worker) == _END for worker in self._others)

    def receive(self, note: Note) -> None:
        """Takes in what another worker says; in another thread than the script's."""
        answer = None
        with self._changed:
            match note.word:
                case Word.CALLING if self._place <= note.place:
                    self._open[note.worker] = note
                case Word.CALLING:
                    answer = self._note(Word.ALONE, number=note.number)
                case Word.GIVES_UP if self._is_open(note):
                    del self._open[note.worker]
                    answer = self._note(Word.ALONE, number=note.number)
                case Word.PASSED:
                    self._passed[note.worker] = max(note.place, self._passed.get(note.worker, 0))
                case Word.ASKED if self._place > note.place:
                    answer = self._note(Word.PASSED)
                case Word.ASKED:
                    self._asked = note.place
                case Word.TOGETHER | Word.ALONE:
                    self._decided[note.number] = note.word is Word.TOGETHER
            self._changed.notify_all()
        if answer is not None:
            self._send([note.worker], answer)

    def _note(self, word: Word, call: Call | None = None, number: int = 0) -> Note:
        return Note(word, self._worker, self._place, call, number)

    def _is_open(self, note: Note) -> bool:
        return note.worker in self._open and self._open[note.worker].number == note.number

    def _go_to(self, place: int) -> None:
        with self._changed:
            self._place = place
            late = [self._open.pop(w) for w in sorted(self._open) if self._open[w].place < place]
            self._owed += [(n.worker, self._note(Word.ALONE, number=n.number)) for n in late]
            if self._asked is not None and self._asked < place:
                self._asked = None
                self._owed.append((0, self._note(Word.PASSED)))

    # -- on the chief ----------------------------------------------------------------------------------------------

    def _gather(self, call: Call, patience: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._yet_to_say(), ASKS_AFTER)
            silent = self._yet_to_say()
            asked = self._note(Word.ASKED)
        if silent:
            self._send(silent, asked)
        with self._changed:
            self._changed.wait_for(lambda: not self._yet_to_say(), patience)
            mine = self._note(Word.CALLING, call)
            callers = [w for w in self._others if w in self._open and _is_like(self._open[w], mine)]
            are_all = callers == self._others and all(self._open[w].call == call for w in callers)
            word = Word.TOGETHER if are_all else Word.ALONE
            answers = [(w, self._note(word, number=self._open.pop(w).number)) for w in callers]
        for to, note in answers:
            self._send([to], note)
        return are_all

    def _yet_to_say(self) -> list[int]:
        return [w for w in self._others if w not in self._open and self._passed.get(w, 0) <= self._place]

    # -- on the others ---------------------------------------------------------------------------------------------

    def _ask(self, call: Call, patience: float | None) -> bool:
        with self._changed:
            self._number += 1
            number, calling = self._number, self._note(Word.CALLING, call, self._number)
            gives_up = self._note(Word.GIVES_UP, call, number)
        self._send([0], calling)
        with self._changed:
            is_decided = self._changed.wait_for(lambda: self._is_clear(number), patience)
        if not is_decided:
            self._send([0], gives_up)
        with self._changed:
            self._changed.wait_for(lambda: self._is_clear(number))
            return self._decided.pop(number, False)

    def _is_clear(self, number: int) -> bool:
        return number in self._decided or 0 in self._passed


def _is_like(one: Note, other: Note) -> bool:
    """Whether two workers call the same thing at the same place, be it with data of their own."""
    calls = one.call is not None and other.call is not None and one.call.what == other.call.what
    return calls and one.place == other.place
