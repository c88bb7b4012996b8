"""companion.attention against torch, against loops written from the definition, and with hostile inputs."""

import doctest
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import companion.attention
from companion.attention import merge_partials, sdpa, visible

NAN, INF = math.nan, math.inf


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(B=2, Hq=6, Hkv=2, Sq=5, Sk=9, D=8, Dv=8, seed=0, dtype=torch.float64):
    return (
        rand(B, Hq, Sq, D, seed=seed, dtype=dtype),
        rand(B, Hkv, Sk, D, seed=seed + 1, dtype=dtype),
        rand(B, Hkv, Sk, Dv, seed=seed + 2, dtype=dtype),
    )


def by_loops(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, sinks=None, key_mask=None):
    """Attention one number at a time, in Python floats. Shares nothing with the code under test."""
    B, Hq, Sq, D = q.shape
    Hkv, Sk, Dv = k.shape[1], k.shape[2], v.shape[3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    Q, K, V = q.double().tolist(), k.double().tolist(), v.double().tolist()
    out, lse = torch.zeros(B, Hq, Sq, Dv).double(), torch.full((B, Hq, Sq), -INF).double()
    for b in range(B):
        for h in range(Hq):
            g = h // (Hq // Hkv)
            for i in range(Sq):
                here = Sk - Sq + i  # the last query stands on the last key
                terms = []
                for j in range(Sk):
                    ahead = j - here
                    if causal and ahead > 0:
                        continue
                    if window[0] != -1 and -ahead > window[0] or window[1] != -1 and ahead > window[1]:
                        continue
                    if key_mask is not None:
                        row = key_mask[b] if key_mask.ndim == 2 else key_mask[b][i]
                        if not row[j]:
                            continue
                    s = scale * sum(x * y for x, y in zip(Q[b][h][i], K[b][g][j]))
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    terms.append((s, V[b][g][j]))
                if not terms:
                    continue
                top = max(s for s, _ in terms)
                total = sum(math.exp(s - top) for s, _ in terms)
                lse[b, h, i] = top + math.log(total)
                if sinks is not None:
                    total += math.exp(sinks[h].item() - top)
                for d in range(Dv):
                    out[b, h, i, d] = sum(math.exp(s - top) * x[d] for s, x in terms) / total
    return out, lse


def check(q, k, v, *, tol=1e-12, **kw):
    want_out, want_lse = by_loops(q, k, v, **kw)
    kw = {{"window": "window_size", "scale": "softmax_scale"}.get(n, n): x for n, x in kw.items()}
    out, lse = sdpa(q, k, v, return_lse=True, **kw)
    torch.testing.assert_close(out, want_out, rtol=0, atol=tol)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=tol)
    torch.testing.assert_close(sdpa(q, k, v, **kw), want_out, rtol=0, atol=tol)  # the path without LSE


# --- which key a query sees -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sq, sk, kw, rows",
    [
        (2, 5, dict(causal=True), ["11110", "11111"]),
        (1, 5, dict(causal=True), ["11111"]),
        (3, 3, dict(causal=True), ["100", "110", "111"]),
        (4, 2, dict(causal=True), ["00", "00", "10", "11"]),
        (3, 5, dict(window_size=(0, 0)), ["00100", "00010", "00001"]),
        (3, 5, dict(window_size=(1, -1)), ["01111", "00111", "00011"]),
        (3, 5, dict(window_size=(-1, 1)), ["11110", "11111", "11111"]),
        (3, 5, dict(causal=True, window_size=(1, 2)), ["01100", "00110", "00011"]),
        (2, 3, dict(), ["111", "111"]),
    ],
)
def test_visible_rows(sq, sk, kw, rows):
    assert ["".join(str(int(x)) for x in row) for row in visible(sq, sk, **kw)] == rows


def test_visible_counts_of_a_window_that_includes_the_token():
    assert visible(6, 6, causal=True, window_size=(3, 0)).sum(1).tolist() == [1, 2, 3, 4, 4, 4]


def test_visible_without_queries_or_keys():
    assert visible(0, 4, causal=True).shape == (0, 4) and visible(3, 0, window_size=(2, 0)).shape == (3, 0)


def test_docstring_example():
    assert doctest.testmod(companion.attention).failed == 0


