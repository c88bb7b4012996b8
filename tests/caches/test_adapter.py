"""A companion cache inside a transformers model: `generate` with it, crop and reset, and what is refused."""

import dataclasses

import pytest
import torch
import transformers

from companion.caches import as_transformers, make_cache
from companion.cost import MLASpec, ModelSpec

PROMPT = torch.tensor([[5, 17, 200, 33, 9, 41, 120, 7]])
NEW = 14


@pytest.fixture(scope="module")
def hf():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def cache_of(hf, kind, batch=1, **options):
    spec = ModelSpec.from_config(hf.config.to_dict(), name="tiny")
    return make_cache(kind, spec, batch=batch, max_tokens=32, **options)


def tokens(hf, cache, ids=PROMPT):
    with torch.inference_mode():
        out = hf.generate(
            ids, cache=cache, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids)
        )
    return out[:, ids.shape[1] :].tolist()


KINDS = {
    "contiguous": ("contiguous", {}),
    "paged": ("paged", {"block_size": 4}),
    "int8": ("quantized", {"codec": "int8"}),
    "kivi4": ("quantized", {"codec": "kivi4", "residual": 4}),
    "int8 pages": ("paged", {"codec": "int8", "block_size": 4}),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_generate_gives_the_tokens_of_a_dynamic_cache(hf, kind, batch):
    ids = torch.cat([PROMPT, PROMPT + 3])[:batch]
    want = tokens(hf, transformers.DynamicCache(), ids)
    name, options = KINDS[kind]
    cache = cache_of(hf, name, batch, **options)
    assert tokens(hf, as_transformers(cache), ids) == want
    assert cache.row_lengths(2) == [8 + NEW - 1] * batch


@pytest.mark.parametrize("kind", ["int8", "kivi4", "int8 pages"])
def test_a_quantized_cache_runs_and_its_bytes_are_its_own(hf, kind):
    name, options = KINDS[kind]
    cache = cache_of(hf, name, **options)
    theirs = as_transformers(cache)
    before = cache.nbytes
    got = tokens(hf, theirs)
    assert len(got[0]) == NEW and theirs.companion is cache
    assert cache.row_lengths() == [8 + NEW - 1] and 0 < cache.nbytes_used <= cache.nbytes == before
    if kind != "kivi4":
        assert cache.nbytes_used < cache_of(hf, "contiguous").nbytes * 21 / 32 / 2.5
        with torch.inference_mode():  # close to the exact one, and not equal to it: it is quantized indeed
            out = [
                hf(torch.tensor(got)[:, -1:], cache=c).logits
                for c in (theirs, self_made(hf, PROMPT.tolist()[0] + got[0][:-1]))
            ]
        gap = (out[0] - out[1]).abs().max()
        assert 0 < gap < 0.1 * out[1].abs().max()


def self_made(hf, ids):
    cache = transformers.DynamicCache()
    hf(torch.tensor([ids]), cache=cache)
    return cache


@pytest.mark.parametrize("kind", list(KINDS))
def test_crop_takes_a_negative_count_as_transformers_does(hf, kind):
    name, options = KINDS[kind]
    cache = cache_of(hf, name, **options)
    theirs = as_transformers(cache)
    with torch.inference_mode():
        hf(PROMPT, cache=theirs)
        assert theirs.get_seq_length() == 8 and theirs.get_max_length() == 32 and theirs.is_croppable
        theirs.crop(0)
        assert theirs.get_seq_length() == 8
        theirs.crop(-4)
        assert [cache.row_lengths(i) for i in range(3)] == [[4]] * 3
        with pytest.raises(ValueError, match="tokens_to_remove must .* got 2"):
            theirs.crop(2)
        assert theirs.get_seq_length() == 4
        theirs.crop(-99)
        assert theirs.get_seq_length() == 0 and cache.nbytes_used == 0


def test_a_draft_that_is_rejected_leaves_no_trace(hf):
    outs = []
    for theirs in (transformers.DynamicCache(), as_transformers(cache_of(hf, "paged", block_size=4))):
        with torch.inference_mode():
            hf(PROMPT, cache=theirs)
            theirs.crop(-3)
            outs.append(hf(PROMPT[:, :2] + 1, cache=theirs).logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)


def test_reset_begins_again(hf):
    cache = cache_of(hf, "paged", block_size=4)
    theirs = as_transformers(cache)
    first = tokens(hf, theirs)
    theirs.reset()
    assert cache.row_lengths(2) == [0] and cache.storage.manager.num_free == cache.storage.num_blocks
    assert tokens(hf, theirs) == first


def test_update_by_hand(hf):
    cache = cache_of(hf, "int8 pages".split()[1].replace("pages", "paged"), codec="int8", block_size=4)
    theirs = as_transformers(cache)
    k, v = torch.randn(1, 1, 5, 32), torch.randn(1, 1, 5, 32)
    got = theirs.update(k, v, 1)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)  # the step's own tokens as they came
    got = theirs.update(k[:, :, :1], v[:, :, :1], 1)
    assert got[0].shape == (1, 1, 6, 32) and torch.equal(got[0][:, :, 5:], k[:, :, :1])
    assert torch.equal(got[0][:, :, :5], cache.read(1)[0][:, :, :5]) and not torch.equal(
        got[0][:, :, :4], k[:, :, :4]
    )
    assert theirs.get_seq_length(0) == 0 and theirs.get_seq_length(1) == 6


def test_what_cannot_be_read_back_is_refused(hf):
    spec = ModelSpec.from_config(hf.config.to_dict(), name="tiny")
    window = dataclasses.replace(spec, window=4, layer_types=("sliding", "full", "full"))
    mla = MLASpec(kv_rank=4, nope_dim=3, rope_dim=2, v_dim=3)
    latent = dataclasses.replace(spec, heads=2, kv_heads=2, head_dim=5, v_head_dim=3, mla=mla)
    for kind, s in (("sliding", window), ("latent", latent)):
        with pytest.raises(ValueError, match="must be contiguous, quantized or paged, got"):
            as_transformers(make_cache(kind, s, max_tokens=8))
    small = make_cache("contiguous", spec, max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens=4"):
        hf(PROMPT, cache=as_transformers(small))
    assert small.row_lengths() == [0]
    with pytest.raises(ValueError, match="k must .* dtype|shape"):
        hf(PROMPT, cache=as_transformers(cache_of(hf, "contiguous", dtype=torch.float64)))
