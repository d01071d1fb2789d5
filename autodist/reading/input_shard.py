"""InputShard: what one worker reads of the data of a run."""

from __future__ import annotations

from autodist.batch.examples import rows_to_read, share_of
from autodist.reading.batch_sharding import Reading, Slices
from autodist.reading.file_sharding import Files
from autodist.runs.run import Run


class InputShard:
    """One worker's share of the data.

    Args:
        run: whose worker it is.

    Attributes:
        slices: tells the script which examples of a batch are this worker's.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.slices = Slices(self._of)

    def _of(self, examples: int) -> tuple[int, int]:
        share = share_of(examples, self._run.spec.feeding_workers, self._run.index)
        return share.start, share.start + share.size

    def reading(self, is_gathered: bool = False) -> Reading | None:
        """How this worker reads global batches; None: whole, since it trains on all of them.

        Args:
            is_gathered: the parts that all workers read are brought together before a pipeline trains on them.
        """
        if self._run.workers == 1:
            return None
        rows = None  # where it is recorded, which is given whole batches
        if self._run.recorder is None:
            workers = self._run.spec.feeding_workers if is_gathered else self._run.spec.replica_workers
            rows = rows_to_read(workers, self._run.index)
        return Reading(rows, self._run.workers, self.slices, self._files())

    def _files(self) -> Files | None:
        """How files are dealt out to the workers; None: they are not."""
        spec = self._run.spec
        if spec.shard is None:
            return None
        names = [worker.name for worker in spec.workers]
        return Files(spec.replica_workers, self._run.index, names, self._run.coordination.agree, spec.shard_refused)

    def require_no_files(self, what: str) -> None:
        """Passes unless the files of data sets are dealt out to several workers.

        Args:
            what: has no part in that.

        Raises:
            ResourceSpecError: they are.
        """
        if self._run.deals_files:
            raise self._run.spec.shard_refused(
                f"{what}; allowed: fit on a tf.data.Dataset, or a loop over ad.distribute_dataset."
            )
