"""What a cache asks of the loop around it: prompts in steps it can take, and memory that outlives a mode."""

import dataclasses
import weakref

import pytest
import torch

from companion.caches import PagedStorage, make_cache
from companion.cost import ModelSpec
from companion.generate import generate
from companion.model import Decoder
from companion.quantize import codec

SHAPE = {"layers": 2, "d_model": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 32}
SPEC = ModelSpec(name="tiny", architecture="mistral", window=5, max_context=128, **SHAPE)


def decoder(spec):
    g = torch.Generator().manual_seed(0)
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 16, "gate": 24, "up_": 24, "down": 16}

    def take(name):
        if "norm" in name:
            return torch.ones(16, dtype=torch.float64)
        out = next((r for part, r in rows.items() if part in name), 32)
        width = 32 if "o_proj" in name else 24 if "down" in name else 16
        return 0.3 * torch.randn(out, width, generator=g, dtype=torch.float64)

    return Decoder(spec, take)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_prompt_longer_than_the_ring_takes_at_once(step):
    model, prompt = decoder(SPEC), list(range(1, 24))
    cache = make_cache("sliding", SPEC, max_tokens=64, dtype=torch.float64, step=step)
    ringed = generate(model, prompt, cache=cache, max_new_tokens=12, stop_ids=())
    assert ringed.tokens == generate(model, prompt, cache=None, max_new_tokens=12, stop_ids=()).tokens
    assert generate(model, prompt, cache="sliding", max_new_tokens=12, stop_ids=()).tokens == ringed.tokens


def test_a_cache_used_in_inference_mode_and_then_outside():
    spec = dataclasses.replace(SPEC, window=None, layer_types=())
    cache = make_cache("paged", spec, max_tokens=40, block_size=4)
    pool = cache.storage.manager.pool
    ids = pool.allocate(pool.num_blocks)
    pool.free(ids[1::2] + ids[0::2])  # no two blocks are neighbours, so the row is gathered
    k, q = torch.randn(1, 2, 9, 8), torch.randn(1, 4, 1, 8)
    with torch.inference_mode():
        cache.append(0, k, k)
        inside = cache.attend(0, q)
    assert torch.equal(cache.attend(0, q), inside)


def test_a_block_size_that_the_storage_does_not_have():
    spec = dataclasses.replace(SPEC, window=None, layer_types=())
    storage = PagedStorage(spec, num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match="block_size must be 4, .* got 16"):
        make_cache("paged", spec, max_tokens=16, storage=storage, block_size=16)
    assert make_cache("paged", spec, max_tokens=16, storage=storage).block_size == 4


def test_fp8_without_a_scale_has_no_groups_along_the_tokens():
    spec = dataclasses.replace(SPEC, window=None, layer_types=())
    cache = make_cache("quantized", spec, max_tokens=40, codec=codec("fp8_e4m3", group_dim=-2))
    k = torch.randn(1, 2, 7, 8)
    cache.append(0, k, k)
    assert torch.equal(cache.read(0)[0], k.to(torch.float8_e4m3fn).float())  # each token at once


def test_the_prompt_is_not_kept_in_full_precision():
    spec = dataclasses.replace(SPEC, window=None, layer_types=(), layers=8)
    cache = make_cache("quantized", spec, max_tokens=40, codec="int8")
    kept = []
    for layer in range(8):
        k = torch.randn(1, 2, 7, 8)
        kept.append(weakref.ref(k))
        cache.append(layer, k, k)
        cache.attend(layer, torch.randn(1, 4, 7, 8))
        del k
    assert [r() is not None for r in kept] == [False] * 7 + [True]
