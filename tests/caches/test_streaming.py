"""Sinks and a window: against runs from scratch over the tokens that are kept, written out here."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from companion.attention import sdpa
from companion.caches import make_cache
from companion.cost import ModelSpec, kv_bytes
from companion.generate import generate
from companion.model import Decoder
from companion.rope import Rope

N, DTYPE = 30, torch.float64
SINK_LOGITS = torch.linspace(-1, 1, 6, dtype=DTYPE)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES = {
    "plain": dict(theta=100.0),
    "yarn": dict(theta=100.0, scaling=YARN),
    "llama3": dict(theta=100.0, scaling=LLAMA3),
    "partial": dict(theta=100.0, partial=0.5),
    "interleaved": dict(theta=100.0, interleaved=True),
    "interleaved yarn": dict(theta=100.0, interleaved=True, scaling=YARN),
}


def spec_of(layers=1, **changes):
    shape = dict(d_model=32, heads=6, kv_heads=2, head_dim=16, ffn=48, vocab=50)
    spec = ModelSpec(
        name="tiny", architecture="llama", layers=layers, rope_theta=100.0, max_context=64, **shape
    )
    return dataclasses.replace(spec, **changes)


def streaming(spec=None, *, dtype=DTYPE, max_tokens=10_000, **options):
    return make_cache("streaming", spec or spec_of(), max_tokens=max_tokens, dtype=dtype, **options)


def tensors(n, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, 6, n, 16), (batch, 2, n, 16), (batch, 2, n, 16)
    return [torch.randn(*s, generator=g, dtype=DTYPE) for s in shapes]


def kept(p, window, s):
    """Positions that the query at p sees."""
    return sorted({*range(min(s, p + 1)), *range(max(0, p - window + 1), p + 1)})


def from_scratch(rope, q, k, v, p, window, s, positions, **options):
    """The query at p, over unrotated q, k, v: kept tokens rotated at 0 .. n - 1, or at their places."""
    held = kept(p, window, s)
    place = torch.arange(len(held)) if positions == "cache" else torch.tensor(held)
    return sdpa(rope(q[:, :, p : p + 1], place[-1:]), rope(k[:, :, held], place), v[:, :, held], **options)


def assert_equal(got, want, atol=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ROPES)
def test_a_key_that_is_turned_on_is_the_key_at_the_place_it_arrives_at(name):
    rope, x = Rope(16, **ROPES[name]), tensors(N)[0].expand(2, -1, -1, -1)
    at, by = torch.arange(N), torch.stack([torch.arange(N) * 3 - 50, torch.full((N,), 1000)])
    assert_equal(rope.turn(rope(x, at), by), rope(x, at + by))
    assert torch.equal(rope.turn(x, 0 * at), x)


@pytest.mark.parametrize("positions", ["cache", "text"])
@pytest.mark.parametrize("name", ROPES)
def test_attend_equals_a_run_from_scratch_over_the_kept_tokens(name, positions):
    rope = Rope(16, **ROPES[name])
    q, k, v = tensors(N)
    place = torch.arange(N)
    for window, s, step in ((5, 3, 1), (5, 3, 4), (1, 2, 3), (6, 0, 2), (4, 4, 9)):
        cache = streaming(window=window, sink_tokens=s, positions=positions, step=step, rope=rope)
        for a in range(0, N, step):
            b = min(N, a + step)
            cache.append(0, rope(k, place)[:, :, a:b], v[:, :, a:b])
            more = ({"softcap": 2.0}, {"sinks": SINK_LOGITS}, {"softmax_scale": 0.3}) if window == 5 else ()
            for options in ({}, *more):
                got = cache.attend(0, rope(q, place)[:, :, a:b], **options)
                want = [from_scratch(rope, q, k, v, p, window, s, positions, **options) for p in range(a, b)]
                assert_equal(got, torch.cat(want, 2))
            out, lse = cache.attend(0, rope(q, place)[:, :, a:b], return_lse=True)
            want = [
                from_scratch(rope, q, k, v, p, window, s, positions, return_lse=True) for p in range(a, b)
            ]
            assert_equal(lse, torch.cat([x for _, x in want], 2))
            assert_equal(out, torch.cat([x for x, _ in want], 2))


def test_the_two_counts_differ_from_the_first_dropped_token_on_and_not_before():
    rope = Rope(16, theta=100.0)
    q, k, v = (rope(x, torch.arange(N)) if i < 2 else x for i, x in enumerate(tensors(N)))
    caches = [streaming(window=5, sink_tokens=3, positions=p) for p in ("cache", "text")]
    for p in range(N):
        part = slice(p, p + 1)
        a, b = ((c.append(0, k[:, :, part], v[:, :, part]), c.attend(0, q[:, :, part]))[1] for c in caches)
        assert ((a - b).abs().max() > 1e-6) == (p >= 8)


# --- whole models -----------------------------------------------------------------------------------------


def weights_of(spec, seed=0):
    g = torch.Generator().manual_seed(seed)
    d, wide, narrow = spec.d_model, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {"self_attn.q_proj": (wide, d), "self_attn.k_proj": (narrow, d), "self_attn.v_proj": (narrow, d)}
    shapes |= {"self_attn.o_proj": (d, wide), "mlp.gate_proj": (spec.ffn, d), "mlp.up_proj": (spec.ffn, d)}
    shapes |= {"mlp.down_proj": (d, spec.ffn), "input_layernorm": (d,), "post_attention_layernorm": (d,)}
    names = {
        "model.embed_tokens.weight": (spec.vocab, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (50, d),
    }
    for i in range(spec.layers):
        names |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    return {
        n: torch.randn(*s, generator=g, dtype=DTYPE) * (0.3 if len(s) > 1 else 1) for n, s in names.items()
    }


def plain_forward(spec, w, ids, window, s, positions):
    """Logits of every token, each layer a loop over queries: nothing of the companion but the rotation."""
    rope = Rope(spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling, partial=spec.partial_rotary)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[name + ".weight"]

    x = w["model.embed_tokens.weight"][ids]
    for i in range(spec.layers):
        at = f"model.layers.{i}."

        def lin(x, name, at=at):
            return x @ w[at + name + ".weight"].T

        h = norm(x, at + "input_layernorm")
        q, k, v = (lin(h, f"self_attn.{c}_proj").view(len(ids), -1, spec.head_dim) for c in "qkv")
        rows = []
        for p in range(len(ids)):
            held = kept(p, window, s)
            place = list(range(len(held))) if positions == "cache" else held
            heads = []
            for j in range(spec.heads):
                own = j * spec.kv_heads // spec.heads
                kj = rope(k[held, own], torch.tensor(place))
                score = kj @ rope(q[p : p + 1, j], torch.tensor([place[-1]]))[0] / spec.head_dim**0.5
                heads.append(score.softmax(0) @ v[held, own])
            rows.append(torch.cat(heads))
        x = x + lin(torch.stack(rows), "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm")
        x = x + lin(F.silu(lin(h, "mlp.gate_proj")) * lin(h, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def run(model, ids, cache, chunk):
    parts = [model(ids[None, a : a + chunk], cache)[0] for a in range(0, len(ids), chunk)]
    return torch.cat(parts)


IDS = torch.tensor([(7 * i * i + 3 * i) % 50 for i in range(24)])


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, {"partial_rotary": 0.5}])
@pytest.mark.parametrize("positions", ["cache", "text"])
def test_three_layers_equal_a_forward_pass_written_out(positions, changes):
    spec = spec_of(3, tied=False, **changes)
    w = weights_of(spec)
    model = Decoder(spec, w)
    for window, s in ((6, 2), (5, 0))[: 1 + (not changes)]:
        want = plain_forward(spec, w, IDS, window, s, positions)
        for chunk in (1, 4, 7):
            cache = streaming(spec, window=window, sink_tokens=s, positions=positions, step=7)
            assert_equal(run(model, IDS, cache, chunk), want, 1e-10)


@pytest.mark.parametrize("s", [0, 1, 4])
def test_one_layer_equals_the_decoder_run_from_scratch_over_the_kept_tokens(s):
    spec = spec_of(1, tied=False)
    model = Decoder(spec, weights_of(spec))
    got = run(model, IDS, streaming(spec, window=6, sink_tokens=s, step=3), 3)
    for p in range(len(IDS)):
        assert_equal(got[p], model(IDS[kept(p, 6, s)][None])[0, -1], 1e-11)


def test_generate_goes_beyond_the_context_that_the_model_was_made_for():
    spec = spec_of(2, tied=False, max_context=16)
    model = Decoder(spec, weights_of(spec))
    prompt = IDS.tolist()[:12]
    free = dataclasses.replace(spec, max_context=None)
    wanted = generate(
        Decoder(free, weights_of(free)),
        prompt,
        cache=streaming(free, window=8, sink_tokens=2, step=1),
        max_new_tokens=30,
        stop_ids=(),
    ).tokens
    for chunk in (None, 1, 2, 50):  # no chunk is larger than the cache takes at once
        cache = streaming(spec, window=8, sink_tokens=2, step=4)
        out = generate(model, prompt, cache=cache, max_new_tokens=30, stop_ids=(), prefill_chunk=chunk)
        assert out.tokens == wanted and len(cache) == 41
    for cache in (
        streaming(spec, window=8, sink_tokens=2, positions="text"),  # distances are those of the text
        streaming(spec, window=15, sink_tokens=2),  # 17 positions where the model has 16
        make_cache("contiguous", spec, max_tokens=64, dtype=DTYPE),
    ):
        with pytest.raises(ValueError, match="made for at most 16"):
            generate(model, prompt, cache=cache, max_new_tokens=30, stop_ids=())
        assert len(cache) == 0
    with pytest.raises(ValueError, match="window must .* got None"):
        generate(model, prompt, cache="streaming", max_new_tokens=2)


# --- rows, crop, fork, bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("positions", ["cache", "text"])
def test_ragged_rows_crops_and_forks_in_any_order(positions, seed):
    """Every row equals itself alone, from scratch; a twin and its origin do not touch each other."""
    rope, window, s, step, batch = Rope(16, theta=100.0, scaling=YARN), 5, 3, 4, 3
    options = dict(window=window, sink_tokens=s, step=step, positions=positions, rope=rope)
    g = torch.Generator().manual_seed(seed)

    def pick(n):
        return int(torch.randint(n, (1,), generator=g))

    n = 60
    place, qkv = torch.arange(n), tensors(n, batch, seed)
    alive, crops = [(streaming(batch=batch, max_tokens=n, **options), [0] * batch, qkv)], 0
    for _ in range(30):
        which = pick(len(alive))
        cache, rows, (q, k, v) = alive[which]
        if pick(4) == 0:
            keep = [max(0, r - pick(step + 1)) for r in rows]
            try:
                cache.crop(keep)
            except ValueError as error:
                assert "no longer holds the window" in str(error)
            else:
                crops += keep != rows
                rows = keep
                other = tensors(n, batch, 1000 + pick(1000))  # what comes next is another text
                front = [torch.arange(n) < torch.tensor(rows)[:, None]] * 3
                q, k, v = (
                    torch.where(f[:, None, :, None], old, new) for f, old, new in zip(front, (q, k, v), other)
                )
        elif pick(5) == 0 and len(alive) < 4:
            alive.append((cache.fork(), list(rows), (q, k, v)))
        else:
            S = 1 + pick(step)
            new = [min(pick(S + 1), n - r) for r in rows]
            parts = [torch.full((batch, h, S, 16), torch.nan, dtype=DTYPE) for h in (6, 2, 2)]
            for part, x in zip(parts, (rope(q, place), rope(k, place), v)):
                for b, (r, m) in enumerate(zip(rows, new)):
                    part[b, :, :m] = x[b, :, r : r + m]
            cache.append(0, parts[1], parts[2], lengths=new)
            got = cache.attend(0, parts[0])
            for b, (r, m) in enumerate(zip(rows, new)):
                for i in range(m):
                    one = (x[b : b + 1] for x in (q, k, v))
                    want = from_scratch(rope, *one, r + i, window, s, positions)
                    assert_equal(got[b : b + 1, :, i : i + 1], want, 1e-11)
            rows = [r + m for r, m in zip(rows, new)]
        alive[which] = cache, rows, (q, k, v)
        assert cache.row_lengths() == rows
    assert crops > 1


@pytest.mark.parametrize("window, s, step", [(5, 3, 1), (5, 0, 4), (4, 2, 6)])
def test_crop_goes_back_step_tokens_and_then_everything_is_as_it_was(window, s, step):
    rope = Rope(16, theta=100.0)
    q, k, v = (rope(x, torch.arange(N)) if i < 2 else x for i, x in enumerate(tensors(N)))
    for n in (20, 21, 27):
        for back in range(step + 3):
            cache = streaming(window=window, sink_tokens=s, step=step)
            for p in range(n):
                cache.append(0, k[:, :, p : p + 1], v[:, :, p : p + 1])
            if back > step:
                with pytest.raises(ValueError, match=f"step={step}"):
                    cache.crop(n - back)
                assert len(cache) == n
                continue
            cache.crop(n - back)
            fresh = streaming(window=window, sink_tokens=s, step=step)
            for p in range(n - back):
                fresh.append(0, k[:, :, p : p + 1], v[:, :, p : p + 1])
            for c in (cache, fresh):
                c.append(0, k[:, :, n - back : n - back + 1], v[:, :, n - back : n - back + 1])
            at = slice(n - back, n - back + 1)
            assert_equal(cache.attend(0, q[:, :, at]), fresh.attend(0, q[:, :, at]))
            assert cache.positions()[-window:] == fresh.positions()[-window:]


def test_the_bytes_do_not_grow_with_the_text():
    spec = spec_of(3)
    for window, s, step, most in ((5, 3, 1, 10_000), (5, 3, 4, 10_000), (5, 0, 4, 6), (100, 4, 1, 50)):
        cache = streaming(spec, window=window, sink_tokens=s, step=step, max_tokens=most, batch=2)
        slots = min(most, s + window + step - 1)
        assert cache.nbytes == sum(t.nbytes for t in (*cache._k, *cache._v))
        assert cache.nbytes == slots * 3 * 2 * 2 * 2 * 16 * 8  # layers, batch, k and v, heads, width, bytes
        if not s:
            assert cache.nbytes == kv_bytes(cache.spec, most, batch=2, dtype=64, step=step)
    cache = streaming(spec_of(1), window=5, sink_tokens=3, step=2)
    k = torch.zeros(1, 2, 1, 16, dtype=DTYPE)
    for n in range(1, 50):
        cache.append(0, k, k)
        assert cache.nbytes_used == min(n, 9) * 2 * 2 * 16 * 8 and len(cache) == n


@pytest.mark.parametrize(
    "dtype, atol", [(torch.float32, 2e-4), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("step", [1, 4])
def test_narrow_numbers_after_three_thousand_tokens(dtype, atol, step):
    """A stored sink is turned once, from what came: errors do not add up over the text.

    What float32 loses is in the angles: 3,000 radians are 1.2e-4 from the next float32 on either side.
    """
    rope, window, s = Rope(16, theta=100.0), 5, 3
    q, k, v = (x.to(dtype).double() for x in tensors(12))
    start = 3_000
    cache = streaming(window=window, sink_tokens=s, step=step, dtype=dtype, max_tokens=4_000)

    def turn(x, at):
        return rope(x.to(torch.float32), at).to(dtype)

    cache.append(0, turn(k[:, :, :1], torch.arange(1)), v[:, :, :1].to(dtype))
    cache.append(0, turn(k[:, :, 1:2], torch.arange(1, 2)), v[:, :, 1:2].to(dtype))
    cache.append(0, turn(k[:, :, 2:3], torch.arange(2, 3)), v[:, :, 2:3].to(dtype))
    zero = torch.zeros(1, 2, 1, 16, dtype=dtype)
    for _ in range(start - 3):
        cache.append(0, zero, zero)
    at = torch.arange(start, start + 8)
    fed = (turn(q[:, :, 3:11], at), turn(k[:, :, 3:11], at), v[:, :, 3:11].to(dtype))
    outs = []
    for a in range(0, 8, step):
        cache.append(0, *(x[:, :, a : a + step] for x in fed[1:]))
        outs.append(cache.attend(0, fed[0][:, :, a : a + step]))
    got = torch.cat(outs, 2)[:, :, 4:]
    assert got.dtype == dtype
    for i in range(4, 8):
        want = from_scratch(rope, q[:, :, :11], k[:, :, :11], v[:, :, :11], i + 3, window, s, "cache")
        torch.testing.assert_close(got[:, :, i - 4 : i - 3].double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_step_without_tokens(dropped):
    cache, (q, k, v) = streaming(window=5, sink_tokens=3, batch=2), tensors(20, 2)
    for p in range(20 if dropped else 2):
        cache.append(0, k[:, :, p : p + 1], v[:, :, p : p + 1])
    for lengths in (None, [0, 0]):
        cache.append(0, k[:, :, :0], v[:, :, :0], lengths=lengths)
        assert cache.attend(0, q[:, :, :0]).shape == (2, 6, 0, 16)
    assert cache.row_lengths() == [20 if dropped else 2] * 2


def test_refusals():
    sliding = spec_of(2, window=4, layer_types=("sliding", "full"))
    for options, spec, message in (
        (dict(window=5), sliding, "kind='sliding'"),
        (dict(), None, "window must .* got None"),
        (dict(window=0), None, "window must .* got 0"),
        (dict(window=True), None, "window must .* got True"),
        (dict(window=5, sink_tokens=-1), None, "sink_tokens must .* got -1"),
        (dict(window=5, step=0), None, "step must .* got 0"),
        (dict(window=5, positions="paper"), None, "positions must .* got 'paper'"),
        (dict(window=5), spec_of(rope_theta=None), "no rope_theta"),
        (dict(window=5, rope=Rope(8, theta=10.0)), None, "head_dim must .* got 8"),
        (dict(window=5, sinks=4), None, "option .* got 'sinks'"),
    ):
        with pytest.raises(ValueError, match=message):
            streaming(spec, **options)
    assert streaming(spec_of(rope_theta=None), window=5, positions="text").reach is None
    cache = streaming(window=5, step=2, sink_tokens=3)
    assert cache.reach == 8
    _, k, v = tensors(3)
    with pytest.raises(ValueError, match="step=2"):
        cache.append(0, k, v)
    assert len(cache) == 0 and cache.nbytes_used == 0
    for _ in range(20):
        cache.append(0, k[:, :, :1], v[:, :, :1])
    cache.crop(19)
    with pytest.raises(ValueError, match="no longer holds"):
        cache.attend(0, torch.zeros(1, 6, 3, 16, dtype=DTYPE))
