"""Keys and values in few bits, in one piece per row or in pages: what is read, what is quantized when, bytes.

The oracle of attention is the reference over [what `read` gives for the old tokens | the step's own, exact].
"""

import jaxtyping
import pytest
import torch

from companion.attend import by_torch
from companion.attention import sdpa
from companion.caches import make_cache
from companion.caches.packed import Packed
from companion.cost import ModelSpec
from companion.paging import PoolFull
from companion.quantize import codec
from companion.quantize.codec import Codec

ROOM = 120
CODECS = {
    "int8": "int8",
    "int4": codec("int4", group=32),
    "kivi4": "kivi4",
    "kivi2": "kivi2",
    "fp8": "fp8_e4m3",
    "nvfp4": codec("nvfp4", tensor_scale=0.002),
}


def spec_of(window=None, layers=2, types=None):
    types = types or (("sliding", "full") if window else ("full",) * layers)
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 32, "d_model": 16, "ffn": 8, "vocab": 32}
    name = {"name": "tiny", "architecture": "llama"}
    return ModelSpec(**name, layers=len(types), window=window, layer_types=tuple(types), **shape)


def build(choice, residual=0, *, paged=False, batch=1, spec=None, max_tokens=ROOM, **more):
    if paged:
        more = {"block_size": 32, **more}
    return make_cache(
        "paged" if paged else "quantized",
        spec or spec_of(),
        batch=batch,
        max_tokens=max_tokens,
        dtype=torch.float64,
        codec=CODECS.get(choice, choice) if isinstance(choice, str) else choice,
        residual=residual,
        **more,
    )


def draw(n, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h, n, 32, generator=g, dtype=torch.float64) for h in (6, 2, 2)]


def fill(cache, n, seed=0):
    q, k, v = draw(n, cache.batch, seed)
    for layer in range(cache.spec.layers):
        cache.append(layer, k, v)
    return q, k, v


def row_of(cache, layer, row):
    """What this row holds, dequantized: (1, Hkv, n, D) each, straight from the store's parts."""
    store, n = cache._layers[layer], cache.row_lengths(layer)[row]
    done = store.quantized[row]
    parts = zip(store.tile(0, done), (store.tail_k, store.tail_v))
    return [torch.cat([x[row : row + 1].double(), t[row : row + 1, :, : n - done]], 2) for x, t in parts]


def tensors_of(cache):
    """Every tensor that stores tokens, for a count of bytes that is not the cache's own."""
    found = []
    for layer in cache._layers:
        found += [layer.tail_k, layer.tail_v, *layer.k.fields.values(), *layer.v.fields.values()]
        found += [w for w in (layer.k.whole, layer.v.whole) if w is not None]
    return found


def state(cache):
    tables = [list(cache._tables.ids(b)) for b in range(cache.batch)] if hasattr(cache, "_tables") else None
    counts = (
        [cache.row_lengths(i) for i in range(cache.spec.layers)],
        [list(x.quantized) for x in cache._layers],
    )
    free = cache.manager.num_free if tables else None
    return [t.clone() for t in tensors_of(cache)], counts, tables, cache.nbytes_used, free


def assert_same(a, b):
    assert a[1:] == b[1:]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a[0], b[0]))


@pytest.fixture
def calls(monkeypatch):
    """The lengths of all calls of quantize and dequantize, in order."""
    seen = {"quantize": [], "dequantize": []}
    real_q, real_d = Codec.quantize, Codec.dequantize

    def quantize(self, x):
        seen["quantize"].append((x.shape[0], x.shape[-2]))
        return real_q(self, x)

    def dequantize(self, qt):
        seen["dequantize"].append((qt.shape[0], qt.shape[-2]))
        return real_d(self, qt)

    monkeypatch.setattr(Codec, "quantize", quantize)
    monkeypatch.setattr(Codec, "dequantize", dequantize)
    return seen


KINDS = pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])


