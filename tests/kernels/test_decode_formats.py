"""`decode_attention` over quantized caches, against float64 on the dequantized cache."""

import pytest
import torch
from kernel_inputs import check, make, tail_of

from companion.kernels import attend_with_tail, decode_attention, decode_reference

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
TOKEN = ["int8", "uint8", "int4", "int4s", "fp8_e4m3", "fp8_e5m2"]
EVERY = [*TOKEN, "kivi4", "kivi2"]


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("kv_format", TOKEN)
def test_scales_per_token(kv_format, dtype):
    case = make([70, 0, 1, 40], (8, 2), 64, dtype=dtype, block_size=16, kv_format=kv_format)
    check(case.run(decode_attention, num_splits=2), case.expected(), dtype)


@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3", "kivi4", "kivi2"])
@pytest.mark.parametrize(
    "made",
    [
        {"dim": 96},
        {"dim": 128, "v_dim": 64},
        {"window_size": (12, 0)},
        {"softcap": 5.0, "sinks": torch.linspace(-2, 2, 4)},
        {"queries": 3, "window_size": (40, 0)},
        {"layout": "heads"},
        {"layout": "strided", "block_size": None},
    ],
    ids=lambda made: "-".join(made),
)
def test_formats_meet_every_feature(kv_format, made):
    case = make([97, 33, 2], (4, 2), **{"dim": 64, "block_size": 32, "kv_format": kv_format, **made})
    check(case.run(decode_attention, num_splits=2), case.expected(), SINGLE)


# kivi's numbers are made in flight and rounded to 16 bits before they are multiplied: the LSE feels it.
KIVI_LSE = {SINGLE: 5e-6, HALF: 1e-3, BRAIN: 8e-3}


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("block_size", [None, 64])
@pytest.mark.parametrize("kv_format", ["kivi4", "kivi2"])
def test_kivi(kv_format, block_size, dtype):
    case = make([97, 0, 32, 1], (8, 2), 64, dtype=dtype, block_size=block_size, kv_format=kv_format)
    check(case.run(decode_attention, num_splits=2), case.expected(), dtype, lse_tolerance=KIVI_LSE[dtype])


@pytest.mark.parametrize("group", [16, 64, 128])
def test_kivi_with_other_groups(group):
    case = make([140, 33], (4, 2), 128, block_size=128, kv_format="kivi4", group=group)
    check(case.run(decode_attention, num_splits=2), case.expected(), SINGLE)


