"""Thirteen architectures against transformers: logits in one pass, over a cache, in ragged rows; counts."""

from functools import cache

import pytest
import torch
from architectures import TINY, TOLERANCE, from_spec, ids, tiny

from companion.caches import make_cache
from companion.cost import active_parameters, models, parameters
from companion.model import FAMILIES, Decoder, from_transformers

NAMES = list(TINY)
S = 24


@pytest.fixture(scope="module")
def built():
    """architecture -> (transformers model, decoder, ids (2, S), its logits), built when first asked for."""

    @cache
    @torch.inference_mode()
    def get(name):
        hf = tiny(name)
        x = ids(2, S)
        return hf, from_transformers(hf), x, hf(x).logits

    return get


def cache_for(decoder, batch, max_tokens):
    kind = "latent" if decoder.spec.mla else "contiguous"
    return make_cache(kind, decoder.spec, batch=batch, max_tokens=max_tokens)


def in_chunks(decoder, x, sizes):
    cache, at, outs = cache_for(decoder, len(x), x.shape[1]), 0, []
    for n in sizes:
        outs.append(decoder(x[:, at : at + n], cache))
        at += n
    assert at == x.shape[1]
    return torch.cat(outs, dim=1)


def test_thirteen_and_all_are_tried():
    assert len(NAMES) == 13
    # Two are other names: Gemma 3's file with a vision tower, and Kimi-K2, which is DeepSeek-V3's code.
    assert set(FAMILIES) - set(NAMES) == {"gemma3", "kimi_k2"}


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_equal_transformers(built, name):
    _, decoder, x, want = built(name)
    assert want.abs().max() > 1  # of a size that a mistake would move
    torch.testing.assert_close(decoder(x), want, rtol=0, atol=TOLERANCE)
    for n in (1, 2, 7):  # short texts take ways of their own
        torch.testing.assert_close(decoder(x[:, :n]), want[:, :n], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", [[1] * S, [9, 1, 1, 6, 7], [S]], ids=["by token", "chunks", "whole"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_over_a_cache_equal_transformers_without_one(built, name, sizes):
    _, decoder, x, want = built(name)
    torch.testing.assert_close(in_chunks(decoder, x, sizes), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_ragged_rows_equal_transformers_row_by_row(built, name):
    """Two ragged steps over one cache, a row of length 0 among them; padding holds other tokens."""
    hf, decoder, x, _ = built(name)
    first, second = [7, 1, 12, 0], [3, 9, 1, 5]
    rows = [ids(a + b, seed=20 + a) for a, b in zip(first, second)]
    alone = [hf(r[None]).logits[0] for r in rows]

    def padded(parts, width, filler):
        out = torch.full((len(parts), width), filler)
        for b, part in enumerate(parts):
            out[b, : len(part)] = part
        return out

    starts = padded([r[:a] for r, a in zip(rows, first)], 12, 3)
    goes_on = padded([r[a:] for r, a in zip(rows, first)], 9, 5)
    cache = cache_for(decoder, 4, 21)
    one = decoder(starts, cache, lengths=first)
    two = decoder(goes_on, cache, lengths=second)
    last = decoder(starts, lengths=[max(a, 1) for a in first], logits="last")
    for b, (a, n, want) in enumerate(zip(first, second, alone)):
        torch.testing.assert_close(one[b, :a], want[:a], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(two[b, :n], want[a : a + n], rtol=0, atol=TOLERANCE)
        if a:
            torch.testing.assert_close(last[b, 0], want[a - 1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_greedy_tokens_equal(built, name):
    hf, decoder, x, _ = built(name)
    steps, prompt = 12, x[:, :9]
    theirs = hf.generate(
        prompt, max_new_tokens=steps, do_sample=False, eos_token_id=None, use_cache=False, pad_token_id=0
    )[:, 9:]
    cache, tokens = cache_for(decoder, 2, 9 + steps), []
    last = decoder(prompt, cache, logits="last")
    for _ in range(steps):
        tokens.append(last[:, -1].argmax(-1))
        last = decoder(tokens[-1][:, None], cache, logits="last")
    assert torch.stack(tokens, 1).tolist() == theirs.tolist()
    assert len(set(theirs.flatten().tolist())) > 2


VARIANTS = {
    "qwen3_moe in all layers, windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    "qwen3_moe every second": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "olmoe without a bound": ("olmoe", {"clip_qkv": None, "num_key_value_heads": 4}),
    "v2 with a direct query": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
    "v2 without groups": ("deepseek_v2", {"topk_method": "greedy", "rope_parameters": None}),
    "v3 with biases": ("deepseek_v3", {"attention_bias": True, "n_group": 1, "topk_group": 1}),
    "v3 with halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "gemma2 tied, uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True},
    ),
    "gemma3 tied, by default": (
        "gemma3_text",
        {"rope_parameters": None, "layer_types": None, "tie_word_embeddings": True},
    ),
    "gpt_oss without YaRN": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "glm without norms": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
}


@pytest.mark.parametrize("name", list(VARIANTS))
@torch.inference_mode()
def test_variants_within_a_family(name):
    kind, changes = VARIANTS[name]
    hf = tiny(kind, **changes)
    decoder, x = from_transformers(hf), ids(2, S)
    want = hf(x).logits
    torch.testing.assert_close(decoder(x), want, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(in_chunks(decoder, x, [9, 1, 14]), want, rtol=0, atol=TOLERANCE)
    assert counted(decoder) == parameters(decoder.spec)


@torch.inference_mode()
def test_kimi_is_deepseek_v3_under_another_name(built):
    hf, _, x, want = built("deepseek_v3")
    spec = from_spec(hf, model_type="kimi_k2")
    assert spec.architecture == "kimi_k2"
    torch.testing.assert_close(Decoder(spec, hf.state_dict())(x), want, rtol=0, atol=TOLERANCE)


# --- what the decoder holds ------------------------------------------------------------------------


def counted(decoder):
    return sum(p.numel() for p in [*decoder.parameters(), *decoder.buffers()])


def active(decoder):
    """Parameters that one token uses, from the tensors: experts beyond the chosen ones are idle."""
    idle = 0
    for b in decoder.blocks:
        if hasattr(b.ffn, "w1"):
            one = sum(t[0].numel() for t in (b.ffn.w1, b.ffn.w2, b.ffn.b1, b.ffn.b2) if t is not None)
            idle += (b.ffn.experts - b.ffn.top_k) * one
    return counted(decoder) - idle


@pytest.mark.parametrize("name", NAMES)
def test_tensors_add_up_to_what_the_cost_model_counts(built, name):
    hf, decoder, *_ = built(name)
    assert counted(decoder) == parameters(decoder.spec)
    assert active(decoder) == active_parameters(decoder.spec)
    assert decoder.weights_bytes == 4 * counted(decoder)
    corrections = [b for n, b in hf.named_buffers() if "correction" in n]
    assert counted(decoder) == sum(p.numel() for p in [*hf.parameters(), *corrections])


REAL = [n for n, spec in models.items() if spec.architecture in FAMILIES]


@pytest.mark.parametrize("name", REAL)
def test_real_models_add_up_too(name):
    """The real shapes on the meta device, from the tensors that transformers says such a model has."""
    import transformers

    spec = models[name]
    config = dict(spec.extra)
    kind = {"kimi_k2": "deepseek_v3"}.get(config.pop("model_type"), spec.architecture)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    decoder = Decoder(spec, hf.state_dict())
    assert decoder.embedding.is_meta
    assert counted(decoder) == parameters(spec)
    assert active(decoder) == active_parameters(spec)


def test_which_real_models_those_are():
    totals = {"mixtral-8x7b": 46_702_792_704, "deepseek-v3": 671_026_419_200, "llama-3.1-8b": 8_030_261_248}
    assert {n: parameters(n) for n in totals} == totals
    assert len({models[n].architecture for n in REAL}) >= 9


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_every_tensor_is_needed_and_every_one_matters(name):
    """None is missing silently, none is read and forgotten, none shares memory with the model it is from."""
    hf = tiny(name, num_hidden_layers=2, **({"layer_types": LAYERS[name]} if name in LAYERS else {}))
    spec, weights = from_spec(hf), dict(hf.state_dict())
    x = ids(3, 16)
    decoder = Decoder(spec, weights)
    base = decoder(x)
    torch.manual_seed(5)
    for tensor, value in weights.items():
        if tensor == "lm_head.weight" and spec.tied:
            continue
        with pytest.raises(ValueError, match=tensor.rsplit(".", 1)[0].replace(".", r"\.")):
            Decoder(spec, {k: v for k, v in weights.items() if k != tensor})
        with pytest.raises(ValueError, match="must be of shape"):
            Decoder(spec, weights | {tensor: torch.cat([value, value[:1]])})
        other = value + 0.5 * torch.randn(value.shape)
        assert not torch.allclose(Decoder(spec, weights | {tensor: other})(x), base, atol=1e-3), tensor
    for value in weights.values():
        value.zero_()
    assert torch.equal(decoder(x), base)


LAYERS = {"gemma3_text": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "glm4_moe", "olmoe"])
@torch.inference_mode()
def test_sixteen_bits_stay_near(built, name):
    hf, decoder, x, want = built(name)
    for dtype, worst in ((torch.bfloat16, 0.15), (torch.float16, 0.02)):
        low = from_transformers(tiny(name).to(dtype))
        got = low(x)
        assert got.dtype == torch.float32 and low.dtype == dtype
        # Most rows: a choice of experts may turn over, and takes its row with it.
        off = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert off.flatten().median() < worst


@pytest.mark.parametrize("name", ["gemma3_text", "olmoe", "deepseek_v2", "gpt_oss"])
@torch.inference_mode()
def test_absorbed_and_expanded_are_one_model_in_float64(name):
    """Over a cache latent attention is absorbed, without one expanded; all else is one definition too."""
    decoder = from_transformers(tiny(name)).double()
    x = ids(2, S)
    kind = "latent" if decoder.spec.mla else "contiguous"
    cache = make_cache(kind, decoder.spec, batch=2, max_tokens=S, dtype=torch.float64)
    parts = [decoder(part, cache) for part in x.split([10, 1, 13], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), decoder(x), rtol=0, atol=1e-11)
