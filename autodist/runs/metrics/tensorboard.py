"""The metrics as scalars for TensorBoard."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from autodist.runs.metrics.records import MetricsLine

_FLUSH_SECONDS = 10


class Scalars:
    """Writes the numbers of each line as scalars, such as `train_step/localhost:1/wait`.

    It uses the writer of TensorFlow 1, which works in sessions too, and in any thread.

    Args:
        folder: the folder of the event file.
    """

    def __init__(self, folder: Path) -> None:
        with tf.Graph().as_default():  # TensorFlow refuses this writer in eager mode
            self._writer = tf.compat.v1.summary.FileWriter(str(folder), flush_secs=_FLUSH_SECONDS)

    def add(self, line: MetricsLine) -> None:
        """Adds the scalars of a line at its step; unknown numbers are left out."""
        scalars = {
            f"{line.name}/seconds": line.seconds,
            f"{line.name}/examples_per_second": line.examples_per_second,
            "run/workers": line.workers,
            "run/restarts": line.restarts,
        }
        for measured in line.by_worker:
            numbers = measured.model_dump(exclude={"worker"})
            scalars |= {f"{line.name}/{measured.worker}/{name}": number for name, number in numbers.items()}
        values = [
            tf.compat.v1.Summary.Value(tag=tag, simple_value=number)
            for tag, number in scalars.items()
            if number is not None
        ]
        self._writer.add_summary(tf.compat.v1.Summary(value=values), line.step)

    def close(self) -> None:
        """Writes all scalars, and closes the file."""
        self._writer.close()
