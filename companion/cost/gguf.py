"""The bytes of a GGUF header: numbers, strings, keys and values, the table of tensors.

`companion.cost.checkpoint` counts from it, `companion.model.files` reads the numbers behind it. Every read is
checked against the file's length: a truncated or a corrupted file is one clear error. Standard library only.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; sizes of blocks: ggml's `GGML_QUANT_SIZES`.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHORTEST = 24  # bytes of a header that says nothing
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# type id: name, numbers per block, bytes per block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


class HeaderBytes:
    """Reads one header from front to back; `at` is where it stands.

    data: the whole file. name: what errors call it. skip_strings: an array of strings, which is a vocabulary,
    becomes its length.

    Raises ValueError for what does not fit, struct.error at the file's end.
    """

    def __init__(self, data: mmap.mmap, name: str, *, skip_strings: bool = False):
        self.data, self.name, self.skip_strings = data, name, skip_strings
        self.at = 0

    def counts(self) -> tuple[int, int]:
        """How many tensors and how many keys follow; the first thing to read."""
        if self.data[:4] != b"GGUF":
            raise self.bad("not a GGUF file (its first four bytes differ)")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.bad(f"GGUF version {version}; accepted: 2, 3")
        tensors, pairs = self.scalar("Q"), self.scalar("Q")
        self.fits(tensors * 24 + pairs * 13, f"{tensors} tensors and {pairs} keys")
        return tensors, pairs

    def keys(self, pairs: int) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.string()
            meta[key] = self.value(self.scalar("I"))
        return meta

    def table(self, tensors: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape in row-major order, type id, offset from the data's start) of each tensor."""
        for _ in range(tensors):
            name, dims = self.string(), self.scalar("I")
            if dims > 4:
                raise self.bad(f"tensor {name!r} has {dims} dimensions; at most 4")
            shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
            yield name, shape, self.scalar("I"), self.scalar("Q")

    def whole_blocks(self, name: str, shape: tuple[int, ...], kind: int) -> None:
        """Raise if a row of a tensor of a known type is no whole number of blocks."""
        if (shape[-1] if shape else 1) % TYPES[kind][1]:
            raise self.bad(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {TYPES[kind][1]}")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or depth > 3:
            raise self.bad(f"corrupted: value of type {kind}")
        inner, n = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = f"<{n}{_SCALARS[inner]}"
            size = n * struct.calcsize("<" + _SCALARS[inner])
            self.fits(size, f"an array of {n}")
            values = list(struct.unpack_from(code, self.data, self.at))
            self.at += size
            return values
        self.fits(n * 8, f"an array of {n}")
        if inner == _STRING and self.skip_strings:
            for _ in range(n):
                self.passed()
            return n
        return [self.value(inner, depth + 1) for _ in range(n)]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def passed(self) -> tuple[int, int]:
        """Step over a string: where it begins and where it ends."""
        length = self.scalar("Q")
        self.fits(length, f"a string of {length} bytes")
        start = self.at
        self.at += length
        return start, self.at

    def string(self) -> str:
        start, end = self.passed()
        try:
            return self.data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("corrupted: a string is not UTF-8") from None

    def fits(self, n: int, what: str) -> None:
        if self.at + n > len(self.data):
            raise self.bad(f"truncated or corrupted: {what} cannot fit in {len(self.data)} bytes")

    def bad(self, why: str) -> ValueError:
        return ValueError(f"{self.name}: {why}")


_NOT_PARAMETERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass
class Header:
    """meta: keys and values, an array of strings as its length. tensors: name -> (row-major shape, type)."""

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Parameters in the table: all elements but the tables of frequencies."""
        return sum(
            math.prod(shape) for name, (shape, _) in self.tensors.items() if not _NOT_PARAMETERS.match(name)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(
            math.prod(shape) // TYPES[kind][1] * TYPES[kind][2] for shape, kind in self.tensors.values()
        )


def read_header(path: str | os.PathLike) -> Header:
    """The header of a file, with the tensors of all its parts."""
    path = Path(path)
    header = _read(path)
    parts = header.meta.get("split.count", 0)
    if not isinstance(parts, int) or parts <= 1:
        return header
    match = _PART.search(path.name)
    if match is None or int(match[2]) != parts or int(match[1]) != 1:
        raise ValueError(
            f"{path.name}: one of {parts} parts; give the first, named ...-00001-of-{parts:05}.gguf"
        )
    for i in range(2, parts + 1):
        other = path.with_name(path.name[: match.start()] + f"-{i:05}-of-{parts:05}.gguf")
        header.tensors.update(_read(other).tensors)
    return header


def _read(path: Path) -> Header:
    """The header of one file, without its other parts."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < SHORTEST:
                raise ValueError(f"{path.name}: too short for a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(path, HeaderBytes(data, path.name, skip_strings=True))
    except struct.error:
        raise ValueError(f"{path.name}: truncated inside the header") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def _header(path: Path, read: HeaderBytes) -> Header:
    tensors, pairs = read.counts()
    header = Header(path, read.keys(pairs))
    for name, shape, kind, _ in read.table(tensors):
        if kind not in TYPES:
            raise read.bad(f"tensor {name!r} has type {kind}, whose size is not known here")
        read.whole_blocks(name, shape, kind)
        if name in header.tensors:
            raise read.bad(f"tensor {name!r} stands in the table twice")
        header.tensors[name] = shape, kind
    return header