def test_a_decode_step_is_the_last_row_of_the_full_pass():
    q, k, v = qkv(Sq=9, Sk=9)
    full, full_lse = sdpa(q, k, v, causal=True, return_lse=True)
    for chunk in (1, 2, 4):
        out, lse = sdpa(q[:, :, -chunk:], k, v, causal=True, return_lse=True)
        torch.testing.assert_close(out, full[:, :, -chunk:], rtol=0, atol=1e-14)
        torch.testing.assert_close(lse, full_lse[:, :, -chunk:], rtol=0, atol=1e-14)


# --- against the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("Hq, Hkv", [(3, 3), (3, 1), (6, 2), (7, 1), (14, 2), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_groups(Hq, Hkv, causal):
    check(*qkv(B=1, Hq=Hq, Hkv=Hkv, Sq=3, Sk=6), causal=causal)


@pytest.mark.parametrize("window", [(0, 0), (0, -1), (2, 0), (3, 2), (-1, 1), (100, 100)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Sq, Sk", [(6, 6), (2, 7), (1, 7), (7, 3)])
def test_windows(window, causal, Sq, Sk):
    check(*qkv(B=1, Hq=2, Hkv=1, Sq=Sq, Sk=Sk), causal=causal, window=window)


@pytest.mark.parametrize("Dv", [1, 3, 13])
def test_value_width_of_its_own(Dv):
    check(*qkv(Dv=Dv), causal=True)


@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0, 2])
def test_scale(scale):
    check(*qkv(), scale=scale)


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50])
def test_softcap(softcap):
    check(*qkv(), scale=3.0, softcap=softcap, causal=True)


def test_scale_comes_before_softcap():
    q, k = torch.tensor([[[[8.0]]]]).double(), torch.tensor([[[[1.0], [0.0]]]]).double()
    v = torch.tensor([[[[1.0], [0.0]]]]).double()
    got = sdpa(q, k, v, softmax_scale=0.5, softcap=2.0).item()
    capped = 2 * math.tanh(8 * 0.5 / 2)  # not 0.5 * 2 * tanh(8 / 2)
    assert got == pytest.approx(math.exp(capped) / (math.exp(capped) + 1), abs=1e-14)


@pytest.mark.parametrize("level", [-30.0, 0.0, 30.0])
def test_sinks(level):
    check(*qkv(), sinks=rand(6, seed=9) + level, causal=True)


def test_key_masks():
    q, k, v = qkv()
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    check(q, k, v, key_mask=mask, causal=True)
    mask = torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[1, 3] = False
    check(q, k, v, key_mask=mask, sinks=rand(6, seed=9))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_combination(data):
    small = st.integers(0, 5)
    B, Hkv, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    Sq, Sk, D, Dv = (
        data.draw(small),
        data.draw(small),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
    )
    q, k, v = qkv(B, Hkv * group, Hkv, Sq, Sk, D, Dv, seed=data.draw(st.integers(0, 1000)))
    side = st.integers(-1, 4)
    shape = data.draw(st.sampled_from([None, (B, Sk), (B, Sq, Sk)]))
    mask = None
    if shape is not None:
        n = math.prod(shape)
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
        mask = mask.reshape(shape)
    check(
        q,
        k,
        v,
        causal=data.draw(st.booleans()),
        window=(data.draw(side), data.draw(side)),
        softcap=data.draw(st.sampled_from([0.0, 1.5])),
        sinks=data.draw(st.sampled_from([None, rand(Hkv * group, seed=4)])),
        key_mask=mask,
    )


