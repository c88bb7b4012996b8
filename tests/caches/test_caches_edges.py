"""What a cache must refuse, and the borders: full to the last slot, empty rows, one-token windows."""

import math

import jaxtyping
import pytest
import torch

from companion.attention import sdpa
from companion.caches import ContiguousCache, LatentCache, make_cache
from companion.cost import MLASpec, ModelSpec, models

NAN = math.nan


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spec(layers=1, heads=4, kv_heads=2, head_dim=6, window=None, **more):
    return ModelSpec(
        name="tiny",
        architecture="llama",
        layers=layers,
        d_model=8,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=8,
        vocab=8,
        window=window,
        **more,
    )


def filled(n, *, batch=1, max_tokens=8, seed=0, **shape):
    s = spec(**shape)
    cache = make_cache("contiguous", s, batch=batch, max_tokens=max_tokens, dtype=torch.float64)
    k = rand(batch, s.kv_heads, n, s.head_dim, seed=seed)
    v = rand(batch, s.kv_heads, n, s.head_dim, seed=seed + 1)
    for layer in range(s.layers):
        cache.append(layer, k, v)
    return cache, k, v


def state(cache):
    return (
        [t.clone() for t in (*cache._k, *cache._v)],
        [cache.row_lengths(i) for i in range(cache.spec.layers)],
        cache.nbytes_used,
    )


def assert_unchanged(cache, before):
    tensors, lengths, used = state(cache)
    assert lengths == before[1] and used == before[2]
    for now, then in zip(tensors, before[0]):
        assert torch.equal(now, then)


# --- KV-17 and KV-15 ------------------------------------------------------------------------------


def test_a_prefill_of_exactly_max_tokens_fits_and_one_more_token_does_not():
    cache, k, v = filled(8, max_tokens=8)
    q = rand(1, 4, 8, 6, seed=5)
    torch.testing.assert_close(cache.attend(0, q), sdpa(q, k, v, causal=True), rtol=1e-12, atol=1e-12)
    before = state(cache)
    with pytest.raises(ValueError, match=r"max_tokens=8.*9 tokens"):
        cache.append(0, k[:, :, :1], v[:, :, :1])
    assert_unchanged(cache, before)
    torch.testing.assert_close(cache.attend(0, q), sdpa(q, k, v, causal=True), rtol=1e-12, atol=1e-12)


def test_one_full_row_stops_the_whole_step():
    cache, k, v = filled(3, batch=2, max_tokens=4)
    cache.append(0, k[:, :, :1], v[:, :, :1], lengths=[1, 0])
    before = state(cache)
    with pytest.raises(ValueError, match="max_tokens"):
        cache.append(0, k[:, :, :1], v[:, :, :1])
    assert_unchanged(cache, before)
    cache.append(0, k[:, :, :1], v[:, :, :1], lengths=[0, 1])  # the other row has room
    assert cache.row_lengths() == [4, 4]


def test_every_layer_counts_for_itself():
    s = spec(layers=3)
    cache = make_cache("contiguous", s, max_tokens=8, dtype=torch.float64)
    k = rand(1, 2, 5, 6)
    seen = []
    for layer in range(3):
        seen.append((cache.row_lengths(layer), cache.lengths(layer).tolist()))
        cache.append(layer, k, k)
        seen.append((cache.row_lengths(layer), cache.lengths(layer).tolist()))
    assert seen == [([0], [0]), ([5], [5])] * 3


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("chunks", [[6], [1] * 6, [3, 1, 1, 1], [2, 4], [5, 1]])
def test_a_window_counts_the_token_itself(window, chunks):
    """With v the one-hot of its position, the output's non-zero entries are the positions that were seen."""
    s = spec(head_dim=6, heads=2, kv_heads=1, window=window)
    cache = make_cache("contiguous", s, max_tokens=6, dtype=torch.float64)
    v, k, q = torch.eye(6, dtype=torch.float64)[None, None], rand(1, 1, 6, 6), rand(1, 2, 6, 6, seed=1)
    at, outs = 0, []
    for n in chunks:
        part = slice(at, at + n)
        cache.append(0, k[:, :, part], v[:, :, part])
        outs.append(cache.attend(0, q[:, :, part]))
        at += n
    seen = torch.cat(outs, dim=2)[0, 0] > 0
    assert seen.sum(dim=1).tolist() == [min(i + 1, window) for i in range(6)]
    for i in range(6):
        assert seen[i].nonzero()[:, 0].tolist() == list(range(max(0, i - window + 1), i + 1))


