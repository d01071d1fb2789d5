"""Where in a pipeline a node of the compute part belongs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelinePart:
    """What is known of one captured node.

    Attributes:
        stage: the pipeline stage that computes it.
        is_backward: whether the seed of the loss reaches it.
        is_held: whether it is made of variables alone, and so the same for all micro-batches.
        is_anew: whether it computes on the way back what was computed on the way forward.
    """

    stage: int
    is_backward: bool = False
    is_held: bool = False
    is_anew: bool = False
