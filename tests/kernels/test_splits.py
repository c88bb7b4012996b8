"""Tiles, splits and traffic of the decode kernel, as pure functions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from companion.kernels.decode.splits import (
    KernelBytes,
    Splits,
    decode_kernel_bytes,
    decode_tile,
    live_keys,
    num_splits,
    parts,
    plan_splits,
    power_of_two,
)

LLAMA = dict(heads=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    "width, pairs, first, want",
    [
        (128, False, None, (128, 0)),
        (64, False, None, (64, 0)),
        (96, False, None, (64, 32)),
        (80, False, None, (64, 16)),
        (100, False, None, (128, 0)),
        (59, False, None, (64, 0)),
        (1, False, None, (16, 0)),
        (192, False, None, (128, 64)),
        (576, False, None, (512, 64)),
        (576, False, 512, (512, 64)),
        (80, False, 48, (64, 16)),
        (64, False, 64, (64, 0)),
        (128, True, None, (64, 64)),
        (96, True, None, (64, 64)),
    ],
)
def test_parts_of_a_head(width, pairs, first, want):
    assert parts(width, pairs=pairs, first=first) == want


@given(st.integers(1, 1200), st.booleans())
def test_parts_cover_a_head_with_powers_of_two(width, pairs):
    a, b = parts(width, pairs=pairs)
    assert a == power_of_two(a) >= 16 and (b == 0 or b == power_of_two(b) >= 16)
    assert a + b >= width and a + b <= max(32, 2 * power_of_two(width))
    if not pairs:
        assert a + b <= max(16, power_of_two(width))  # never more than padding would take


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 4), (10, 0), (12, 0)])
@pytest.mark.parametrize("dim, v_dim", [(64, 64), (96, 96), (128, 128), (256, 256), (576, 512)])
def test_tiles(capability, dim, v_dim):
    for rows in (1, 4, 7, 16, 128):
        tile = decode_tile(dim, v_head_dim=v_dim, rows=rows, dtype="fp16", capability=capability)
        assert tile.dot is (capability >= (8, 0))
        assert tile.rows == power_of_two(tile.rows) and tile.keys == power_of_two(tile.keys) >= 16
        assert tile.rows >= 16 or not tile.dot  # what a matrix instruction takes
        assert tile.rows <= max(16, power_of_two(rows))
    assert decode_tile(dim, rows=4, key_group=16, capability=capability).keys == 16
    assert decode_tile(dim, dtype="fp32", capability=capability).dot is False


def test_a_latent_is_read_by_as_many_rows_as_fit():
    """128 heads over one latent: 2 programs on an H100, 4 on an L4, whose shared memory is smaller."""
    rows = [
        decode_tile(576, v_head_dim=512, rows=128, dtype="bf16", capability=c).rows
        for c in ((9, 0), (8, 0), (8, 9), (12, 0), (9, 4))
    ]
    assert rows == [64, 64, 32, 32, 16]


@pytest.mark.parametrize(
    "programs, cores, tiles, want",
    [
        (8, 264, 1000, 29),  # 33 would fill one wave; 29 fill 88 % of it, and merge less
        (8, 264, 16, 16),
        (8, 264, 1, 1),
        (8, 264, 0, 1),
        (212, 264, 1000, 1),  # 80 % of the cores are busy without splitting
        (1000, 264, 1000, 1),
        (211, 264, 1000, 5),  # 211: one wave at 80 %; 5 x 211 makes four waves, all but full
        (1, 264, 10_000, 108),  # 85 % of 127, the most that shortens a split
        (1, 1, 1000, 1),
    ],
)
def test_how_many_splits(programs, cores, tiles, want):
    assert num_splits(programs, cores, tiles) == want


@given(st.integers(1, 2000), st.integers(1, 400), st.integers(0, 3000))
def test_splits_are_within_bounds_and_fill_waves(programs, cores, tiles):
    n = num_splits(programs, cores, tiles)
    most = max(1, min(128, cores, tiles))
    shorter = [m for m in range(1, most + 1) if m == 1 or -(-tiles // m) < -(-tiles // (m - 1))]

    def full(m):
        return programs * m / cores / math.ceil(programs * m / cores)

    if programs >= 0.8 * cores:
        assert n == 1
    else:
        good = [m for m in shorter if full(m) >= 0.85 * max(map(full, shorter))]
        assert n == good[0]


@given(
    st.integers(0, 5000), st.sampled_from([16, 32, 64]), st.integers(0, 200), st.none() | st.integers(1, 700)
)
def test_splits_cover_the_keys_once(keys, tile, count, fixed):
    plan = plan_splits(keys, tile, count=count, fixed=fixed)
    assert plan.count * plan.size >= keys and (plan.count - 1) * plan.size < max(1, keys)
    if fixed is None:
        assert plan.size % tile == 0 and plan.count <= max(1, count)
    else:
        assert plan.size == fixed


def test_a_fixed_size_does_not_ask_who_else_is_there():
    assert plan_splits(1000, 64, fixed=256, programs=1, cores=132).size == 256
    assert plan_splits(9999, 64, fixed=256, programs=900, cores=132).size == 256
    assert plan_splits(0, 64) == Splits(1, 64)


@pytest.mark.parametrize("bad", [dict(keys=-1), dict(fixed=0), dict(tile=0)])
def test_bad_plans(bad):
    with pytest.raises(ValueError, match=f"plan_splits: {next(iter(bad))}"):
        plan_splits(**{"keys": 5, "tile": 64, **bad})


def test_live_keys():
    assert [live_keys(100, None), live_keys(100, 10), live_keys(5, 10), live_keys(100, 10, 4)] == [
        100,
        10,
        5,
        13,
    ]


# --- bytes --------------------------------------------------------------------------------------------------


def test_bytes_of_llama_at_8192():
    """2 x 8 heads x 128 channels x 2 bytes = 4,096 bytes a token; everything else is small."""
    b = decode_kernel_bytes([8192], **LLAMA)
    assert b == KernelBytes(cache=8192 * 4096, query=32 * 128 * 2, table=4, partials=0, output=32 * (256 + 4))
    assert b.total == sum((b.cache, b.query, b.table, b.partials, b.output))
    assert b.cache / b.total > 0.999


@pytest.mark.parametrize(
    "kv_format, offsets, token",
    [
        ("none", False, 2 * 128 * 2),
        ("int8", False, 2 * (128 + 2)),
        ("int4", False, 2 * (64 + 2)),
        ("int4", True, 2 * (64 + 4)),
        ("fp8_e4m3", False, 2 * 128),
        ("kivi4", False, 2 * (64 + 4 * 4)),
        ("kivi2", False, 2 * (32 + 4 * 4)),
    ],
)
def test_bytes_per_token_of_every_format(kv_format, offsets, token):
    b = decode_kernel_bytes([1000, 24], **LLAMA, kv_format=kv_format, offsets=offsets)
    assert b.cache == 1024 * 8 * token


def test_a_latent_is_read_once():
    mla = dict(heads=128, kv_heads=1, head_dim=576, v_head_dim=512)
    once = decode_kernel_bytes([4096], **mla, latent=True).cache
    assert once == 4096 * 576 * 2
    assert decode_kernel_bytes([4096], **mla).cache == 4096 * (576 + 512) * 2
    assert decode_kernel_bytes([4096], **mla, latent=True, row_tiles=2).cache == 2 * once


def test_windows_pages_and_partials():
    assert decode_kernel_bytes([8192, 10], **LLAMA, window=128).cache == (128 + 10) * 4096
    assert decode_kernel_bytes([33, 0], **LLAMA, block_size=16).table == 8 + 4 * 3
    b = decode_kernel_bytes([1000, 100], **LLAMA, splits=4, split_size=256)
    assert b.partials == 2 * 4 * 32 * ((4 + 1) * 128 + 2 * 4)  # a short row has keys in one split of four
    assert decode_kernel_bytes([1000], **LLAMA, queries=3).query == 3 * 32 * 128 * 2


def test_they_are_the_bytes_of_tensors():
    torch = pytest.importorskip("torch")
    cache = torch.empty(2, 100, 8, 128, dtype=torch.bfloat16)
    q, lse = torch.empty(2, 32, 128, dtype=torch.bfloat16), torch.empty(2, 32)
    b = decode_kernel_bytes([100, 100], **LLAMA)
    assert b.cache == 2 * cache.nbytes and b.query == q.nbytes and b.output == q.nbytes + lse.nbytes
