"""Phase: deals a replicated step out to the workers of a pipeline."""
