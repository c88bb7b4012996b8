"""The codecs that only cast: what others are measured against, and the exact side of a pair."""

import pytest
import torch

from companion.caches import make_cache
from companion.cost import ModelSpec
from companion.quantize import codec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DTYPES)
def test_it_is_torchs_cast_and_takes_its_bytes(name):
    x, c = rand(2, 5, 7) * torch.logspace(-6, 4, 7), codec(name)
    qt = c.quantize(x)
    assert torch.equal(c.dequantize(qt), x.to(DTYPES[name]).float())
    assert qt.bits_per_value == c.bits == 8 * DTYPES[name].itemsize
    assert ((c.dequantize(qt) - x).abs() <= c.bound(qt)).all()


def test_fp16_cuts_and_does_not_overflow():
    x = torch.tensor([[1e6, -1e6, 65504.0, 1e-9]])
    assert codec("fp16").dequantize(codec("fp16").quantize(x)).tolist() == [[65504.0, -65504.0, 65504.0, 0.0]]


def test_what_is_stored_is_a_copy_and_so_is_what_is_read():
    x, c = rand(4, 4), codec("fp32")
    before, qt = x.clone(), c.quantize(x)
    x += 1
    c.dequantize(qt).add_(1)
    assert torch.equal(c.dequantize(qt), before)


@pytest.mark.parametrize(
    "option", [{"group": 32}, {"symmetric": True}, {"tensor_scale": 1.0}, {"scale_dtype": torch.float32}]
)
def test_options_are_refused(option):
    with pytest.raises(ValueError, match="takes no options"):
        codec("bf16", **option)


def test_numbers_without_a_scale_are_refused_all_the_same():
    with pytest.raises(ValueError, match="NaN"):
        codec("fp32").quantize(torch.tensor([[float("nan"), 1.0]]))


@pytest.mark.parametrize("codecs, exact", [(("fp32", "int2"), 0), (("int2", "fp32"), 1)])
def test_one_side_of_a_cache_stays_exact(codecs, exact):
    spec = ModelSpec(
        name="tiny", architecture="llama", layers=1, d_model=16, heads=4, kv_heads=2, head_dim=8, ffn=8,
        vocab=9,
    )  # fmt: skip
    cache = make_cache("quantized", spec, max_tokens=12, codec=codecs)
    kv = rand(1, 2, 12, 8), rand(1, 2, 12, 8, seed=1)
    cache.append(0, *kv)
    read = cache.read(0)
    assert torch.equal(read[exact], kv[exact]) and not torch.equal(read[1 - exact], kv[1 - exact])
    assert cache.nbytes_used == 12 * 2 * (8 * 4 + 8 * 2 // 8 + 2 + 2)
