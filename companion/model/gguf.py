"""GGUF: a header of key-value pairs, a table of tensors, and blocks of quantized numbers.

Layouts (little endian): https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every read is checked
against the file's length, so that a truncated or a corrupted file is one clear error.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# type id: name, numbers per block, bytes per block
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: shape in row-major order, type id, byte offset from the file's start."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def nbytes(self) -> int:
        _, per_block, size = TYPES[self.kind]
        return _count(self.shape) // per_block * size


class GGUF:
    """An open GGUF file: `meta` (dict) and `entries` (name -> Entry). Use as a context manager.

    Raises ValueError naming the file for anything that is not a whole, sane GGUF of version 2 or 3.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file")
        if self.path.stat().st_size < 24:
            raise self._bad("too short for a GGUF header")
        with open(self.path, "rb") as f:
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
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
        if self._map[:4] != b"GGUF":
            raise self._bad("not a GGUF file (its first four bytes differ)")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._bad(f"GGUF version {version}; accepted: 2, 3")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self._fits(tensors * 24 + pairs * 13, f"{tensors} tensors and {pairs} keys")
        meta: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            meta[key] = self._value(self._scalar("I"))
        table = []
        for _ in range(tensors):
            name, dims = self._string(), self._scalar("I")
            if dims > 4:
                raise self._bad(f"tensor {name!r} has {dims} dimensions; at most 4")
            shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
            table.append((name, shape, self._scalar("I"), self._scalar("Q")))
        align = meta.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise self._bad(f"general.alignment={align!r}; need a positive integer")
        base = (self._at + align - 1) // align * align
        return meta, {name: self._entry(name, shape, kind, base + at) for name, shape, kind, at in table}

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
        if kind not in TYPES:
            known = ", ".join(t[0] for t in TYPES.values())
            raise self._bad(f"tensor {name!r} has type {kind}; accepted: {known}")
        if (shape[-1] if shape else 1) % TYPES[kind][1]:
            raise self._bad(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {TYPES[kind][1]}")
        entry = Entry(shape, kind, start)
        if start + entry.nbytes > len(self._map):
            raise self._bad(f"truncated: tensor {name!r} ends beyond the file's {len(self._map)} bytes")
        return entry

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY or depth > 3:
            raise self._bad(f"corrupted: value of type {kind}")
        inner, n = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            code = f"<{n}{_SCALARS[inner]}"
            self._fits(n * struct.calcsize("<" + _SCALARS[inner]), f"an array of {n}")
            values = list(struct.unpack_from(code, self._map, self._at))
            self._at += struct.calcsize(code)
            return values
        self._fits(n * 8, f"an array of {n}")
        return [self._value(inner, depth + 1) for _ in range(n)]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        n = self._scalar("Q")
        self._fits(n, f"a string of {n} bytes")
        raw = self._map[self._at : self._at + n]
        self._at += n
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad("corrupted: a string is not UTF-8") from None

    def _fits(self, n: int, what: str) -> None:
        if self._at + n > len(self._map):
            raise self._bad(f"truncated or corrupted: {what} cannot fit in {len(self._map)} bytes")

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


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
