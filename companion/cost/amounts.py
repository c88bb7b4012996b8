"""Amounts as people type them: 24GB, 1.5GiB, 3.35TB/s, 989TFLOPS."""

from __future__ import annotations

import math
import re

_AMOUNT = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*$", re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _read(text: str, endings: tuple[str, ...], example: str) -> float:
    match = _AMOUNT.match(text)
    if match:
        number, unit = float(match[1].replace("_", "").replace(",", "")), match[2].lower()
        for ending in sorted(endings, key=len, reverse=True):
            prefix = unit.removesuffix(ending) if unit.endswith(ending) else None
            if prefix is not None and (prefix in _DECIMAL or prefix in _BINARY):
                amount = number * (_DECIMAL.get(prefix) or _BINARY[prefix])
                if math.isfinite(amount):
                    return amount
    raise ValueError(f"{text!r} is not an amount like {example}")


def bytes_of(text: str) -> int:
    """Bytes: 80GB = 80 * 10^9, 80GiB = 80 * 2^30, a bare number is bytes. ValueError for anything else.

    >>> bytes_of("1.5GiB"), bytes_of("640 GB"), bytes_of("8_000")
    (1610612736, 640000000000, 8000)
    """
    amount = _read(text, ("b", "bytes", ""), "80GB, 1.5GiB or 2000000000")
    if amount != int(amount):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(amount)


def rate_of(text: str) -> float:
    """Bytes per second: 3.35TB/s, 900GB/s; a bare number is bytes per second."""
    return _read(text, ("b/s", ""), "3.35TB/s or 900GB/s")


def flops_of(text: str) -> float:
    """Operations per second: 989TFLOPS, 65T; a bare number is operations per second."""
    return _read(text, ("flops", "flop/s", "ops", ""), "989TFLOPS")
