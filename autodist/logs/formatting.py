"""Numbers in messages and tables, as one reads them."""

from __future__ import annotations

_MOST_DIGITS = 999.5


def counted(number: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "replica"), counted(2, "replica"), counted(2, "micro-batch")
    ('1 replica', '2 replicas', '2 micro-batches')
    """
    many = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number} {thing if number == 1 else many}"


def readable_bytes(count: int) -> str:
    """A number of bytes with three digits that count, in powers of 1000.

    >>> readable_bytes(1536), readable_bytes(40_000_000)
    ('1.54 kB', '40.0 MB')
    """
    return f"{count} B" if count < 1000 else _scaled(count, ("kB", "MB", "GB", "TB"))


def readable_flops(count: int | None) -> str:
    """FLOPs with three digits that count.

    >>> readable_flops(1_234_567), readable_flops(12), readable_flops(None)
    ('1.23 M', '12', 'not known')
    """
    if count is None:
        return "not known"
    return str(count) if count < 1000 else _scaled(count, ("k", "M", "G", "T", "P"))


def _scaled(count: int, units: tuple[str, ...]) -> str:
    size, unit = count / 1000, units[0]
    for larger in units[1:]:
        if size < _MOST_DIGITS:
            break
        size, unit = size / 1000, larger
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"
