"""The ring against all tokens under an explicit mask; what it holds, its bytes, how far it goes back."""

import dataclasses

import pytest
import torch

from companion.attention import sdpa
from companion.caches import make_cache
from companion.cost import ModelSpec, kv_bytes

N = 23
SINKS = torch.linspace(-1, 1, 6, dtype=torch.float64)


def spec_of(window, layer_types=("sliding", "full")):
    return ModelSpec(
        name="tiny",
        architecture="llama",
        layers=len(layer_types),
        d_model=16,
        heads=6,
        kv_heads=2,
        head_dim=32,
        ffn=8,
        vocab=32,
        window=window,
        layer_types=tuple(layer_types),
    )


def ring(window, step, *, sink_tokens=0, batch=1, max_tokens=N, types=("sliding", "full")):
    shape = {"batch": batch, "max_tokens": max_tokens, "dtype": torch.float64}
    return make_cache("sliding", spec_of(window, types), step=step, sink_tokens=sink_tokens, **shape)


def tensors(n, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, 6, n, 32), (batch, 2, n, 32), (batch, 2, n, 32)
    return [torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes]


def wanted(q, k, v, start, stop, window, sink_tokens, **options):
    """Queries start .. stop - 1 over all tokens up to there: near ones, and those at the beginning."""
    i, j = torch.arange(start, stop)[:, None], torch.arange(stop)[None]
    mask = (j <= i) & ((j > i - window) | (j < sink_tokens))
    mask = mask.expand(q.shape[0], -1, -1)
    return sdpa(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], key_mask=mask, **options)


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sink_tokens", [0, 2])
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("feed", ["1", "3", "W-1", "W", "W+1", "2W+3"])
def test_fed_any_number_of_tokens_it_equals_a_full_cache_under_a_mask(window, feed, sink_tokens):
    step = {"W-1": window - 1, "W": window, "W+1": window + 1, "2W+3": 2 * window + 3}.get(feed) or int(
        feed if feed.isdigit() else 1
    )
    cache = ring(window, step, sink_tokens=sink_tokens)
    q, k, v = tensors(N)
    for start in range(0, N, step):
        stop = min(N, start + step)
        for layer in range(2):
            cache.append(layer, k[:, :, start:stop], v[:, :, start:stop])
        for options in ({}, {"softcap": 2.0}, {"sinks": SINKS}):
            want = wanted(q, k, v, start, stop, window, sink_tokens, **options)
            assert_equal(cache.attend(0, q[:, :, start:stop], **options), want)
        full = sdpa(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], causal=True)
        assert_equal(cache.attend(1, q[:, :, start:stop]), full)
        last = min(stop, window + step - 1)
        held = {*range(min(sink_tokens, stop)), *range(max(0, stop - last), stop)}
        assert cache.positions() == sorted(held)


def test_the_feeding_of_3_1_1_2_tokens_into_a_window_of_4():
    """KV-06: exactly full, and writes shorter than the window."""
    cache = ring(4, 3, types=("sliding",))
    q, k, v = tensors(7)
    at = 0
    for n in (3, 1, 1, 2):
        part = slice(at, at + n)
        cache.append(0, k[:, :, part], v[:, :, part])
        assert_equal(cache.attend(0, q[:, :, part]), wanted(q, k, v, at, at + n, 4, 0))
        at += n
        assert cache.positions()[-4:] == list(range(max(0, at - 4), at))


@pytest.mark.parametrize("window", [1, 4, 5])
def test_fed_one_at_a_time_it_holds_the_window_and_no_more(window):
    cache = ring(window, 1)
    assert cache._k[0].shape[2] == window
    _, k, v = tensors(N)
    for n in range(N):
        assert cache.positions() == list(range(max(0, n - window), n))
        for layer in range(2):
            cache.append(layer, k[:, :, n : n + 1], v[:, :, n : n + 1])


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_ragged_rows(sink_tokens):
    cache = ring(4, 3, sink_tokens=sink_tokens, batch=3, types=("sliding",))
    q, k, v = tensors(N, batch=3)
    rows = [0, 0, 0]
    for t in range(12):
        new = [t % 4, (t + 1) % 3, 3 if t < 3 else 0]
        parts = [torch.full((3, h, 3, 32), torch.nan, dtype=torch.float64) for h in (6, 2, 2)]
        new = [min(n, N - r) for n, r in zip(new, rows)]
        for part, x in zip(parts, (q, k, v)):
            for b, (r, n) in enumerate(zip(rows, new)):
                part[b, :, :n] = x[b, :, r : r + n]
        cache.append(0, parts[1], parts[2], lengths=new)
        got = cache.attend(0, parts[0])
        for b, (r, n) in enumerate(zip(rows, new)):
            one = (x[b : b + 1] for x in (q, k, v))
            assert_equal(got[b : b + 1, :, :n], wanted(*one, r, r + n, 4, sink_tokens))
        rows = [r + n for r, n in zip(rows, new)]
        assert cache.row_lengths() == rows


