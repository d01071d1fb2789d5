"""Checkpoints in TensorFlow's own format, from which another run resumes."""

from autodist.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
