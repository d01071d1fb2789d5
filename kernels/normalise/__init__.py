"""Normalization of the captured step into the form that the other kernels expect."""