@KINDS
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("residual", [0, 5, 32])
@pytest.mark.parametrize("choice", list(CODECS))
def test_attention_is_over_what_is_stored_and_the_steps_own_tokens_exactly(
    choice, residual, window, paged, monkeypatch
):
    monkeypatch.setattr(by_torch, "TILE", 32)  # several tiles in a short text
    cache = build(choice, residual, paged=paged, spec=spec_of(window))
    q, k, v = draw(ROOM)
    at = 0
    for n in (3, 28, 1, 1, 40, 0, 1, 31, 1, 14):
        a, b = at, at + n
        for layer, w in enumerate([window, None]):
            cache.append(layer, k[:, :, a:b], v[:, :, a:b])
            old = [x[:, :, :a] for x in cache.read(layer)]
            assert torch.equal(torch.stack(old), torch.stack([x[:, :, :a] for x in row_of(cache, layer, 0)]))
            kk, vv = torch.cat([old[0], k[:, :, a:b]], 2), torch.cat([old[1], v[:, :, a:b]], 2)
            size = (-1, -1) if w is None else (w - 1, 0)
            for options in ({}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 1, 6, dtype=torch.float64)}):
                want = sdpa(q[:, :, a:b], kk, vv, causal=True, window_size=size, **options)
                got = cache.attend(layer, q[:, :, a:b], **options)
                torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        at = b
    for layer in range(2):  # the newest `residual` tokens, at least, are there as they came
        exact = (cache.read(layer)[0] == k).all(-1).all(1)[0]
        assert exact[ROOM - residual :].all()
        assert cache._layers[layer].quantized[0] >= ROOM - residual - 31 and not exact[:32].any()
        near = {"int8": 0.02, "int4": 0.3, "kivi4": 0.3, "kivi2": 1.5, "fp8": 0.3, "nvfp4": 0.8}[choice]
        for got, x in zip(cache.read(layer), (k, v)):
            assert (got - x).abs().max() < near  # each token in its own place


@KINDS
@pytest.mark.parametrize("residual", [0, 5])
def test_ragged_rows_with_nan_in_their_padding(residual, paged):
    cache = build("kivi4", residual, paged=paged, batch=3, spec=spec_of(window=50))
    q, k, v = draw(ROOM, batch=3)
    rows = [0, 0, 0]
    for new in ([30, 2, 0], [3, 40, 0], [0, 0, 0], [1, 1, 1], [35, 1, 31], [1, 0, 1], [1, 1, 1]):
        S = max(1, *new)
        parts = [torch.full((3, h, S, 32), torch.nan, dtype=torch.float64) for h in (6, 2, 2)]
        for part, x in zip(parts, (q, k, v)):
            for b, (r, n) in enumerate(zip(rows, new)):
                part[b, :, :n] = x[b, :, r : r + n]
        for layer, w in enumerate([50, None]):
            cache.append(layer, parts[1], parts[2], lengths=new)
            got = cache.attend(layer, parts[0])
            for b, (r, n) in enumerate(zip(rows, new)):
                old = [x[:, :, :r] for x in row_of(cache, layer, b)]
                keys, values = (torch.cat([o, x[b : b + 1, :, r : r + n]], 2) for o, x in zip(old, (k, v)))
                size = (-1, -1) if w is None else (w - 1, 0)
                want = sdpa(q[b : b + 1, :, r : r + n], keys, values, causal=True, window_size=size)
                torch.testing.assert_close(got[b : b + 1, :, :n], want, rtol=0, atol=1e-6)
        rows = [r + n for r, n in zip(rows, new)]
        assert cache.row_lengths() == rows


