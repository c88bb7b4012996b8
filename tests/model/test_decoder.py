"""The decoder against transformers, and against itself: with and without a cache, in chunks, in batches."""

import pytest
import torch
from tinymodels import LLAMA3, tiny, widen

from companion.caches import make_cache
from companion.model import from_transformers, right_padded

VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 20, "num_key_value_heads": 1}),
    "llama 3 positions": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "mistral window 1": ("mistral", {"sliding_window": 1}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 windows": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
}


def ids(*shape, seed=0):
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models():
    """name -> (transformers model in float64 throughout, decoder in float64), built when first asked for."""
    built = {}

    def get(name):
        if name not in built:
            kind, config = VARIANTS[name]
            hf = widen(tiny(kind, torch.float64, **config))
            built[name] = hf, from_transformers(hf)
        return built[name]

    return get


def cache_for(decoder, batch, max_tokens):
    return make_cache("contiguous", decoder.spec, batch=batch, max_tokens=max_tokens, dtype=decoder.dtype)


def in_chunks(decoder, x, sizes):
    """Logits of x (B, S) read over a cache, in pieces of the given sizes."""
    cache, at, outs = cache_for(decoder, len(x), x.shape[1]), 0, []
    for n in sizes:
        outs.append(decoder(x[:, at : at + n], cache))
        at += n
    return torch.cat(outs, dim=1)


# --- parity with transformers ---------------------------------------------------------------------


