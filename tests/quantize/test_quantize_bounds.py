"""The error that each codec states is never exceeded, and is not idle."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.quantize import codec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
S, D = 32, 32
KINDS = ("normal", "outlier", "constant", "offset", "zeros", "negative", "mixed scales", "ties")


def data(kind, exponent, seed):
    """(32, 32) numbers around 2**exponent of one kind of trouble; one row in eight is zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(S, D, generator=g, dtype=torch.float64)
    if kind == "outlier":
        x[:, seed % D] *= 300
        x[seed % S] *= 50
    elif kind == "constant":
        x = x[:, :1].expand(S, D).clone() if seed % 2 else x[:1].expand(S, D).clone()
    elif kind == "offset":
        x = 1 + x * 2.0 ** -(seed % 20)
    elif kind == "zeros":
        x = torch.where(torch.rand(S, D, generator=g) < 0.9, 0.0, x)
    elif kind == "negative":
        x = -x.abs() - 0.1
    elif kind == "mixed scales":
        x = x * 2.0 ** torch.randint(-30, 1, (S, D), generator=g)
    elif kind == "ties":
        x = torch.randint(-24, 25, (S, D), generator=g) / 8
    x[:: 8 + seed % 3] = 0
    return x * 2.0**exponent


def excess(c, x):
    """(largest error minus bound, largest error over bound), in float64."""
    before = x.clone()
    qt = c.quantize(x)
    y, bound = c.dequantize(qt), c.bound(qt)
    assert torch.equal(x, before)
    assert y.shape == bound.shape == x.shape and y.dtype == x.dtype and bound.dtype == torch.float32
    assert torch.isfinite(y).all() and torch.isfinite(bound).all() and (bound >= 0).all()
    error = (y.double() - x.double()).abs()
    bound = bound.double()
    return (error - bound).max().item(), (error / bound.clamp_min(1e-300)).max().item()


integers = st.builds(
    lambda bits, symmetric, group, dim, scale: codec(
        f"int{bits}", symmetric=symmetric, group=group, group_dim=dim, scale_dtype=scale
    ),
    st.sampled_from([8, 4, 2]),
    st.booleans(),
    st.sampled_from([None, 1, 2, 4, 16, 32]),
    st.sampled_from([-1, -2]),
    st.sampled_from([F16, BF16, F32]),
)
grouped_fp8 = st.builds(
    lambda name, group, dim, scale: codec(name, group=group, group_dim=dim, scale_dtype=scale),
    st.sampled_from(["fp8_e4m3", "fp8_e5m2"]),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([-1, -2]),
    st.sampled_from([F16, BF16, F32]),
)
fp4 = st.builds(
    lambda name, dim: codec(name, group_dim=dim),
    st.sampled_from(["nvfp4", "mxfp4"]),
    st.sampled_from([-1, -2]),
)
kinds, seeds = st.sampled_from(KINDS), st.integers(0, 10**6)


@settings(max_examples=250, deadline=None)
@given(integers, kinds, st.integers(-140, 5), seeds)
def test_integers_in_the_range_of_float16(c, kind, exponent, seed):
    x = data(kind, exponent, seed).clamp(-65504, 65504).float()
    assert excess(c, x)[0] <= 0


@settings(max_examples=150, deadline=None)
@given(st.one_of(integers.filter(lambda c: c.scale_dtype != F16), fp4), kinds, st.integers(-150, 105), seeds)
def test_what_has_wide_scales_in_the_whole_range(c, kind, exponent, seed):
    assert excess(c, data(kind, exponent, seed).float().clamp(-(2.0**126), 2.0**126))[0] <= 0


@settings(max_examples=150, deadline=None)
@given(grouped_fp8, kinds, st.integers(-140, 8), seeds)
def test_fp8_with_scales(c, kind, exponent, seed):
    assert excess(c, data(kind, exponent, seed).float())[0] <= 0


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([("fp8_e4m3", 448), ("fp8_e5m2", 57344)]), kinds, st.integers(-140, 12), seeds)
def test_fp8_without_a_scale_in_its_range(name, kind, exponent, seed):
    name, most = name
    assert excess(codec(name), data(kind, exponent, seed).clamp(-most, most).float())[0] <= 0
    scaled = codec(name, tensor_scale=0.37)
    assert excess(scaled, data(kind, exponent, seed).clamp(-0.37 * most, 0.37 * most).float())[0] <= 0


@settings(max_examples=100, deadline=None)
@given(kinds, st.integers(-20, 3), seeds, st.floats(1e-3, 1e3))
def test_nvfp4_with_a_fixed_scale_in_its_range(kind, exponent, seed, scale):
    most = 2688 * scale
    assert (
        excess(codec("nvfp4", tensor_scale=scale), data(kind, exponent, seed).clamp(-most, most).float())[0]
        <= 0
    )


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(integers, grouped_fp8, fp4),
    kinds,
    st.integers(-12, 5),
    seeds,
    st.sampled_from([F16, BF16, torch.float64]),
)
def test_other_dtypes(c, kind, exponent, seed, dtype):
    """The bound includes what reading back in 16 bits adds."""
    x = data(kind, exponent, seed).clamp(-65280, 65280).to(dtype)
    assert excess(c, x)[0] <= 0


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(integers, grouped_fp8, fp4),
    st.lists(st.floats(-65504, 65504, width=32), min_size=32, max_size=32),
)
def test_numbers_that_hypothesis_likes(c, values):
    """Subnormals, powers of two, neighbours of them; along either axis."""
    x = torch.tensor(values, dtype=torch.float32).view(32, 1).expand(32, 32).clone()
    x[:, 16:] = x[:, :16].flip(0)
    assert excess(c, x)[0] <= 0