# --- against torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("Hq, Hkv", [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("Sq, Sk", [(64, 64), (1, 200), (17, 130)])
def test_equals_torch(Hq, Hkv, Sq, Sk):
    q, k, v = qkv(Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=Sk, D=16, Dv=16)
    for kw in ({}, {"scale": 0.7}):
        want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kw)
        torch.testing.assert_close(sdpa(q, k, v, softmax_scale=kw.get("scale")), want, rtol=0, atol=1e-13)
    # torch aligns is_causal top left, so bottom-right needs an explicit mask.
    below = torch.ones(Sq, Sk, dtype=torch.bool).tril(Sk - Sq)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=below, enable_gqa=True)
    torch.testing.assert_close(sdpa(q, k, v, causal=True), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 5e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_low_precision_against_float64_of_the_rounded_inputs(dtype, tol):
    q, k, v = qkv(Hq=14, Hkv=2, Sq=33, Sk=140, D=64, Dv=64, dtype=dtype)
    kw = dict(causal=True, window_size=(50, 0), softcap=20.0, sinks=rand(14, seed=5), return_lse=True)
    out, lse = sdpa(q, k, v, **kw)
    want, want_lse = sdpa(q.double(), k.double(), v.double(), **kw)
    assert out.dtype == dtype and lse.dtype == torch.float32 and want_lse.dtype == torch.float64
    assert torch.linalg.norm(out.double() - want) <= tol * torch.linalg.norm(want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=5e-6)


def test_float16_scores_beyond_its_range_are_computed_in_float32():
    q = k = torch.full((1, 1, 2, 64), 100.0, dtype=torch.float16)  # q . k = 640,000 > 65,504
    v = torch.tensor([[[[1.0], [3.0]]]], dtype=torch.float16)
    assert sdpa(q, k, v, softmax_scale=1.0).flatten().tolist() == [2.0, 2.0]


# --- heads ----------------------------------------------------------------------------------------------


def test_query_heads_are_grouped_not_tiled():
    q, k = rand(1, 4, 1, 8), rand(1, 2, 5, 8, seed=1)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 5, 1)
    assert sdpa(q, k, v).flatten().tolist() == pytest.approx([10, 10, 20, 20])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, views with stride 0 counted once."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_keys_are_not_repeated_in_memory():
    q, k, v = qkv(B=1, Hq=8, Hkv=1, Sq=1, Sk=128, D=32, Dv=32, dtype=torch.float32)
    with Largest() as seen:
        sdpa(q, k, v, causal=True, return_lse=True)
    assert seen.numel <= k.numel()
    with Largest() as seen:  # the same measure sees a repeat
        F.scaled_dot_product_attention(q, k.repeat_interleave(8, 1), v.repeat_interleave(8, 1))
    assert seen.numel >= 8 * k.numel()


def test_a_cache_layout_is_a_view():
    q, k, v = qkv()
    k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert not k_cache.is_contiguous()
    torch.testing.assert_close(sdpa(q, k_cache, v_cache), sdpa(q, k, v), rtol=0, atol=1e-14)


# --- hostile inputs -------------------------------------------------------------------------------------


def test_no_visible_key_gives_zero_and_minus_infinity():
    q, k, v = qkv(B=2, Sq=3, Sk=4)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0] = False
    for sinks in (None, torch.zeros(6)):
        out, lse = sdpa(q, k, v, key_mask=mask, sinks=sinks, return_lse=True)
        assert (out[0] == 0).all() and (lse[0] == -INF).all()
        want, want_lse = sdpa(q, k, v, sinks=sinks, return_lse=True)
        assert torch.equal(out[1], want[1]) and torch.equal(lse[1], want_lse[1])  # the other row is untouched
        assert torch.equal(sdpa(q, k, v, key_mask=mask, sinks=sinks), out)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_masked_slots_may_hold_anything(poison, dtype, sinks):
    q, k, v = qkv(Sq=4, Sk=9, dtype=dtype)
    sinks = torch.zeros(6) if sinks else None
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = False
    mask[1, 0] = False
    want = sdpa(q, k, v, key_mask=mask, sinks=sinks, return_lse=True)
    bad_k = k.masked_fill(~mask[:, None, :, None], poison)
    bad_v = v.masked_fill(~mask[:, None, :, None], poison)
    got = sdpa(q, bad_k, bad_v, key_mask=mask, sinks=sinks, return_lse=True)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
        assert torch.isfinite(a).all()


@pytest.mark.parametrize(
    "kw", [dict(causal=True), dict(window_size=(2, 0)), dict(causal=True, window_size=(1, 0))]
)
def test_poison_outside_the_mask_of_one_query_and_inside_that_of_another(kw):
    q, k, v = qkv(Sq=6, Sk=6)
    seen = visible(6, 6, **kw)
    for j in range(6):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, j], bad_v[:, :, j, 0] = NAN, INF
        want, got = sdpa(q, k, v, **kw), sdpa(q, bad_k, bad_v, **kw)
        blind = ~seen[:, j]
        torch.testing.assert_close(got[:, :, blind], want[:, :, blind], rtol=0, atol=1e-14)
        assert got[:, :, ~blind].isnan().all()  # garbage that is seen is not hidden


def test_visible_infinity_in_one_value_column_stays_in_that_column():
    q, k, v = qkv(B=1, Sq=2, Sk=4)
    v[:, :, 1, 3] = INF
    out = sdpa(q, k, v, key_mask=torch.tensor([[True, True, True, False]]))
    assert (out[..., 3] == INF).all() and torch.isfinite(out[..., :3]).all()