# --- padding and borders --------------------------------------------------------------------------


def test_nan_in_padding_reaches_nothing():
    s = spec()
    cache = make_cache("contiguous", s, batch=2, max_tokens=6, dtype=torch.float64)
    k, v = rand(2, 2, 3, 6), rand(2, 2, 3, 6, seed=1)
    k[0, :, 1:], v[0, :, 1:] = NAN, NAN
    cache.append(0, k, v, lengths=[1, 3])
    q = rand(2, 4, 3, 6, seed=2)
    q[0, :, 1:] = NAN
    out = cache.attend(0, q)
    assert torch.isfinite(out[1]).all() and torch.isfinite(out[0, :, :1]).all()
    step = torch.ones(2, 2, 1, 6, dtype=torch.float64)
    cache.append(0, step, step)  # the next token overwrites what was padding
    assert torch.isfinite(cache.attend(0, rand(2, 4, 1, 6))).all()
    assert all(torch.isfinite(t).all() for t in (*cache._k, *cache._v))


def test_nothing_is_left_of_cropped_tokens():
    cache, _, _ = filled(5, batch=2)
    bad = torch.full((2, 2, 2, 6), NAN, dtype=torch.float64)
    cache.append(0, bad, bad)
    cache.crop([5, 3])
    out = cache.attend(0, rand(2, 4, 1, 6))
    assert torch.isfinite(out).all()
    assert all((t[0, :, 5:] == 0).all() and (t[1, :, 3:] == 0).all() for t in (*cache._k, *cache._v))


def test_rows_without_any_token_give_zero_and_minus_infinity():
    cache = make_cache("contiguous", spec(), batch=2, max_tokens=4, dtype=torch.float64)
    q = rand(2, 4, 2, 6)
    assert torch.equal(cache.attend(0, q), torch.zeros(2, 4, 2, 6, dtype=torch.float64))
    k = rand(2, 2, 2, 6)
    cache.append(0, k, k, lengths=[0, 2])
    for return_lse in (False, True):
        got = cache.attend(0, q, return_lse=return_lse)
        out = got[0] if return_lse else got
        assert torch.isfinite(out[1]).all() and (out[1] != 0).all()
    cache.crop([0, 2])
    out, lse = cache.attend(0, q, return_lse=True)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    assert (cache.attend(0, q)[0] == 0).all()


def test_zero_tokens_change_nothing():
    cache, k, v = filled(3)
    before = state(cache)
    cache.append(0, k[:, :, :0], v[:, :, :0])
    assert_unchanged(cache, before)
    assert cache.attend(0, rand(1, 4, 0, 6)).shape == (1, 4, 0, 6)


def test_lengths_as_a_tensor():
    cache = make_cache("contiguous", spec(), batch=2, max_tokens=4, dtype=torch.float64)
    k = rand(2, 2, 3, 6)
    cache.append(0, k, k, lengths=torch.tensor([3, 1], dtype=torch.int32))
    assert cache.row_lengths() == [3, 1]


def test_a_fork_shares_nothing():
    cache, k, v = filled(3)
    twin = cache.fork()
    q = rand(1, 4, 1, 6)
    was = twin.attend(0, q)
    cache.crop(1)
    cache.append(0, k, v)
    assert twin.row_lengths() == [3] and torch.equal(twin.attend(0, q), was)
    twin.append(0, k[:, :, :1], v[:, :, :1])
    assert cache.row_lengths() == [4]
    mine = {t.untyped_storage().data_ptr() for t in (*cache._k, *cache._v)}
    theirs = {t.untyped_storage().data_ptr() for t in (*twin._k, *twin._v)}
    assert not mine & theirs


def test_a_forked_latent_cache_keeps_its_values_in_its_keys():
    mla = MLASpec(kv_rank=4, nope_dim=3, rope_dim=2, v_dim=3)
    s = spec(heads=2, kv_heads=2, head_dim=5, mla=mla)
    cache = make_cache("latent", s, max_tokens=4, dtype=torch.float64).fork()
    latent, q = rand(1, 1, 3, 6), rand(1, 2, 3, 6, seed=1)
    cache.append(0, latent, None)
    want = sdpa(q, latent, latent[..., :4], causal=True, softmax_scale=5**-0.5)
    torch.testing.assert_close(cache.attend(0, q), want, rtol=1e-12, atol=1e-12)


