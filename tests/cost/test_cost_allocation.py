"""Every formula equals an allocation: byte counts against tensors that exist."""

import pytest
import torch

from companion.caches import make_cache
from companion.cost import ModelSpec, kv_bytes, models, weight_bytes, weight_bytes_read

SLIDING = [name for name in models if models[name].sliding_layers]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", models)
def test_cache_of_every_row(name, dtype):
    """Three sequences of five tokens: what the formula says is what the cache's tensors take."""
    spec = models[name]
    cache = make_cache("latent" if spec.mla else "contiguous", spec, batch=3, max_tokens=5, dtype=dtype)
    assert cache.nbytes == kv_bytes(spec, 5, batch=3, dtype=dtype)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*cache._k, *cache._v)}
    assert sum(storages.values()) == kv_bytes(spec, 5, batch=3, dtype=dtype)


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("tokens", [100, 4095, 4096, 4097, 6000])
def test_sliding_layers_against_a_static_cache(name, tokens):
    """transformers' StaticCache allocates min(length, window) slots in a sliding layer (shapes only)."""
    import transformers

    spec = models[name]
    types = [f"{kind}_attention" for kind in spec.layer_types]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=spec.layers, layer_types=types, sliding_window=spec.window
    )
    cache = transformers.StaticCache(config=config, max_cache_len=tokens)
    cache.early_initialization(
        batch_size=2, num_heads=spec.kv_heads, head_dim=spec.head_dim, dtype=torch.bfloat16, device="meta"
    )
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_bytes(spec, tokens, batch=2) == allocated


def test_weights_against_a_model():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=320,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    spec = ModelSpec.from_config(config.to_dict())
    held = sum(p.nbytes for p in model.parameters())
    assert weight_bytes(spec, torch.float32) == held
    assert weight_bytes_read(spec, 1, torch.float32) == held - model.model.embed_tokens.weight.nbytes


def test_packed_formats_against_packed_tensors():
    """4.5 bits: two codes in a byte and a scale byte per 16 values."""
    spec = models["smollm2-135m"]
    values = 2 * spec.kv_heads * spec.head_dim * spec.layers * 7
    for dtype, group, scale in [("nvfp4", 16, 1), ("mxfp4", 32, 1), ("int4-g32", 32, 2), ("kivi4", 32, 4)]:
        codes = torch.empty(values // 2, dtype=torch.uint8)
        scales = torch.empty(values // group, scale, dtype=torch.uint8)
        assert kv_bytes(spec, 7, dtype=dtype) == codes.nbytes + scales.nbytes
