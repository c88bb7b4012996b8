"""GGUF: a header of key-value pairs, a table of tensors, and blocks of quantized numbers.

The header is read by `companion.cost.gguf`. A tensor that would end beyond the file is refused too.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cost.gguf import SHORTEST, HeaderBytes
from ..cost.gguf import TYPES as BLOCKS

TYPES = {kind: BLOCKS[kind] for kind in (0, 1, 2, 3, 8, 30)}  # that `dequantize` knows


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: shape in row-major order, type id, byte offset from the file's start."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def nbytes(self) -> int:
        _, per_block, size = TYPES[self.kind]
        return math.prod(self.shape) // per_block * size


class GGUF:
    """An open GGUF file: `meta` (dict) and `entries` (name -> Entry). Use as a context manager.

    Raises ValueError naming the file for anything that is not a whole, sane GGUF of version 2 or 3.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file")
        if self.path.stat().st_size < SHORTEST:
            raise self._bad("too short for a GGUF header")
        with open(self.path, "rb") as f:
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.meta, self.entries = self._header()
        except struct.error:
            self.close()
            raise self._bad("truncated inside the header") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GGUF":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as float32, dequantized; a new array, independent of the file."""
        if name not in self.entries:
            raise self._bad(f"no tensor {name!r}")
        entry = self.entries[name]
        # No name is given to the view of the file: an error would keep it, and the file could not be closed.
        out = dequantize(entry.kind, np.frombuffer(self._map, np.uint8, entry.nbytes, entry.start))
        out = out.reshape(entry.shape)
        if not np.isfinite(out).all():
            raise self._bad(f"tensor {name!r} holds NaN or infinity")
        return out

    def _header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        read = HeaderBytes(self._map, self.path.name)
        tensors, pairs = read.counts()
        meta, table = read.keys(pairs), list(read.table(tensors))
        align = meta.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise self._bad(f"general.alignment={align!r}; need a positive integer")
        base = (read.at + align - 1) // align * align
        return meta, {name: self._entry(read, name, shape, k, base + at) for name, shape, k, at in table}

    def _entry(self, read: HeaderBytes, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
        if kind not in TYPES:
            known = ", ".join(t[0] for t in TYPES.values())
            raise self._bad(f"tensor {name!r} has type {kind}; accepted: {known}")
        read.whole_blocks(name, shape, kind)
        entry = Entry(shape, kind, start)
        if start + entry.nbytes > len(self._map):
            raise self._bad(f"truncated: tensor {name!r} ends beyond the file's {len(self._map)} bytes")
        return entry

    def _bad(self, why: str) -> ValueError:
        return ValueError(f"{self.path.name}: {why}")


def dequantize(kind: int, raw: np.ndarray) -> np.ndarray:
    """Blocks of bytes (uint8, whole blocks) to float32 numbers, flat.

    Q8_0: scale, 32 signed bytes. Q4_0: scale, 16 bytes; low nibbles are numbers 0 to 15, high ones 16 to 31,
    minus 8. Q4_1: scale and minimum, 16 bytes in the same order.
    """
    name, _, size = TYPES[kind]
    if name == "F32":
        return raw.view(np.float32).copy()
    if name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if name == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    head = 4 if name == "Q4_1" else 2
    nibbles = np.concatenate([blocks[:, head:] & 15, blocks[:, head:] >> 4], axis=1)
    if name == "Q4_0":
        return ((nibbles.astype(np.float32) - 8) * scale).reshape(-1)
    out = nibbles * scale
    out += blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return out.reshape(-1)