@pytest.fixture
def unchecked(monkeypatch):
    """Without the tests' check of annotations: the library's own refusals, as a user meets them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=rand(1, 3, 2, 6)), r"k must be of shape \(1, 2, S, 6\), got \(1, 3, 2, 6\)"),
        (dict(k=rand(1, 2, 2, 5)), r"k must be of shape"),
        (dict(k=rand(2, 2, 2, 6)), r"k must be of shape"),
        (dict(k=rand(2, 2, 6)), r"k must be of shape"),
        (dict(v=rand(1, 2, 2, 7)), r"v must be of shape"),
        (dict(v=rand(1, 2, 1, 6)), r"v must be of shape \(1, 2, 2, 6\), got \(1, 2, 1, 6\)"),
        (dict(v=None), r"v must .* got None"),
        (dict(k=rand(1, 2, 2, 6, dtype=torch.float32)), r"k must .* dtype torch.float64, got torch.float32"),
        (dict(v=rand(1, 2, 2, 6, dtype=torch.float16)), r"v must .* dtype"),
        (dict(lengths=[3]), r"lengths must be 1 counts from 0 to S=2, got \[3\]$"),
        (dict(lengths=[-1]), r"lengths must .* got \[-1\]"),
        (dict(lengths=[1, 1]), r"lengths must .* got \[1, 1\]"),
        (dict(lengths=[]), r"lengths must .* got \[\]"),
        (dict(lengths=[1.5]), r"lengths must .* got \[1.5\]"),
        (dict(lengths=torch.tensor([1.0])), r"lengths must"),
        (dict(layer=1), r"layer must .* from 0 to 0, got 1"),
        (dict(layer=-1), r"layer must .* got -1"),
    ],
)
def test_append_refuses_and_changes_nothing(change, message, unchecked):
    cache, k, v = filled(3)
    before = state(cache)
    given = {"layer": 0, "k": k[:, :, :2], "v": v[:, :, :2], "lengths": None} | change
    with pytest.raises(ValueError, match=message):
        cache.append(given["layer"], given["k"], given["v"], lengths=given["lengths"])
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    "q, options, message",
    [
        (rand(1, 2, 1, 6), {}, r"q must be of shape \(1, 4, S, 6\), got \(1, 2, 1, 6\)"),
        (rand(1, 4, 1, 5), {}, "q must be of shape"),
        (rand(2, 4, 1, 6), {}, "q must be of shape"),
        (rand(1, 4, 1, 6, dtype=torch.float32), {}, "q must .* dtype"),
        (rand(1, 4, 1, 6), {"sinks": rand(3)}, "sinks must"),
        (rand(1, 4, 1, 6), {"softcap": -1.0}, "softcap must .* got -1"),
        (rand(1, 4, 1, 6), {"softcap": NAN}, "softcap must .* got nan"),
        (rand(1, 4, 1, 6), {"softmax_scale": NAN}, "softmax_scale must .* got nan"),
        (rand(1, 4, 2, 6), {"softmax_scale": math.inf}, "softmax_scale must .* got inf"),
    ],
)
def test_attend_refuses(q, options, message, unchecked):
    cache, _, _ = filled(3)
    with pytest.raises(ValueError, match=message):
        cache.attend(0, q, **options)


@pytest.mark.parametrize("n", [-1, [1], [1, -1], [1, 1, 1], [], [1.5, 1], 1.5, None])
def test_crop_refuses_and_changes_nothing(n, unchecked):
    cache, _, _ = filled(3, batch=2)
    before = state(cache)
    with pytest.raises(ValueError, match="n must be a count"):
        cache.crop(n)
    assert_unchanged(cache, before)


def test_crop_takes_a_tensor_and_beyond_the_end_is_no_crop():
    cache, _, _ = filled(3, batch=2)
    cache.crop(99)
    assert cache.row_lengths() == [3, 3]
    cache.crop([1, 2])
    assert cache.row_lengths() == [1, 2]


def test_kinds_and_sizes():
    with pytest.raises(ValueError, match="kind must .* contiguous.* latent.* got 'rotating'"):
        make_cache("rotating", spec(), max_tokens=4)
    for batch, max_tokens in ((0, 4), (1, 0), (-1, 4), (True, 4)):
        with pytest.raises(ValueError, match="batch" if max_tokens == 4 else "max_tokens"):
            make_cache("contiguous", spec(), batch=batch, max_tokens=max_tokens)
    with pytest.raises(ValueError, match="latent"):
        ContiguousCache(models["deepseek-v3"], max_tokens=4)
    with pytest.raises(ValueError, match="contiguous"):
        LatentCache(spec(), max_tokens=4)
