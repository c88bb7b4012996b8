"""Decode steps through all layers by one compiled call, against transformers and against the modules."""

import pytest
import torch
from architectures import TOLERANCE, ids, tiny

from companion.caches import ContiguousCache, PagedCache, PagedStorage, make_cache
from companion.generate import generate
from companion.kernels import use
from companion.model import Decoder, from_transformers, load, quantize_weights
from companion.paging import PoolFull

PLAIN = {
    "llama": ("llama", {"attention_bias": False, "mlp_bias": False}),
    "llama, GELU": (
        "llama",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
        },
    ),
    "llama, one key head": ("llama", {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
OTHERS = ("llama", "gemma2", "gemma3_text", "mixtral", "olmoe", "gpt_oss", "glm4_moe")  # llama with biases
S, FIRST = 24, 11


def cache_of(kind, spec, batch, max_tokens=S):
    if kind == "contiguous":
        return make_cache(kind, spec, batch=batch, max_tokens=max_tokens)
    return make_cache("paged", spec, batch=batch, max_tokens=max_tokens, block_size=int(kind.split()[1]))


def by_token(decoder, x, cache, how="compiled"):
    """Logits of x (B, n), a step for each token."""
    with use(how):
        return torch.cat([decoder(x[:, t : t + 1], cache) for t in range(x.shape[1])], dim=1)


@pytest.mark.parametrize("kind", ["contiguous", "paged 4", "paged 1"])
@pytest.mark.parametrize("name", PLAIN)
@torch.inference_mode()
def test_logits_equal_transformers(taken, name, kind):
    architecture, changes = PLAIN[name]
    hf = tiny(architecture, **changes)
    decoder, batch = from_transformers(hf), 3
    x = ids(batch, S)
    want, cache = hf(x).logits, cache_of(kind, decoder.spec, batch)
    got = torch.cat([decoder(x[:, :FIRST], cache), by_token(decoder, x[:, FIRST:], cache)], dim=1)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert taken == [batch] * (S - FIRST)
    assert all(cache.row_lengths(layer) == [S] * batch for layer in range(decoder.spec.layers))


@pytest.mark.parametrize("name", PLAIN)
@torch.inference_mode()
def test_int8_weights_equal_the_same_weights_in_float64(taken, name):
    architecture, changes = PLAIN[name]
    coded = quantize_weights(from_transformers(tiny(architecture, **changes)))
    x, cache = ids(3, S), cache_of("contiguous", coded.spec, 3)
    got = torch.cat([coded(x[:, :FIRST], cache), by_token(coded, x[:, FIRST:], cache)], dim=1)
    want = coded.double()(x)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE)
    assert taken == [3] * (S - FIRST)


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
@pytest.mark.parametrize("kind", ["contiguous", "paged 4"])
@torch.inference_mode()
def test_rows_of_different_lengths_and_from_nothing(taken, name, kind):
    """Every row as transformers computes it alone; then rows cropped, forked, and gone on with."""
    hf = tiny(*PLAIN[name][:1], **PLAIN[name][1])
    decoder = from_transformers(hf)
    first, more = [5, 0, 9, 1], 6
    rows = [ids(n + more, seed=n) for n in first]
    cache = cache_of(kind, decoder.spec, 4)
    padded = torch.stack([torch.cat([r[:n], r.new_zeros(9 - n)]) for r, n in zip(rows, first)])
    decoder(padded, cache, lengths=first)
    later = torch.stack([r[n:] for r, n in zip(rows, first)])
    got = by_token(decoder, later, cache)
    for b, (row, n) in enumerate(zip(rows, first)):
        torch.testing.assert_close(got[b], hf(row[None]).logits[0, n:], rtol=0, atol=TOLERANCE)
    cache.crop([n + 2 for n in first])
    twin = cache.fork()
    again, other = by_token(decoder, later[:, 2:], cache), by_token(decoder, later[:, 3:4], twin)
    torch.testing.assert_close(again, got[:, 2:], rtol=0, atol=TOLERANCE)
    third = by_token(decoder, later[:, 2:3], twin.fork() if kind == "contiguous" else cache.fork(), "never")
    assert third.isfinite().all() and other.isfinite().all()
    assert twin.row_lengths() == [n + 3 for n in first] and len(taken) == more + 4 + 1


@torch.inference_mode()
def test_a_fork_writes_into_its_own_copy(taken):
    """Two caches share a half-filled block; each then writes another token there."""
    decoder = from_transformers(tiny("qwen3"))
    x, y = ids(1, 7), ids(1, 3, seed=5)
    one = cache_of("paged 4", decoder.spec, 1)
    decoder(x[:, :6], one)
    two = one.fork()
    got = by_token(decoder, y, two), by_token(decoder, x[:, 6:], one)
    for tokens, logits in ((torch.cat([x[:, :6], y], dim=1), got[0]), (x, got[1])):
        want = decoder(tokens)[:, 6:]
        torch.testing.assert_close(logits, want, rtol=0, atol=TOLERANCE)
    assert taken == [1] * 4


@torch.inference_mode()
def test_what_lies_in_unused_slots_is_never_read(taken):
    decoder = from_transformers(tiny("mistral"))
    x = ids(2, 9)
    want = decoder(x)
    storage = PagedStorage(decoder.spec, num_blocks=9, block_size=4)
    contiguous = make_cache("contiguous", decoder.spec, batch=2, max_tokens=16)
    for store in (*storage.k, *storage.v, *contiguous._k, *contiguous._v):
        store.fill_(torch.nan)
    for cache in (contiguous, PagedCache(decoder.spec, batch=2, max_tokens=16, storage=storage)):
        torch.testing.assert_close(by_token(decoder, x, cache), want, rtol=0, atol=TOLERANCE)
    assert len(taken) == 18


@pytest.mark.parametrize("kind", ["contiguous", "paged 4"])
@torch.inference_mode()
def test_a_full_cache_is_told_and_stays_as_it_was(taken, kind):
    decoder = from_transformers(tiny("qwen3"))
    x = ids(1, 9)
    cache = cache_of(kind, decoder.spec, 1, max_tokens=8)
    by_token(decoder, x[:, :8], cache)
    before = [t.clone() for layer in range(decoder.spec.layers) for t in cache.read(layer)]
    with pytest.raises(ValueError, match="max_tokens=8"):
        by_token(decoder, x[:, 8:], cache)
    after = [t for layer in range(decoder.spec.layers) for t in cache.read(layer)]
    assert all(map(torch.equal, before, after)) and len(taken) == 8


@torch.inference_mode()
def test_a_pool_that_is_empty_is_told_and_takes_nothing(taken):
    decoder = from_transformers(tiny("qwen3"))
    storage = PagedStorage(decoder.spec, num_blocks=3, block_size=4)
    cache, other = (PagedCache(decoder.spec, max_tokens=12, storage=storage) for _ in "ab")
    by_token(decoder, ids(1, 8), cache)
    decoder(ids(1, 3), other)
    with pytest.raises(PoolFull):
        by_token(decoder, ids(1, 1), cache)
    assert cache.row_lengths() == [8] and cache.row_lengths(2) == [8] and len(taken) == 8


@pytest.mark.parametrize("name", OTHERS)
@torch.inference_mode()
def test_other_layers_go_module_by_module(taken, name):
    hf = tiny(name)
    decoder, x = from_transformers(hf), ids(2, 9)
    cache = make_cache("contiguous", decoder.spec, batch=2, max_tokens=9)
    torch.testing.assert_close(by_token(decoder, x, cache), hf(x).logits, rtol=0, atol=TOLERANCE)
    assert not taken


class Own(ContiguousCache):
    """A reader's cache, which counts what is appended."""

    appended = 0

    def append(self, *args, **kwargs):
        self.appended += 1
        super().append(*args, **kwargs)


def test_what_keeps_a_step_with_the_modules(taken):
    decoder = from_transformers(tiny("qwen3"))
    spec, x = decoder.spec, ids(9, 4)

    def asked(x, cache=None, how="compiled", model=decoder, **options):
        if cache is None:
            cache = make_cache("contiguous", spec, batch=len(x), max_tokens=4)
        taken.clear()
        with use(how):
            model(x, cache, **options)
        return len(taken)

    assert asked(x[:1, :1]) == asked(x[:8, :1]) == 1
    assert asked(x[:2, :1], lengths=[1, 1]) == 1 and not asked(x[:2, :1], lengths=[1, 0])
    assert not asked(x[:, :1]) and not asked(x[:1, :2])
    assert not asked(x[:1, :1], how="auto") and not asked(x[:1, :1], how="never")
    own = Own(spec, max_tokens=4)
    assert not asked(x[:1, :1], own) and own.appended == spec.layers
    for kind in ("quantized", "streaming"):
        options = {"window": 4} if kind == "streaming" else {}
        assert not asked(x[:1, :1], make_cache(kind, spec, max_tokens=4, **options))
    with use("compiled"):
        assert decoder(x[:1, :1]).isfinite().all()  # no cache
    elsewhere = make_cache("contiguous", spec, max_tokens=4, device="meta")  # without memory
    with pytest.raises(Exception, match="meta|device"):
        asked(x[:1, :1], elsewhere)
    assert not taken
    for module in (decoder.blocks[1], decoder.blocks[1].attention, decoder.blocks[2].ffn_norm):
        heard = []
        hook = module.register_forward_hook(lambda *given, heard=heard: heard.append(1))
        assert not asked(x[:1, :1]) and heard
        hook.remove()
    decoder.blocks[1].ffn.down.requires_grad_(True)
    assert not asked(x[:1, :1])
    with torch.no_grad():
        assert asked(x[:1, :1]) == 1
    decoder.blocks[1].ffn.down.requires_grad_(False)
    assert asked(x[:1, :1]) == 1
    decoder = quantize_weights(decoder)
    codes = decoder.blocks[1].ffn.down
    assert asked(x[:1, :1], model=decoder) == 1
    hook = codes.register_forward_pre_hook(lambda *given: None)
    assert not asked(x[:1, :1], model=decoder)
    hook.remove()
    codes.scale.data = codes.scale.data.bfloat16()
    assert not asked(x[:1, :1], model=decoder)
    del decoder.blocks[1].ffn.down
    decoder.blocks[1].ffn.down = torch.nn.Parameter(codes.dense(torch.float32), requires_grad=False)
    assert not asked(x[:1, :1], model=decoder)  # one matrix in floats among codes


@torch.inference_mode()
def test_weights_that_change_are_read_anew(taken):
    """In place, replaced, and on their way through another dtype."""
    decoder = from_transformers(tiny("qwen3"))
    x = ids(1, 2)

    def both():
        caches = [make_cache("contiguous", decoder.spec, max_tokens=2) for _ in "ab"]
        ours = by_token(decoder, x, caches[0])
        torch.testing.assert_close(ours, by_token(decoder, x, caches[1], "never"), rtol=0, atol=TOLERANCE)
        return ours

    results = [both()]
    decoder.blocks[0].attention.o.mul_(2)
    results.append(both())
    down = decoder.blocks[1].ffn.down
    decoder.blocks[1].ffn.down = torch.nn.Parameter(down * 2, requires_grad=False)
    results.append(both())
    decoder.to(torch.bfloat16).to(torch.float32)
    results.append(both())
    decoder.blocks[2].attention.scoring["softmax_scale"] = 0.7
    results.append(both())
    assert len(taken) == 8  # one layer has another scale now
    decoder.blocks[2].attention.scoring = {}
    decoder.blocks[2].ffn.act = torch.nn.functional.relu
    results.append(both())
    decoder.blocks[2].ffn.act = decoder.blocks[1].ffn.act
    decoder.blocks[1].attention.scoring["softcap"] = 0.5
    results.append(both())
    assert len(taken) == 8
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(results, results[1:]))


@torch.inference_mode()
def test_float64_stays_exact(taken):
    hf = tiny("qwen3")
    decoder: Decoder = from_transformers(hf.double())
    cache = make_cache("contiguous", decoder.spec, max_tokens=4, dtype=torch.float64)
    x = ids(1, 4)
    assert (by_token(decoder, x, cache) - decoder(x)).abs().max() < 1e-10 and not taken


def test_the_real_model_writes_the_same(taken):
    """Greedy tokens of SmolLM2, one row and several, by the modules and by the compiled step."""
    model, tokenizer = load("smollm2-135m")
    ids = tokenizer.encode("A printing press applies pressure to an inked surface, and " * 3)
    written = []
    for kind, how in (("contiguous", "never"), ("contiguous", "compiled"), ("paged", "compiled")):
        with use(how):
            written.append(generate(model, ids, max_new_tokens=12, cache=kind).tokens)
    assert written[0] == written[1] == written[2] and len(taken) == 2 * 11
