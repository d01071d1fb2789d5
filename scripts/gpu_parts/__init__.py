"""The parts of `scripts/gpu_day.py`: `python -m gpu_parts NAME` runs one."""
