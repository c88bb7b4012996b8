"""Weights in int8: the model is the one whose weights have been rounded, and holds the bytes foretold."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from architectures import TINY, TOLERANCE, ids, tiny

from companion.attend import products
from companion.attend.products import PACKED_ROWS, packed
from companion.caches import make_cache
from companion.cost import ModelSpec, parameters, weight_bytes
from companion.model import Decoder, from_transformers, load, quantize_weights
from companion.model.products import Int8Matrix
from companion.study import compare, text
from tests.model.test_architectures_caches import EXACT, FITS, logits_over

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EPS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}


def rounded(weight, dim=-1):
    """The definition: 127 steps up to the largest weight of an output channel, whose inputs lie along dim."""
    scale = weight.abs().amax(dim, keepdim=True) / 127
    return (weight / scale).round() * scale


def matrices(hf):
    """(name, parameter, dimension of the inputs) of what a step reads whole, by transformers' own names."""
    tied = hf.config.tie_word_embeddings
    for name, p in hf.named_parameters():
        router = name.endswith((".gate.weight", ".router.weight"))
        own_table = "embed_tokens" in name and not tied
        if p.ndim >= 2 and not router and not own_table and not name.endswith("bias"):
            yield name, p, -2 if hf.config.model_type == "gpt_oss" and "experts" in name else -1


@pytest.fixture(scope="module")
def built():
    """architecture -> (int8 decoder, decoder, two texts, transformers' logits with its weights rounded)."""

    @cache
    @torch.inference_mode()
    def get(name):
        hf, texts = tiny(name), [ids(21), ids(17, seed=2)]
        decoder = from_transformers(hf)
        for _, p, dim in matrices(hf):
            p.copy_(rounded(p, dim))
        return quantize_weights(decoder), decoder, texts, [hf(t[None]).logits[0] for t in texts]

    return get


# The model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TINY))
@torch.inference_mode()
def test_logits_are_those_of_transformers_with_rounded_weights(built, name):
    q, decoder, texts, want = built(name)
    for t, theirs in zip(texts, want):
        torch.testing.assert_close(q(t[None])[0], theirs, rtol=0, atol=TOLERANCE)
        assert (decoder(t[None])[0] - theirs).abs().max() > 10 * TOLERANCE  # rounding shows


