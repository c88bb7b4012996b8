"""What must not matter: the batch around a row, empty splits, the table's order, where memory lies."""

import ctypes
import mmap

import pytest
import torch
from kernel_inputs import check, make

from companion.kernels import decode_attention, mode
from companion.kernels.decode.checks import check_call
from companion.kernels.decode.launch import constexprs, merge_arguments, prepare

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def row_of(case, b):
    """The call for one sequence alone."""
    cache = dict(case.cache)
    for name in ("cache_seqlens", "block_table"):
        if name in cache:
            cache[name] = cache[name][b : b + 1]
    if "block_table" not in cache:
        cache |= {n: x[b : b + 1] for n, x in cache.items() if isinstance(x, torch.Tensor) and x.ndim > 2}
    case = type(case)(case.q[b : b + 1], case.lengths[b : b + 1], cache, [], case.options)
    return case.run


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"block_size": 16, "dtype": HALF},
        {"block_size": 16, "dtype": BRAIN, "window_size": (90, 0), "queries": 2},
        {"sinks": torch.linspace(-1, 1, 8), "softcap": 9.0},
        {"block_size": 32, "kv_format": "int4", "dtype": HALF},
        {"block_size": 32, "kv_format": "kivi4", "dtype": HALF},
    ],
    ids=lambda made: "-".join(made) or "plain",
)
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(made):
    case = make([339, 5, 140, 0, 64, 65], (8, 2), 64, **made)
    out, lse = case.run(decode_attention, fixed_split_size=64)
    check((out, lse), case.expected(), case.q.dtype, lse_tolerance=1e-3)
    for b in range(len(case.lengths)):
        alone, alone_lse = row_of(case, b)(decode_attention, fixed_split_size=64)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("kv_format", ["none", "int8"])
def test_the_fixed_mode_compiles_one_kernel_for_any_batch(kv_format):
    """The interpreter adds in one order whatever the tile; a GPU does not. So the tile must be the same."""
    shapes = []
    for lengths in ([5], [5, 339], [0] * 40, [140] * 7):
        case = make(lengths, (8, 2), 64, dtype=HALF, block_size=16, room=30, kv_format=kv_format)
        cache = dict(case.cache)
        call = check_call(
            case.q, cache.pop("k_cache"), cache.pop("v_cache"), cache.pop("cache_seqlens"), **cache
        )
        launch = prepare(call, fixed_split_size=64)
        shapes.append((launch.tile, launch.splits.size, constexprs(call, launch.tile)))
    assert all(shape == shapes[0] for shape in shapes)
    tiles = [
        merge_arguments(
            torch.zeros(2, 1, 8, n, 64), torch.zeros(2, 8, 1, n), None, case.q, torch.zeros(2, 8, 1)
        )
        for n in (1, 5, 40)
    ]
    assert {(t["BLOCK_S"], t["BLOCK_D"]) for t in tiles} == {(16, 64)}


def test_splits_that_adapt_to_the_batch_do_not_give_the_same_bits():
    """Why the fixed mode exists: one more sequence, a longer one, and this one's sum is divided elsewhere."""
    case = make([140, 339], (8, 2), 64)
    together = case.run(decode_attention, num_splits=3)[0][0]
    alone = row_of(case, 0)(decode_attention, num_splits=3)[0][0]
    assert not torch.equal(alone, together)
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("splits", [1, 2, 7, 1000])
def test_more_splits_than_keys_and_empty_splits(splits):
    case = make([97, 0, 1, 33], (4, 2), 64, block_size=16)
    check(case.run(decode_attention, num_splits=splits), case.expected(), SINGLE)


@pytest.mark.parametrize("size", [1, 5, 16, 33, 500])
def test_splits_of_any_size(size):
    case = make([20, 0, 1, 17], (2, 1), 64, block_size=8)
    check(case.run(decode_attention, fixed_split_size=size), case.expected(), SINGLE)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("size", [7, 64])
def test_windows_smaller_than_a_split_and_at_its_edges(window, size):
    case = make([97, 64, 16, 1, 0], (2, 1), 64, block_size=16, window_size=(window - 1, 0))
    check(case.run(decode_attention, fixed_split_size=size), case.expected(), SINGLE)


@pytest.mark.parametrize("kv_format", ["none", "int8", "int4", "fp8_e4m3", "kivi4"])
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_without_tensor_cores(monkeypatch, dim, kv_format):
    """A device below capability 8.0: the same body, products multiplied and summed."""
    case = make([97, 0, 33], (8, 2), dim, dtype=HALF, block_size=32, kv_format=kv_format, queries=2)
    plain = case.run(decode_attention, num_splits=2)
    monkeypatch.setattr(mode, "capability", lambda tensor: (7, 5))
    seen = []
    monkeypatch.setattr("companion.kernels.decode.prepare", lambda *a: seen.append(prepare(*a)) or seen[-1])
    got = case.run(decode_attention, num_splits=2)
    assert seen[0].tile.dot is False
    check(got, case.expected(), HALF, lse_tolerance=1e-3 if kv_format == "kivi4" else 5e-6)
    torch.testing.assert_close(got, plain, rtol=4e-3, atol=4e-3)


def test_a_device_with_many_cores_splits_by_itself(monkeypatch):
    monkeypatch.setattr(mode, "cores", lambda tensor: 100)
    case = make([339, 20], (8, 2), 64, dtype=HALF, block_size=16)
    seen = []
    monkeypatch.setattr("companion.kernels.decode.prepare", lambda *a: seen.append(prepare(*a)) or seen[-1])
    check(case.run(decode_attention), case.expected(), HALF)
    assert seen[0].splits.count == 6  # one per tile of 64 keys: 24 programs are far from filling 100 cores


