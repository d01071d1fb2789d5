"""File sharding of a data set: all workers end together, and each record is used once in an epoch."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import AutoDistError, ClusterError, ResourceSpecError
from autodist.reading.batch_sharding import Reading, Slices
from autodist.reading.file_sharding import FileSharding, ShardedFiles, part_sizes, reason_not_sharded
from autodist.resources import ResourceSpec
from autodist.runs.resolve_config import resolve
from autodist.runtime.dataset import DistributedDataset
from tests.unit.kernels.pairs import pairs

Data = tf.data.Dataset

COUNTS = [13, 4, 0, 29, 9]
"""Records of each file."""


@dataclass
class Meeting:
    """Workers side by side in threads, which agree as those of a run do.

    Attributes:
        replicas: for each replica, the index of its worker.
        workers: how many there are.
        calls: how often they have agreed.
    """

    replicas: Sequence[int]
    workers: int
    calls: int = 0
    _said: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.workers, timeout=30)

    def files(self, worker: int) -> FileSharding:
        names = [f"host:{k}" for k in range(self.workers)]

        def agree(said: str, decide: Callable[[list[str]], str]) -> str:
            self._said[worker] = said
            self._barrier.wait()
            decided = decide([self._said[k] for k in range(self.workers)])
            if self._barrier.wait() == 0:
                self.calls += 1
            return decided

        return FileSharding(self.replicas, worker, names, agree, refused)

    def each(self, act: Callable[[FileSharding], Any]) -> list[Any]:
        """Returns the result of `act` on each worker, or its exception."""
        found: list[Any] = [None] * self.workers

        def run(worker: int) -> None:
            try:
                found[worker] = act(self.files(worker))
            except Exception as error:  # noqa: BLE001 - looked at by the test
                found[worker] = error
                if not isinstance(error, AutoDistError | tf.errors.OpError):
                    self._barrier.abort()

        threads = [threading.Thread(target=run, args=(k,)) for k in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


def refused(problem: str) -> AutoDistError:
    return ResourceSpecError(f"shard: {problem}")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    found = []
    for number, count in enumerate(COUNTS):
        path = folder / f"part{number}.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for k in range(count):
                writer.write(str(100 * number + k).encode())
        path.with_suffix(".txt").write_text("".join(f"{100 * number + k}\n" for k in range(count)))
        found.append(str(path))
    return found


ALL = sorted(100 * number + k for number, count in enumerate(COUNTS) for k in range(count))


def numbered(record: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(record, tf.int64)


PIPELINES: dict[str, Callable[[list[str]], Data]] = {
    "records": lambda names: tf.data.TFRecordDataset(names).map(numbered).batch(10),
    "in parallel": lambda names: tf.data.TFRecordDataset(names, num_parallel_reads=3).map(numbered, 2).batch(10),
    "lines": lambda names: (
        tf.data.TextLineDataset([n.replace("tfrecord", "txt") for n in names]).batch(10).map(numbered).prefetch(1)
    ),
    "interleaved": lambda names: (
        Data.list_files(names, seed=3)
        .interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=2)
        .map(numbered)
        .shuffle(20, seed=1)
        .batch(10)
    ),
    "shuffled by file": lambda names: (
        Data.from_tensor_slices(names)
        .shuffle(5, seed=3)
        .flat_map(tf.data.TFRecordDataset)
        .map(numbered)
        .cache()
        .batch(10)
    ),
    "twice": lambda names: tf.data.TFRecordDataset(names).map(numbered).repeat(2).batch(10),
    "batches of one": lambda names: tf.data.TFRecordDataset(names).map(numbered).batch(1),
}


_BUILDING = threading.Lock()


def pipeline(name: str, names: list[str]) -> Data:
    """Builds a pipeline, in one thread at a time: TensorFlow may crash if several threads build some at once."""
    with _BUILDING:
        return PIPELINES[name](names)


@pytest.mark.parametrize("name, replicas", pairs(PIPELINES, [[0, 1, 2], [0, 2], [0, 0, 0, 1, 2]], each=2))
def test_an_epoch_has_each_record_once_and_all_workers_end_it_together(
    names: list[str], name: str, replicas: list[int]
):
    meeting = Meeting(replicas, 3)
    times = 2 if name == "twice" else 1

    def read(files: FileSharding) -> list[list[list[int]]]:
        data = ShardedFiles(pipeline(name, names), files)
        return [[part.numpy().tolist() for part in data] for _ in range(2)]

    found = meeting.each(read)
    for epochs in zip(*found, strict=True):
        assert len({len(parts) for parts in epochs}) == 1, "they end together"
        assert sorted(n for parts in epochs for part in parts for n in part) == sorted(ALL * times)
        sizes = [sum(map(len, step)) for step in zip(*epochs, strict=True)]
        most = len(set(replicas)) if name == "batches of one" else 10
        assert all(1 <= size <= most for size in sizes), "a step has an example, and no more of them than a batch"
    by_worker = [{n // 100 for part in epochs[0] for n in part} for epochs in found]
    assert all(not a & b for k, a in enumerate(by_worker) for b in by_worker[:k]), "no file is read by two"


def test_workers_agree_on_steps_ahead_and_not_on_each(names: list[str]):
    meeting = Meeting([0, 1], 2)
    steps = meeting.each(lambda files: len(list(ShardedFiles(pipeline("batches of one", names), files))))
    assert steps == [33, 33]
    assert meeting.calls == 6, "of 1, 2, 4, 8, 16 and the rest of 32"


def test_prefetched_data_are_bounded_by_their_bytes(names: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autodist.reading.file_sharding._BYTES_AHEAD", 3 * 8)
    meeting = Meeting([0, 1], 2)
    read: list[int] = []

    def ahead(files: FileSharding) -> int:
        given = iter(ShardedFiles(pipeline("batches of one", names), files))
        most = 0
        for _ in given:
            most = max(most, len(given._ahead) + 1)
        return most

    read = meeting.each(ahead)
    assert max(read) == 3


def test_parts_of_a_full_batch_add_up_to_it_in_each_step():
    for full, workers in ((10, 3), (32, 4), (7, 7)):
        replicas = [k for k in range(workers) for _ in range(2)]
        sizes = np.array([part_sizes(full, full, replicas, worker) for worker in range(workers)])
        np.testing.assert_array_equal(sizes.sum(0), full)
        np.testing.assert_array_equal(sizes.sum(1), full)
    assert part_sizes(3, 10, [0, 1, 2], 1) == [3], "a last one makes no step of nothing"
    assert part_sizes(2, 2, [0, 1, 2, 3], 2) == [1, 1], "nor does one of fewer examples than workers"
    assert part_sizes(4, 10, [0, 1, 1, 1], 0) == [3, 1], "who has more replicas takes more at once"


def nest(number: tf.Tensor) -> dict[str, Any]:
    wide = tf.fill([tf.cast(number % 3 + 1, tf.int32)], tf.cast(number, tf.float64))
    return {"wide": wide, "text": (tf.strings.as_string(number), number)}


def test_a_worker_whose_files_have_no_record_takes_part_in_the_others_shapes(names: list[str]):
    data = tf.data.TFRecordDataset(names[:3]).map(numbered).map(nest).padded_batch(5)
    found = Meeting([0, 1, 2], 3).each(lambda files: list(ShardedFiles(data, files)))
    assert {len(parts) for parts in found} == {8}, "13 records in batches of 2, 2 and 1 of 5"
    for part in found[2]:
        assert part["wide"].shape == (0, 3) and part["text"][0].shape == part["text"][1].shape == (0,)
        assert (part["wide"].dtype, part["text"][0].dtype) == (tf.float64, tf.string)
    assert [len(part["text"][1]) for part in found[1]] == [1, 1, 2, 0, 0, 0, 0, 0]


def of_any_length(number: tf.Tensor) -> tuple[tf.Tensor, tf.SparseTensor]:
    return tf.range(number % 4), tf.sparse.from_dense(tf.stack([number + 1, number]))


def test_ragged_and_sparse_examples_are_cut_and_are_none_in_the_end(names: list[str]):
    rows = tf.data.TFRecordDataset(names[:2]).map(lambda record: of_any_length(numbered(record)))
    data = rows.ragged_batch(5)
    found = Meeting([0, 1], 2).each(lambda files: list(ShardedFiles(data, files)))
    assert len(found[0]) == len(found[1])
    assert sorted(int(n) for parts in found for _, s in parts for n in tf.sparse.to_dense(s)[:, 1]) == ALL[:17]
    assert found[1][-1][0].shape[0] == 0 and found[1][-1][1].shape[0] == 0


REFUSED: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "arrays": (lambda _: [np.zeros((4, 2))], "a list has no files"),
    "no file": (lambda _: Data.range(9).batch(2), "begins with a RangeDataset, which does not read files"),
    "a file an element": (
        lambda names: Data.from_tensor_slices(names).map(tf.io.read_file).batch(2),
        "begins with a TensorSliceDataset, which does not read files.*remove `shard`",
    ),
    "numbers beside": (
        lambda names: Data.zip((tf.data.TFRecordDataset(names), Data.range(9))).batch(2),
        "begins with a RangeDataset",
    ),
    "taken": (lambda names: tf.data.TFRecordDataset(names).take(5).batch(2), "has a take, which would count"),
    "skipped": (lambda names: tf.data.TFRecordDataset(names).batch(2).skip(1), "has a skip"),
    "dealt out by itself": (lambda names: tf.data.TFRecordDataset(names).shard(2, 0).batch(2), "has a shard"),
    "counted": (
        lambda names: tf.data.TFRecordDataset(names).apply(tf.data.experimental.assert_cardinality(55)).batch(2),
        "an assert_cardinality",
    ),
    "kept": (lambda names: tf.data.TFRecordDataset(names).cache("/nowhere/at/all").batch(2), "a cache in a file"),
    "dropped": (lambda names: tf.data.TFRecordDataset(names).batch(2, drop_remainder=True), "drops the remainder"),
    "single": (tf.data.TFRecordDataset, "are not known, since none of its tensors has rows"),
    "too few": (lambda names: tf.data.TFRecordDataset(names[:2]).batch(2), "reads 2 files, but 3 workers"),
    "one": (lambda names: tf.data.TFRecordDataset(names[0]).batch(2), "reads 1 file, but 3 workers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sharding_that_would_repeat_or_skip_records_is_refused_on_all_workers(names: list[str], name: str):
    make, told = REFUSED[name]
    found = Meeting([0, 1, 2], 3).each(lambda files: list(ShardedFiles(make(names), files)))
    assert len({str(error) for error in found}) == 1
    assert isinstance(found[0], ResourceSpecError) and re.match("shard: .*" + told, str(found[0]))


def test_batches_may_drop_the_remainder_of_what_never_ends(names: list[str]):
    data = tf.data.TFRecordDataset(names[:2]).map(numbered).repeat().batch(6, drop_remainder=True)

    def some(files: FileSharding) -> list[int]:
        return [len(part) for part, _ in zip(ShardedFiles(data, files), range(9), strict=False)]

    assert Meeting([0, 1], 2).each(some) == [[3] * 9] * 2


def test_a_file_that_one_worker_cannot_read_is_an_error_on_all(names: list[str], tmp_path: Path):
    broken = tmp_path / "broken.tfrecord"
    broken.write_bytes(Path(names[0]).read_bytes()[:-3])
    data = tf.data.TFRecordDataset([names[3], str(broken)]).batch(2)
    mine, theirs = Meeting([0, 1], 2).each(lambda files: list(ShardedFiles(data, files)))[::-1]
    assert isinstance(mine, tf.errors.DataLossError)
    assert isinstance(theirs, ClusterError) and re.match("host:1 cannot read its files: DataLossError", str(theirs))


# -- in a loop of the script's own -----------------------------------------------------------------------------------


def of_loop(data: Data, files: FileSharding) -> DistributedDataset:
    reading = Reading(None, 2, Slices(lambda n: (0, n)), files)
    return DistributedDataset(data, files.replicas, files.worker, reading=reading)


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in caplog.messages if "sharded differently" in m]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_loop_goes_on_at_its_place(names: list[str], caplog: pytest.LogCaptureFixture, seed: int | None):
    tf.random.set_seed(seed)

    def half(files: FileSharding) -> tuple[list[Any], list[Any]]:
        data = of_loop(pipeline("interleaved", names), files)
        whole = [part.numpy().tolist() for part in data]
        place, rest = "", []
        for number, part in enumerate(data):
            if number == 3:
                place = data.serialize()
            if number > 3:
                rest.append(part.numpy().tolist())
        other = of_loop(pipeline("interleaved", names), files)
        other.deserialize(place)
        assert whole
        return rest, [part.numpy().tolist() for part in other]

    with caplog.at_level(logging.WARNING, "autodist"):
        for rest, gone_on in Meeting([0, 1], 2).each(half):
            assert rest == gone_on and rest
    assert not told_by(caplog)


def test_an_epoch_of_files_that_were_dealt_to_others_begins_anew_and_that_is_told(
    names: list[str], caplog: pytest.LogCaptureFixture
):
    places: list[str] = []

    def begin(files: FileSharding) -> None:
        data = of_loop(pipeline("records", names), files)
        given: Iterator[Any] = iter(data)
        next(given), next(given)
        if files.worker == 0:
            places.append(data.serialize())

    assert Meeting([0, 1, 2], 3).each(begin) == [None] * 3

    def go_on(files: FileSharding) -> list[int]:
        data = of_loop(pipeline("records", names), files)
        data.deserialize(places[0])
        return [int(n) for part in data for n in part]

    with caplog.at_level(logging.WARNING, "autodist"):
        found = Meeting([0, 1], 2).each(go_on)
    assert sorted(n for numbers in found for n in numbers) == ALL
    assert all("read from its beginning" in m for m in told_by(caplog)) and len(told_by(caplog)) == 2


# -- requests --------------------------------------------------------------------------------------------------------


def test_files_fit_neither_a_comparison_nor_a_pipeline():
    assert reason_not_sharded(is_compared=False, is_pipeline=False) is None
    assert "compared" in (reason_not_sharded(is_compared=True, is_pipeline=False) or "")
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "shard": "files"})
    with pytest.raises(ResourceSpecError, match=r"^shard: .*a pipeline"):
        resolve(None, spec, "Pipeline", None, is_first=True)


def test_the_yaml_says_it_and_where(tmp_path: Path):
    path = tmp_path / "cluster.yml"
    path.write_text("nodes: [{address: localhost, cpus: [0, 1], workers: 2}]\nshard: files\n")
    spec = ResourceSpec.from_file(path)
    assert spec.shard == "files" and ResourceSpec.from_payload(spec.to_payload()).shard == "files"
    assert str(spec.shard_refused("no")) == f"{path}:2: shard: no"
    path.write_text("nodes: [{address: localhost}]\nbatch: per_worker\nshard: files\n")
    with pytest.raises(ResourceSpecError, match=r"cluster.yml:3: shard: .*one of the two"):
        ResourceSpec.from_file(path)