@pytest.mark.parametrize("name, what", FITS)
@torch.inference_mode()
def test_over_every_cache(built, name, what):
    q, _, texts, want = built(name)
    kind, options, _ = EXACT[what]
    cache = make_cache(kind, q.spec, batch=2, max_tokens=21, dtype=q.dtype, device=q.device, **options)
    for got, theirs in zip(logits_over(q, texts, cache), want):
        torch.testing.assert_close(got, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", list(TINY))
def test_bytes_are_those_of_the_cost_model(name):
    """All in int8, a scale of 4 bytes per output channel, and 3 more for each number left in float32."""
    hf = tiny(name)
    q = quantize_weights(from_transformers(hf))
    inside = {n: (p, p.shape[dim]) for n, p, dim in matrices(hf)}
    scales = sum(p.numel() // width for p, width in inside.values())
    whole = parameters(q.spec)
    kept = whole - sum(p.numel() for p, _ in inside.values())
    assert q.weights_bytes == weight_bytes(q.spec, "int8") + 4 * scales + 3 * kept


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_is_one_matrix(tied):
    q = quantize_weights(from_transformers(tiny("llama", tie_word_embeddings=tied)))
    assert (q.embedding is q.output) == tied and isinstance(q.output, Int8Matrix)
    assert isinstance(q.embedding, Int8Matrix) == tied and q.dtype == torch.float32
    assert not any(p.requires_grad for p in q.parameters()) and not q.training


def test_the_model_given_stays_as_it_was():
    for name in ("llama", "gpt_oss", "deepseek_v3"):
        decoder = from_transformers(tiny(name))
        before = {n: (p, p.clone()) for n, p in decoder.state_dict(keep_vars=True).items()}
        q = quantize_weights(decoder)
        after = decoder.state_dict(keep_vars=True)
        assert before.keys() == after.keys() and decoder.weight_format is None and q.weight_format == "int8"
        assert all(after[n] is p and torch.equal(p, copy) for n, (p, copy) in before.items())
        own = dict(q.named_parameters())
        shared = {n for n in own if not n.endswith((".codes", ".scale"))}
        assert len(shared) > 5 and all(own[n] is before[n][0] for n in shared)  # norms: no second copy


def test_a_state_goes_into_another():
    name = "deepseek_v3"
    q, other = (quantize_weights(from_transformers(tiny(name, seed=s))) for s in (0, 1))
    other.load_state_dict(q.state_dict())
    assert torch.equal(other(ids(9)[None]), q(ids(9)[None]))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_every_dtype(dtype):
    decoder = from_transformers(tiny("llama", tie_word_embeddings=True).to(dtype))
    q = quantize_weights(decoder)
    cache = make_cache("contiguous", q.spec, batch=2, max_tokens=12, dtype=q.dtype)
    assert q.dtype == dtype and q.embed(ids(2, 3)).dtype == dtype
    whole, steps = q(ids(2, 12)), torch.cat([q(ids(2, 12)[:, i : i + 4], cache) for i in (0, 4, 8)], dim=1)
    want = decoder(ids(2, 12))
    assert whole.dtype == want.dtype and (whole - want).norm() < 0.05 * want.norm()
    assert (steps - whole).norm() < max(0.03, 10 * EPS[dtype]) * whole.norm() if EPS[dtype] > 1e-4 else 1e-5


@torch.inference_mode()
def test_another_dtype_afterwards():
    """As for any module, `to` turns what is a float; codes stay codes."""
    q = quantize_weights(from_transformers(tiny("deepseek_v3", tie_word_embeddings=True)))
    want, q = q(ids(2, 9)), q.to(torch.bfloat16)
    got = q(ids(2, 9))
    assert q.dtype == torch.bfloat16 and q.output.codes.dtype == torch.int8
    off = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median()  # another expert may be chosen
    assert off < 0.05


@torch.inference_mode()
def test_the_real_model_says_nearly_the_same():
    decoder, tokenizer = load("smollm2-135m")
    q = quantize_weights(decoder)
    spec = decoder.spec
    channels = spec.vocab + spec.layers * ((9 + 3 + 3) * 64 + 576 + 2 * 1536 + 576)
    norms = (2 * spec.layers + 1) * 576
    assert q.weights_bytes == weight_bytes(spec, "int8") + 4 * channels + 3 * norms == 135_439_104
    x = torch.tensor(tokenizer.encode(text())[: 2 * 128]).view(2, 128)
    found = compare(decoder(x)[:, :-1], q(x)[:, :-1], x[:, 1:])
    assert 1e-4 < found.kl.mean() < 0.012 and found.kl.max() < 0.3
    assert found.agree.double().mean() > 0.88
    assert abs((found.nll - found.nll_reference).mean()) < 0.05


# The product ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["as it comes", "no such kernel", "small tiles"])
def way(request, monkeypatch):
    """Torch's kernel where it is asked, tiles where it is missing, and many tiles, the last one short."""
    packed.cache_clear()
    if request.param == "no such kernel":
        monkeypatch.delattr(torch, "_weight_int8pack_mm")
    if request.param == "small tiles":
        monkeypatch.setattr(products, "PACKED_ROWS", 0)
        monkeypatch.setattr(products, "TILE", 4 * 60 * 7)
    yield request.param
    packed.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, width", [(96, 60), (7, 64), (1, 1), (49, 33), (10, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_weights(way, dtype, out, width, bias):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=g, dtype=torch.float64).to(dtype)
    m = Int8Matrix(weight)
    exact = m.codes.double() * m.scale.double()[:, None]
    assert (exact - weight.double()).abs().amax(1).le(0.51 * m.scale.double()).all()
    b = torch.randn(out, generator=g).to(dtype) if bias else None
    for rows in (0, 1, 2, PACKED_ROWS, PACKED_ROWS + 1, 40):
        for shape in ((rows, width), (1, rows, width), (rows, 1, width)):
            x = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
            y, want = m(x, b), F.linear(x.double(), exact, None if b is None else b.double())
            assert y.shape == want.shape and y.dtype == dtype
            assert (y - want).norm() <= EPS[dtype] * (want.norm() + 1)


def test_rows_that_are_no_contiguous_tensor(way):
    m = Int8Matrix(torch.randn(96, 64))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 8).to(dtype).t()[::2]
        assert (m(x) - F.linear(x.double(), m.dense(torch.float64))).norm() < 0.01 * m(x).norm()


def test_a_kernel_that_answers_wrong_is_not_asked(monkeypatch):
    packed.cache_clear()
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda x, codes, scale: x @ codes.to(x.dtype).t())
    assert not packed(torch.bfloat16)
    packed.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_passes_to_the_input(dtype):
    m = Int8Matrix(torch.randn(6, 5).to(dtype))
    x = torch.randn(3, 5).to(dtype).requires_grad_()
    m(x).sum().backward()
    want = m.dense(dtype).sum(0).expand(3, 5)
    assert (x.grad - want).abs().max() <= 4 * EPS[dtype] * want.abs().max()


