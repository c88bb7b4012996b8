"""A state in the place of a cache: step by step, in chunks and as a square of weights it is one function."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from companion.caches import make_cache
from companion.cost import ModelSpec, linear_state_bytes

HEADS, KV, D, DV, DTYPE = 6, 2, 8, 5, torch.float64
SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    layers=2,
    d_model=16,
    heads=HEADS,
    kv_heads=KV,
    head_dim=D,
    ffn=8,
    vocab=9,
    v_head_dim=DV,
)


def linear(*, spec=SPEC, max_tokens=5_000, dtype=DTYPE, batch=1, **options):
    return make_cache("linear", spec, max_tokens=max_tokens, dtype=dtype, batch=batch, **options)


def tensors(n, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, n, D), (batch, KV, n, D), (batch, KV, n, DV)
    return [torch.randn(*s, generator=g, dtype=DTYPE) for s in shapes]


def assert_equal(got, want, atol=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def square(q, k, v):
    """Katharopoulos et al., equation 4: weights phi(q) . phi(k), normalized over the keys up to the query."""
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    a = torch.where(q > 0, q + 1, q.exp()) @ torch.where(k > 0, k + 1, k.exp()).transpose(-2, -1)
    a = a.tril()
    return (a / a.sum(-1, keepdim=True)) @ v


def delta(q, k, v):
    """Yang et al., equation 5 with beta = 1, token by token: what is stored at a key is replaced."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(HEADS):
            state = torch.zeros(v.shape[-1], D, dtype=q.dtype)
            for t in range(q.shape[2]):
                key = k[b, h * KV // HEADS, t] / k[b, h * KV // HEADS, t].norm()
                state = state - torch.outer(state @ key, key) + torch.outer(v[b, h * KV // HEADS, t], key)
                out[b, h, t] = state @ (q[b, h, t] / q[b, h, t].norm())
    return out


ORACLES = {"sum": square, "delta": delta}


@pytest.mark.parametrize("rule", ORACLES)
@pytest.mark.parametrize("chunks", [[1] * 24, [24], [5, 1, 0, 8, 3, 7], [23, 1]])
def test_recurrent_chunked_and_quadratic_are_equal(rule, chunks):
    q, k, v = tensors(24, batch=2)
    want, cache, a = ORACLES[rule](q, k, v), linear(rule=rule, batch=2), 0
    for S in chunks:
        part = slice(a, a + S)
        for layer in range(2):  # another layer in between, with other contents
            sign = 1 - 2 * layer
            cache.append(layer, k[:, :, part], sign * v[:, :, part])
            assert_equal(cache.attend(layer, q[:, :, part]), sign * want[:, :, part], 1e-11)
        a += S
    assert cache.row_lengths() == [24, 24]


@pytest.mark.parametrize("rule", ORACLES)
def test_rows_of_a_ragged_batch_do_as_they_would_alone(rule):
    batch = 3
    q, k, v = tensors(40, batch)
    want, cache, rows = ORACLES[rule](q, k, v), linear(rule=rule, batch=batch), [0] * batch
    for t in range(12):
        new = [t % 4, (t + 1) % 3, 3 if t < 3 else 0]
        parts = [
            torch.full((batch, h, 3, w), torch.nan, dtype=DTYPE) for h, w in ((HEADS, D), (KV, D), (KV, DV))
        ]
        for part, x in zip(parts, (q, k, v)):
            for b, (r, n) in enumerate(zip(rows, new)):
                part[b, :, :n] = x[b, :, r : r + n]
        cache.append(0, parts[1], parts[2], lengths=new)
        got = cache.attend(0, parts[0])
        for b, (r, n) in enumerate(zip(rows, new)):
            assert_equal(got[b, :, :n], want[b, :, r : r + n], 1e-11)
        rows = [r + n for r, n in zip(rows, new)]
        assert cache.row_lengths() == rows


@pytest.mark.parametrize("rule", ORACLES)
def test_the_bytes_are_those_of_the_state_from_the_first_token_on(rule):
    for dtype, wide in ((torch.bfloat16, 4), (torch.float32, 4), (DTYPE, 8)):
        cache = linear(rule=rule, dtype=dtype, batch=3)
        per_row = 2 * KV * (D * DV + (D if rule == "sum" else 0)) * wide  # layers
        assert cache.nbytes == 3 * per_row == sum(t.nbytes for t in (*cache._s, *cache._z))
        assert cache.nbytes_used == 0
        normaliser = rule == "sum"
        assert cache.nbytes == linear_state_bytes(SPEC, batch=3, dtype=8 * wide, normaliser=normaliser)
        _, k, v = (x.to(dtype) for x in tensors(50, 3))
        for a in range(0, 50, 10):
            for layer in range(2):
                cache.append(layer, k[:, :, a : a + 10], v[:, :, a : a + 10], lengths=[10, 1, 0])
            assert cache.nbytes == 3 * per_row and cache.nbytes_used == 2 * per_row
        assert cache.row_lengths() == [50, 5, 0]


@pytest.mark.parametrize("rule", ORACLES)
def test_crop_forks_and_the_last_token_again(rule):
    q, k, v = tensors(20)
    want, cache = ORACLES[rule](q, k, v), linear(rule=rule)

    def fed(cache, a, b):
        for layer in range(2):
            cache.append(layer, k[:, :, a:b], v[:, :, a:b])
        return cache.attend(1, q[:, :, a:b])

    fed(cache, 0, 9)
    twin = cache.fork()
    assert_equal(twin.attend(0, q[:, :, 8:9]), want[:, :, 8:9])
    with pytest.raises(ValueError, match="q has 2 tokens"):
        twin.attend(0, q[:, :, 7:9])
    assert_equal(fed(twin, 9, 20), want[:, :, 9:], 1e-11)
    for n in (1, 8):
        with pytest.raises(ValueError, match="fork before"):
            cache.crop(n)
        assert len(cache) == 9
    cache.crop(9)
    assert_equal(fed(cache, 9, 14), want[:, :, 9:14], 1e-11)  # what the twin read is not in here
    cache.crop(0)
    assert cache.nbytes_used == 0 and not any(t.any() for t in (*cache._s, *cache._z))
    assert_equal(fed(cache, 0, 20), want, 1e-11)


def test_a_state_made_in_inference_mode_can_be_cropped_outside():
    cache, (q, k, v) = linear(), tensors(3)
    with torch.inference_mode():
        cache.append(0, k, v)
        cache.attend(0, q)
    cache.crop(0)
    cache.append(0, k, v)
    assert_equal(cache.attend(0, q), square(q, k, v))


@pytest.mark.parametrize("rule", ORACLES)
def test_narrow_keys_go_into_a_wide_state(rule):
    q, k, v = (x.bfloat16() for x in tensors(60))
    cache = linear(rule=rule, dtype=torch.bfloat16)
    outs = []
    for a in range(60):
        cache.append(0, k[:, :, a : a + 1], v[:, :, a : a + 1])
        outs.append(cache.attend(0, q[:, :, a : a + 1]))
    want = ORACLES[rule](*(x.double() for x in (q, k, v)))
    got = torch.cat(outs, 2)
    assert got.dtype == torch.bfloat16 and cache._s[0].dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)  # rounded once, at the end


def test_a_query_without_any_key_has_output_0():
    cache, (q, _, _) = linear(batch=1), tensors(1)
    assert torch.equal(cache.attend(0, q), torch.zeros(1, HEADS, 1, DV, dtype=DTYPE))


def test_refusals():
    for options, message in (
        (dict(rule="gated"), "rule must .* got 'gated'"),
        (dict(step=4), "option .* got 'step'"),
        (dict(spec=dataclasses.replace(SPEC, window=4, layer_types=("sliding", "full"))), "sliding"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(**options)
    cache, (q, k, v) = linear(max_tokens=6), tensors(9)
    cache.append(0, k[:, :, :2], v[:, :, :2])
    state = cache._s[0].clone()
    for options, name in (
        (dict(softmax_scale=0.1), "softmax_scale"),
        (dict(softcap=5.0), "softcap"),
        (dict(sinks=torch.zeros(HEADS, dtype=DTYPE)), "sinks"),
        (dict(return_lse=True), "lse"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be left out"):
            cache.attend(0, q[:, :, :2], **options)
    for bad, message in (
        ((k, v), "max_tokens=6"),
        ((k, None), "v must .* got None"),
        ((k.float(), v), "dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(0, *bad)
    assert torch.equal(cache._s[0], state) and len(cache) == 2


# --- capacity ---------------------------------------------------------------------------------------------


def recalled(kind, n, d, **options):
    """Of n random pairs, the share whose own value is the nearest of all to what its key brings back."""
    right = []
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(1, 1, n, d, generator=g, dtype=DTYPE) for _ in range(2))
        v = F.normalize(v, dim=-1)
        spec = dataclasses.replace(
            SPEC, layers=1, layer_types=(), heads=1, kv_heads=1, head_dim=d, v_head_dim=d
        )
        cache = make_cache(kind, spec, max_tokens=n, dtype=DTYPE, **options)
        cache.append(0, k, v)
        # The last token of a step sees all pairs; the state answers one query at a time.
        back = [cache.attend(0, k[:, :, i : i + 1]) for i in range(n)]
        right.append((torch.cat(back, 2)[0, 0] @ v[0, 0].T).argmax(-1) == torch.arange(n))
    return torch.cat(right).double().mean().item()


def test_a_cache_recalls_every_pair_and_a_state_as_many_as_it_is_wide():
    d = 64
    few, full, many = d // 4, d, 4 * d
    assert recalled("contiguous", many, d) == 1.0
    delta = [recalled("linear", n, d, rule="delta") for n in (few, full, many)]
    assert delta[0] > 0.98 and 0.8 < delta[1] < 1 and delta[2] < 0.35
    plain = [recalled("linear", n, d) for n in (few, full, many)]  # positive features overlap: worse by far
    assert all(a < b / 2 for a, b in zip(plain, delta))


def test_orthogonal_keys_up_to_the_width_come_back_exactly_with_the_delta_rule():
    d, g = 8, torch.Generator().manual_seed(1)
    spec = dataclasses.replace(SPEC, layers=1, layer_types=(), heads=1, kv_heads=1, v_head_dim=d)
    k, v = (torch.randn(1, 1, d, d, generator=g, dtype=DTYPE) for _ in range(2))
    k = torch.linalg.qr(k)[0]
    cache = linear(spec=spec, rule="delta")
    cache.append(0, torch.cat([k, k], 2), torch.cat([-v, v], 2))  # written twice: the second value stands
    back = [cache.fork().attend(0, k[:, :, i : i + 1]) for i in range(d)]
    assert_equal(torch.cat(back, 2), v)
