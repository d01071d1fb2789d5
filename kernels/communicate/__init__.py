"""Communication between workers: all-reduce, parameter servers, cached copies, and synchronization modes."""