@pytest.mark.parametrize("sink_tokens", [0, 2])
@pytest.mark.parametrize("window, step", [(1, 3), (4, 1), (4, 3), (5, 5), (5, 8)])
def test_crop_goes_back_up_to_step_tokens_and_no_further(window, step, sink_tokens):
    q, k, v = tensors(N)
    for n in range(1, N + 1):
        for back in range(1, n + 1):
            cache = ring(window, step, sink_tokens=sink_tokens, types=("sliding",))
            for a in range(0, n, step):
                b = min(n, a + step)
                cache.append(0, k[:, :, a:b], v[:, :, a:b])
            keep = n - back
            lost = n - (window + step - 1) > sink_tokens  # the ring has come round
            if back > step and lost and keep > sink_tokens:
                before = [t.clone() for t in (*cache._k, *cache._v)], cache.positions()
                with pytest.raises(ValueError, match=f"n={keep}.*step={step}"):
                    cache.crop(keep)
                assert cache.row_lengths() == [n] and cache.positions() == before[1]
                assert all(torch.equal(a, b) for a, b in zip(before[0], (*cache._k, *cache._v)))
                continue
            cache.crop(keep)
            assert cache.row_lengths() == [keep]
            held = cache.positions()
            assert set(held) >= set(range(max(0, keep - window + 1), keep)) and max(held, default=-1) < keep
            for p in held:  # what it says it holds is there
                slot = int(cache._slot(torch.tensor(p)))
                assert torch.equal(cache._k[0][:, :, slot], k[:, :, p])
            for a in range(keep, min(N, keep + 2 * step + 1), step):
                b = min(N, a + step)
                cache.append(0, k[:, :, a:b], v[:, :, a:b])
                assert_equal(cache.attend(0, q[:, :, a:b]), wanted(q, k, v, a, b, window, sink_tokens))


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_several_crops_in_a_row_cannot_go_deeper_than_one(sink_tokens):
    cache = ring(4, 3, sink_tokens=sink_tokens, types=("sliding",))
    _, k, v = tensors(18)
    for a in range(0, 18, 3):
        cache.append(0, k[:, :, a : a + 3], v[:, :, a : a + 3])
    cache.crop(17)
    cache.crop(15)
    with pytest.raises(ValueError, match="n=14"):
        cache.crop(14)
    cache.append(0, k[:, :, 15:17], v[:, :, 15:17])
    with pytest.raises(ValueError, match="n=14"):
        cache.crop(14)
    assert cache.row_lengths() == [17]


def test_a_look_back_is_right_or_refused():
    """After a crop or a fork, queries of the last S tokens: never an answer from keys that are gone."""
    q, k, v = tensors(N)
    answered = refused = 0
    for n in range(3, N + 1):
        for back in range(0, 4):
            cache = ring(4, 3, types=("sliding",))
            for a in range(0, n, 3):
                b = min(n, a + 3)
                cache.append(0, k[:, :, a:b], v[:, :, a:b])
            cache.crop(n - back)
            for S in range(1, 5):
                keep, start = n - back, n - back - S
                if start < 0:
                    continue
                try:
                    got = cache.attend(0, q[:, :, start:keep])
                except ValueError as error:
                    assert "ring" in str(error) and back + S > 3 and n > 6
                    refused += 1
                else:
                    assert_equal(got, wanted(q, k, v, start, keep, 4, 0))
                    answered += 1
    assert answered > 100 and refused > 50


@pytest.mark.parametrize(
    "window, step, n", [(4, 1, 9), (4, 3, 23), (5, 5, 7), (1, 1, 3), (5, 8, 12), (5, 9, 12)]
)
def test_bytes_are_those_of_the_tensors_and_of_the_formula(window, step, n):
    types = ("sliding", "sliding", "full")
    cache = ring(window, step, batch=2, max_tokens=n, types=types)
    assert cache.nbytes == sum(t.nbytes for t in (*cache._k, *cache._v))
    want = kv_bytes(cache.spec, n, batch=2, dtype=64, step=step)
    assert cache.nbytes == want
    assert cache.nbytes_used == 0
    _, k, v = tensors(n, batch=2)
    for a in range(0, n, step):
        for layer in range(3):
            cache.append(layer, k[:, :, a : a + step], v[:, :, a : a + step])
    assert cache.nbytes == cache.nbytes_used == want
    sinks = ring(window, step, batch=2, max_tokens=n, types=types, sink_tokens=2)
    more = min(n, window + step + 1) - min(n, window + step - 1)
    assert sinks.nbytes - cache.nbytes == more * 2 * 2 * 2 * 2 * 32 * 8  # layers, batch, k and v, heads


def test_refusals_change_nothing():
    cache = ring(4, 3)
    _, k, v = tensors(6)
    cache.append(0, k[:, :, :3], v[:, :, :3])
    before = [t.clone() for t in (*cache._k, *cache._v)]
    with pytest.raises(ValueError, match="step=3"):
        cache.append(0, k[:, :, :4], v[:, :, :4])
    with pytest.raises(ValueError, match="v must .* got None"):
        cache.append(0, k[:, :, :1], None)
    with pytest.raises(ValueError, match="k must .* dtype"):
        cache.append(0, k[:, :, :1].float(), v[:, :, :1].float())
    assert cache.row_lengths() == [3]
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache._k, *cache._v)))
    for options, name in (
        (dict(step=0), "step"),
        (dict(step=True), "step"),
        (dict(sink_tokens=-1), "sink_tokens"),
    ):
        with pytest.raises(ValueError, match=f"{name} must"):
            make_cache("sliding", spec_of(4), max_tokens=8, **options)
    with pytest.raises(ValueError, match="no sliding layers"):
        make_cache(
            "sliding", dataclasses.replace(spec_of(4), window=None, layer_types=("full",) * 2), max_tokens=8
        )