def test_memory_kept_between_calls_is_no_result():
    """Inside and outside of inference mode, and a second product does not change what the first gave."""
    small, large = Int8Matrix(torch.randn(8, 16)), Int8Matrix(torch.randn(300, 64))
    with torch.inference_mode():
        first = small(torch.ones(1, 16))
    copy = first.clone()
    large(torch.ones(3, 64))
    assert torch.equal(first, copy) and torch.equal(small(torch.ones(1, 16)), copy)


def test_rows_of_zeros_and_of_tiny_numbers():
    m = Int8Matrix(torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [3.0, -1.5]]))
    assert torch.isfinite(m.scale).all() and torch.isfinite(m.dense(torch.float32)).all()
    assert m.codes.tolist()[0] == [0, 0] and m.codes.tolist()[2] == [127, -64]


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int4", "fp8", "", "int8-g32", torch.float16])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype must be one of int8, got"):
        quantize_weights(from_transformers(tiny("qwen3")), dtype)


def test_torchs_name_is_accepted():
    assert quantize_weights(from_transformers(tiny("qwen3")), torch.int8).weight_format == "int8"


def test_twice_is_refused():
    q = quantize_weights(from_transformers(tiny("qwen3")))
    with pytest.raises(ValueError, match="decoder must be a model as loaded.*got 'int8'"):
        quantize_weights(q)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name, where, says",
    [
        ("llama", "model.layers.1.self_attn.o_proj.weight", "blocks.1.attention.o"),
        ("mixtral", "model.layers.2.mlp.experts.down_proj", "blocks.2.ffn"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", "blocks.0.attention"),
        ("qwen2", "lm_head.weight", "output"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(value, name, where, says):
    hf = tiny(name)
    with torch.no_grad():
        hf.get_parameter(where)[-1].fill_(value)
    decoder = from_transformers(hf)
    with pytest.raises(ValueError, match=f"decoder: {says}.*holds NaN, infinity"):
        quantize_weights(decoder)
    assert decoder.weight_format is None


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), Int8Matrix(torch.ones(2, 2))])
def test_no_decoder_at_all(thing):
    with pytest.raises(ValueError, match="decoder must be a companion.model.Decoder"):
        quantize_weights(thing)


def test_a_part_from_elsewhere_is_refused():
    decoder = from_transformers(tiny("qwen3"))
    decoder.blocks[1].ffn = torch.nn.Sequential(decoder.blocks[1].ffn)
    with pytest.raises(ValueError, match="decoder: blocks.1.ffn is a Sequential; only whole models"):
        quantize_weights(decoder)


@pytest.mark.parametrize("device", ["cuda", "nowhere", "cuda:x"])
def test_a_device_that_is_not_there(device, tiny_gguf):
    path, _ = tiny_gguf()
    if device == "cuda" and torch.cuda.is_available():
        device = "cuda:99"
    with pytest.raises(ValueError, match="device=") as e:
        load(path, device=device)
    assert "\n" not in str(e.value)


def test_a_checkpoint_that_is_quantized_is_refused():
    config = tiny("qwen3").config.to_dict() | {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ValueError, match="weights are quantized .bitsandbytes."):
        Decoder(ModelSpec.from_config(config), {})