CODECS = {
    "int8": codec("int8"),
    "int8 asymmetric": codec("int8", symmetric=False),
    "int8, bf16 scales": codec("int8", symmetric=False, scale_dtype=BF16),
    "int4": codec("int4", group=32),
    "int4 symmetric": codec("int4", symmetric=True),
    "int2": codec("int2", group=16, group_dim=-2),
    "int2 symmetric": codec("int2", symmetric=True),
    "fp8_e4m3": codec("fp8_e4m3"),
    "fp8_e5m2": codec("fp8_e5m2"),
    "fp8_e4m3 grouped": codec("fp8_e4m3", group=32),
    "nvfp4": codec("nvfp4"),
    "mxfp4": codec("mxfp4"),
}


@pytest.mark.parametrize("name", CODECS)
def test_the_bound_is_reached(name):
    """Somewhere in sixty-four thousand numbers an error comes within a tenth of what is stated."""
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(1))
    assert 0.9 <= excess(CODECS[name], x)[1] <= 1


@pytest.mark.parametrize("name", CODECS)
def test_the_bound_is_reached_almost_everywhere(name):
    """In every 64th of the numbers someone gets near it, and the average error is not far below."""
    c = CODECS[name]
    x = torch.randn(64 * 128, 32, generator=torch.Generator().manual_seed(2))
    qt = c.quantize(x)
    ratio = (c.dequantize(qt) - x).abs() / c.bound(qt)
    assert (ratio.view(64, -1).amax(1) > 0.75).all()
    # Evenly spread errors average half the bound; codes with gaps of two sizes, and int2's ends, less.
    assert ratio.mean() > (0.4 if name.startswith("int") else 0.3)


@pytest.mark.parametrize("name", [n for n in CODECS if n.startswith("int")])
def test_the_bound_of_integers_is_half_a_step(name):
    c = CODECS[name]
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    qt = c.quantize(x)
    dim = -1 if c.group_dim == -1 else -2
    groups = x.view(64 // 16, 16, 32) if dim == -2 else x
    spread = 2 * groups.abs().amax(dim) if c.symmetric else groups.amax(dim) - groups.amin(dim)
    steps = {8: 254 if c.symmetric else 255, 4: 14 if c.symmetric else 15, 2: 2 if c.symmetric else 3}[c.bits]
    half = spread / steps / 2
    bound = c.bound(qt)
    bound = bound.view(64 // 16, 16, 32)[:, 0] if dim == -2 else bound[:, 0]
    slack = 2 * torch.finfo(c.scale_dtype).eps  # of the scale, and of the zero beside the spread
    assert (bound >= half * 0.999).all()
    assert (bound <= half * (1 + slack) + groups.abs().amax(dim) * slack / steps + 1e-9).all()


def test_the_bound_of_fp4_is_half_the_gap():
    x = torch.tensor([[6.0, 4, 3, 2, 1.5, 1, 0.5, 0] * 4])
    for name, top in (("mxfp4", 2.0), ("nvfp4", 1.0)):
        c = codec(name)
        qt = c.quantize(x)
        assert torch.equal(c.dequantize(qt), x)
        assert c.bound(qt)[0, :8].tolist() == pytest.approx(
            [top, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25], rel=1e-4
        )


def test_the_bound_of_fp8_is_half_the_gap():
    x = torch.tensor([[448.0, 256, 255, 1, 2.0**-6, 2.0**-9, 0]])
    c = codec("fp8_e4m3")
    gaps = [32, 32, 32, 0.125, 2.0**-9, 2.0**-9, 2.0**-9]  # 255 reads 256
    assert c.bound(c.quantize(x))[0].tolist() == pytest.approx([g / 2 for g in gaps], rel=1e-3)


def test_a_block_whose_scale_is_subnormal_is_cut_by_at_most_what_is_stated():
    """Half of e4m3's smallest step is a third of the smallest scales: up to three units are cut off."""
    worst = 0.0
    for k in torch.linspace(1.0, 8.0, 200):
        x = torch.full((2, 16), 2688.0)
        x[1] = 6 * 2.0**-9 * k
        over, ratio = excess(codec("nvfp4"), x)
        assert over <= 0
        worst = max(worst, ratio)
    assert worst > 0.95


def test_a_wrong_dequantization_exceeds_the_bound():
    """The check itself: swapped nibbles, a scale off by one group, a lost zero are all seen."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    c = codec("int4", group=32)
    qt = c.quantize(x)
    bound = c.bound(qt)
    wrong = {
        "nibbles": type(qt)((qt.codes >> 4) | (qt.codes << 4), qt.scale, qt.zero, None, qt.shape, qt.dtype),
        "group": type(qt)(qt.codes, qt.scale.roll(1, 1), qt.zero, None, qt.shape, qt.dtype),
        "zero": type(qt)(qt.codes, qt.scale, qt.zero * 0, None, qt.shape, qt.dtype),
    }
    for what, bad in wrong.items():
        assert ((c.dequantize(bad) - x).abs() > bound).any(), what
    assert math.isfinite(float(bound.max()))
