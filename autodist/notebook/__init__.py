"""Training from a notebook: runs a function in new processes and returns its result."""
