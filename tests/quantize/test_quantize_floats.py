"""fp8, nvfp4 and mxfp4 against their definitions: every code, every tie, saturation, both levels of scale."""

import math

import pytest
import torch
from quantize_oracles import E2M1, E4M3, E5M2, nearest

from companion.quantize import codec, unpack
from companion.quantize.floats import decode_e2m1, encode_e2m1

FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, E4M3, 448.0), "fp8_e5m2": (torch.float8_e5m2, E5M2, 57344.0)}


def rand(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(codes):
    return codes.view(torch.uint8)


def every_float16():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    return x[torch.isfinite(x)], x[~torch.isfinite(x)]


# --- fp8 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FP8)
def test_all_finite_float16_numbers_as_torch_casts_them(name):
    dtype, _, largest = FP8[name]
    x, bad = every_float16()
    assert len(x) + len(bad) == 65536 and len(bad) == 2048
    c = codec(name)
    qt = c.quantize(x[None])
    assert torch.equal(bits(qt.codes)[0], bits(x.float().clamp(-largest, largest).to(dtype)))
    back = c.dequantize(qt)[0]
    assert back.dtype == torch.float16 and torch.isfinite(back).all()
    assert torch.equal(back, qt.codes[0].to(torch.float16))


@pytest.mark.parametrize("name", FP8)
def test_all_finite_float16_numbers_by_the_definition(name):
    """The nearest value with ties to the even code, found in a table of all codes."""
    _, values, _ = FP8[name]
    x, _ = every_float16()
    codes = bits(codec(name).quantize(x[None]).codes)[0]
    wanted = [nearest(v, values) | (0x80 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert codes.tolist() == wanted


@pytest.mark.parametrize("name", FP8)
def test_nan_and_infinity_are_refused_each_by_itself(name):
    _, bad = every_float16()
    for v in bad[:: len(bad) // 16].tolist() + [math.inf, -math.inf]:
        with pytest.raises(ValueError, match="x holds NaN"):
            codec(name).quantize(torch.tensor([[1.0, v]]))


def test_saturation_is_448_on_every_version():
    x = torch.tensor([[448.0, 464, 465, 1000, -1000, 1e30]])
    c = codec("fp8_e4m3")
    assert c.dequantize(c.quantize(x))[0].tolist() == [448, 448, 448, 448, -448, 448]
    c = codec("fp8_e5m2")
    x = torch.tensor([[57344.0, 61440, 65504, -1e6]])
    assert c.dequantize(c.quantize(x))[0].tolist() == [57344, 57344, 57344, -57344]


def test_signs_of_zero_and_subnormals():
    c = codec("fp8_e4m3")
    x = torch.tensor([[0.0, -0.0, 2.0**-9, -(2.0**-9), 2.0**-10, 1.5 * 2.0**-10]])
    y = c.dequantize(c.quantize(x))
    assert y[0].tolist() == [0, 0, 2.0**-9, -(2.0**-9), 0, 2.0**-9]  # 2**-10 is a tie: to even, 0
    assert torch.signbit(y)[0].tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("group_dim", [-1, -2])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_per_group_uses_the_whole_range(name, group_dim, scale_dtype):
    x = torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(1)) + 1  # 16 groups of four
    x = x * (10.0 ** torch.linspace(-4, 4, 16)).view(4, 4, 1)
    x = x.view(4, 16) if group_dim == -1 else x.view(4, 16).T.contiguous()
    c = codec(name, group=4, group_dim=group_dim, scale_dtype=scale_dtype)
    qt = c.quantize(x)
    assert qt.scale.dtype == scale_dtype and qt.scale.shape == (4, 4)
    assert ((c.dequantize(qt) - x).abs() <= x * torch.finfo(FP8[name][0]).eps / 2 * 1.001).all()
    turned = qt.codes.float() if group_dim == -1 else qt.codes.float().T
    peaks = turned.reshape(4, 4, 4).amax(-1)
    full = (qt.scale if group_dim == -1 else qt.scale.T) >= 2.0**-14  # scales of full precision
    assert full.any() and (peaks[full] == FP8[name][2]).all()


@pytest.mark.parametrize("name", FP8)
def test_a_small_group_is_not_lost_to_a_float16_scale(name):
    """amax / 57344 rounds to 0 in float16 for anything below 0.0017."""
    x = torch.tensor([[1e-3, 5e-4, -2e-4, 1e-6]])
    c = codec(name, group=4)
    y = c.dequantize(c.quantize(x))
    assert ((y - x).abs() <= x.abs() * 0.13).all()


def test_a_fixed_scale_for_the_tensor():
    c = codec("fp8_e4m3", tensor_scale=2.0)
    qt = c.quantize(torch.tensor([[2.0, 896.0, 897.0, -4000.0]]))
    assert c.dequantize(qt)[0].tolist() == [2, 896, 896, -896]
    assert qt.tensor_scale.dtype == torch.float32 and float(qt.tensor_scale) == 2.0 and qt.nbytes == 4 + 4
    both = codec("fp8_e4m3", tensor_scale=0.5, group=2)
    x = rand(3, 4)
    assert ((both.dequantize(both.quantize(x)) - x).abs() <= x.abs() / 15).all()


# --- e2m1 -----------------------------------------------------------------------------------------------


def test_the_sixteen_numbers():
    assert E2M1 == [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # the definition, not the package
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert encode_e2m1(values).tolist() == list(range(16))


@pytest.mark.parametrize(
    "tie, value", [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code(tie, value):
    t = torch.tensor([tie])
    above, below = torch.nextafter(t, t + 1), torch.nextafter(t, t - 1)
    for sign in (1, -1):
        assert decode_e2m1(encode_e2m1(sign * t)).item() == sign * value
        assert abs(decode_e2m1(encode_e2m1(sign * above)).item()) > tie
        assert abs(decode_e2m1(encode_e2m1(sign * below)).item()) < tie


def test_a_fine_grid_by_the_definition():
    x = torch.linspace(-8, 8, 2**14 + 1)
    wanted = [nearest(v, E2M1) | (8 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert encode_e2m1(x).tolist() == wanted


# --- nvfp4 ----------------------------------------------------------------------------------------------


def nvfp4_by_hand(x, tensor_scale=None):
    """(block scales as values, dequantized) of rows of 16, in Python floats."""
    amax = max(abs(v) for row in x for v in row)
    whole = tensor_scale or (amax / 2688 if amax else 1.0)
    scales, out = [], []
    for row in x:
        block = max(abs(v) for v in row) / 6 / whole
        s = E4M3[nearest(min(max(block, 2**-9), 448), E4M3)]
        scales.append(s)
        out.append([math.copysign(E2M1[nearest(v / (s * whole), E2M1)], v) * s * whole for v in row])
    return scales, out


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_nvfp4_by_hand(spread):
    x = rand(200, 16, seed=4) * torch.exp(spread * rand(200, 1, seed=5))
    c = codec("nvfp4")
    qt = c.quantize(x)
    scales, values = nvfp4_by_hand(x.double().tolist())
    assert qt.scale.dtype == torch.float8_e4m3fn and qt.scale.float()[:, 0].tolist() == scales
    assert torch.allclose(c.dequantize(qt).double(), torch.tensor(values).double(), rtol=1e-6)


def test_the_block_that_holds_the_largest_number_stores_448():
    x = rand(50, 64, seed=6)
    qt = codec("nvfp4").quantize(x)
    at = x.abs().amax(-1).argmax(), x.abs().amax(0).argmax() // 16
    assert qt.scale.float().max() == 448 and qt.scale.float()[at] == 448
    assert math.isclose(float(qt.tensor_scale), float(x.abs().max()) / (6 * 448), rel_tol=1e-6)
    assert float(codec("nvfp4").dequantize(qt).abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-6)


def test_nvfp4_needs_no_global_scale_from_outside_for_large_numbers():
    x = rand(8, 16, scale=1e6)  # far beyond 2688 = 448 x 6
    c = codec("nvfp4")
    assert (c.dequantize(c.quantize(x)) - x).abs().max() < 0.2 * x.abs().max()


@pytest.mark.parametrize("name, fill", [("nvfp4", 1.0), ("mxfp4", 2.0**-127)])
def test_all_zero_blocks_and_tensors(name, fill):
    for x in (torch.zeros(4, 64), -torch.zeros(4, 64)):
        c = codec(name)
        qt = c.quantize(x)
        y = c.dequantize(qt)
        assert torch.equal(y, x) and torch.equal(torch.signbit(y), torch.signbit(x))
        assert torch.isfinite(qt.scale.float()).all()
        assert (c.bound(qt) <= fill).all()
    mixed = torch.cat([torch.zeros(1, 32), rand(1, 32)])
    y = c.dequantize(c.quantize(mixed))
    assert torch.equal(y[0], mixed[0]) and (y[1] != 0).any()


def test_a_tiny_block_among_huge_ones_keeps_a_scale():
    x = torch.full((2, 16), 2688.0)
    x[1] = 6 * 2**-9 * torch.linspace(-1, 1, 16)
    c = codec("nvfp4")
    qt = c.quantize(x)
    assert qt.scale.float().tolist() == [[448.0], [2.0**-9]]
    assert (c.dequantize(qt)[1] - x[1]).abs().max() <= 2.0**-9
    x[1] *= 1e-6  # too small even for that: gone, but without NaN and within the bound
    y = c.dequantize(c.quantize(x))
    assert torch.equal(y[1].abs(), torch.zeros(16)) and torch.equal(y[0], x[0])


def test_a_fixed_tensor_scale_saturates_and_does_not_look_at_the_data():
    c = codec("nvfp4", tensor_scale=0.01)
    small, large = rand(1, 16), torch.full((1, 16), 100.0)
    together = c.dequantize(c.quantize(torch.cat([small, large])))
    assert torch.equal(together[:1], c.dequantize(c.quantize(small)))  # a growing cache may append
    assert together[1].tolist() == pytest.approx([26.88] * 16, rel=1e-6)  # 0.01 x 448 x 6
    scales, values = nvfp4_by_hand(small.double().tolist(), 0.01)
    assert torch.allclose(together[:1].double(), torch.tensor(values).double(), rtol=1e-5)


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 1e30, 2.0**126])
def test_extreme_tensor_scales_give_no_nan(scale):
    for name in ("nvfp4", "fp8_e4m3", "fp8_e5m2"):
        c = codec(name, tensor_scale=scale)
        y = c.dequantize(c.quantize(torch.cat([rand(1, 16), torch.zeros(1, 16)])))
        assert torch.isfinite(y).all() and torch.equal(y[1], torch.zeros(16))


# --- mxfp4 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(-125, 127))
def test_powers_of_two_survive_at_every_exponent(k):
    """The shared exponent is stored with a bias of 127: above 0 it is 128 and more, which int8 would turn."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([1.0, -0.5, 0.25, 0.75]) * 2.0**k
    c = codec("mxfp4")
    qt = c.quantize(x)
    assert qt.scale.dtype == torch.uint8 and int(qt.scale) == k - 2 + 127
    assert torch.equal(c.dequantize(qt), x)


def test_the_shared_exponent_is_the_floor():
    """amax from 4 to below 8 has unit 1; 7.99 is cut to 6, as the specification has it."""
    for amax, unit, read in (
        (4.0, 1.0, 4.0),
        (6.0, 1.0, 6.0),
        (7.99, 1.0, 6.0),
        (8.0, 2.0, 8.0),
        (3.99, 0.5, 3.0),
    ):
        x = torch.zeros(1, 32)
        x[0, 7] = amax
        c = codec("mxfp4")
        qt = c.quantize(x)
        assert 2.0 ** (int(qt.scale) - 127) == unit and c.dequantize(qt)[0, 7] == read


def test_mxfp4_at_the_low_end():
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([2.0**-127, 2.0**-149, 2.0**-130])
    c = codec("mxfp4")
    qt = c.quantize(x)
    assert int(qt.scale) == 0
    assert c.dequantize(qt)[0, :3].tolist() == [2.0**-127, 0, 0]


def test_mxfp4_by_hand():
    x = rand(100, 32, seed=9) * torch.exp(5 * rand(100, 1, seed=10))
    c = codec("mxfp4")
    values = []
    for row in x.double().tolist():
        unit = 2.0 ** (math.floor(math.log2(max(abs(v) for v in row))) - 2)
        values.append([math.copysign(E2M1[nearest(v / unit, E2M1)], v) * unit for v in row])
    assert torch.equal(c.dequantize(c.quantize(x)).double(), torch.tensor(values).double())


@pytest.mark.parametrize("name, size", [("nvfp4", 16), ("mxfp4", 32)])
def test_blocks_along_tokens_are_those_along_channels_turned(name, size):
    x = rand(3, 64, 32, seed=11)
    along, turned = codec(name, group_dim=-2), codec(name)
    a, b = along.quantize(x), turned.quantize(x.mT.contiguous())
    assert torch.equal(along.dequantize(a), turned.dequantize(b).mT)
    assert a.scale.shape == (3, 64 // size, 32)
    assert torch.equal(unpack(a.codes, 4), unpack(b.codes, 4).mT)
