"""Pipeline parallelism: distributes a replicated step over the workers of a pipeline."""
