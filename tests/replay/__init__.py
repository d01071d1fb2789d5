"""Replay: captured steps kept in files, what the kernels make of them as text, and the texts as they were recorded."""
