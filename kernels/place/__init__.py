"""Which worker holds what, and in which pieces."""
