"""Reads the traces that workers have written, and analyzes them for `autodist trace`."""