@pytest.mark.parametrize("name", list(VARIANTS))
@torch.inference_mode()
def test_logits_equal_transformers_in_float64(models, name):
    hf, decoder = models(name)
    x = ids(2, 12)
    want = hf(x).logits
    assert want.abs().max() > 1  # logits of a size that a mistake would move
    torch.testing.assert_close(decoder(x), want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(in_chunks(decoder, x, [5, 1, 1, 3, 2]), want, rtol=1e-11, atol=1e-11)
    for n in (1, 2, 3):  # short texts take ways of their own
        torch.testing.assert_close(decoder(x[:, :n]), want[:, :n], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", list(VARIANTS))
@torch.inference_mode()
def test_logits_equal_transformers_in_float32(name):
    kind, config = VARIANTS[name]
    hf = tiny(kind, **config)
    decoder, x = from_transformers(hf), ids(2, 12, seed=1)
    torch.testing.assert_close(decoder(x), hf(x).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_chunks(decoder, x, [7, 1, 4]), hf(x).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_long_positions_of_llama_3(models):
    """Beyond the trained length the scaled pairs differ most."""
    hf, decoder = models("llama 3 positions")
    x = ids(1, 200, seed=2)
    torch.testing.assert_close(decoder(x), hf(x).logits, rtol=1e-10, atol=1e-10)


@torch.inference_mode()
def test_sixteen_bits_stay_near(models):
    _, decoder = models("llama")
    x, want = ids(2, 9), decoder(ids(2, 9))
    for dtype, worst in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        hf = tiny("llama", torch.float64)
        low = from_transformers(hf.to(dtype))
        got = low(x)
        assert got.dtype == torch.float32
        assert (got.double() - want).norm() / want.norm() < worst


# --- one definition, however it is run ------------------------------------------------------------


def greedy(decoder, prompt, steps, *, cache, chunk=None):
    """Greedy tokens and the logits that chose them, by a loop of its own."""
    x, tokens, logits = torch.tensor([prompt]), [], []
    if cache:
        store = cache_for(decoder, 1, len(prompt) + steps)
        for start in range(0, len(prompt), chunk or len(prompt)):
            last = decoder(x[:, start : start + (chunk or len(prompt))], store)[:, -1]
    else:
        last = decoder(x)[:, -1]
    for _ in range(steps):
        logits.append(last[0])
        tokens.append(int(last[0].argmax()))
        if cache:
            last = decoder(torch.tensor([[tokens[-1]]]), store, logits="last")[:, -1]
        else:
            last = decoder(torch.tensor([prompt + tokens]), logits="last")[:, -1]
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("name", list(VARIANTS))
@torch.inference_mode()
def test_greedy_is_the_same_with_no_cache_a_cache_and_every_chunk(models, name):
    hf, decoder = models(name)
    prompt = ids(9, seed=5).tolist()
    tokens, logits = greedy(decoder, prompt, 10, cache=False)
    assert len(set(tokens)) > 1
    for chunk in range(1, len(prompt) + 1):
        again, close = greedy(decoder, prompt, 10, cache=True, chunk=chunk)
        assert again == tokens, chunk
        torch.testing.assert_close(close, logits, rtol=0, atol=1e-10)
    theirs = hf.generate(
        torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, use_cache=False
    )
    assert theirs[0, 9:].tolist() == tokens


@pytest.mark.parametrize("name", ["llama", "llama 3 positions", "mistral window", "qwen2 windows", "qwen3"])
@torch.inference_mode()
def test_a_ragged_or_left_padded_batch_gives_each_row_what_it_gives_alone(models, name):
    hf, decoder = models(name)
    lengths = [7, 1, 12, 4]
    rows = [ids(n, seed=n) for n in lengths]
    alone = [decoder(r[None])[0] for r in rows]

    left, mask = torch.full((4, 12), 299), torch.zeros(4, 12, dtype=torch.long)
    for b, r in enumerate(rows):
        left[b, 12 - len(r) :], mask[b, 12 - len(r) :] = r, 1
    x, n = right_padded(left, mask)
    assert n.tolist() == lengths and all(x[b, : len(r)].equal(r) for b, r in enumerate(rows))
    y, n2 = right_padded(x, torch.arange(12) < n[:, None])  # padded on the right already; a bool mask
    assert y.equal(x) and n2.equal(n)

    for noise in (0, 1, 299):
        filled = torch.where(torch.arange(12) < n[:, None], x, noise)
        whole = decoder(filled, lengths=n)
        cache = cache_for(decoder, 4, 16)
        cached = decoder(filled, cache, lengths=lengths)
        last = decoder(filled, lengths=lengths, logits="last")
        for b, want in enumerate(alone):
            for got in (whole, cached):
                torch.testing.assert_close(got[b, : lengths[b]], want, rtol=0, atol=1e-10)
            torch.testing.assert_close(last[b, 0], want[-1], rtol=0, atol=1e-10)
        assert cache.row_lengths() == lengths

    # Transformers on the left-padded batch says the same.
    theirs = hf(left, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
    torch.testing.assert_close(torch.stack([a[-1] for a in alone]), theirs, rtol=1e-10, atol=1e-10)


@torch.inference_mode()
def test_rows_that_go_on_at_their_own_pace(models):
    """Ragged steps over one cache, one row resting: each row's logits are those of its own text."""
    _, decoder = models("mistral window")
    texts = [ids(11, seed=b).tolist() for b in range(3)]
    alone = [decoder(torch.tensor([t]))[0] for t in texts]
    cache, at = cache_for(decoder, 3, 11), [0, 0, 0]
    for lengths in ([3, 0, 2], [0, 5, 1], [1, 1, 1], [4, 0, 0], [2, 2, 4]):
        S = max(lengths)
        x = torch.tensor([(t[a : a + n] + [7] * S)[:S] for t, a, n in zip(texts, at, lengths)])
        out = decoder(x, cache, lengths=lengths)
        last = decoder(x, rewound(cache, at), lengths=lengths, logits="last")
        for b, n in enumerate(lengths):
            torch.testing.assert_close(out[b, :n], alone[b][at[b] : at[b] + n], rtol=0, atol=1e-10)
            if n:
                torch.testing.assert_close(last[b, 0], alone[b][at[b] + n - 1], rtol=0, atol=1e-10)
        at = [a + n for a, n in zip(at, lengths)]
    assert cache.row_lengths() == at == [10, 8, 8]


def rewound(cache, at):
    twin = cache.fork()
    twin.crop(at)
    return twin


@torch.inference_mode()
def test_a_fork_goes_its_own_way_and_a_crop_goes_back(models):
    _, decoder = models("qwen3 windows")
    prompt, a, b = ids(1, 6), ids(1, 4, seed=1), ids(1, 4, seed=2)
    cache = cache_for(decoder, 1, 10)
    decoder(prompt, cache)
    twin = cache.fork()
    first = decoder(a, cache)
    second = decoder(b, twin)
    torch.testing.assert_close(first, decoder(torch.cat([prompt, a], 1))[:, 6:], rtol=0, atol=1e-10)
    torch.testing.assert_close(second, decoder(torch.cat([prompt, b], 1))[:, 6:], rtol=0, atol=1e-10)
    cache.crop(6)
    assert torch.equal(decoder(b, cache), second)


# --- layout of the weights ------------------------------------------------------------------------


@torch.inference_mode()
def test_weights_are_the_others_in_memory_of_their_own():
    for tied in (True, False):
        hf = tiny("llama", tie_word_embeddings=tied)
        decoder = from_transformers(hf)
        assert torch.equal(decoder.embedding, hf.model.embed_tokens.weight)
        x = ids(2, 5)
        assert torch.equal(decoder.embed(x), hf.model.embed_tokens(x))
        assert torch.equal(decoder.embed(x[:, :1]), hf.model.embed_tokens(x[:, :1]))
        assert decoder.weights_bytes == 4 * sum(p.numel() for p in hf.parameters())
        hf.model.embed_tokens.weight.zero_()  # a copy, not a view of the other model
        assert decoder.embedding.abs().sum() > 0
        torch.testing.assert_close(
            decoder.double()(x).float(),
            from_transformers(tiny("llama", tie_word_embeddings=tied))(x),
            rtol=1e-4,
            atol=1e-4,
        )
