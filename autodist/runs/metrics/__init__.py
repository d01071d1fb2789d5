"""The metrics of a run (`metrics` in the YAML): measured by each worker, written by the chief."""
