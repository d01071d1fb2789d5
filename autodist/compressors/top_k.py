"""TopK: sends only the elements of largest magnitude of each gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tensorflow as tf
from pydantic import Field

from autodist.compressors.base import Compressor, Dense, register_compressor
from autodist.compressors.reduction import Gradient, Reduction

INDEX = tf.int32
"""Dtype of an element's position in its gradient."""


DEFAULT_FRACTION = 0.01
"""Ten times the fraction of Lin et al. (below), who begin with larger ones for some epochs."""


@register_compressor("TOP_K")
@dataclass(frozen=True)
class TopK(Compressor):
    """Each worker sends its k largest elements and their positions to all: (W-1) · k · (element's bytes + 4) bytes.

    The positions differ between workers, so the sum has up to W·k elements and is not compressed again. This pays off
    for few workers or a small fraction. A worker adds the elements that it did not send to its next gradient.

    Sources: S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Y. Lin et al.,
    "Deep Gradient Compression", ICLR 2018.

    Attributes:
        fraction: k as a share of a gradient's elements, above 0 and at most 1, rounded up.
        error_feedback: True to add the lost part to the next gradient; required.
    """

    fraction: Annotated[float, Field(gt=0, le=1)] = DEFAULT_FRACTION
    error_feedback: bool = True

    goes_to_all: ClassVar[bool] = True
    uses_subgroups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_error_feedback(self.error_feedback)

    @property
    def text(self) -> str:
        return f"{self.kind} {100 * self.fraction:g} % with error feedback"

    def bytes_of(self, gradient: Dense) -> int:
        return self._count(gradient.elements) * (gradient.element_bytes + INDEX.size)

    def _count(self, elements: int) -> int:
        """Returns the number of elements of a gradient to send."""
        return math.ceil(self.fraction * elements)

    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        gradients = reduction.gradients
        counts = [self._count(gradient.shape.num_elements()) for gradient in gradients]
        parts = reduction.all_to_all("largest", self._local_tensors(reduction, sum(counts)))
        by_worker = [list(zip(tf.split(v, counts), tf.split(p, counts), strict=True)) for v, p in parts]
        return [_scattered(gradient, sent) for gradient, *sent in zip(gradients, *by_worker, strict=True)]

    def _local_tensors(self, reduction: Reduction, count: int) -> list[tf.Tensor]:
        """Returns the tensors that this worker sends; their specs if it sends nothing."""
        if not reduction.computes:
            return [tf.TensorSpec([count], reduction.dtype), tf.TensorSpec([count], INDEX)]
        largest = [self._largest(reduction, gradient) for gradient in reduction.gradients]
        return [tf.concat([one[at] for one in largest], 0) for at in (0, 1)]

    def _largest(self, reduction: Reduction, gradient: Gradient) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns values and positions of the elements to send; stores the others as the residual."""
        count = self._count(gradient.shape.num_elements())
        flat = tf.reshape(reduction.share_of(gradient), [gradient.shape.num_elements()])
        memory = reduction.memory("residual", tf.zeros_like(flat), gradient)
        flat += memory.value
        # NaNs rank highest, or they would never reach the other workers.
        magnitude = tf.where(tf.math.is_nan(flat), tf.constant(math.inf, flat.dtype), tf.abs(flat))
        places = tf.math.top_k(magnitude, count, sorted=False, index_type=INDEX).indices
        rest = tf.tensor_scatter_nd_update(flat, places[:, tf.newaxis], tf.zeros([count], flat.dtype))
        reduction.remember(memory, rest)
        return tf.gather(flat, places), places


def _scattered(gradient: Gradient, sent: list[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """Returns the sum of the workers' elements of a gradient, with zeros elsewhere."""
    # A segment's values are added one by one in order, which is that of the workers.
    values, places = (tf.concat([one[at] for one in sent], 0) for at in (0, 1))
    return tf.reshape(tf.math.unsorted_segment_sum(values, places, gradient.shape.num_elements()), gradient.shape)
