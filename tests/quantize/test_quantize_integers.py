"""Integer codecs against a loop in Python floats, and the groups that break careless ones."""

import numpy as np
import pytest
import torch
from quantize_oracles import toward

from companion.quantize import codec, unpack

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def rand(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop(x, bits, group, group_dim, symmetric, dtype):
    """(codes, ties, dequantized, size of what was added) of an (S, D) array, number by number."""
    kind = str(dtype).removeprefix("torch.")
    x = x.numpy() if group_dim == -1 else x.numpy().T
    size = group or x.shape[1]
    codes, near_tie = np.zeros(x.shape, int), np.zeros(x.shape, bool)
    values, reach = np.zeros(x.shape), np.zeros(x.shape)
    for i in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            members = [np.float32(v) for v in x[i, start : start + size]]
            if symmetric:
                largest, zero = 2 ** (bits - 1) - 1, 0.0
                scale = toward(max(abs(v) for v in members) / np.float32(largest), kind, up=True)
            else:
                largest, zero = 2**bits - 1, toward(min(members), kind, up=False)
                scale = toward((max(members) - np.float32(zero)) / np.float32(largest), kind, up=True)
            for j, v in enumerate(members):
                exact = 0.0 if scale == 0 else (float(v) - zero) / scale
                c = max(-largest if symmetric else 0, min(largest, round(exact)))  # Python: ties to even
                codes[i, start + j] = c + (2 ** (bits - 1) if symmetric and bits < 8 else 0)
                near_tie[i, start + j] = abs(exact % 1 - 0.5) < 1e-3
                values[i, start + j] = c * scale + zero
                reach[i, start + j] = abs(c * scale) + abs(zero)
    found = codes, near_tie, values, reach
    return found if group_dim == -1 else tuple(a.T for a in found)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group, group_dim", [(8, -1), (None, -1), (6, -2), (None, -2)])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_codes_and_values_are_those_of_a_plain_loop(bits, symmetric, group, group_dim, dtype):
    x = rand(12, 16, seed=bits) * torch.logspace(-2, 2, 16)
    x[:, 3] -= x[:, 3].amax() + 0.5  # a group that lies below zero
    x[2] = -x[2].abs()
    c = codec(f"int{bits}", group=group, group_dim=group_dim, symmetric=symmetric, scale_dtype=dtype)
    qt = c.quantize(x)
    codes = qt.codes if qt.codes.dtype == torch.int8 else unpack(qt.codes, bits)
    wanted, tie, values, reach = loop(x, bits, group, group_dim, symmetric, dtype)
    assert tie.mean() < 0.05
    assert np.array_equal(codes.numpy()[~tie], wanted[~tie])
    error = np.abs(c.dequantize(qt).double().numpy() - values)
    assert (error[~tie] <= 2.0**-22 * reach[~tie]).all()


def test_symmetric_codes_use_the_whole_range_and_no_more():
    for bits, low, high in ((8, -127, 127), (4, 1, 15), (2, 1, 3)):
        c = codec(f"int{bits}", symmetric=True)
        qt = c.quantize(torch.linspace(-1, 1, 64)[None])
        codes = qt.codes if bits == 8 else unpack(qt.codes, bits)
        assert (int(codes.min()), int(codes.max())) == (low, high)


def test_int8_asymmetric_uses_all_256_codes():
    c = codec("int8", symmetric=False, scale_dtype=F32)
    qt = c.quantize(torch.arange(256.0)[None])
    assert qt.codes.dtype == torch.uint8 and qt.codes[0].tolist() == list(range(256))
    assert torch.equal(c.dequantize(qt)[0], torch.arange(256.0))


def test_small_signed_numbers_survive():
    """-6, 2, 3, -2: a careless signed nibble gives -6, 1, 3, -2."""
    x = torch.tensor([[-6.0, 2, 3, -2, 7, 0, 0, -7]])
    c = codec("int4", symmetric=True)
    assert torch.equal(c.dequantize(c.quantize(x)), x)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("value", [9.0, -9.0, 0.0, 65504.0, -65504.0, 2.0**-24, 0.333251953125])
@pytest.mark.parametrize("group_dim", [-1, -2])
def test_constant_groups_are_exact_where_float16_holds_the_constant(bits, value, group_dim):
    x = torch.full((8, 8), value)
    c = codec(f"int{bits}", group=4, group_dim=group_dim, symmetric=False)
    assert torch.equal(c.dequantize(c.quantize(x)), x)


@pytest.mark.parametrize("value", [0.1, -0.1, 1000.3, -1e-3, 1e-9])
def test_other_constants_are_within_half_a_step_that_is_tiny(value):
    x = torch.full((1, 8), value)
    c = codec("int4", symmetric=False)
    qt = c.quantize(x)
    error = (c.dequantize(qt) - x).abs().max()
    assert error <= qt.scale.float().max() / 2 + abs(value) * 2**-21
    assert error <= max(abs(value) * 2**-10 / 15, 2**-24)  # a fifteenth of what float16 alone would lose


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_all_zero_stays_zero_without_nan(symmetric, dtype):
    x = torch.zeros(4, 8)
    c = codec("int4", symmetric=symmetric, scale_dtype=dtype)
    qt = c.quantize(x)
    assert torch.equal(c.dequantize(qt), x) and torch.equal(qt.scale.float(), torch.zeros(4, 1))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_next_to_nothing_do_not_vanish(bits, symmetric):
    """A scale below float16's smallest number is rounded up to it: errors stay half of 6e-8."""
    x = rand(16, 8, scale=1e-6)
    c = codec(f"int{bits}", group=8, symmetric=symmetric)
    qt = c.quantize(x)
    assert (qt.scale > 0).all()
    steps = qt.scale.float()
    assert ((c.dequantize(qt) - x).abs() <= steps / 2 * 1.0001).all()
    tiny = torch.full((1, 8), 1e-9)
    assert (c.dequantize(c.quantize(tiny)) - tiny).abs().max() <= 2.0**-25


def test_a_narrow_group_far_from_zero_keeps_its_order():
    """In float16 numbers near 1000 lie half a unit apart: rounding the minimum up would lose the group."""
    x = torch.tensor([[1000.30, 1000.33, 1000.35, 1000.40]])
    c = codec("int4", symmetric=False)
    y = c.dequantize(c.quantize(x))
    assert (y.diff() > 0).all() and (y - x).abs().max() < 0.017


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_sixteen_bit_tensors_come_back_finite(dtype):
    x = torch.tensor([[65504.0, 1.0, -65504.0, 0.5]]).to(dtype)
    for symmetric in (True, False):
        c = codec("int4", symmetric=symmetric)
        y = c.dequantize(c.quantize(x))
        assert y.dtype == dtype and torch.isfinite(y).all()
        if dtype == F16:
            assert y[0, 0] == 65504


def test_beyond_float16s_range_the_ends_are_cut():
    x = torch.tensor([[1e6, 0.0, -1e6, 3e4]])
    c = codec("int8", symmetric=False)  # the zero cannot go below -65504
    y = c.dequantize(c.quantize(x))
    assert y[0, 2] == -65504 and torch.isfinite(y).all()
    c = codec("int8", symmetric=False, scale_dtype=F32)
    assert (c.dequantize(c.quantize(x)) - x).abs().max() <= 2e6 / 255 / 2 * 1.001


def test_one_outlier_costs_its_group_only():
    x = rand(1, 64)
    x[0, 5] = 1000.0
    c = codec("int4", group=32)
    error = (c.dequantize(c.quantize(x)) - x).abs()[0]
    assert error[:32].max() > 1.0 and error[32:].max() < 0.25