@KINDS
@pytest.mark.parametrize("choice, unit", [("int8", 1), ("kivi4", 32), ("nvfp4", 1)])
@pytest.mark.parametrize("residual", [0, 7])
def test_every_token_is_quantized_once_and_its_codes_stay(choice, unit, residual, paged, calls):
    unit = 32 if paged else unit
    cache = build(choice, residual, paged=paged)
    calls["quantize"].clear()
    _, k, v = draw(ROOM)
    codes = None
    for t in range(70):
        for layer in range(2):
            cache.append(layer, k[:, :, t : t + 1], v[:, :, t : t + 1])
        if paged:
            ids = cache._tables.ids(0)
            full = max(0, t + 1 - residual) // 32
            now = [cache._layers[0].k.fields["codes"][:, i].clone() for i in ids[:full]]
            if codes:
                assert all(torch.equal(a, b) for a, b in zip(codes, now))
            codes = now
        else:
            done = cache._layers[0].quantized[0]
            now = cache._layers[0].k.fields["codes"][:, :, : done // unit * cache._layers[0].k.lines["codes"]]
            now = now.clone()
            if codes is not None:
                assert torch.equal(codes, now[:, :, : codes.shape[2]])
            codes = now
    whole = (70 - residual) // unit * unit
    assert cache._layers[0].quantized == cache._layers[1].quantized == [whole]
    assert sum(n for _, n in calls["quantize"]) == whole * 2 * 2  # layers, keys and values
    assert {n for _, n in calls["quantize"]} == {unit}
    assert not calls["dequantize"]  # appending reads nothing back


@KINDS
def test_attention_never_dequantizes_more_than_a_tile(paged, calls):
    n = 2 * by_torch.TILE + 300
    cache = build("kivi4", 16, paged=paged, max_tokens=n + 1, spec=spec_of(types=("full",)))
    fill(cache, n)
    q, k, v = draw(1, seed=1)
    old = [x.clone() for x in cache.read(0)]
    cache.append(0, k, v)
    calls["dequantize"].clear()
    got = cache.attend(0, q)
    assert max(n for _, n in calls["dequantize"]) <= by_torch.TILE
    assert sum(n for _, n in calls["dequantize"]) < 2 * (n + 32)  # once each, keys and values
    want = sdpa(q, torch.cat([old[0], k], 2), torch.cat([old[1], v], 2))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_a_windowed_layer_dequantizes_no_tile_before_its_window(calls):
    n = 2 * by_torch.TILE + 300
    cache = build("int8", 16, max_tokens=n + 1, spec=spec_of(window=40, types=("sliding",)))
    fill(cache, n)
    q, k, v = draw(1, seed=1)
    cache.append(0, k, v)
    calls["dequantize"].clear()
    cache.attend(0, q)
    assert 0 < sum(n for _, n in calls["dequantize"]) <= 2 * 300


@KINDS
def test_crop_in_the_tail_and_on_a_group_but_not_inside_one(paged):
    q, k, v = draw(ROOM)
    for keep in (100, 97, 96, 64, 32, 0):  # 96 are quantized
        cache = build("kivi4", 0, paged=paged)
        for layer in range(2):
            cache.append(layer, k[:, :, :100], v[:, :, :100])
        old = [x.clone() for x in cache.read(0)]
        cache.crop(keep)
        assert cache.row_lengths() == [keep]
        for a, b in zip(cache.read(0), old):
            assert torch.equal(a, b[:, :, :keep])
        new = k[:, :, keep : keep + 20] * 2, v[:, :, keep : keep + 20]
        cache.append(0, *new)
        want = [torch.cat([x[:, :, :keep], y], 2) for x, y in zip(old, new)]
        got = cache.attend(0, q[:, :, :20])
        torch.testing.assert_close(got, sdpa(q[:, :, :20], *want, causal=True), rtol=0, atol=1e-6)
    cache = build("kivi4", 0, paged=paged, batch=2)
    fill(cache, 100)
    before = state(cache)
    for n in (95, 33, 1, [64, 95], [31, 100]):
        with pytest.raises(ValueError, match="n=.*groups of 32"):
            cache.crop(n)
        assert_same(before, state(cache))


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_has_no_scale_is_refused_and_nothing_changes(bad, which, paged):
    cache = build("int8", 0, paged=paged, batch=2, block_size=32) if paged else build("int8", batch=2)
    fill(cache, 40)
    before = state(cache)
    _, k, v = draw(33, batch=2, seed=2)
    {"k": k, "v": v}[which][1, 1, 32, 5] = bad
    with pytest.raises(ValueError, match=f"^{which} holds NaN"):
        cache.append(0, k, v)
    assert_same(before, state(cache))
    cache.append(0, k, v, lengths=[33, 32])  # as padding it may be anything


@KINDS
def test_rows_of_one_length_that_are_quantized_to_different_depths_are_read_each_as_it_is(paged):
    cache = build("int8", 32, paged=paged, batch=2)
    _, k, v = draw(100, batch=2)
    for layer in range(2):
        cache.append(layer, k, v, lengths=[100, 70])
    cache.crop(70)
    assert len(set(cache._layers[0].quantized)) == 2
    for got, x in zip(cache.read(0), (k, v)):
        assert (got - x[:, :, :70]).abs().max() < 0.05


@KINDS
@pytest.mark.parametrize("choice", list(CODECS))
def test_bytes_are_those_of_the_tensors(choice, paged):
    cache = build(choice, 5, paged=paged, batch=2)
    allocated = cache.nbytes
    assert allocated == sum(t.nbytes for t in tensors_of(cache)) and cache.nbytes_used == 0
    fill(cache, 100)
    assert cache.nbytes == allocated == sum(t.nbytes for t in tensors_of(cache))
    done = cache._layers[0].quantized[0]
    _, k, v = draw(done, batch=2)
    pair = cache.codecs[0]
    few = sum(c.quantize(x).nbytes for c, x in zip(pair, (k, v)))
    few -= sum(4 for c in pair if c.name == "nvfp4")  # one scale for all tokens takes no room per token
    waiting = 2 * (100 - done) * 2 * 2 * 32 * 8
    assert cache.nbytes_used == 2 * (few + waiting)
    assert cache.nbytes_used <= cache.nbytes


def test_bits_per_number_of_a_long_int4_cache_are_the_codecs():
    spec = spec_of(layers=1)
    cache = make_cache("quantized", spec, max_tokens=4096, codec=codec("int4", group=32), dtype=torch.float32)
    assert cache.nbytes * 8 == 4096 * 2 * 2 * 32 * 5  # 4 + 32 / 32: no room but for the codes and scales


def test_a_codec_for_each_layer():
    cache = build(["int8", ("int8", codec("int4", group=16)), "kivi2"], spec=spec_of(layers=3))
    _, k, v = fill(cache, 64)
    errors = [[float((x - y).abs().max()) for x, y in zip(cache.read(i), (k, v))] for i in range(3)]
    assert errors[0][0] == errors[1][0] < 0.02 and errors[0][1] < 0.02 < errors[1][1] < 0.4 < errors[2][1]
    assert [store.unit for store in cache._layers] == [1, 1, 32]
    cache.crop(32)
    with pytest.raises(ValueError, match="groups of 32"):
        cache.crop(31)


@KINDS
def test_a_fork_goes_its_own_way(paged):
    cache = build("kivi4", 5, paged=paged, num_blocks=12) if paged else build("kivi4", 5)
    q, k, v = fill(cache, 70)
    twin = cache.fork()
    lines = {0: (cache, 3), 1: (twin, 4)}
    for c, seed in lines.values():
        q2, k2, v2 = draw(40, seed=seed)
        for layer in range(2):
            old = [x.clone() for x in c.read(layer)]
            c.append(layer, k2, v2)
            now = [x[:, :, :70] for x in c.read(layer)]
            want = sdpa(q2, torch.cat([now[0], k2], 2), torch.cat([now[1], v2], 2), causal=True)
            torch.testing.assert_close(c.attend(layer, q2), want, rtol=0, atol=1e-6)
            assert all((a - b).abs().max() < 0.4 for a, b in zip(old, now))
    assert (cache.read(0)[0][:, :, 70:] - twin.read(0)[0][:, :, 70:]).abs().max() > 1


def test_a_fork_of_pages_shares_the_full_ones_and_quantizes_none_again(calls):
    cache = build("int8", 0, paged=True, num_blocks=8)
    fill(cache, 70)
    calls["quantize"].clear()
    used = 8 - cache.manager.num_free
    twin = cache.fork()
    assert 8 - cache.manager.num_free == used == 3 and not calls["quantize"]
    assert twin.block_table().tolist() == cache.block_table().tolist()
    pool = [layer.k.fields["codes"] for layer in cache._layers]
    assert all(a.data_ptr() == layer.k.fields["codes"].data_ptr() for a, layer in zip(pool, twin._layers))
    shared = pool[0][:, cache._tables.ids(0)[:2]].clone()
    for c, seed in ((cache, 1), (twin, 2)):
        _, k, v = draw(30, seed=seed)
        for layer in range(2):
            c.append(layer, k, v)
        c.manager.pool.check()
    assert sorted(calls["quantize"]) == [(1, 32)] * 8  # one page, for each of two, two layers, k and v
    assert (
        cache._tables.ids(0)[:2] == twin._tables.ids(0)[:2]
        and cache._tables.ids(0)[2] != twin._tables.ids(0)[2]
    )
    assert torch.equal(shared, pool[0][:, cache._tables.ids(0)[:2]])
    cache.free()
    assert len(twin.read(0)[0][0, 0]) == 100
    twin.free()
    cache.manager.pool.check()
    assert cache.manager.num_free == 8


def test_a_full_pool_of_pages_stores_nothing():
    cache = build("int8", 0, paged=True, batch=2, num_blocks=4)
    fill(cache, 40)
    twin = cache.fork()
    before = state(cache), state(twin)
    _, k, v = draw(30, batch=2, seed=1)
    with pytest.raises(PoolFull, match="0 are free"):
        twin.append(0, k, v)
    with pytest.raises(PoolFull):
        twin.append(0, k, v, lengths=[1, 0])  # a copy of the shared block
    assert_same(before[0], state(cache))
    assert_same(before[1], state(twin))
    cache.manager.pool.check()
    cache.free()
    twin.append(0, k, v, lengths=[24, 1])
    with pytest.raises(ValueError, match="freed"):
        cache.fork()
    with pytest.raises(ValueError):
        cache.free()
    twin.free()
    assert cache.manager.num_free == 4


@pytest.mark.parametrize("lengths", [0, 1, 31, 32, 33])
@KINDS
def test_lengths_about_a_block(lengths, paged):
    cache = build("kivi4", paged=paged)
    q, k, v = fill(cache, lengths)
    assert [x.shape for x in cache.read(1)] == [(1, 2, lengths, 32)] * 2
    torch.testing.assert_close(cache.attend(1, q), sdpa(q, k, v, causal=True), rtol=0, atol=1e-6)


def test_unwritten_pages_of_nan_change_nothing():
    """Scales of recycled memory: NaN in every field that can hold one, in the tails, and codes of 255."""
    out = []
    for poison in (False, True):
        cache = build("kivi4", 5, paged=True, batch=2, num_blocks=9)
        if poison:
            for t in tensors_of(cache):
                t.fill_(float("nan") if t.is_floating_point() else 255)
        q, k, v = draw(70, batch=2)
        got = []
        for layer in range(2):
            cache.append(layer, k, v, lengths=[70, 3])
            got.append(cache.attend(layer, q)[0])
            cache.append(layer, k[:, :, :1], v[:, :, :1])
            got.append(cache.attend(layer, q[:, :, :1]))
        out.append(got)
    for a, b in zip(*out):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"codec": codec("int4", group=20)}, "group=20 does not divide"),
        ({"codec": ["int8"]}, "codec must be a list of 2"),
        ({"codec": "nvfp4"}, "tensor_scale"),
        ({"codec": ("int8", "nvfp4")}, "codec"),
        ({"codec": "int3"}, "int3"),
        ({"codec": 8}, "codec"),
        ({"codec": None}, "codec"),
        ({"residual": -1}, "residual must .* got -1"),
        ({"residual": True}, "residual must .* got True"),
        ({"block_size": 16}, "option .* got 'block_size'"),
    ],
)
def test_refused_at_the_start(more, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        make_cache("quantized", spec_of(), max_tokens=64, **more)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"block_size": 16}, "block_size must be a multiple of 32 .* got 16"),
        ({"block_size": 48}, "block_size must .* got 48"),
        ({"block_size": 0}, r"block_size must .* got 0"),
        ({"num_blocks": 0, "block_size": 32}, r"num_blocks must .* got 0"),
        ({"storage": None}, "option .* got 'storage'"),
        ({"sequences": None}, "option .* got 'sequences'"),
    ],
)
def test_pages_refused_at_the_start(more, message):
    with pytest.raises(ValueError, match=message):
        make_cache("paged", spec_of(), max_tokens=64, codec="kivi4", **more)