@pytest.mark.parametrize("Sq, Sk", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (1, 0)])
def test_no_queries_or_no_keys(Sq, Sk, causal, window):
    q, k, v = qkv(Sq=Sq, Sk=Sk, Dv=3)
    for sinks in (None, torch.ones(6)):
        mask = torch.ones(2, Sk, dtype=torch.bool)
        for key_mask in (None, mask):
            kw = dict(causal=causal, window_size=window, sinks=sinks, key_mask=key_mask)
            out, lse = sdpa(q, k, v, return_lse=True, **kw)
            assert out.shape == (2, 6, Sq, 3) and lse.shape == (2, 6, Sq)
            assert (out == 0).all() and (lse == -INF).all()
            assert torch.equal(sdpa(q, k, v, **kw), out)


def test_no_batch():
    q, k, v = qkv(B=0)
    assert sdpa(q, k, v, causal=True).shape == (0, 6, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_scores_do_not_overflow(dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    for scale in (1e4, -1e4):
        for softcap in (0.0, 1.0, 50.0):
            out, lse = sdpa(q, k, v, softmax_scale=scale, softcap=softcap, return_lse=True)
            assert torch.isfinite(out).all() and torch.isfinite(lse).all()
            if softcap:
                assert lse.abs().max() <= softcap + math.log(9) + 1e-6


def test_lse_is_a_natural_logarithm():
    q, k, v = torch.zeros(1, 1, 1, 4), rand(1, 1, 8, 4).float(), rand(1, 1, 8, 4).float()
    assert sdpa(q, k, v, return_lse=True)[1].item() == pytest.approx(math.log(8), abs=1e-6)


# --- sinks ----------------------------------------------------------------------------------------------


def test_a_sink_is_one_more_column_of_logits_without_a_value():
    q, k, v = qkv(Hq=2, Hkv=2)
    sinks = torch.tensor([1.5, -2.0], dtype=torch.float64)
    scores = q @ k.transpose(-2, -1) / math.sqrt(8)
    column = sinks.view(1, 2, 1, 1).expand(2, 2, 5, 1)
    want = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v
    torch.testing.assert_close(sdpa(q, k, v, sinks=sinks), want, rtol=0, atol=1e-14)


def test_a_sink_is_neither_scaled_nor_capped_nor_in_the_lse():
    q, k, v = torch.zeros(1, 1, 1, 4).double(), rand(1, 1, 1, 4), torch.ones(1, 1, 1, 1).double()
    out, lse = sdpa(
        q, k, v, sinks=torch.tensor([3.0]), softmax_scale=0.1, softcap=0.5, return_lse=True
    )  # the only score is 0
    assert out.item() == pytest.approx(1 / (1 + math.exp(3.0)), abs=1e-12)
    assert lse.item() == 0.0


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = qkv(Sq=9, Sk=4)
    none = torch.full((6,), -INF)
    torch.testing.assert_close(
        sdpa(q, k, v, sinks=none, causal=True), sdpa(q, k, v, causal=True), rtol=0, atol=1e-14
    )


# --- merging --------------------------------------------------------------------------------------------


def split(q, k, v, cuts, mask=None, **kw):
    """Partial results over the pieces of the keys between cuts."""
    pieces = []
    for a, b in zip([0, *cuts], [*cuts, k.shape[2]]):
        m = None if mask is None else mask[..., a:b]
        pieces.append(sdpa(q, k[:, :, a:b], v[:, :, a:b], key_mask=m, return_lse=True, **kw))
    return [o for o, _ in pieces], [lse for _, lse in pieces]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(0, 9), max_size=6).map(sorted),
    with_sinks=st.booleans(),
    causal=st.booleans(),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 100),
)
def test_any_split_merges_exactly(cuts, with_sinks, causal, spread, seed):
    q, k, v = qkv(Sq=4, seed=seed)
    q = q * spread  # spread 30: one split may outweigh another by e^200
    mask = visible(4, 9, causal=causal).expand(2, 4, 9).clone()
    mask[1, 2] = False  # one row sees nothing in any split
    sinks = rand(6, seed=5) if with_sinks else None
    want, want_lse = sdpa(q, k, v, key_mask=mask, sinks=sinks, return_lse=True)
    outs, lses = split(q, k, v, cuts, mask)
    out, lse = merge_partials(outs, lses, sinks=sinks)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-14, atol=1e-12)
    assert (out[1, :, 2] == 0).all() and (lse[1, :, 2] == -INF).all()
    stacked = merge_partials(torch.stack(outs), torch.stack(lses), sinks=sinks)
    assert torch.equal(stacked[0], out) and torch.equal(stacked[1], lse)


