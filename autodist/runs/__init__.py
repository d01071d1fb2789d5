"""One worker's view of a run: its start, the coordination of its workers, the plans of its steps, and its end."""
