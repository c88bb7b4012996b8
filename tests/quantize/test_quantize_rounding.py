"""Rounding up and down to a narrow type, at every float16 and bfloat16 number and around each."""

import numpy as np
import pytest
import torch
from quantize_oracles import toward

from companion.quantize.codec import at_least, at_most, half_ulp


def every(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return x[torch.isfinite(x)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_and_its_neighbourhood(dtype):
    numbers = every(dtype).float().unique()  # sorted; -0 and 0 are one
    exact = numbers[1:-1]
    assert torch.equal(at_least(exact, dtype).float(), exact)
    assert torch.equal(at_most(exact, dtype).float(), exact)
    low, high = numbers[:-1], numbers[1:]
    for part in (2**-12, 0.25, 0.5, 0.75, 1 - 2**-12):
        x = low + (high - low) * part
        inside = (x > low) & (x < high)
        assert inside.float().mean() > 0.9
        assert torch.equal(at_least(x, dtype).float()[inside], high[inside])
        assert torch.equal(at_most(x, dtype).float()[inside], low[inside])


@pytest.mark.parametrize("dtype, kind", [(torch.float16, "float16"), (torch.bfloat16, "bfloat16")])
def test_against_numpy_and_bits(dtype, kind):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-12, 4, 3000)
    up = [toward(np.float32(v), kind, up=True) for v in x.numpy()]
    down = [toward(np.float32(v), kind, up=False) for v in x.numpy()]
    assert at_least(x, dtype).float().tolist() == up and at_most(x, dtype).float().tolist() == down


def test_the_smallest_numbers_go_up_to_the_smallest_number():
    for v in (2.0**-149, 1e-40, 4.9e-32, 2.0**-26, 2.0**-25, 2.0**-24):
        assert at_least(torch.tensor([v]), torch.float16).item() == 2.0**-24
        assert at_most(torch.tensor([-v]), torch.float16).item() == -(2.0**-24)
    assert (
        at_least(torch.zeros(1), torch.float16).item() == 0 == at_most(torch.zeros(1), torch.float16).item()
    )


def test_beyond_the_range_there_is_the_largest_number():
    x = torch.tensor([65504.0, 65505.0, 1e30, -65505.0])
    assert at_least(x, torch.float16).tolist() == [65504, 65504, 65504, -65504]
    assert at_most(-x, torch.float16).tolist() == [-65504, -65504, -65504, 65504]


def test_float32_is_left_alone():
    x = torch.randn(100)
    assert torch.equal(at_least(x, torch.float32), x) and torch.equal(at_most(x, torch.float32), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_half_ulp_is_half_the_gap_above(dtype):
    bits = (
        torch.arange(256, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(2**15).to(torch.int16)
    )
    x = bits[: len(bits) // 2 if dtype.itemsize == 1 else None].view(dtype).float()
    x = x[torch.isfinite(x)]
    gap = (x[1:] - x[:-1]).double()
    assert torch.equal(half_ulp(x[:-1], dtype).double(), gap / 2)
    assert torch.equal(half_ulp(-x[:-1], dtype).double(), gap / 2)