def test_an_empty_split_may_hold_anything():
    q, k, v = qkv()
    outs, lses = split(q, k, v, [4])
    want = merge_partials(outs, lses)
    for junk in (NAN, INF, 7.0):
        empty = torch.full_like(outs[0], junk), torch.full_like(lses[0], -INF)
        got = merge_partials([outs[0], empty[0], outs[1]], [lses[0], empty[1], lses[1]])
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        for sinks in (None, torch.zeros(6)):
            out, lse = merge_partials([empty[0]] * 2, [empty[1]] * 2, sinks=sinks)
            assert (out == 0).all() and (lse == -INF).all()


def test_a_nan_in_a_split_that_counts_is_not_hidden():
    q, k, v = qkv()
    outs, lses = split(q, k, v, [4])
    outs[0][0, 0, 0, 0] = NAN
    out, _ = merge_partials(outs, lses)
    assert out[0, 0, 0, 0].isnan() and out.isnan().sum() == 1


def test_merging_in_any_grouping():
    q, k, v = qkv()
    outs, lses = split(q, k, v, [2, 5, 7])
    want = merge_partials(outs, lses)
    left = merge_partials(outs[:2], lses[:2])
    right = merge_partials(outs[2:], lses[2:])
    for a, b in zip(merge_partials([right[0], left[0]], [right[1], left[1]]), want):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_merging_decode_partials_of_one_query():
    q, k, v = qkv(Sq=1)
    outs, lses = split(q, k, v, [3, 3, 8])
    sinks = rand(6, seed=3)
    out, lse = merge_partials([o[:, :, 0] for o in outs], [x[:, :, 0] for x in lses], sinks=sinks)
    want, want_lse = sdpa(q, k, v, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out, want[:, :, 0], rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, want_lse[:, :, 0], rtol=0, atol=1e-13)


def test_merged_dtypes():
    q, k, v = qkv(dtype=torch.bfloat16)
    out, lse = merge_partials(*split(q, k, v, [4]))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    want = sdpa(q, k, v).double()
    assert torch.linalg.norm(out.double() - want) <= 8e-3 * torch.linalg.norm(want)


def test_a_base_two_lse_would_be_noticed():
    """The known mix-up: a kernel that returns log2. The merge is wrong by much more than rounding."""
    q, k, v = qkv()
    outs, lses = split(q, k, v, [2])
    wrong, _ = merge_partials(outs, [x / math.log(2) for x in lses])
    assert (wrong - sdpa(q, k, v)).abs().max() > 1e-3


# --- autograd, inputs -----------------------------------------------------------------------------------


def test_gradients_equal_numerical_ones():
    q, k, v = (x.requires_grad_() for x in qkv(B=1, Hq=2, Hkv=1, Sq=3, Sk=4, D=2, Dv=3))
    sinks = rand(2, seed=7).requires_grad_()
    mask = torch.tensor([[True, True, False, True]])

    def plain(q, k, v):
        out, lse = sdpa(q, k, v, causal=True, softcap=2.0, key_mask=mask, return_lse=True)
        return out, lse

    def with_sinks(q, k, v, sinks):
        outs, lses = split(q, k, v, [2])
        return sdpa(q, k, v, window_size=(1, 1), sinks=sinks), *merge_partials(outs, lses, sinks=sinks)

    assert torch.autograd.gradcheck(plain, (q, k, v))
    assert torch.autograd.gradcheck(with_sinks, (q, k, v, sinks))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_of_a_row_without_keys_are_zero(return_lse, sinks):
    q, k, v = (x.requires_grad_() for x in qkv(Sq=3, Sk=2))  # the first causal query sees nothing
    sinks = torch.zeros(6, dtype=torch.float64, requires_grad=True) if sinks else None
    got = sdpa(q, k, v, causal=True, sinks=sinks, return_lse=return_lse)
    (got[0] if return_lse else got).sum().backward()
    assert (q.grad[:, :, 0] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v) + ((sinks,) if sinks is not None else ()))


