from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from autodist.reading import data_sets, ended_iterators
from autodist.reading.ended_iterators import destroy_aside

LIMIT = 30.0


class Resource:
    """Its destruction takes until `may_end`, unless that is set; `destroyed_by` receives the thread's name."""

    def __init__(self) -> None:
        self.may_end, self.has_ended, self.destroyed_by = threading.Event(), threading.Event(), list[str]()

    def handle(self) -> Any:
        return _Handle(self)


class _Handle:
    def __init__(self, resource: Resource) -> None:
        self._resource = resource

    def __del__(self) -> None:
        self._resource.may_end.wait(LIMIT)
        self._resource.destroyed_by.append(threading.current_thread().name)
        self._resource.has_ended.set()


class Reader:
    pass


@pytest.fixture
def resource() -> Iterator[Resource]:
    made = Resource()
    yield made
    made.may_end.set()


def test_who_drops_a_reader_does_not_wait_for_its_resource(resource: Resource) -> None:
    reader = Reader()
    destroy_aside(reader, [resource.handle()])
    del reader
    assert not resource.has_ended.is_set()
    resource.may_end.set()
    assert resource.has_ended.wait(LIMIT)
    assert resource.destroyed_by == ["autodist-iterator"]


def test_nor_does_another_owner_that_ends_a_moment_later(resource: Resource) -> None:
    reader, handle = Reader(), resource.handle()
    destroy_aside(reader, [handle])
    del reader
    del handle
    resource.may_end.set()
    assert resource.has_ended.wait(LIMIT)
    assert resource.destroyed_by == ["autodist-iterator"]


def test_an_owner_that_stays_keeps_it(resource: Resource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_iterators, "_OTHER_OWNERS_LIMIT", 0.01)
    reader, handle = Reader(), resource.handle()
    held = [handle]
    destroy_aside(reader, held)
    before = {thread for thread in threading.enumerate() if thread.name != "autodist-iterator"}
    del reader
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
    assert held == []
    assert not resource.has_ended.is_set()
    resource.may_end.set()
    del handle
    assert resource.destroyed_by == [threading.current_thread().name]


def _script(seconds: float, ending: str) -> str:
    return f"""
import importlib.util, os, time
spec = importlib.util.spec_from_file_location("ended_iterators", {ended_iterators.__file__!r})
ended_iterators = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ended_iterators)

class Handle:
    def __del__(self, sleep=time.sleep, write=os.write):
        sleep({seconds})
        write(1, b"destroyed")

class Reader:
    pass

reader = Reader()
reader.resource = [Handle()]
ended_iterators.destroy_aside(reader, reader.resource)
{ending}
"""


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread once the script has ended")
def test_a_script_ends_without_waiting_long_for_the_iterator_that_it_still_reads() -> None:
    assert _output(_script(10 * LIMIT, "")) == b""


@pytest.mark.parametrize("ending", ["", "del reader"], ids=["read to the end", "ended before"])
def test_a_script_s_end_waits_for_a_destructor_in_progress(ending: str) -> None:
    """Python may abort the process, if the thread returns from the destructor while Python ends."""
    assert _output(_script(0.3, ending)) == b"destroyed"


def test_a_script_s_end_does_not_wait_for_another_owner() -> None:
    limits = "ended_iterators._OTHER_OWNERS_LIMIT = ended_iterators._END_LIMIT = 1e6"
    _output(_script(0.0, f"kept = reader.resource[0]; {limits}; del reader"))


def _output(script: str) -> bytes:
    return subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT, stdout=subprocess.PIPE).stdout


def test_without_threads_it_is_destroyed_at_once(resource: Resource, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    resource.may_end.set()
    reader = Reader()
    destroy_aside(reader, [resource.handle()])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    del reader
    assert resource.destroyed_by == [threading.current_thread().name]


def test_it_is_the_iterator_of_a_quick_read(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[Any, list[Any]]] = []
    monkeypatch.setattr(data_sets, "destroy_aside", lambda reader, resource: noted.append((reader, resource)))
    iterator = iter(tf.data.Dataset.range(3))
    read = data_sets.quick_read(iterator)
    ((reader, resource),) = noted
    assert reader is read
    assert len(resource) == 1
    assert resource[0] is iterator._iterator_resource
    resource.clear()
    assert read is not None
    with pytest.raises(IndexError):  # the only handle that the reader has
        read()


@pytest.mark.parametrize(
    "dataset",
    [tf.data.Dataset.range(3), tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))],
    ids=["tensors", "ragged"],
)
def test_the_elements_of_a_data_set_are_read_by_such_an_iterator(
    dataset: tf.data.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(data_sets, "destroy_aside", lambda reader, resource: noted.extend(resource))
    iterator = iter(dataset)
    assert len(list(data_sets.elements_of(iterator))) == len(dataset)
    assert len(noted) == 1
    assert noted[0] is iterator._iterator_resource
