"""Cache writes: the codecs' own bytes, in the right slot and nowhere else.

The oracle is `companion.quantize` (and torch's casts for fp8), applied outside of any cache; places are
worked out here by hand. The reference is held against the same.
"""

import jaxtyping
import pytest
import torch

from companion.caches import make_cache
from companion.cost import models
from companion.kernels.append import append
from companion.kernels.append.reference import append_reference, slots_of
from companion.quantize import codec

# The interpreter is NumPy, which warns where a GPU does not: NaN divided, a cast that overflows to infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INTEGERS = [("int8", False), ("int8", True), ("int4", False), ("int4", True)]  # with a zero?
both = pytest.mark.parametrize("write", [append, append_reference])


def same(a, b):
    """Equal, NaN for NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a != a) & (b != b)).all())


def store(shape, D, kv_format, *, kind=F32, scales=F16, zero=False, fill=77):
    """(cache, scale, zero) for (num_blocks, block_size, Hkv) tokens, filled with junk."""
    dtype = {"none": kind, "int8": torch.uint8 if zero else torch.int8}.get(kv_format, torch.uint8)
    cache = torch.full((*shape, D // 2 if kv_format == "int4" else D), fill).to(dtype)
    if not kv_format.startswith("int"):
        return cache, None, None
    scale = torch.full(shape, float(fill), dtype=scales)
    return cache, scale, scale.clone() if zero else None


def put(write, k, v, ks, vs, kv_format, **places):
    named = dict(k_scale=ks[1], k_zero=ks[2])
    if vs is not None:
        named |= dict(v_scale=vs[1], v_zero=vs[2])
    write(k, v, ks[0], None if vs is None else vs[0], kv_format=kv_format, **named, **places)


def rows(T, Hkv, D, kind, seed=0):
    """Keys of all magnitudes: rows from 1e-9 to 1e9 (what the dtype holds), some with an offset."""
    g = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(T, Hkv, 1, generator=g) * 5)
    x = torch.randn(T, Hkv, D, generator=g) * size + size * torch.randint(-3, 4, (T, Hkv, 1), generator=g)
    return x.clamp(-6e4, 6e4).to(kind)


# --- the bytes ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kv_format, zero", INTEGERS)
@pytest.mark.parametrize("scales", [F16, BF16, F32])
@pytest.mark.parametrize("kind", [F16, BF16, F32])
def test_integer_codes_are_the_codecs_own(write, kv_format, zero, scales, kind):
    T, Hkv, D, Dv = 40, 2, 64, 48  # the second width is no power of two
    k, v = rows(T, Hkv, D, kind), rows(T, Hkv, Dv, kind, seed=1)
    ks, vs = (store((T, 1, Hkv), n, kv_format, scales=scales, zero=zero) for n in (D, Dv))
    put(write, k, v, ks, vs, kv_format, slot_mapping=torch.arange(T))
    c = codec(kv_format, symmetric=not zero, scale_dtype=scales)
    for x, (codes, scale, low) in ((k, ks), (v, vs)):
        qt = c.quantize(x)
        assert torch.equal(codes[:, 0], qt.codes)
        assert torch.equal(scale[:, 0], qt.scale[..., 0])
        assert low is None or torch.equal(low[:, 0], qt.zero[..., 0])


@both
@pytest.mark.parametrize("kv_format, zero", INTEGERS)
@pytest.mark.parametrize("scales", [F16, BF16, F32])
def test_rows_that_are_hard_for_a_codec(write, kv_format, zero, scales):
    D = 32
    x = torch.zeros(12, 1, D)
    x[1], x[2], x[3] = 5.0, -5.0, 1000.25  # constant rows
    x[4] = 1e-42 * torch.arange(D)  # subnormal in float32
    x[5] = torch.linspace(0, 3e-7, D)  # its scale is subnormal in float16
    x[6] = torch.linspace(-1e6, 2e6, D)  # beyond what a float16 scale or zero reaches
    x[7] = 2.0**126 * torch.linspace(-1, 1, D)  # the most that is allowed
    x[8, 0, 3] = 1.0
    x[9] = torch.arange(D) - 15.5  # ties everywhere, with a step of 1
    x[9, 0, 0], x[9, 0, 1] = -127, 127
    x[10] = -0.0
    x[11] = torch.arange(D) + 2.0**20  # far from zero, narrow
    ks = store((12, 1, 1), D, kv_format, scales=scales, zero=zero)
    put(write, x, None, ks, None, kv_format, slot_mapping=torch.arange(12))
    qt = codec(kv_format, symmetric=not zero, scale_dtype=scales).quantize(x)
    assert torch.equal(ks[0][:, 0], qt.codes) and torch.equal(ks[1][:, 0], qt.scale[..., 0])
    assert not zero or torch.equal(ks[2][:, 0], qt.zero[..., 0])


@both
@pytest.mark.parametrize("kv_format, zero", INTEGERS)
def test_a_row_that_has_no_scale_reads_back_as_nan_and_spoils_no_other(write, kv_format, zero):
    x = rows(6, 2, 32, F32)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])
    for i, value in enumerate(bad):
        x[i, 0, 5 + i] = value
    ks = store((6, 1, 2), 32, kv_format, zero=zero)
    put(write, x, None, ks, None, kv_format, slot_mapping=torch.arange(6))
    assert ks[1][:4, 0, 0].isnan().all()
    good = codec(kv_format, symmetric=not zero).quantize(torch.cat([x[4:], x[:4].flip(1)])[:, :1])
    mine = torch.cat([ks[0][4:, 0, :1], ks[0][:4, 0, 1:]])
    assert torch.equal(mine, good.codes)  # the other head of those tokens, and the other tokens
    assert ks[1].isnan().sum() == 4 and (zero is False or ks[2].isfinite().all())


@both
@pytest.mark.parametrize("kv_format", FP8)
@pytest.mark.parametrize("kind", [F16, BF16])
def test_fp8_for_every_number_of_sixteen_bits(write, kv_format, kind):
    x = torch.arange(65536).to(torch.uint16).view(kind).view(512, 1, 128)
    ks = store((512, 1, 1), 128, kv_format)
    put(write, x, None, ks, None, kv_format, slot_mapping=torch.arange(512))
    largest = torch.finfo(FP8[kv_format]).max
    want = x.float().clamp(-largest, largest).to(FP8[kv_format]).view(torch.uint8)
    nan = x.isnan()
    got = ks[0][:, 0][:, None].view_as(want)
    assert torch.equal(got[~nan], want[~nan])
    assert got.view(FP8[kv_format]).float()[nan].isnan().all()
    assert torch.equal(got >= 128, x.signbit())


@both
@pytest.mark.parametrize("kv_format", FP8)
@pytest.mark.parametrize("scale", [0.75, 0.3, 1e-30, 2.0**126])
def test_fp8_under_one_scale(write, kv_format, scale):
    x = rows(64, 2, 16, F32)
    x[:, 1] = (x[:, 1] * scale).clamp(-(2.0**126), 2.0**126)  # within its range too
    ks = store((64, 1, 2), 16, kv_format)
    write(x, None, ks[0].view(FP8[kv_format]), None, slot_mapping=torch.arange(64), kv_format=kv_format,
          k_scale=scale)  # fmt: skip
    qt = codec(kv_format, tensor_scale=scale).quantize(x)
    assert torch.equal(ks[0][:, 0], qt.codes.view(torch.uint8))


@both
@pytest.mark.parametrize("kv_format", FP8)
@pytest.mark.parametrize("scales", [F16, F32])
def test_fp8_with_a_scale_for_every_token_and_head(write, kv_format, scales):
    x = rows(40, 2, 48, BF16)
    x[3], x[4, 1], x[5, 0, 7], x[6, 1, 0] = 0.0, 1e-38, torch.nan, torch.inf
    ks = store((40, 1, 2), 48, kv_format)[0], torch.full((40, 1, 2), 77.0, dtype=scales)
    write(x, None, ks[0], None, slot_mapping=torch.arange(40), kv_format=kv_format, k_scale=ks[1])
    good = torch.ones(40, 2, dtype=torch.bool)
    good[5, 0] = good[6, 1] = False
    qt = codec(kv_format, group=48, scale_dtype=scales).quantize(torch.where(good[..., None], x, 0.0))
    assert torch.equal(ks[0][:, 0][good], qt.codes.view(torch.uint8)[good])
    assert torch.equal(ks[1][:, 0][good], qt.scale[good][:, 0]) and ks[1][:, 0][~good].isnan().all()


@both
@pytest.mark.parametrize("kv_format", FP8)
def test_fp8_of_ties_and_subnormals_in_float32(write, kv_format):
    grid = torch.arange(256, dtype=torch.uint8).view(FP8[kv_format]).float()
    grid = grid[grid.isfinite()].sort().values
    middle = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, middle, middle.nextafter(grid[1:]), middle.nextafter(grid[:-1])])
    x = torch.cat([x, torch.tensor([1e-45, -1e-45, 3e38, -3e38, torch.inf, -torch.inf])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 1, 8)
    ks = store((len(x), 1, 1), 8, kv_format)
    put(write, x, None, ks, None, kv_format, slot_mapping=torch.arange(len(x)))
    largest = torch.finfo(FP8[kv_format]).max
    assert torch.equal(ks[0][:, 0], x.clamp(-largest, largest).to(FP8[kv_format]).view(torch.uint8))


@both
@pytest.mark.parametrize("kind", [F16, BF16, F32])
@pytest.mark.parametrize("stored", [F16, BF16, F32])
def test_without_a_format_numbers_are_rounded_as_torch_does(write, kind, stored):
    bits = torch.randint(-(2**31), 2**31 - 1, (64 * 32,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(F32)
    half = torch.arange(-8, 8).to(BF16).float().view(torch.int32) + 0x8000  # halfway between bfloat16s
    x[:16], x[16:20] = half.view(F32), torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38])
    x[20] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)  # a NaN that would round up to zero
    x = x.to(kind).view(64, 1, 32)
    ks = store((64, 1, 1), 32, "none", kind=stored)
    put(write, x, None, ks, None, "none", slot_mapping=torch.arange(64))
    assert same(ks[0][:, 0], x.to(stored))
    if kind == stored:
        assert torch.equal(ks[0].view(torch.uint8).flatten(), x.view(torch.uint8).flatten())


def test_a_paged_quantized_cache_holds_the_same_bytes():
    spec = models["smollm2-135m"]
    cache = make_cache("paged", spec, max_tokens=32, codec="int4", block_size=16)
    k, v = torch.randn(2, 1, spec.kv_heads, 32, 64)
    cache.append(0, k[None, 0], v[None, 0])
    ks, vs = (store((2, 16, spec.kv_heads), 64, "int4", zero=True) for _ in "kv")
    tokens = dict(cache_seqlens=torch.tensor([32]), block_table=cache.block_table())
    put(append, k.transpose(1, 2), v.transpose(1, 2), ks, vs, "int4", **tokens)
    for mine, theirs in ((ks, cache._layers[0].k.fields), (vs, cache._layers[0].v.fields)):
        assert torch.equal(mine[0], theirs["codes"].permute(1, 2, 0, 3))
        for field, name in zip(mine[1:], ("scale", "zero")):
            assert torch.equal(field, theirs[name].permute(1, 2, 0, 3)[..., 0])


# --- the places --------------------------------------------------------------------------------------------


def expected(cache, x, slots):
    """The cache after x (T, Hkv, D) went to these slots, one token after another."""
    out = cache.clone().flatten(0, 1)
    for token, slot in zip(x, slots):
        if 0 <= slot < len(out):
            out[slot] = token
    return out.view_as(cache)


@both
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots_are_filled_and_nothing_else(write, index):
    x = torch.randn(50, 3, 24)
    slots = torch.randperm(64)[:50]
    slots[[3, 9]], slots[20], slots[30], slots[31] = -1, -64, 64, 2**31 - 1  # skipped, none of them wraps
    cache = store((8, 8, 3), 24, "none")[0]
    want = expected(cache, x, slots.tolist())
    write(x, None, cache, None, slot_mapping=slots.to(index))
    assert torch.equal(cache, want) and (cache == 77).all(-1).sum() == (64 - 45) * 3


@both
def test_every_slot_may_be_skipped(write):
    cache, scale, _ = store((2, 4, 1), 8, "int8")
    write(torch.full((5, 1, 8), torch.nan), None, cache, None, slot_mapping=torch.full((5,), -1),
          kv_format="int8", k_scale=scale)  # fmt: skip
    assert (cache == 77).all() and (scale == 77).all()


@both
@pytest.mark.parametrize("S", [1, 3, 8])
def test_lengths_say_where_a_row_of_a_contiguous_cache_goes_on(write, S):
    lengths = torch.tensor([8, 20, 0, 12, 1, 21, 22], dtype=torch.int32)  # after the step; room for 20
    x = torch.randn(7, S, 2, 16)
    cache = store((7, 20, 2), 16, "none")[0]
    slots = [[b * 20 + p if 0 <= p < 20 else -1 for p in range(n - S, n)] for b, n in enumerate(lengths)]
    want = expected(cache, x.flatten(0, 1), sum(slots, []))
    write(x, None, cache, None, cache_seqlens=lengths)
    assert torch.equal(cache, want)


@both
def test_padding_of_a_ragged_step_is_not_stored(write):
    lengths, new = torch.tensor([5, 9, 3, 0]), torch.tensor([2, 4, 0, 0])
    x = torch.randn(4, 4, 1, 16)
    x[0, 2:], x[2:] = torch.nan, torch.nan
    cache = store((4, 9, 1), 16, "none")[0]
    want = expected(cache, torch.cat([x[0, :2], x[1]]), [3, 4, 9 + 5, 9 + 6, 9 + 7, 9 + 8])
    write(x, None, cache, None, cache_seqlens=lengths, new_tokens=new)
    assert torch.equal(cache, want)


@both
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("junk", [-1, 2147480000])
def test_a_block_table_says_it_for_pages(write, block_size, junk):
    lengths, S = [17, 4, 0, 33], 5
    blocks = -(-33 // block_size)
    ids = torch.randperm(3 * blocks).tolist()
    table = torch.full((4, blocks + 2), junk, dtype=torch.int32)
    slots = []
    for b, n in enumerate(lengths):
        mine = [ids.pop() for _ in range(-(-n // block_size))]
        table[b, : len(mine)] = torch.tensor(mine)
        places = range(n - S, n)
        slots += [mine[p // block_size] * block_size + p % block_size if p >= 0 else -1 for p in places]
    x = torch.randn(4, S, 2, 16)
    cache = store((3 * blocks, block_size, 2), 16, "none")[0]
    want = expected(cache, x.flatten(0, 1), slots)
    write(x, None, cache, None, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table)
    assert torch.equal(cache, want)
    assert slots_of(torch.tensor(lengths), S, None, table, block_size).flatten().tolist() == slots


@both
def test_a_row_that_outgrew_its_table_writes_into_no_one_elses_block(write):
    x, cache = torch.randn(2, 2, 1, 8), store((6, 4, 1), 8, "none")[0]
    table = torch.tensor([[3, 1], [0, 6]], dtype=torch.int32)  # 8 tokens each; block 6 does not exist
    want = expected(cache, x[1, :1], [3])
    want = expected(want, x[0, :1], [7])
    write(x, None, cache, None, cache_seqlens=torch.tensor([9, 5]), block_table=table)
    assert torch.equal(cache, want)


@both
def test_slots_and_lengths_agree_and_one_token_needs_no_axis(write):
    x, table = torch.randn(3, 2, 8), torch.tensor([[2, 0], [1, -1], [3, 4]], dtype=torch.int32)
    lengths = torch.tensor([6, 2, 8], dtype=torch.int32)
    caches = [store((5, 4, 2), 8, "none")[0] for _ in range(4)]
    write(x, None, caches[0], None, cache_seqlens=lengths, block_table=table)
    write(x[:, None], None, caches[1], None, cache_seqlens=lengths, block_table=table)
    slots = slots_of(lengths, 1, None, table, 4)
    write(x, None, caches[2], None, slot_mapping=slots[:, 0])
    write(x[:, None], None, caches[3], None, slot_mapping=slots)
    assert all(torch.equal(c, caches[0]) for c in caches[1:]) and (caches[0] != 77).any()


# --- strides, widths, sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format, zero", [("none", False), *INTEGERS, ("fp8_e4m3", False)])
def test_heads_may_lie_before_tokens(kv_format, zero):
    def turned(fields):  # the same tensors, stored as (Hkv, num_blocks, block_size, D)
        return [None if f is None else f.movedim(2, 0).contiguous().movedim(0, 2) for f in fields]

    k, v = (torch.randn(4, 2, 20, 16).transpose(1, 2) for _ in "kv")  # (B, S, Hkv, D) out of (B, H, S, D)
    plain = [store((4, 24, 2), 16, kv_format, zero=zero) for _ in "kv"]
    views = [turned(f) for f in plain]
    where = dict(cache_seqlens=torch.tensor([20, 21, 24, 22]))
    put(append, k, v, *views, kv_format, **where)
    put(append_reference, k, v, *plain, kv_format, **where)
    for a, b in zip(plain, views):
        assert all(x is None or torch.equal(x, y) for x, y in zip(a, b)) and not b[0].is_contiguous()


@both
@pytest.mark.parametrize("kv_format, zero", [("none", False), *INTEGERS, ("fp8_e5m2", False)])
@pytest.mark.parametrize("D, Dv", [(2, 64), (80, 96), (100, 58), (576, 512), (256, 2)])
def test_widths(write, kv_format, zero, D, Dv):
    k, v = rows(5, 3, D, F16), rows(5, 3, Dv, F16, seed=1)
    wide = [store((3, 2, 3), n, kv_format, kind=F16, zero=zero) for n in (D, Dv)]
    put(write, k, v, *wide, kv_format, slot_mapping=torch.tensor([5, 0, 3, 1, 2]))
    for x, (codes, _, _) in zip((k, v), wide):
        if kv_format == "none":
            want = x
        else:
            options = {} if kv_format[0] == "f" else dict(symmetric=not zero)
            want = codec(kv_format, **options).quantize(x).codes.view(codes.dtype)
        assert torch.equal(codes.flatten(0, 1)[[5, 0, 3, 1, 2]], want)
        assert (codes.flatten(0, 1)[4] == 77).all()


@pytest.mark.parametrize("D", [1, 59])
@pytest.mark.parametrize("kv_format", ["none", "int8", "fp8_e4m3"])
def test_odd_widths(D, kv_format):
    k, (cache, scale, _) = rows(5, 1, D, F32), store((1, 5, 1), D, kv_format)
    append(k, None, cache, None, slot_mapping=torch.arange(5), kv_format=kv_format, k_scale=scale)
    want = k if kv_format == "none" else codec(kv_format).quantize(k).codes
    assert torch.equal(cache[0], want.view(cache.dtype))


def test_offsets_beyond_two_to_the_31():
    """Block 17 times a stride of 2**27: each fits in 32 bits, their product does not."""
    room = torch.empty(17 * 2**27 + 64, dtype=torch.int8)  # 2.3 GB of which two pages are ever touched
    far = room.as_strided((18, 4, 2, 8), (2**27, 16, 8, 1))
    near, scale, again = (
        torch.zeros(18, 4, 2, 8, dtype=torch.int8),
        torch.zeros(18, 4, 2),
        torch.zeros(18, 4, 2),
    )
    far[17] = 0
    x = torch.randn(2, 2, 8)
    for cache, s in ((far, scale), (near, again)):
        append(x, None, cache, None, slot_mapping=torch.tensor([70, 68]), kv_format="int8", k_scale=s)
    assert torch.equal(far[17], near[17]) and near[17].any()


@both
@pytest.mark.parametrize("shape", [(0, 2, 8), (0, 3, 2, 8), (4, 0, 2, 8)])
def test_no_token_at_all(write, shape):
    cache = store((4, 4, 2), 8, "none")[0]
    write(torch.zeros(shape), None, cache, None, slot_mapping=torch.zeros(shape[:-2], dtype=torch.int64))
    if len(shape) == 4 and shape[0]:
        write(torch.zeros(shape), None, cache, None, cache_seqlens=torch.zeros(4, dtype=torch.int32))
    assert (cache == 77).all()


def test_a_second_run_writes_the_same():
    x = rows(40, 2, 64, BF16)
    slots, runs = torch.randperm(40), []
    for _ in range(2):
        fields = store((5, 8, 2), 64, "int4", zero=True)
        put(append, x, None, fields, None, "int4", slot_mapping=slots)
        runs.append(fields)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


# --- what is refused ---------------------------------------------------------------------------------------

K = dict(
    k=torch.zeros(2, 3, 2, 8),
    v=torch.zeros(2, 3, 2, 8),
    k_cache=torch.zeros(2, 5, 2, 8),
    v_cache=torch.zeros(2, 5, 2, 8),
    cache_seqlens=torch.tensor([3, 4]),
)
BYTES = torch.zeros(2, 5, 2, 8, dtype=torch.uint8)
HALF = torch.zeros(2, 5, 2, 4, dtype=torch.uint8)
SIGNED, SCALE = BYTES.to(torch.int8), torch.zeros(2, 5, 2)
INT8 = dict(kv_format="int8", k_cache=SIGNED, v_cache=SIGNED, k_scale=SCALE, v_scale=SCALE)
INT4 = dict(kv_format="int4", k_cache=HALF, v_cache=HALF, k_scale=SCALE, v_scale=SCALE)
NO_V = dict(v=None, v_cache=None)


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(kv_format="int3"), "kv_format='int3'; accepted: 'none'"),
        (dict(cache_seqlens=None), "need either slot_mapping or cache_seqlens"),
        (dict(slot_mapping=torch.zeros(2, 3, dtype=torch.int64)), "need either slot_mapping or"),
        (dict(k=torch.zeros(2, 8)), r"k has shape \(2, 8\)"),
        (dict(k=K["k"].double()), "k is torch.float64"),
        (dict(v=K["v"].half()), "v is torch.float16"),
        (dict(v=torch.zeros(2, 3, 1, 8)), "v is .* in front"),
        (dict(v=None), "v and v_cache go together"),
        (dict(v_cache=None), "v and v_cache go together"),
        (dict(cache_seqlens=torch.tensor([3, 4, 5])), r"cache_seqlens is torch.int64 \(3,\)"),
        (dict(cache_seqlens=torch.tensor([3.0, 4.0])), "cache_seqlens is torch.float32"),
        (dict(new_tokens=torch.tensor([3])), "new_tokens is"),
        (dict(cache_seqlens=None, slot_mapping=torch.zeros(6, dtype=torch.int64)), "slot_mapping is"),
        (
            dict(cache_seqlens=None, slot_mapping=torch.zeros(2, 3).long(), new_tokens=torch.tensor([1, 1])),
            "new_tokens goes with cache_seqlens",
        ),
        (dict(block_table=torch.zeros(3, 2, dtype=torch.int32)), "block_table is"),
        (dict(block_table=torch.zeros(2, 2)), "block_table is torch.float32"),
        (dict(block_table=torch.zeros(3, 2, dtype=torch.int32).t()), "block_table has strides"),
        (
            dict(k_cache=torch.zeros(3, 5, 2, 8), v_cache=torch.zeros(3, 5, 2, 8)),
            "k_cache has 3 rows and k 2",
        ),
        (dict(v_cache=torch.zeros(2, 6, 2, 8)), "v_cache is .*the same blocks"),
        (dict(k_cache=torch.zeros(2, 5, 1, 8)), "k_cache is"),
        (dict(k_cache=torch.zeros(2, 5, 2, 4)), "k_cache is"),
        (dict(k_cache=torch.zeros(2, 2, 8)), "k_cache is"),
        (dict(k_cache=SIGNED), "k_cache is torch.int8"),
        (dict(k=torch.zeros(2, 3, 8, 2).transpose(2, 3)), "k has strides"),
        (dict(v_cache=torch.zeros(2, 5, 8, 2).transpose(2, 3)), "v_cache has strides"),
        (dict(k_scale=SCALE), "k_scale: kv_format 'none' has none"),
        (dict(v_zero=SCALE), "v_zero: kv_format 'none' has none"),
        (INT8 | dict(k_scale=None), "k_scale is None"),
        (INT8 | dict(v_scale=torch.zeros(2, 5)), r"v_scale is torch.float32 \(2, 5\)"),
        (INT8 | dict(v_scale=SCALE.int()), "v_scale is torch.int32"),
        (INT8 | dict(k_zero=SCALE), "k_cache is torch.int8 .*; need torch.uint8"),
        (INT8 | dict(k_cache=BYTES), "k_cache is torch.uint8 .*; need torch.int8"),
        (INT4 | dict(k_cache=BYTES), "k_cache is"),
        (INT4 | dict(k_zero=SCALE.half()), "k_zero needs shape, dtype and strides"),
        (INT4 | dict(v_zero=torch.zeros(5, 2, 2).transpose(0, 1)), "v_zero needs shape, dtype and strides"),
        (INT4 | NO_V, "v_scale and v_zero need v"),
        (INT4 | NO_V | dict(v_scale=None, k=torch.zeros(2, 3, 2, 9)), "k has 9 channels; int4 needs an even"),
        (dict(kv_format="fp8_e4m3", k_cache=SIGNED), "k_cache is torch.int8"),
        (dict(kv_format="fp8_e4m3", k_cache=BYTES.view(torch.float8_e5m2)), "k_cache is torch.float8_e5m2"),
        (dict(kv_format="fp8_e4m3", k_cache=BYTES, k_scale=SCALE[0]), "k_scale is .*; need a float tensor"),
        (dict(kv_format="fp8_e4m3", k_cache=BYTES, k_scale=0.0), "k_scale=0.0; need a finite number above 0"),
        (INT8 | dict(k_scale=0.5), "k_scale is 0.5; need a float tensor"),
        (dict(kv_format="fp8_e4m3", k_cache=BYTES, k_zero=SCALE), "k_zero: kv_format 'fp8_e4m3' has none"),
        (dict(k_cache=torch.zeros(2, 5, 2, 8, device="meta")), "on cpu and meta"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(unchecked, changes, says):
    call = {**K, **changes}
    tensors = [t for t in call.values() if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match=says):
        append(call.pop("k"), call.pop("v"), call.pop("k_cache"), call.pop("v_cache"), **call)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))