@KINDS
def test_mismatched_tensors_are_refused(paged, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    cache = build("int8", paged=paged)
    fill(cache, 40)
    before = state(cache)
    _, k, v = draw(2)
    for args, options, name in (
        ((0, k[:, :1], v), {}, "k must be of shape"),
        ((0, k, v[..., :16]), {}, "v must be of shape"),
        ((0, k.float(), v), {}, "k must .* dtype"),
        ((0, k, None), {}, "v must .* got None"),
        ((2, k, v), {}, "layer must .* got 2"),
        ((0, k, v), {"lengths": [3]}, "lengths must"),
        ((0, *draw(100)[1:]), {}, "max_tokens="),
    ):
        with pytest.raises(ValueError, match=name):
            cache.append(*args, **options)
        assert_same(before, state(cache))


def test_packed_fields_are_the_codecs_own():
    """Group by group or all at once: the same codes, scales and zeros, byte for byte."""
    c = codec("int4", group=32, group_dim=-2)
    store = Packed(c, (1, 2), 96, 32, 32, torch.device("cpu"))
    x = draw(96)[1]
    for a in range(0, 96, 32):
        store.write(slice(0, 1), a, x[:, :, a : a + 32])
    want = c.quantize(x)
    for name, field in store.fields.items():
        assert torch.equal(field, getattr(want, name))
    assert torch.equal(store.read(40, 70), c.dequantize(want)[:, :, 40:70])
