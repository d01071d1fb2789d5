"""The captured step in the form that the other kernels read."""
