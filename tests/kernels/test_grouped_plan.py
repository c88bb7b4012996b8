"""Tiles of a grouped product: counted by hand, and by marking every row."""

import random

import pytest

from companion.kernels.moe.plan import (
    FORMS,
    GemmTile,
    gemm_tile,
    max_tiles,
    moe_kernel_bytes,
    padded_rows,
    products,
    straddling_tiles,
    tiles,
)

COUNTS = [[], [0], [1], [0, 0, 5], [64, 64], [63, 2, 0, 64], [1] * 8, [17] * 8, [0, 300, 0, 1]]
COUNTS += [[random.Random(seed).choice((0, 0, 1, 3, 16, 40)) for _ in range(12)] for seed in range(6)]


def owners(counts):
    return [e for e, n in enumerate(counts) for _ in range(n)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("block_m", [1, 4, 16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_every_row_is_in_one_tile(counts, block_m, form):
    cut, owner = tiles(counts, block_m, form), owners(counts)
    assert [row for begin, end in cut for row in range(begin, end)] == list(range(len(owner)))
    assert all(0 < end - begin <= block_m for begin, end in cut)
    experts = [set(owner[begin:end]) for begin, end in cut]
    assert products(counts, block_m, form) == sum(map(len, experts))
    assert len(cut) <= max_tiles(len(owner), max(len(counts), 1), block_m, form)
    if form == "padded":
        assert all(len(e) == 1 for e in experts)
        assert padded_rows(counts, block_m) == block_m * len(cut)
    else:
        assert straddling_tiles(counts, block_m) == sum(len(e) > 1 for e in experts)
        assert len(cut) == max_tiles(len(owner), max(len(counts), 1), block_m, form)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_straddling_saves_tiles_and_no_products(counts):
    for block_m in (4, 16, 64):
        assert len(tiles(counts, block_m, "straddle")) <= len(tiles(counts, block_m, "padded"))
        assert products(counts, block_m, "straddle") >= products(counts, block_m, "padded")


def test_the_reserved_tiles_are_reached():
    """One row to each expert but the last, which has one more than fills its tiles."""
    for rows, experts, block_m in ((8, 8, 16), (100, 4, 16), (3, 64, 64), (129, 1, 64)):
        used = min(rows, experts)
        counts = [1] * (used - 1) + [rows - used + 1]
        assert len(tiles(counts, block_m)) == max_tiles(rows, experts, block_m)


def test_one_token_of_eight_experts():
    counts = [1] * 8
    assert padded_rows(counts, 64) == 512 and padded_rows(counts, 16) == 128
    assert len(tiles(counts, 64, "straddle")) == 1 and products(counts, 64, "straddle") == 8


def test_bytes_of_a_decode_step_are_its_weights():
    """Qwen3-30B-A3B's layer: 8 of 128 experts, 3 x 2048 x 768 each."""
    moved = moe_kernel_bytes([1] * 8 + [0] * 120, tokens=1, d_model=2048, ffn=768)
    assert moved.weights == 8 * 3 * 2048 * 768 * 2
    assert moved.x == 8 * 2048 * 2 and moved.hidden == 2 * 8 * 768 * 2 and moved.partial == 2 * 8 * 2048 * 4
    assert moved.out == 2048 * 2
    assert moved.total == moved.weights + moved.x + moved.hidden + moved.partial + moved.out
    assert moved.weights / moved.total > 0.99
    assert moe_kernel_bytes([], tokens=0, d_model=8, ffn=8).total == 0


def test_the_tile_follows_the_rows_and_the_device():
    assert (
        gemm_tile(8, 128).block_m == 16 < gemm_tile(128 * 32, 128).block_m < gemm_tile(128 * 256, 128).block_m
    )
    assert gemm_tile(8, 128, gated=True).block_n * 2 == gemm_tile(8, 128).block_n
    assert gemm_tile(0, 4).block_m == 16
    for size, capability in ((4, (8, 0)), (2, (7, 5)), (4, (7, 5))):  # no matrix instructions: small
        tile = gemm_tile(8192, 4, element_bytes=size, capability=capability)
        assert tile.block_m * tile.block_n <= 2048
    assert gemm_tile(8192, 4, capability=(9, 0)) != gemm_tile(8192, 4, capability=(12, 0))


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: tiles([1], 0), "block_m"),
        (lambda: tiles([-1], 4), "counts"),
        (lambda: tiles([1], 4, "other"), "form"),
        (lambda: products([1], 4, "other"), "form"),
        (lambda: gemm_tile(-1, 4), "rows"),
        (lambda: gemm_tile(1, 0), "experts"),
        (lambda: GemmTile(3, 16, 16), "block_m"),
        (lambda: GemmTile(16, 8, 16), "block_n"),
        (lambda: GemmTile(16, 16, 48), "block_k"),
        (lambda: GemmTile(16, 16, 16, num_warps=3), "num_warps"),
        (lambda: GemmTile(16, 16, 16, num_stages=0), "num_stages"),
        (lambda: GemmTile(True, 16, 16), "block_m"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
