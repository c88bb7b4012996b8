"""A grouped product in tiles: how rows of many experts are cut, what that multiplies and what it reads.

`counts` is how many rows each expert has. A tile holds `block_m` rows, and a tensor core multiplies all of
them whether they hold something or not.

    "padded"     every expert begins a new tile: an expert of n rows takes ceil(n / block_m)
    "straddle"   the rows of all experts are cut without a gap: ceil(sum / block_m) tiles, and one that holds
                 rows of several experts is multiplied once for each of them

>>> counts = [1, 0, 1, 1, 1, 1, 1, 1, 1]        # one token sent to eight experts
>>> padded_rows(counts, 64), padded_rows(counts, 16)
(512, 128)
>>> [len(tiles(counts, 64, form)) for form in FORMS], [products(counts, 64, form) for form in FORMS]
([8, 1], [8, 8])

So a straddling tile saves tiles, not multiplications: what helps few rows is a smaller block_m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FORMS = ("padded", "straddle")


@dataclass(frozen=True)
class GemmTile:
    """A program makes block_m x block_n numbers of the product, block_k terms of each sum at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low = 16 if name in ("block_n", "block_k") else 1
            power = name == "num_stages" or value & (value - 1) == 0
            if isinstance(value, bool) or not isinstance(value, int) or value < low or not power:
                raise ValueError(f"{name} must be a power of two of at least {low}, got {value!r}")

    def halved(self) -> GemmTile:
        """For two products a tile, each of half the width."""
        return replace(self, block_n=max(16, self.block_n // 2))


def gemm_tile(
    rows: int,
    experts: int,
    *,
    element_bytes: int = 2,
    gated: bool = False,
    capability: tuple[int, int] = (8, 0),
) -> GemmTile:
    """The tile for `rows` rows sent to `experts` experts.

    A step that writes few rows per expert is bound by the weights that it reads: narrow tiles, many bytes in
    flight. Many rows are bound by the multiplications: wide tiles. Without matrix instructions (capability
    below 8.0, or float32) they stay small. Each is one that the compiler fits into registers without a
    spill (`companion bench --compile`). gated: two products a tile, each of half the width.

    The tile depends on the number of rows, and the last bits of a sum on the tile: who needs a row to come
    out the same in every batch fixes one.
    """
    if rows < 0 or experts < 1:
        raise ValueError(f"rows must be at least 0 and experts at least 1, got {rows} and {experts}")
    mean = rows / min(experts, max(rows, 1))
    if element_bytes > 2:  # float32 is not given to matrix instructions, which would round it
        tile = GemmTile(4 if mean <= 4 else 32, 64, 32, num_stages=2)
    elif capability < (8, 0):
        tile = GemmTile(4 if mean <= 4 else 16, 32, 64, num_stages=2)
    elif mean <= 16:
        tile = GemmTile(16, 64, 128)
    elif mean <= 64:
        tile = GemmTile(64, 128, 32, num_stages=4)
    elif 9 <= capability[0] < 12:  # wgmma and tcgen05 read operands from shared memory: registers are left
        tile = GemmTile(128, 128, 64, num_warps=8)
    else:
        tile = GemmTile(128, 128, 32, num_warps=8, num_stages=4)
    return tile.halved() if gated else tile


def tiles(counts: Sequence[int], block_m: int, form: str = "padded") -> list[tuple[int, int]]:
    """(first row, one past the last) of every tile, rows counted through all experts."""
    _check(counts, block_m, form)
    spans = _spans(counts) if form == "padded" else [(0, sum(counts))]
    return [(row, min(row + block_m, end)) for begin, end in spans for row in range(begin, end, block_m)]


def max_tiles(rows: int, experts: int, block_m: int, form: str = "padded") -> int:
    """The most tiles that `rows` rows can take, however they are spread: what a launch reserves, so that the
    counts need not be known on the host."""
    _check([rows], block_m, form)
    if form == "straddle":
        return -(-rows // block_m)
    used = min(experts, rows)
    return used + (rows - used) // block_m


def products(counts: Sequence[int], block_m: int, form: str = "padded") -> int:
    """Pairs of a tile and an expert that has rows in it. Each multiplies block_m rows by the expert's weights
    and, where no cache keeps them, reads those again."""
    _check(counts, block_m, form)
    if form == "padded":
        return len(tiles(counts, block_m))
    return sum((end - 1) // block_m - begin // block_m + 1 for begin, end in _spans(counts))


def padded_rows(counts: Sequence[int], block_m: int) -> int:
    """Rows that the padded form multiplies: each expert's, rounded up to whole tiles."""
    return block_m * products(counts, block_m)


def straddling_tiles(counts: Sequence[int], block_m: int) -> int:
    """Tiles of the straddling form that hold rows of more than one expert."""
    _check(counts, block_m, "straddle")
    return len({begin // block_m for begin, _ in _spans(counts) if begin % block_m})  # begins within a tile


@dataclass(frozen=True)
class MoEBytes:
    """Bytes that the kernels of one mixture-of-experts layer move, each tensor once.

    weights   both matrices of every expert that has rows
    x         the token of each row, gathered
    hidden    between the two products, written and read
    partial   float32 rows before they are added up, written and read
    out       the result
    """

    weights: int
    x: int
    hidden: int
    partial: int
    out: int

    @property
    def total(self) -> int:
        return self.weights + self.x + self.hidden + self.partial + self.out


def moe_kernel_bytes(
    counts: Sequence[int], *, tokens: int, d_model: int, ffn: int, element_bytes: int = 2
) -> MoEBytes:
    """What `companion.kernels.moe` moves for `tokens` tokens whose rows are spread as `counts`.

    A lower bound: no tensor is read twice. Without a cache the weights of an expert are read once for each
    of its tiles, `products` in all instead of the number of experts with rows.
    """
    _check(counts, 1, "padded")
    rows, used = sum(counts), len(_spans(counts))
    return MoEBytes(
        weights=used * 3 * d_model * ffn * element_bytes,
        x=rows * d_model * element_bytes,
        hidden=2 * rows * ffn * element_bytes,
        partial=2 * rows * d_model * 4,
        out=tokens * d_model * element_bytes,
    )


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, one past the last) of every expert that has rows."""
    spans, begin = [], 0
    for n in counts:
        if n:
            spans.append((begin, begin + n))
        begin += n
    return spans


def _check(counts: Sequence[int], block_m: int, form: str) -> None:
    if any(n < 0 for n in counts):
        raise ValueError(f"counts must be at least 0, got {min(counts)}")
    if block_m < 1:
        raise ValueError(f"block_m must be at least 1, got {block_m}")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}; got {form!r}")
