"""Position of a node of the compute part in a pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelinePart:
    """Pipeline assignment of one captured node.

    Attributes:
        stage: the pipeline stage that computes it.
        is_backward: True if it depends on the seed of the loss.
        is_held: True if it depends on variables alone and is therefore the same for all micro-batches.
    """

    stage: int
    is_backward: bool = False
    is_held: bool = False
