"""A formula equals an allocation: kv_bytes of every model in the table, against the bytes of real tensors."""

import pytest
import torch

from companion.caches import make_cache
from companion.cost import cached_values, kv_bytes, models

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def real_bytes(cache):
    """Bytes of every tensor that the object holds, each memory counted once."""
    found, seen, left = {}, set(), [vars(cache)]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            left += x.values()
        elif isinstance(x, (list, tuple)):
            left += x
    return sum(found.values())


def kind_for(spec):
    return "latent" if spec.mla else "contiguous"


@pytest.mark.parametrize("name", list(models))
def test_kv_bytes_equals_what_is_allocated(name):
    spec = models[name]
    tokens = 5
    assert spec.window is None or tokens <= spec.window  # the plain cache keeps every token of every layer
    for dtype, torch_dtype in DTYPES.items():
        cache = make_cache(kind_for(spec), spec, batch=2, max_tokens=tokens, dtype=torch_dtype)
        assert cache.nbytes == real_bytes(cache) == kv_bytes(name, tokens, batch=2, dtype=dtype)
        assert cache.nbytes_used == 0


@pytest.mark.parametrize("name", ["smollm2-135m", "deepseek-v3", "gpt-oss-20b", "gemma-3-1b"])
def test_bytes_used_are_those_of_the_tokens(name):
    if name not in models:
        name = next(n for n in models if n.startswith(name.rsplit("-", 1)[0]))
    spec = models[name]
    cache = make_cache(kind_for(spec), spec, batch=2, max_tokens=7, dtype=torch.bfloat16)
    heads, width = (1, spec.mla.width) if spec.mla else (spec.kv_heads, spec.head_dim)
    k = torch.zeros(2, heads, 4, width, dtype=torch.bfloat16)
    for layer in range(spec.layers):
        cache.append(layer, k, None if spec.mla else k, lengths=[4, 1])
    want = kv_bytes(name, 4, dtype="bf16") + kv_bytes(name, 1, dtype="bf16")
    assert cache.nbytes_used == want == 2 * cached_values(name, 5)
    assert cache.nbytes == real_bytes(cache)
    cache.crop([2, 0])
    assert cache.nbytes_used == kv_bytes(name, 2, dtype="bf16")


def test_a_layer_half_way_through_a_step_is_counted():
    spec = models["smollm2-135m"]
    cache = make_cache("contiguous", spec, max_tokens=4)
    k = torch.zeros(1, 3, 2, 64)
    cache.append(0, k, k)
    assert cache.nbytes_used == 2 * 2 * 3 * 64 * 4  # two tokens, one layer


def test_the_example_of_the_documentation():
    cache = make_cache("contiguous", models["smollm2-135m"], max_tokens=64)
    assert cache.nbytes == 64 * 2 * 30 * 3 * 64 * 4 == 2_949_120
    assert repr(cache) == "ContiguousCache(smollm2-135m, batch=1, tokens=0 of 64, 0 of 2949120 bytes used)"
