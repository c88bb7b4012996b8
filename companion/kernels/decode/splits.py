"""How a decode kernel divides its work, and the bytes it moves. Standard library only.

The kernel, its tests and the cost model ask the same functions. A decode step's attention is B x Hkv
independent pieces; with few sequences there are fewer pieces than a GPU has cores, so the keys of each are
split over several programs, whose results are merged by LSE.

Sources: flash-attention's `num_splits_heuristic` (the waves), Dao et al. 2023, "Flash-Decoding".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...checks import whole
from ...formats import INT4, INT8, KERNELS, bits_per_value, dtype_name

MOST_SPLITS = 128
PER_CORE = 2  # programs that a core (an SM) should hold, so that one computes while the other waits
WIDTHS = {name: f.bits / 8 for name, f in KERNELS.items()}  # bytes of a code


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def parts(width: int, *, pairs: bool = False, first: int | None = None) -> tuple[int, int]:
    """Two powers of two, A and B, that cover a head's channels; B = 0 where one is enough.

    pairs  even and odd channels apart, as packed formats store them
    first  channels that part A has to cover: a latent's values

    >>> parts(128), parts(576), parts(96), parts(100), parts(128, pairs=True)
    ((128, 0), (512, 64), (64, 32), (128, 0), (64, 64))
    """
    if pairs:
        half = max(16, power_of_two(-(-width // 2)))
        return half, half
    whole_width = max(16, power_of_two(width))
    a = max(16, power_of_two(first) if first else whole_width if whole_width == width else whole_width // 2)
    if a >= width:
        return a, 0
    b = max(16, power_of_two(width - a))
    return (a, b) if first or a + b < whole_width else (whole_width, 0)


@dataclass(frozen=True)
class Tile:
    """What one program works on at a time, and how it is launched.

    rows    query rows that share a key head, heads and draft tokens together
    keys    tokens of a tile
    dot     products on tensor cores (False: multiplied and summed)
    """

    rows: int
    keys: int
    dot: bool
    warps: int
    stages: int


def decode_tile(
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    rows: int = 1,
    dtype="bf16",
    capability: tuple[int, int] = (8, 0),
    key_group: int | None = None,
) -> Tile:
    """The tile for one shape of head. Not for a batch or a length: a row's bits must not depend on those.

    rows        query rows of one key head: Hq / Hkv, times the tokens that are verified at once
    dtype       in which products are made, the query's
    capability  CUDA compute capability; tensor cores are used from 8.0 on, and not in fp32
    key_group   tokens that share a scale per channel (KIVI); a tile must not straddle two groups
    """
    width = max(sum(parts(head_dim)), power_of_two(head_dim if v_head_dim is None else v_head_dim))
    dot = tuple(capability) >= (8, 0) and dtype_name(dtype) != "fp32"
    if dot:
        # A latent is one head for all queries: the more rows a program takes, the fewer times it is read.
        shared = _shared_kib(tuple(capability))
        wide = 64 if shared > 160 else 32 if shared > 64 else 16
        most, keys = (64, 64) if width <= 128 else (32, 32) if width <= 256 else (wide, 32)
        tile = min(max(16, power_of_two(rows)), most), keys
        warps, stages = 8 if tile[0] >= 32 and width > 256 else 4, 2
    else:
        tile = min(power_of_two(rows), 4 if width <= 128 else 1), 32 if 128 < width <= 256 else 16
        warps, stages = 4, 1
    keys = tile[1] if key_group is None else min(tile[1], key_group)
    return Tile(tile[0], keys, dot, warps, stages)


def _shared_kib(capability: tuple[int, int]) -> int:
    """Shared memory that one program may have. AMD's devices report capability 9.4 and above."""
    if (9, 4) <= capability < (10, 0):
        return 64
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99)


