"""What outlives a run, in TensorFlow's own format."""

from autodist.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
