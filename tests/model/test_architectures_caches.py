"""Every kind of cache under every architecture: transformers' logits where it makes sense, else an error."""

from functools import cache

import pytest
import torch
from architectures import TINY, TOLERANCE, ids, tiny

from companion.caches import KINDS, make_cache
from companion.model import from_transformers
from companion.quantize import codec

WINDOWED = {"mistral", "qwen2", "gemma2", "gemma3_text", "mixtral", "gpt_oss"}
LATENT = {"deepseek_v2", "deepseek_v3"}
HEADS = set(TINY) - LATENT  # those that cache keys and values

# kind, options, and the architectures that it is for; no approximation among them: what would be left out or
# rounded is more than the text has.
EXACT = {
    "contiguous": ("contiguous", {}, HEADS),
    "sliding": ("sliding", {"step": 9}, WINDOWED),
    "quantized, all in the tail": ("quantized", {"codec": "int8", "residual": 64}, HEADS),
    "paged": ("paged", {"block_size": 4}, HEADS),
    "paged, all in the tail": ("paged", {"block_size": 4, "codec": "int8", "residual": 64}, HEADS),
    "latent": ("latent", {}, LATENT),
    "streaming": ("streaming", {"window": 64}, HEADS - WINDOWED),
    "evicting": ("evicting", {"budget": 64}, HEADS - WINDOWED),
}
FITS = [(name, what) for what, (_, _, fit) in EXACT.items() for name in TINY if name in fit]
NONE = [(name, what) for what, (_, _, fit) in EXACT.items() for name in TINY if name not in fit]


@pytest.fixture(scope="module")
def built():
    """architecture -> (decoder, two texts, transformers' logits of each), built when first asked for."""

    @cache
    @torch.inference_mode()
    def get(name):
        hf, texts = tiny(name), [ids(21), ids(17, seed=2)]
        return from_transformers(hf), texts, [hf(t[None]).logits[0] for t in texts]

    return get


def logits_over(decoder, texts, cache):
    """Logits of two texts read over one cache in ragged steps, the second row resting once."""
    at, outs = [0, 0], [[], []]
    for step in ([8, 5], [1, 1], [6, 0], [1, 1], [5, 9], [0, 1]):
        x = torch.full((2, max(step)), 7)
        for b, n in enumerate(step):
            x[b, :n] = texts[b][at[b] : at[b] + n]
        out = decoder(x, cache, lengths=step)
        for b, n in enumerate(step):
            outs[b].append(out[b, :n])
            at[b] += n
    assert at == [21, 17] and cache.row_lengths() == at
    return [torch.cat(o) for o in outs]


@pytest.mark.parametrize("name, what", FITS)
@torch.inference_mode()
def test_a_cache_that_fits_gives_the_logits_of_transformers(built, name, what):
    decoder, texts, want = built(name)
    kind, options, _ = EXACT[what]
    cache = make_cache(kind, decoder.spec, batch=2, max_tokens=21, **options)
    for got, theirs in zip(logits_over(decoder, texts, cache), want):
        torch.testing.assert_close(got, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name, what", NONE)
def test_a_cache_that_does_not_fit_is_refused_in_one_line(built, name, what):
    decoder, *_ = built(name)
    kind, options, _ = EXACT[what]
    with pytest.raises(ValueError, match="kind=") as error:
        make_cache(kind, decoder.spec, batch=2, max_tokens=21, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 120


KIVI = codec("int4", group=8, group_dim=-2), codec("int4", group=8)


@pytest.mark.parametrize("codec, worst", [("int8", 0.02), (KIVI, 0.15)], ids=["int8", "int4"])
@pytest.mark.parametrize("name", sorted(HEADS))
@torch.inference_mode()
def test_few_bits_cost_little_and_something(built, name, codec, worst):
    """Softcaps, sinks and windows hold over quantized parts too: the error is that of the codec."""
    decoder, texts, want = built(name)
    cache = make_cache("quantized", decoder.spec, batch=2, max_tokens=21, codec=codec, residual=0)
    for got, theirs in zip(logits_over(decoder, texts, cache), want):
        # Of most tokens: another expert may be chosen, and takes a row with it.
        off = ((got - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median()
        assert 1e-4 < off < worst


@pytest.mark.parametrize("name", list(TINY))
@torch.inference_mode()
def test_a_crop_goes_back_and_a_fork_goes_its_own_way(built, name):
    decoder, (text, other), want = built(name)
    kind = "latent" if name in LATENT else "sliding" if name in WINDOWED else "contiguous"
    options = {"step": 12} if kind == "sliding" else {}
    cache = make_cache(kind, decoder.spec, max_tokens=32, **options)
    decoder(text[None, :12], cache)
    twin = cache.fork()
    decoder(other[None, :6], cache)
    cache.crop(12)
    for c in (cache, twin):
        got = decoder(text[None, 12:], c)[0]
        torch.testing.assert_close(got, want[0][12:], rtol=0, atol=TOLERANCE)


def test_every_kind_is_tried_but_the_one_that_is_no_attention():
    assert {kind for kind, _, _ in EXACT.values()} == set(KINDS) - {"linear"}


@torch.inference_mode()
def test_a_cache_of_another_kind_of_model_is_refused_before_it_is_touched(built):
    """The same heads and widths, but keys and values where the model has a latent."""
    from dataclasses import replace

    decoder, texts, _ = built("deepseek_v3")
    spec = replace(decoder.spec, mla=None)
    cache = make_cache("contiguous", spec, max_tokens=21)
    with pytest.raises(ValueError, match="cache must be made for .* mla=.* got None"):
        decoder(texts[0][None], cache)
    assert cache.nbytes_used == 0