def num_splits(programs: int, cores: int, tiles: int, *, most: int = MOST_SPLITS) -> int:
    """Into how many splits to divide the keys of each of `programs` pieces of work.

    cores   programs that run at once
    tiles   tiles of keys in the longest piece; there are never more splits than tiles

    One split if the pieces alone fill 80 % of the cores. Otherwise the fewest splits whose last wave of
    programs is filled within 85 % as well as with the best number of splits: more are merging for nothing.
    """
    programs = whole("programs", programs, owner="num_splits")
    cores, tiles = whole("cores", cores, owner="num_splits"), whole("tiles", tiles, 0, owner="num_splits")
    if programs >= 0.8 * cores:
        return 1
    efficiency = {}
    for n in range(1, max(1, min(most, cores, tiles)) + 1):
        if n > 1 and -(-tiles // n) == -(-tiles // (n - 1)):
            continue  # the longest split is no shorter than with one split fewer
        waves = programs * n / cores
        efficiency[n] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(n for n, e in efficiency.items() if e >= 0.85 * best)


@dataclass(frozen=True)
class Splits:
    """`count` splits of `size` keys each, counted from the first live key of a sequence."""

    count: int
    size: int


def plan_splits(
    keys: int, tile: int, *, programs: int = 1, cores: int = 1, count: int = 0, fixed: int | None = None
) -> Splits:
    """Splits for sequences of up to `keys` live keys.

    tile    keys of a tile; a split is a multiple of it, unless `fixed`
    count   how many splits: 0 chooses by `num_splits`; if there are fewer tiles there are fewer splits
    fixed   keys of a split, whatever the batch: a row's result then has the same bits in any batch. Splits of
            a number that adapts to the batch divide a sum elsewhere, and rounding sees that.
    """
    keys, tile = whole("keys", keys, 0, owner="plan_splits"), whole("tile", tile, owner="plan_splits")
    if fixed is not None:
        size = whole("fixed", fixed, owner="plan_splits")
    else:
        tiles = -(-keys // tile)
        n = count or num_splits(programs, cores, tiles)
        size = max(1, -(-tiles // n)) * tile
    return Splits(max(1, -(-keys // size)), size)


def live_keys(length: int, window: int | None, queries: int = 1) -> int:
    """Keys that one of a sequence's last `queries` tokens sees, at least; a window includes the token."""
    return length if window is None else min(length, window + queries - 1)


@dataclass(frozen=True)
class KernelBytes:
    """Bytes that a decode kernel asks of memory, by what they are for."""

    cache: int  # keys and values, their scales included
    query: int
    table: int  # lengths, and block numbers if paged
    partials: int  # written by stage one, read by stage two
    output: int  # with its LSE

    @property
    def total(self) -> int:
        return self.cache + self.query + self.table + self.partials + self.output


def decode_kernel_bytes(
    lengths,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    latent: bool = False,
    queries: int = 1,
    dtype="bf16",
    kv_format: str = "none",
    scale_bytes: int = 2,
    offsets: bool = False,
    group: int = 32,
    block_size: int | None = None,
    window: int | None = None,
    splits: int = 1,
    split_size: int | None = None,
    row_tiles: int = 1,
) -> KernelBytes:
    """The traffic of one decode step of one layer.

    lengths     keys of each sequence
    latent      values are the front of the keys (MLA): read once
    queries     query tokens per sequence
    dtype       of the query, the output, and of a cache with kv_format "none"
    scale_bytes, offsets   int8, int4: bytes of a scale, and whether a zero of the same size lies beside it
    group       kivi: tokens that share a key's scale, channels that share a value's; zeros always included
    splits, split_size     as launched; a sequence writes a partial for each split in which it has keys
    row_tiles   how often the rows of a key head make a program read its keys; beyond the first time they may
                come from the L2 cache
    """
    lengths = [whole("lengths", n, 0, owner="decode_kernel_bytes") for n in lengths]
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    number = bits_per_value(dtype) / 8
    live = [live_keys(n, window, queries) for n in lengths]
    width = head_dim + (0 if latent else v_head_dim)
    token = width * (number if kv_format == "none" else WIDTHS[kv_format])
    if kv_format in (INT8.kernel, INT4.kernel):
        token += (1 if latent else 2) * scale_bytes * (2 if offsets else 1)
    elif kv_format.startswith("kivi"):
        token += 2 * scale_bytes * (head_dim + v_head_dim) / group
    rows = queries * heads
    size = max(live, default=0) if split_size is None else split_size
    full = sum(max(1, min(splits, -(-n // max(1, size)))) for n in live)
    return KernelBytes(
        cache=math.ceil(sum(live) * kv_heads * token * row_tiles),
        query=int(len(lengths) * rows * head_dim * number),
        table=4 * len(lengths) + (4 * sum(-(-n // block_size) for n in live) if block_size else 0),
        partials=0 if splits == 1 else 2 * 4 * rows * (full * v_head_dim + len(lengths) * splits),
        output=int(len(lengths) * rows * (v_head_dim * number + 4)),
    )