@pytest.mark.parametrize("kv_format", ["int8", "uint8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_latent_in_eight_bits(kv_format, dtype):
    case = make(
        [70, 0, 20], (6, 1), 80, dtype=dtype, v_dim=64, latent=True, block_size=16, kv_format=kv_format
    )
    check(case.run(decode_attention, num_splits=2), case.expected(), dtype)


@pytest.mark.parametrize("kv_format", ["int8", "fp8_e4m3"])
def test_one_scale_for_all(kv_format):
    case = make([70, 3], (4, 2), 64, block_size=16, kv_format=kv_format)
    case.cache |= {"k_scale": 0.5, "v_scale": 0.03125}
    # int8's codes stand for other numbers now: what the oracle takes is made from them.
    codes = [
        torch.cat([case.cache[c][p] for p in row if p < 1000])
        for c in ("k_cache", "v_cache")
        for row in case.cache["block_table"]
    ]
    real = [c.view(torch.float8_e4m3fn) if kv_format != "int8" else c for c in codes]
    case.dense = [
        (k.float()[:n] * 0.5, v.float()[:n] * 0.03125) for k, v, n in zip(real[:2], real[2:], case.lengths)
    ]
    check(case.run(decode_attention), case.expected(), SINGLE)


@pytest.mark.parametrize("small", [1e-5, 1e-3, 1e3])
def test_float16_weights_keep_their_precision_beside_any_scale(small):
    """A scale of 1e-7 times a weight would be 0 in float16."""
    case = make([97, 33], (4, 2), 64, dtype=HALF, kv_format="int8")
    case.cache["v_scale"] = case.cache["v_scale"].float() * small
    case.dense = [(k, v * small) for k, v in case.dense]
    out, true = case.run(decode_attention, num_splits=2)[0], case.expected()[0]
    error = (out.double() - true).norm() / true.norm()
    assert error < (2e-2 if small == 1e-5 else 1e-3)  # out itself is float16: near 1e-5 it has 8 bits less


# --- every byte ---------------------------------------------------------------------------------------------


def one_token(k, v, q, kv_format, **more):
    """Attention over a single token is its value, and the LSE its score: every byte comes out as itself."""
    n = torch.ones(1, dtype=torch.int32)
    caches = (x.view(1, 1, 1, -1) for x in (k, v))
    args = q, *caches, n
    options = dict(kv_format=kv_format, softmax_scale=1.0, return_lse=True, **more)
    return decode_attention(*args, **options), decode_reference(*args, **options)


ALL_BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_byte_of_fp8_as_a_value(kv_format, dtype):
    q = torch.zeros(1, 1, 16, dtype=dtype)
    (out, _), (reference, _) = one_token(torch.zeros(16, dtype=torch.uint8), ALL_BYTES, q, kv_format)
    true = ALL_BYTES.view(torch.float8_e4m3fn if kv_format == "fp8_e4m3" else torch.float8_e5m2).to(dtype)
    for got in (out, reference):  # NaN and infinity where torch has them
        torch.testing.assert_close(got[0, 0], true, rtol=0, atol=0, equal_nan=True)
    codes_of_nan = [127, 255] if kv_format == "fp8_e4m3" else [125, 126, 127, 253, 254, 255]
    assert out[0, 0].isnan().nonzero().flatten().tolist() == codes_of_nan


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_byte_of_fp8_as_a_key(kv_format):
    """Query h is 1 in channel h: the LSE is that channel's key. Codes that are not finite would reach all."""
    real = ALL_BYTES.view(torch.float8_e4m3fn if kv_format == "fp8_e4m3" else torch.float8_e5m2).float()
    codes = torch.where(real.isfinite(), ALL_BYTES, 0)
    q = torch.eye(256, dtype=HALF)[None]
    (_, lse), (_, reference) = one_token(codes, torch.zeros(16, dtype=torch.uint8), q, kv_format)
    true = torch.where(real.isfinite(), real, 0.0)
    torch.testing.assert_close(lse[0], true, rtol=2e-7, atol=0)
    assert torch.equal(reference[0], true)


ONE = torch.ones(1, 1, 1)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
def test_every_byte_of_int4_as_a_value(dtype):
    """512 channels: bytes 0 to 255 in order, the even channel from the low nibble."""
    q, k = torch.zeros(1, 1, 32, dtype=dtype), torch.zeros(16, dtype=torch.uint8)
    (out, _), (reference, _) = one_token(k, ALL_BYTES, q, "int4", k_scale=ONE, v_scale=ONE)
    true = torch.tensor([x for b in range(256) for x in (b % 16 - 8, b // 16 - 8)], dtype=dtype)
    assert torch.equal(out[0, 0], true) and torch.equal(reference[0, 0], true)
    half = 0.5 * ONE
    (out, _), (reference, _) = one_token(
        k, ALL_BYTES, q, "int4", k_scale=half, v_scale=half, k_zero=ONE, v_zero=ONE
    )
    assert torch.equal(out[0, 0], (true + 8) / 2 + 1) and torch.equal(reference[0, 0], out[0, 0])


def test_every_byte_of_int4_as_a_key():
    q = torch.eye(512, dtype=HALF)[None]
    (_, lse), (_, reference) = one_token(
        ALL_BYTES, torch.zeros(16, dtype=torch.uint8), q, "int4", k_scale=ONE, v_scale=ONE
    )
    true = torch.tensor([float(x) for b in range(256) for x in (b % 16 - 8, b // 16 - 8)])
    torch.testing.assert_close(lse[0], true, rtol=2e-7, atol=0)
    assert torch.equal(reference[0], true)


@pytest.mark.parametrize("bits", [4, 2])
def test_every_byte_of_kivi(bits):
    """One group of 32 tokens; token 0 holds every byte. The other tokens are not its sequence's."""
    per_byte = 8 // bits
    D = 256 * per_byte
    codes = torch.full((1, 32, 1, 256), 255, dtype=torch.uint8)
    codes[0, 0, 0] = ALL_BYTES
    k = torch.zeros(1, 32, 1, 32 // per_byte, dtype=torch.uint8)
    flat = dict(dtype=SINGLE)
    args = torch.zeros(1, 1, 32), k, codes, torch.ones(1, dtype=torch.int32)
    options = dict(
        kv_format=f"kivi{bits}",
        k_scale=torch.zeros(1, 1, 1, 32, **flat),
        k_zero=torch.zeros(1, 1, 1, 32, **flat),
        v_scale=torch.full((1, 32, 1, D // 32), 0.5, **flat),
        v_zero=torch.arange(D // 32, **flat).expand(1, 32, 1, -1).contiguous(),
    )
    options["v_scale"] = options["v_scale"].contiguous()
    true = [(b >> (bits * i)) % 2**bits / 2 for b in range(256) for i in range(per_byte)]
    true = torch.tensor(true) + torch.arange(D // 32).repeat_interleave(32)
    assert torch.equal(decode_attention(*args, **options)[0, 0], true)
    assert torch.equal(decode_reference(*args, **options)[0, 0], true)


# --- the tail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["kivi4", "kivi2", "int8"])
@pytest.mark.parametrize(
    "made",
    [{}, {"queries": 3}, {"window_size": (20, 0)}, {"queries": 4, "window_size": (40, 0), "softcap": 3.0}],
    ids=lambda made: "-".join(made) or "plain",
)
def test_a_tail_in_full_precision(kv_format, made):
    """As if all tokens lay in one cache: windows, causality and sinks span both parts."""
    sinks = torch.linspace(-1, 2, 8)
    behind = [5, 0, 40, 7]
    case = make(
        [64, 96, 0, 32], (8, 2), 64, dtype=SINGLE, block_size=32, kv_format=kv_format, behind=behind, **made
    )
    tail, whole = tail_of(case)
    whole.options["sinks"] = sinks
    got = case.run(attend_with_tail, **tail, sinks=sinks, num_splits=2)
    check(got, whole.expected(), SINGLE)


def test_a_tail_of_16_bits_is_merged_before_it_is_rounded():
    case = make([64, 96], (8, 2), 64, dtype=BRAIN, block_size=32, kv_format="kivi4", behind=[5, 33])
    tail, whole = tail_of(case)
    got = case.run(attend_with_tail, **tail)
    check(got, whole.expected(), BRAIN, lse_tolerance=KIVI_LSE[BRAIN])


@pytest.mark.parametrize("kv_format", ["none", *EVERY])
def test_the_reference_says_the_same(kv_format):
    case = make(
        [97, 0, 33], (4, 2), 64, block_size=32, kv_format=kv_format, queries=2, sinks=torch.linspace(-1, 1, 4)
    )
    check(case.run(decode_reference), case.expected(), SINGLE)