def test_permuting_the_pages_changes_no_bit():
    case = make([97, 33], (4, 2), 64, block_size=16)
    first = case.run(decode_attention, num_splits=2)
    order = torch.randperm(len(case.cache["k_cache"]), generator=torch.Generator().manual_seed(3))
    table = case.cache["block_table"]
    real = table < len(order)
    table[real] = order.argsort()[table[real].long()].to(torch.int32)
    case.cache |= {n: case.cache[n][order] for n in ("k_cache", "v_cache")}
    second = case.run(decode_attention, num_splits=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_two_rows_may_share_pages():
    case = make([64, 64], (4, 2), 64, block_size=16)
    case.cache["block_table"][1] = case.cache["block_table"][0]
    case.dense[1] = case.dense[0]
    check(case.run(decode_attention), case.expected(), SINGLE)


@pytest.mark.parametrize("axis", ["page", "slot", "head", "sequence"])
def test_offsets_beyond_two_to_the_31(axis):
    """2.4e9 bytes of address space, of which a few pages are touched."""
    far = 1_200_000_000
    memory = torch.empty(2 * far + 4096, dtype=torch.uint8)
    shape = {"page": (3, 4, 1, 64), "slot": (1, 3, 1, 64), "head": (1, 4, 3, 64), "sequence": (3, 4, 1, 64)}[
        axis
    ]
    near = [256, 64, 64, 1]
    near[{"page": 0, "sequence": 0, "slot": 1, "head": 2}[axis]] = far
    cache = memory.as_strided(shape, near)
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 120, shape, generator=g, dtype=torch.uint8)
    cache.copy_(codes)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32) if axis == "page" else None
    B = 3 if axis == "sequence" else 1
    n = 12 if axis == "page" else 3
    q = torch.randn(B, shape[2], 64, generator=g) * 0.02
    lengths = torch.full((B,), n, dtype=torch.int32)
    options = dict(kv_format="fp8_e4m3", return_lse=True)
    got = decode_attention(q, cache, cache, lengths, block_table=table, **options)
    want = decode_attention(q, codes, codes, lengths, block_table=table, **options)
    assert got[0].isfinite().all() and all(torch.equal(a, b) for a, b in zip(got, want))


def guarded(x):
    """A copy of x whose last byte lies before a page that may not be touched: reading on ends the process."""
    size = x.numel() * x.element_size()
    before = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, before + mmap.PAGESIZE), dtype=torch.uint8)
    forbidden = ctypes.c_void_p(memory.data_ptr() + before)
    assert ctypes.CDLL(None).mprotect(forbidden, mmap.PAGESIZE, 0) == 0
    return memory[before - size : before].view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.parametrize("kv_format", ["none", "int4", "kivi2"])
@pytest.mark.parametrize("block_size", [None, 32])
def test_nothing_behind_a_tensor_is_read(kv_format, block_size):
    """The last sequence fills its cache to the end, its table has no column to spare, D is 96."""
    case = make([5, 96], (6, 2), 96, dtype=HALF, block_size=block_size, kv_format=kv_format, room=96)
    if block_size:
        case.cache["block_table"] = case.cache["block_table"][:, :3]
        table, last = case.cache["block_table"], len(case.cache["k_cache"]) - 1
        other = int(table[1, 2])  # changes places with the pool's last page
        for x in case.cache.values():
            if isinstance(x, torch.Tensor) and x.ndim > 2:
                x[[other, last]] = x[[last, other]]
        table[table == last] = other
        table[1, 2] = last
    case.cache = {n: guarded(x) if isinstance(x, torch.Tensor) else x for n, x in case.cache.items()}
    case.q = guarded(case.q)
    sinks = guarded(torch.linspace(-1, 1, 6))
    case.options["sinks"] = sinks
    check(case.run(decode_attention, num_splits=2), case.expected(), HALF, lse_tolerance=1e-3)


def test_a_query_and_a_result_that_are_views():
    case = make([97, 33], (4, 2), 64, block_size=16, queries=2)
    wide = torch.full((2, 3, 5, 70), torch.nan)
    wide[:, 1:, :4, 3:67] = case.q
    case.q = wide[:, 1:, :4, 3:67]
    check(case.run(decode_attention, num_splits=2), case.expected(), SINGLE)


def test_nothing_is_written_to():
    case = make([97, 0], (4, 2), 64, block_size=16, sinks=torch.zeros(4))
    before = {n: x.clone() for n, x in case.cache.items()}
    q = case.q.clone()
    case.run(decode_attention, num_splits=2)
    assert torch.equal(case.q, q)
    for n, x in case.cache.items():
        torch.testing.assert_close(x, before[n], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 4, 64)])
def test_nothing_to_do(shape):
    cache = torch.empty(shape[0], 8, 2, 64)
    out, lse = decode_attention(
        torch.empty(shape), cache, cache, torch.zeros(shape[0], dtype=torch.int32), return_lse=True
    )
    assert out.shape == shape and lse.numel() == 0


def test_a_cache_without_a_slot():
    cache = torch.empty(2, 0, 2, 64)
    out, lse = decode_attention(
        torch.ones(2, 4, 64), cache, cache, torch.zeros(2, dtype=torch.int32), return_lse=True
    )
    assert (out == 0).all() and (lse == -torch.inf).all()
