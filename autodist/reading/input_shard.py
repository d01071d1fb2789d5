"""InputShard: the part of a run's data that one worker reads."""

from __future__ import annotations

from autodist.batch.examples import rows_to_read, share_of
from autodist.reading.batch_sharding import Reading, Slices
from autodist.reading.file_sharding import FileSharding
from autodist.runs.run import Run


class InputShard:
    """One worker's shard of the data.

    Attributes:
        slices: returns the examples of a batch that belong to this worker.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.slices = Slices(self._of)

    def _of(self, examples: int) -> tuple[int, int]:
        share = share_of(examples, self._run.spec.feeding_workers, self._run.index)
        return share.start, share.start + share.size

    def reading(self, is_gathered: bool = False) -> Reading | None:
        """Returns the rule by which this worker reads global batches; None: it trains on complete batches.

        Args:
            is_gathered: True if the parts of all workers are gathered before a pipeline trains on them.
        """
        if self._run.workers == 1:
            return None
        rows = None  # a recorded run reads complete batches
        if self._run.recorder is None:
            workers = self._run.spec.feeding_workers if is_gathered else self._run.spec.replica_workers
            rows = rows_to_read(workers, self._run.index)
        return Reading(rows, self._run.workers, self.slices, self._files())

    def _files(self) -> FileSharding | None:
        """Returns the rule by which files are sharded; None if they are not."""
        spec = self._run.spec
        if spec.shard is None:
            return None
        names = [worker.name for worker in spec.workers]
        return FileSharding(
            spec.replica_workers, self._run.index, names, self._run.coordination.decide_by_chief, spec.shard_refused
        )

    def require_no_files(self, what: str) -> None:
        """Checks that the files of data sets are not sharded over several workers.

        Args:
            what: the reason why sharded files are not supported here.

        Raises:
            ResourceSpecError: files are sharded.
        """
        if self._run.shards_files:
            raise self._run.spec.shard_refused(
                f"{what}; allowed: fit on a tf.data.Dataset, or a loop over ad.distribute_dataset."
            )
