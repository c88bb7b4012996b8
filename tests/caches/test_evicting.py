"""The newest and the heaviest: against a simulation in float64, head by head and token by token."""

import dataclasses
import math

import pytest
import torch

from companion.attention import sdpa
from companion.caches import make_cache
from companion.cost import ModelSpec

HEADS, KV, D, DTYPE = 6, 2, 8, torch.float64
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
    v_head_dim=6,
)
SINKS = torch.linspace(-2, 1, HEADS, dtype=DTYPE)


def evicting(*, spec=SPEC, max_tokens=5_000, dtype=DTYPE, batch=1, **options):
    return make_cache("evicting", spec, max_tokens=max_tokens, dtype=dtype, batch=batch, **options)


def tensors(n, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, n, D), (batch, KV, n, D), (batch, KV, n, 6)
    return [2 * torch.randn(*s, generator=g, dtype=DTYPE) for s in shapes]


class Simulation:
    """One row, one layer: a dict of weights per key head, and a loop over queries. Nothing is vectorized."""

    def __init__(self, budget, recent):
        self.budget, self.recent, self.n = budget, recent, 0
        self.sums = [{} for _ in range(KV)]

    def step(self, q, k, v, S, softcap=0.0, sinks=None):
        """q, k, v of the whole text (H, n, D); the next S tokens come in. Returns their outputs and LSEs."""
        for sums in self.sums if S else ():
            if len(sums) > self.budget:
                order = sorted(sums)
                newest, old = order[len(order) - self.recent :], order[: len(order) - self.recent]
                old.sort(key=lambda t: (-sums[t], t))
                for t in old[self.budget - len(newest) :]:
                    del sums[t]
        for sums in self.sums:
            sums.update({t: 0.0 for t in range(self.n, self.n + S)})
        outs, lses = [], []
        for h in range(HEADS):
            sums = self.sums[h * KV // HEADS]
            for p in range(self.n, self.n + S):
                see = [t for t in sorted(sums) if t <= p]
                scores = [float(q[h, p] @ k[h * KV // HEADS, t]) / math.sqrt(D) for t in see]
                if softcap:
                    scores = [softcap * math.tanh(x / softcap) for x in scores]
                total = sum(map(math.exp, scores))
                lses.append(math.log(total))
                total += math.exp(sinks[h]) if sinks is not None else 0.0
                weights = [math.exp(x) / total for x in scores]
                outs.append(sum(w * v[h * KV // HEADS, t] for w, t in zip(weights, see)))
                for w, t in zip(weights, see):
                    sums[t] += w
        self.n += S
        return torch.stack(outs).view(HEADS, S, -1), torch.tensor(lses, dtype=DTYPE).view(HEADS, S)


def assert_equal(got, want, atol=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": SINKS}])
@pytest.mark.parametrize(
    "budget, recent, step", [(6, 3, 1), (6, 1, 1), (6, 6, 1), (5, 2, 4), (8, 4, 8), (1, 1, 2)]
)
def test_outputs_held_tokens_and_sums_equal_a_simulation(budget, recent, step, options):
    q, k, v = tensors(40)
    cache, simulation = evicting(budget=budget, recent=recent, step=step), Simulation(budget, recent)
    a = i = 0
    while a < 40:
        S = min(1 + i % step, 40 - a)
        part, i = slice(a, a + S), i + 1
        cache.append(0, k[:, :, part], v[:, :, part])
        out, lse = cache.attend(0, q[:, :, part], return_lse=True, **options)
        want_out, want_lse = simulation.step(q[0], k[0], v[0], S, **options)
        assert_equal(out[0], want_out)
        assert_equal(lse[0], want_lse)
        assert cache.positions() == [sorted(s) for s in simulation.sums]
        want = torch.tensor([[s[t] for t in sorted(s)] for s in simulation.sums])
        torch.testing.assert_close(cache.weight_sums(), want, rtol=1e-5, atol=1e-6)
        a += S
    assert len(cache) == 40 and budget < len(cache.positions()[0]) <= budget + step
    if budget > recent:
        assert cache.positions()[0] != cache.positions()[1]  # each head chooses for itself
        assert cache.positions()[0][0] < 40 - budget - step  # and something old was worth keeping


@pytest.mark.parametrize("step", [1, 3, 8])
def test_within_the_budget_it_is_full_attention(step):
    n = 24
    cache = evicting(budget=n, recent=2, step=step, batch=2)
    q, k, v = tensors(n + step, batch=2)
    for a in range(0, n + step, step):
        b = min(a + step, n + step)
        for layer in range(2):
            cache.append(layer, k[:, :, a:b], v[:, :, a:b])
            want = sdpa(q[:, :, a:b], k[:, :, :b], v[:, :, :b], causal=True, return_lse=True)
            for got, x in zip(cache.attend(layer, q[:, :, a:b], return_lse=True), want):
                assert_equal(got, x)


def test_when_only_the_newest_are_kept_it_is_a_window():
    spec = dataclasses.replace(SPEC, v_head_dim=D)
    cache = evicting(spec=spec, budget=5, recent=5, step=1)
    window = make_cache(
        "streaming", spec, max_tokens=99, dtype=DTYPE, window=6, sink_tokens=0, positions="text", step=1
    )
    q, k, _ = tensors(30)
    for p in range(30):
        part = slice(p, p + 1)
        for c in (cache, window):
            c.append(0, k[:, :, part], k[:, :, part])
        assert_equal(cache.attend(0, q[:, :, part]), window.attend(0, q[:, :, part]))


def test_of_equal_sums_the_earlier_token_stays():
    """All queries look at token 0 alone; what the others got is exactly nothing."""
    cache = evicting(budget=4, recent=1, step=1)
    k = torch.zeros(1, KV, 12, D, dtype=DTYPE)
    k[:, :, 0, 0], k[:, :, 1:, 0] = 1e4, -1e4
    q = torch.zeros(1, HEADS, 12, D, dtype=DTYPE)
    q[..., 0] = 1.0
    for p in range(12):
        part = slice(p, p + 1)
        cache.append(0, k[:, :, part], k[:, :, part, :6])
        cache.attend(0, q[:, :, part])
        assert cache.positions()[0] == (list(range(p + 1)) if p < 5 else [0, 1, 2, p - 1, p])
    assert cache.weight_sums().tolist() == [[12.0 * 3, 0, 0, 0, 0]] * 2  # three query heads each


def test_rows_of_a_ragged_batch_do_as_they_would_alone():
    batch, budget, step = 3, 5, 3
    q, k, v = tensors(60, batch)
    cache = evicting(budget=budget, recent=2, step=step, batch=batch)
    alone = [evicting(budget=budget, recent=2, step=step) for _ in range(batch)]
    rows = [0] * batch
    for t in range(25):
        new = [t % 4, (t + 1) % 3, 3 if t < 6 else 0]
        parts = [
            torch.full((batch, h, 3, w), torch.nan, dtype=DTYPE) for h, w in ((HEADS, D), (KV, D), (KV, 6))
        ]
        for part, x in zip(parts, (q, k, v)):
            for b, (r, n) in enumerate(zip(rows, new)):
                part[b, :, :n] = x[b, :, r : r + n]
        cache.append(0, parts[1], parts[2], lengths=new)
        got = cache.attend(0, parts[0])
        for b, (r, n) in enumerate(zip(rows, new)):
            if n:
                alone[b].append(0, k[b : b + 1, :, r : r + n], v[b : b + 1, :, r : r + n])
                assert_equal(got[b : b + 1, :, :n], alone[b].attend(0, q[b : b + 1, :, r : r + n]))
            assert cache.positions(row=b) == alone[b].positions()
            assert_equal(cache.weight_sums(row=b), alone[b].weight_sums())
        rows = [r + n for r, n in zip(rows, new)]
        assert cache.row_lengths() == rows
    assert max(rows) > 20


def test_attending_again_adds_nothing_to_the_sums():
    cache = evicting(budget=4, step=3)
    q, k, v = tensors(9)
    for a in (0, 3, 6):
        part = slice(a, a + 3)
        cache.append(0, k[:, :, part], v[:, :, part])
        first, sums = cache.attend(0, q[:, :, part]), cache.weight_sums()
        assert_equal(cache.attend(0, q[:, :, part]), first)
        assert torch.equal(cache.weight_sums(), sums)
    twin = cache.fork()
    assert_equal(twin.attend(0, q[:, :, 7:9]), first[:, :, 1:])  # the last two tokens again
    assert torch.equal(twin.weight_sums(), sums)
    with pytest.raises(ValueError, match="evicted at token 6"):
        twin.attend(0, q[:, :, 5:9])


def test_crop_goes_back_to_the_last_eviction_and_no_further():
    q, k, v = tensors(40)

    def fed(cache, start, stop, S=3):
        for a in range(start, stop, S):
            b = min(stop, a + S)
            cache.append(0, k[:, :, a:b], v[:, :, a:b])
            cache.append(1, k[:, :, a:b], v[:, :, a:b])
            out = cache.attend(0, q[:, :, a:b]), cache.attend(1, q[:, :, a:b])
        return out[0]

    def make():
        return evicting(budget=6, recent=3, step=3)

    young = make()
    fed(young, 0, 7)  # nothing was evicted: every crop is possible
    for n in (6, 2, 1):
        young.crop(n)
        assert young.positions() == [list(range(n))] * 2
    assert_equal(fed(young, 1, 7), sdpa(q[:, :, 4:7], k[:, :, :7], v[:, :, :7], causal=True))
    old = make()
    fed(old, 0, 21)  # last evicted at 18
    before = [t.clone() for t in (*old._k, *old._v, *old._sum, *old._at)]
    for n in (17, 6, 1):
        with pytest.raises(ValueError, match="last evicted at token 18"):
            old.crop(n)
        assert len(old) == 21
    assert all(torch.equal(a, b) for a, b in zip(before, (*old._k, *old._v, *old._sum, *old._at)))
    fresh = make()
    fed(fresh, 0, 19)  # the step that begins at 18 brings one token only
    old.crop(19)
    assert old.positions() == fresh.positions() and old.nbytes_used == fresh.nbytes_used
    assert torch.equal(old._k[0], fresh._k[0]) and torch.equal(old._v[1], fresh._v[1])
    old.crop(18)
    twin = old.fork()
    want = fed(old, 18, 21)
    assert_equal(fed(twin, 18, 21), want)
    fed(twin, 21, 30)
    assert len(old) == 21 and len(twin) == 30
    old.crop(0)
    assert old.nbytes_used == 0 and old.positions() == [[], []]
    assert_equal(fed(old, 0, 21), fed(make(), 0, 21))
    fresh = make()
    fed(fresh, 0, 21)
    assert_equal(old.weight_sums(), fresh.weight_sums())


def test_the_bytes_count_sums_and_positions_and_do_not_grow():
    for budget, step, most, dtype in (
        (5, 1, 900, torch.float32),
        (5, 4, 7, DTYPE),
        (64, 16, 900, torch.bfloat16),
    ):
        cache = evicting(budget=budget, step=step, max_tokens=most, dtype=dtype, batch=2)
        slots = min(most, budget + step)
        number = torch.finfo(dtype).bits // 8
        assert cache.nbytes == 2 * 2 * KV * slots * ((D + 6) * number + 4 + 4)  # layers, batch
        held = sum(t.nbytes for store in (cache._k, cache._v, cache._sum, cache._at) for t in store)
        assert held == cache.nbytes and cache.nbytes_used == 0
        k = torch.zeros(2, KV, 1, D, dtype=dtype)
        for n in range(1, min(most, 200) + 1):
            for layer in range(2):
                cache.append(layer, k, k[..., :6])
                cache.attend(layer, torch.zeros(2, HEADS, 1, D, dtype=dtype))
            assert cache.nbytes_used == cache.nbytes // slots * min(n, budget + 1)
        assert cache.row_lengths() == [min(most, 200)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_numbers(dtype):
    q, k, v = (x.to(dtype) for x in tensors(12))
    cache = evicting(budget=12, step=4, dtype=dtype)
    for a in range(0, 12, 4):
        part = slice(a, a + 4)
        cache.append(0, k[:, :, part], v[:, :, part])
        got = cache.attend(0, q[:, :, part])
        want = sdpa(*(x.double() for x in (q[:, :, part], k[:, :, : a + 4], v[:, :, : a + 4])), causal=True)
        assert got.dtype == dtype and cache.weight_sums().dtype == torch.float32
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=16 * torch.finfo(dtype).eps * v.abs().max()
        )


def test_a_step_without_tokens_evicts_nothing():
    cache, (q, k, v) = evicting(budget=4, step=3), tensors(9)
    for a in (0, 3, 6):
        cache.append(0, k[:, :, a : a + 3], v[:, :, a : a + 3])
        cache.attend(0, q[:, :, a : a + 3])
    held, sums = cache.positions(), cache.weight_sums()
    cache.append(0, k[:, :, :0], v[:, :, :0])
    assert cache.attend(0, q[:, :, :0]).shape == (1, HEADS, 0, 6)
    assert cache.positions() == held and torch.equal(cache.weight_sums(), sums)


def test_refusals():
    windowed = dataclasses.replace(SPEC, window=4, layer_types=("sliding", "full"))
    for options, message in (
        (dict(), "budget must .* got None"),
        (dict(budget=0), "budget must .* got 0"),
        (dict(budget=4, recent=5), "recent must .* to 4, got 5"),
        (dict(budget=4, recent=0), "recent must .* got 0"),
        (dict(budget=4, step=True), "step must .* got True"),
        (dict(budget=4, window=4), "option .* got 'window'"),
        (dict(budget=4, spec=windowed), "sliding layers"),
    ):
        with pytest.raises(ValueError, match=message):
            evicting(**options)
    cache = evicting(budget=4, step=2, max_tokens=6)
    assert cache.recent == 2 and evicting(budget=5).recent == 3 and evicting(budget=5).step == 5
    q, k, v = tensors(9)
    cache.append(0, k[:, :, :2], v[:, :, :2])
    for a, b, message in ((2, 5, "step=2"), (2, 4, "v must .* got None")):
        with pytest.raises(ValueError, match=message):
            cache.append(0, k[:, :, a:b], None if "v must" in message else v[:, :, a:b])
    with pytest.raises(ValueError, match="softmax_scale"):
        cache.attend(0, q[:, :, :2], softmax_scale=math.inf)
    with pytest.raises(ValueError, match="softcap"):
        cache.attend(0, q[:, :, :2], softcap=-1.0)
    for a in (2, 4):
        cache.append(0, k[:, :, a : a + 2], v[:, :, a : a + 2])
    held = cache.positions()
    with pytest.raises(ValueError, match="max_tokens=6"):
        cache.append(0, k[:, :, 6:7], v[:, :, 6:7])
    assert cache.positions() == held and len(cache) == 6  # refused before anything was evicted
