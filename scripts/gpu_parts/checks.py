"""The checks of `scripts/gpu_day.py`. Each returns its result as a line of text, or raises `CheckError`."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_parts.processes import CheckError, Ended, one, run, two_workers

COMPUTES = re.compile(r"^\s*\S+ = (?:MatMul|Conv2D)\b.*device:(\w+:\d+)", re.MULTILINE)
"""A node of `step.txt` that has to be on a GPU, with its device."""
REFUSAL = re.compile(r"duplicate gpu|nccl.*(?:invalid|error|fail)|(?:invalid|error|fail).*nccl", re.IGNORECASE)
FLOAT32, HALF = 0.01, 0.03
"""Largest relative difference of a loss: GPUs multiply float32 in TF32, whose mantissa has 10 bits as float16's; the 7
bits of bfloat16 are fewer."""


def placement(gpus: int, limit: float) -> str:
    """Checks that matrix products and convolutions of a step are on the GPUs, which hold its tensors."""
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        (ended,) = run([one("local", AUTODIST_DUMP=folder)], limit)
        report = ended.report()
        texts = [path.read_text() for path in _last_dumps(Path(folder))]
    devices = Counter(device for text in texts for device in COMPUTES.findall(text))
    counts = ", ".join(f"{count} on {device}" for device, count in sorted(devices.items()))
    if not devices or not all(device.startswith("GPU:") for device in devices):
        raise CheckError(f"MatMul and Conv2D: {counts or 'none has a device'}; all have to be on GPUs")
    if sum(report["peaks"]) < report["variable_bytes"]:
        raise CheckError(f"the tensors on GPUs took {_mb(report['peaks'])} MB at most, less than the variables")
    return f"MatMul and Conv2D: {counts}; peak memory {_mb(report['peaks'])} MB"


def memory_growth(gpus: int, limit: float) -> str:
    """Checks that `set_memory_growth` in the script holds under AutoDist."""
    os.environ.pop("TF_FORCE_GPU_ALLOW_GROWTH", None)
    used = {}
    for name, options in (("with set_memory_growth", ["--grow"]), ("without", [])):
        (ended,) = run([one("local", *options)], limit / 2)
        report = ended.report()
        used[name] = report["used"][0]
    text = ", ".join(f"{name} {_mb([held])} MB" for name, held in used.items())
    total = report["total"][0]
    if used["with set_memory_growth"] > total / 2:
        raise CheckError(f"used of the {_mb([total])} MB of the first GPU: {text}")
    return f"used of {_mb([total])} MB: {text}"


def shuffle(gpus: int, limit: float) -> str:
    """Compares two workers, whose gradients are summed through queues, with one device."""
    return _two_workers_alike(gpus, limit, FLOAT32)


def policy(gpus: int, limit: float, name: str) -> str:
    """Compares two workers with one device, both under a dtype policy."""
    return _two_workers_alike(gpus, limit, HALF, f"--policy={name}")


def nccl(gpus: int, limit: float) -> str:
    """Compares two workers under NCCL with one device; on one GPU, expects NCCL's refusal of a second rank there."""
    chief, worker, alone = run([*two_workers(gpus, "--spec=NCCL", NCCL_DEBUG="WARN"), one("alone")], limit)
    if chief.status == 0:
        return _alike(chief, alone, FLOAT32, gpus)
    lines = [line.strip() for ended in (chief, worker) for line in (ended.output + ended.errors).splitlines()]
    refusals = sorted(filter(REFUSAL.search, lines), key=lambda line: "duplicate" not in line.lower())
    if gpus > 1 or chief.status is None or not refusals:
        chief.report()
    return f"refuses two ranks on one GPU: {refusals[0]}"


def xla(gpus: int, limit: float) -> str:
    """Compares a step that XLA compiles with the same step without XLA."""
    compiled, plain = run([one("local", "--jit"), one("local")], limit)
    return _alike(compiled, plain, FLOAT32, gpus, "compiled by XLA", "without")


CHECKS: dict[str, Callable[..., str]] = {
    "placement": placement,
    "memory-growth": memory_growth,
    "shuffle": shuffle,
    "policy": policy,
    "nccl": nccl,
    "xla": xla,
}


def _two_workers_alike(gpus: int, limit: float, most: float, *options: str) -> str:
    chief, _, alone = run([*two_workers(gpus, *options), one("alone", *options)], limit)
    return _alike(chief, alone, most, gpus)


def _alike(
    ours: Ended, peer: Ended, most: float, gpus: int, name: str = "two workers", peer_name: str = "one device"
) -> str:
    """Compares the losses of two trainings, epoch by epoch.

    Raises:
        CheckError: one has failed, or they differ by more than `most`, relatively.
    """
    losses, peers = (list(map(float, ended.report()["losses"])) for ended in (ours, peer))
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, peers, strict=True)]
    text = (
        f"loss {losses[-1]:.4f} ({name}, {gpus} GPU{'s' if gpus > 1 else ''}), {peers[-1]:.4f} ({peer_name}); largest "
        f"relative difference {max(differences):.1e}, at most {most}"
    )
    if not all(difference <= most for difference in differences):  # also if one is not a number
        raise CheckError(text)
    return text


def _last_dumps(folder: Path) -> list[Path]:
    """Returns the text of each step after its last kernel."""
    workers = {path.parent.parent for path in folder.rglob("step.txt")}
    return [
        max(worker.iterdir(), key=lambda kernel: int(kernel.name.partition("_")[0])) / "step.txt" for worker in workers
    ]


def _mb(sizes: Sequence[int]) -> str:
    return " + ".join(f"{size / 1e6:.0f}" for size in sizes)
