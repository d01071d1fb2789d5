"""Control code on three simulated workers: no drawn order of threads and messages blocks it or changes a value.

`AUTODIST_CONTROL_SCENARIOS=5000 pytest tests/unit/runs/test_control_model.py -k scenarios` draws more scenarios.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from autodist.runs.peers import Peers
from autodist.runtime.call_matching import CallMatching, CallMessage, CallMessageKind
from autodist.runtime.control_messages import ControlKind, ControlMessage
from autodist.runtime.write_consensus import WriteConsensus
from tests.unit.runs.control_scenarios import Fault, Scenario, legal, run
from tests.unit.runs.control_scripts import ALL, Kind, Line
from tests.unit.runs.simulated_cluster import Mailbox
from tests.unit.runs.simulated_workers import CONSTANT, TRAINED, Setting

CHIEF, OTHER, THIRD = (0,), (1,), (2,)

_FAULTY = (Kind.FAIL, Kind.LEAVE, Kind.REFUSE, Kind.REJECT)
_BY_SOME = (Kind.ASSIGN, Kind.READ, Kind.EVALUATE, Kind.WRITE)
_KINDS = [Kind.TRAIN] * 4 + [Kind.ASSIGN] * 4 + [Kind.EVALUATE] * 2 + [k for k in Kind if k not in _FAULTY[:2]]

_VARIABLES = st.sampled_from([TRAINED, CONSTANT])
_SOME = st.sampled_from([ALL, ALL, CHIEF, OTHER, THIRD, (0, 1), (0, 2), (1, 2)])


def _line(kind: Kind) -> st.SearchStrategy[Line]:
    """Draws a line that ends no run."""
    by = _SOME if kind in _BY_SOME else st.sampled_from([ALL, CHIEF] if kind is Kind.SAVE else [ALL])
    return st.builds(Line, st.just(kind), by, _VARIABLES)


LINES = st.sampled_from(_KINDS).flatmap(_line)
FAULTY_LINES = st.builds(
    Line, st.sampled_from(_FAULTY), st.sampled_from([CHIEF, OTHER, THIRD, ALL]), survives=st.booleans()
)
IN_LOCKSTEP = st.builds(Setting, owner=st.sampled_from([None, None, 0, 1, 2]), is_large=st.booleans())
ASYNCHRONOUS = st.builds(Setting, st.just(True), st.sampled_from(ALL), st.booleans())
SCHEDULES = st.sampled_from([0, 30, 100, 300, 600]).flatmap(lambda length: st.binary(min_size=length, max_size=length))
_DEATHS = st.builds(Fault, st.integers(5, 250), st.sampled_from(ALL), st.none(), st.integers(0, 2))
_LINKS = st.sampled_from([(0, 1), (0, 2), (1, 0), (2, 0)]).flatmap(
    lambda link: st.builds(Fault, st.integers(5, 250), st.just(link[0]), st.just(link[1]), st.integers(0, 2))
)


def scripts(*lines: st.SearchStrategy[Line]) -> st.SearchStrategy[tuple[Line, ...]]:
    return st.lists(st.one_of(*lines), max_size=7).map(legal)


_COUNT = int(os.environ.get("AUTODIST_CONTROL_SCENARIOS", "25"))

_DRAWN = settings(max_examples=_COUNT, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("simulated-")]


@_DRAWN
@given(st.builds(Scenario, IN_LOCKSTEP, scripts(LINES), SCHEDULES, states=st.booleans()))
def test_scenarios_in_lockstep_have_the_values_of_one_device(scenario: Scenario):
    run(scenario)


@_DRAWN
@given(st.builds(Scenario, ASYNCHRONOUS, scripts(LINES), SCHEDULES, states=st.booleans()))
def test_scenarios_with_asynchronous_steps_lose_no_update_and_no_write(scenario: Scenario):
    run(scenario)


@_DRAWN
@given(
    st.builds(
        Scenario,
        st.one_of(IN_LOCKSTEP, ASYNCHRONOUS),
        scripts(LINES, LINES, FAULTY_LINES),
        SCHEDULES,
        st.one_of(st.none(), _DEATHS, _LINKS),
        st.booleans(),
        st.sampled_from([1, 2]),
    )
)
def test_scenarios_with_a_fault_end_on_all_workers_by_the_first_cause(scenario: Scenario):
    """The next run begins while workers of the failed one still send messages."""
    run(scenario)


# -- schedules that once failed ----------------------------------------------------------------------------------------

TRAIN = Line(Kind.TRAIN)

ONCE_FAILED = {
    "a worker evaluates alone before all restore": Scenario(
        Setting(), (Line(Kind.EVALUATE, OTHER), Line(Kind.RESTORE))
    ),
    "a worker evaluates alone before all refuse a step": Scenario(
        Setting(), (Line(Kind.EVALUATE, OTHER), Line(Kind.REFUSE))
    ),
    "a worker writes a variable that all have just reset": Scenario(
        Setting(), (TRAIN, Line(Kind.RESET), Line(Kind.ASSIGN, OTHER), TRAIN)
    ),
    "all exchange a value after asynchronous steps before which the chief has written": Scenario(
        Setting(True, 0), (Line(Kind.ASSIGN, CHIEF), TRAIN)
    ),
    "a worker that is ahead has written as well": Scenario(
        Setting(True, 2),
        (Line(Kind.ASSIGN, CHIEF, CONSTANT), TRAIN, Line(Kind.ASSIGN, (0, 1)), TRAIN),
    ),
    "a worker dies while the others refuse a step": Scenario(
        Setting(owner=1), (Line(Kind.REJECT),), fault=Fault(23, 1, None, 2)
    ),
    "a dropped write is told although the step is void": Scenario(
        Setting(owner=1), (Line(Kind.ASSIGN, THIRD, CONSTANT), Line(Kind.ASSIGN, (0, 2)), TRAIN)
    ),
    "COMING, which was decided before READY, is sent after it": Scenario(
        Setting(),
        (Line(Kind.ASSIGN), TRAIN),
        b"\x00\xd3\x00v]b\xa3\x00\x00\x00\x00\x00\x00\x00\x00\x00\xdd\xb3\x00\xc7\xb3\xfa\x93",
    ),
    "READY replaces VOIDED while the chief waits for another worker": Scenario(
        Setting(),
        (Line(Kind.ASSIGN, CHIEF), TRAIN),
        bytes(15) + b"I\x00A\x003\x96\x0f\x00\x00\x00\x00\x00\xb8\xaa2\xa1\x00\x00V",
    ),
    "the chief repeats a step before the others have ended the void one": Scenario(
        Setting(),
        (Line(Kind.ASSIGN, (0, 1)), TRAIN),
        b"\x87'"
        + bytes(14)
        + b"azL\x92\x00\x00\x00\x00\x00l\x00\x00\xcf,\x00\x00\x00\x00\x00\x005\xe9\x00\x00\xff\xb75\xcb"
        + bytes(14)
        + b"2\xdfu\xb9\x8c\xec\xa5\xa9\x00\x00i\x01\x00\x00\x14\xea\x00\x00b\xce",
    ),
    "BEGUN overtakes PUSHED": Scenario(
        Setting(),
        (Line(Kind.ASSIGN, (0, 1), CONSTANT), TRAIN),
        b"\x00\x00m"
        + bytes(12)
        + b"\x7f:\x00\x00>sz\x00\x00\x00J\xa0\x12\x8b\x00\x00\x00\x00\x00\xd1&"
        + bytes(7)
        + b"\xe6\xff\x00u\x00o\x9e1\x00e]!\x9d\x07\x97",
    ),
}


@pytest.mark.parametrize("scenario", ONCE_FAILED.values(), ids=ONCE_FAILED)
def test_scenario_that_once_failed(scenario: Scenario):
    run(scenario)


# -- faults put in on purpose ------------------------------------------------------------------------------------------


_ended = WriteConsensus.ended


def _counts_void_step(consensus: WriteConsensus) -> bool:
    _ended(consensus)
    return False


_pushed = WriteConsensus.pushed


def _does_not_wait_for_receivers(consensus: WriteConsensus, names: list[str], waits: bool = True) -> None:
    _pushed(consensus, names, waits=False)


def _leaves_in_silence(calls: CallMatching) -> None:
    calls._advance(1 << 62)
    calls.answer()


_receive_call = CallMatching.receive


def _decides_twice(calls: CallMatching, message: CallMessage) -> None:
    """Answers ALONE to a worker that gives up, even if TOGETHER is on its way; that answer is the later one."""
    if message.kind is CallMessageKind.GIVES_UP and not calls._is_open(message):
        calls._send([message.worker], calls._message(CallMessageKind.ALONE, number=message.number))
    _receive_call(calls, message)


_receive_control = WriteConsensus.receive


def _forgets_waiting(consensus: WriteConsensus, message: ControlMessage) -> None:
    if message.kind is not ControlKind.WAITING:
        _receive_control(consensus, message)


def _reads_newest_first(mailbox: Mailbox, source: int) -> bytes:
    return mailbox._cluster.mail[source, mailbox._process.index].items.pop()


def _fails_in_silence(peers: Peers, error: BaseException) -> None:
    """Leaves a worker that waits for a dead one waiting."""


WRITES = (Line(Kind.ASSIGN, CHIEF), TRAIN, Line(Kind.READ))

FAULTS_ON_PURPOSE = {
    "a void step counts": (WriteConsensus, "ended", _counts_void_step, Setting(), WRITES),
    "PUSHED comes before TAKEN": (
        WriteConsensus,
        "pushed",
        _does_not_wait_for_receivers,
        Setting(True, 1),
        (Line(Kind.ASSIGN), TRAIN),
    ),
    "a worker that leaves does not say so": (
        CallMatching,
        "leave",
        _leaves_in_silence,
        Setting(),
        (),
    ),
    "ALONE after TOGETHER": (CallMatching, "receive", _decides_twice, Setting(), (Line(Kind.EVALUATE),)),
    "no answer to WAITING": (
        WriteConsensus,
        "receive",
        _forgets_waiting,
        Setting(),
        (Line(Kind.ASSIGN, OTHER), TRAIN),
    ),
    "messages of a sender are reordered": (Mailbox, "take", _reads_newest_first, Setting(), WRITES),
    "a death is not told to a worker that waits": (Peers, "fail", _fails_in_silence, Setting(), (TRAIN,) * 6),
}


@pytest.mark.parametrize("owner, name, fault, setting, lines", FAULTS_ON_PURPOSE.values(), ids=FAULTS_ON_PURPOSE)
def test_fault_on_purpose_is_found(
    owner: type, name: str, fault: Callable[..., object], setting: Setting, lines: tuple[Line, ...]
):
    death = st.builds(Fault, st.integers(20, 80), st.just(1)) if owner is Peers else st.none()
    scenarios = st.builds(Scenario, st.just(setting), st.just(lines), SCHEDULES, death)
    with mock.patch.object(owner, name, fault):
        find(scenarios, _fails, settings=settings(_DRAWN, max_examples=500, phases=[Phase.generate], database=None))


def _fails(scenario: Scenario) -> bool:
    try:
        run(scenario)
    except AssertionError:
        return True
    return False