def test_inputs_are_left_as_they_were():
    q, k, v = qkv()
    sinks, mask = rand(6, seed=8), torch.rand(2, 9) < 0.7
    before = [x.clone() for x in (q, k, v, sinks, mask)]
    outs, lses = split(q, k, v, [4], mask, softcap=3.0)
    kept = [x.clone() for x in (*outs, *lses)]
    sdpa(q, k, v, causal=True, sinks=sinks, key_mask=mask, return_lse=True)
    merge_partials(outs, lses, sinks=sinks)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, sinks, mask)))
    assert all(torch.equal(a, b) for a, b in zip(kept, (*outs, *lses)))


# --- errors ---------------------------------------------------------------------------------------------

# The tests run with shapes checked at the door; a user's call reaches the function's own checks, as here.
raw_sdpa, raw_merge, raw_visible = (inspect.unwrap(f) for f in (sdpa, merge_partials, visible))


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(q=torch.zeros(6, 5, 8)), r"q must .* got \("),
        (dict(k=torch.zeros(2, 2, 9, 7)), r"k must .* got \("),
        (dict(k=torch.zeros(1, 2, 9, 8)), r"k must .* got \("),
        (dict(v=torch.zeros(2, 2, 8, 8)), r"v must .* got \("),
        (dict(v=torch.zeros(2, 1, 9, 8)), r"v must .* got \("),
        (dict(k=torch.zeros(2, 4, 9, 8), v=torch.zeros(2, 4, 9, 8)), "heads of q must .* 4, got 6"),
        (dict(k=torch.zeros(2, 0, 9, 8), v=torch.zeros(2, 0, 9, 8)), "heads of q must .* 0, got 6"),
        (dict(q=torch.zeros(2, 6, 5, 0), k=torch.zeros(2, 2, 9, 0)), "D > 0"),
        (dict(k=torch.zeros(2, 2, 9, 8).double()), "dtype of k must"),
        (dict(v=torch.zeros(2, 2, 9, 8).half()), "dtype of v must"),
        (dict(q=torch.zeros(2, 6, 5, 8).long()), "dtype of q must"),
        (dict(softcap=-1.0), "softcap"),
        (dict(softcap=NAN), "softcap"),
        (dict(softcap=INF), "softcap"),
        (dict(softmax_scale=NAN), "softmax_scale"),
        (dict(softmax_scale=INF), "softmax_scale"),
        (dict(window_size=(-2, 0)), "window_size"),
        (dict(window_size=(0, -2)), "window_size"),
        (dict(window_size=(3,)), "window_size"),
        (dict(window_size=(1.5, 0)), "window_size"),
        (dict(sinks=torch.zeros(2)), "sinks"),
        (dict(sinks=torch.zeros(6).long()), "sinks"),
        (dict(key_mask=torch.ones(2, 9)), "key_mask must be torch.bool.* got torch.float32"),
        (dict(key_mask=torch.ones(2, 5, dtype=torch.bool)), r"key_mask must .* got \("),
        (dict(key_mask=torch.ones(1, 9, dtype=torch.bool)), r"key_mask must .* got \("),
    ],
)
def test_bad_input_is_named(change, name):
    good = dict(q=torch.zeros(2, 6, 5, 8), k=torch.zeros(2, 2, 9, 8), v=torch.zeros(2, 2, 9, 8))
    raw_sdpa(**good)
    args = {**good, **change}
    with pytest.raises(ValueError, match=name):
        raw_sdpa(args.pop("q"), args.pop("k"), args.pop("v"), **args)


@pytest.mark.parametrize(
    "outs, lses, sinks, name",
    [
        ([], [], None, "outs must .* got none"),
        (torch.zeros(0, 2, 6, 5, 8), torch.zeros(0, 2, 6, 5), None, "outs must be at least one"),
        ([torch.zeros(2, 6, 5, 8)] * 2, [torch.zeros(2, 6, 5)], None, "lses must"),
        ([torch.zeros(2, 6, 5, 8)], [torch.zeros(2, 6, 4)], None, "lses must"),
        (
            [torch.zeros(2, 6, 5, 8), torch.zeros(2, 6, 5, 7)],
            [torch.zeros(2, 6, 5)] * 2,
            None,
            "outs must be splits of one shape",
        ),
        ([torch.zeros(2, 6, 5, 8)], [torch.zeros(2, 6, 5)], torch.zeros(5), "sinks must be of shape"),
    ],
)
def test_bad_partials_are_named(outs, lses, sinks, name):
    with pytest.raises(ValueError, match=name):
        raw_merge(outs, lses, sinks=sinks)


def test_bad_window_of_visible():
    with pytest.raises(ValueError, match="window_size"):
        raw_visible(3, 3, window_size=(-5, 0))
