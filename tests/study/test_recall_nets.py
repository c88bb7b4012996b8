"""The small nets: right attention, a servable latent, an honest task, and a script that runs."""

import json
import math

import pytest
import torch

from companion.attention import sdpa
from companion.caches import make_cache
from companion.cost import kv_bytes_per_token, parameters
from companion.study import nets as module
from companion.study.nets import (
    CODECS,
    KEYS,
    VALUES,
    VARIANTS,
    RecallNet,
    accuracy,
    cache_bits,
    load_net,
    positions,
    rounded,
    save_nets,
    sequences,
)

LATENTS = [name for name, s in VARIANTS.items() if s.mla]
HEADS = [name for name in VARIANTS if name not in LATENTS]


def net_of(name: str, dtype=torch.float64) -> RecallNet:
    torch.manual_seed(3)
    net = RecallNet(VARIANTS[name])
    for p in net.parameters():  # norms too: weights of one would hide a norm in the wrong place
        torch.nn.init.normal_(p, std=0.3)
    return net.to(dtype)


def ids_of(rows=3, pairs=5, seed=0):
    return sequences(rows, pairs, torch.Generator().manual_seed(seed), held_out=False)[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_equals_the_reference(name, monkeypatch):
    net, ids = net_of(name), ids_of()
    fast = net(ids)

    def reference(q, k, v, is_causal, scale=None, enable_gqa=False):
        return sdpa(q, k, v, causal=is_causal, softmax_scale=scale)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", reference)
    torch.testing.assert_close(net(ids), fast, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", HEADS)
def test_shared_heads_equal_plain_attention_with_the_heads_repeated(name):
    net, plain, ids = net_of(name), net_of("kv8"), ids_of()
    state = net.state_dict()
    for key in [k for k in state if k.endswith(("key.weight", "value.weight"))]:
        kv = VARIANTS[name].kv_heads
        state[key] = state[key].view(kv, 16, 64).repeat_interleave(8 // kv, 0).reshape(128, 64)
    plain.load_state_dict(state)
    torch.testing.assert_close(net(ids), plain(ids), rtol=0, atol=1e-10)


def test_eight_heads_are_plain_multi_head_attention():
    """Written out from the weights, one head and one query at a time."""
    net, x = net_of("kv8"), torch.randn(2, 7, 64, dtype=torch.float64)
    a = net.layers[0].attention
    cos, sin = a.rope.cos_sin(torch.arange(7), dtype=torch.float64)
    heads = []
    for h in range(8):
        rows = slice(16 * h, 16 * h + 16)
        q, k, v = (x @ w.weight[rows].T for w in (a.query, a.key, a.value))
        q, k = a.rope.apply_rope(q, cos, sin), a.rope.apply_rope(k, cos, sin)
        each = []
        for i in range(7):
            weights = torch.softmax((k[:, : i + 1] @ q[:, i, :, None])[..., 0] / math.sqrt(16), -1)
            each.append((weights[..., None] * v[:, : i + 1]).sum(1))
        heads.append(torch.stack(each, 1))
    expected = torch.cat(heads, -1) @ a.out.weight.T
    torch.testing.assert_close(a.attend(x, a.cached(x, cos, sin), cos, sin), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LATENTS)
def test_latent_absorbed_equals_projected(name):
    net, ids = net_of(name), ids_of()
    torch.testing.assert_close(net(ids, absorbed=True), net(ids), rtol=0, atol=1e-10)
    torch.testing.assert_close(  # and with the cache rounded, which both read
        net(ids, absorbed=True, codec="int4"), net(ids, codec="int4"), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", LATENTS)
def test_latent_is_served_from_a_latent_cache(name):
    """Token by token through the companion's cache, which holds kv_rank + rope_dim numbers and no more."""
    spec, net = VARIANTS[name], net_of(name)
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    a = net.layers[0].attention
    cos, sin = a.rope.cos_sin(torch.arange(9), dtype=torch.float64)
    expected = a.attend(x, a.cached(x, cos, sin), cos, sin)
    cache = make_cache("latent", spec, batch=2, max_tokens=9, dtype=torch.float64)
    H, m = spec.heads, spec.mla
    for t in range(9):
        one, turn = x[:, t : t + 1], (cos[t : t + 1], sin[t : t + 1])
        for layer in range(spec.layers):
            cache.append(layer, torch.cat(a.cached(one, *turn), -1))
        nope, rotated = a._queries(one, *turn)
        q = torch.cat([nope @ a.key.weight.view(H, m.nope_dim, m.kv_rank), rotated], -1)
        o = cache.attend(0, q) @ a.value.weight.view(H, m.v_dim, m.kv_rank).mT
        out = a.out(o.transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, expected[:, t : t + 1], rtol=0, atol=1e-10)
    assert cache.nbytes_used == 2 * 9 * spec.layers * spec.cached_width * 8


@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_cached_are_those_that_the_companion_counts(name):
    spec, net = VARIANTS[name], net_of(name, torch.float32)
    assert sum(p.numel() for p in net.parameters()) == parameters(spec)
    a = net.layers[0].attention
    cos, sin = a.rope.cos_sin(torch.arange(6))
    cached = a.cached(torch.randn(1, 6, 64), cos, sin)
    assert sum(t.numel() for t in cached) == 6 * spec.cached_width
    assert kv_bytes_per_token(spec) == spec.layers * cache_bits(spec, None) // 8
    for codec, per_number in zip(CODECS, (8, 8, 4, 2)):
        scales = sum(t.shape[1] for t in cached) * (16 if per_number == 8 else 32)
        assert cache_bits(spec, codec) == per_number * spec.cached_width + scales


def test_latents_cache_as_much_as_the_head_counts_they_stand_beside():
    width = {name: s.cached_width for name, s in VARIANTS.items()}
    assert width == {"kv8": 256, "kv4": 128, "kv2": 64, "kv1": 32, "latent64": 64, "latent32": 32}


@pytest.mark.parametrize("name", VARIANTS)
def test_causal(name):
    net, ids = net_of(name), ids_of()
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % KEYS
    before, after = net(ids), net(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 9:], before[:, 9:])


@pytest.mark.parametrize("name", VARIANTS)
def test_positions_are_relative(name):
    net, ids = net_of(name), ids_of()
    torch.testing.assert_close(net(ids, torch.arange(15) + 40), net(ids), rtol=0, atol=1e-9)
    assert not torch.allclose(net(ids, positions(5, gap=40)), net(ids))


def test_positions_leave_a_gap_before_the_questions():
    assert positions(2, gap=10).tolist() == [0, 1, 2, 3, 14, 15]
    assert positions(2).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", VARIANTS)
def test_codecs_touch_the_cache_and_nothing_else(name, monkeypatch):
    net, ids = net_of(name, torch.float32), ids_of()
    errors = [(net(ids, codec=c) - net(ids)).abs().mean().item() for c in ("int8", "int4", "int2")]
    assert 0 < errors[0] < errors[1] < errors[2]
    seen = []
    monkeypatch.setattr(module, "rounded", lambda x, name: (seen.append(tuple(x.shape[1:])), x)[1])
    assert torch.equal(net(ids, codec="int4"), net(ids))
    spec = VARIANTS[name]
    m = spec.mla
    one = [(1, 15, m.kv_rank), (1, 15, m.rope_dim)] if m else [(spec.kv_heads, 15, 16)] * 2
    assert seen == one * spec.layers


def test_each_token_and_head_has_its_own_scale():
    x = torch.randn(2, 3, 5, 16) * torch.logspace(-3, 3, 30).view(2, 3, 5, 1)
    error = (rounded(x, "int8") - x).abs().amax(-1) / x.abs().amax(-1)
    assert error.max() < 0.6 / 127
    with pytest.raises(ValueError, match="int8, fp8_e4m3, int4, int2"):
        rounded(x, "int3")


def test_answers_stand_in_the_context_and_only_there():
    ids, answers = sequences(200, 6, torch.Generator().manual_seed(1), held_out=False)
    assert ids.shape == (200, 18) and answers.shape == (200, 6)
    for row, answer in zip(ids.tolist(), answers.tolist()):
        said = dict(zip(row[:12:2], row[1:12:2]))
        assert len(said) == 6 and sorted(said) == sorted(row[12:])  # distinct keys, each asked once
        assert all(0 <= k < KEYS for k in said) and all(KEYS <= v < KEYS + VALUES for v in said.values())
        assert [said[k] for k in row[12:]] == answer
    assert len({tuple(r) for r in ids.tolist()}) == 200
    # A key says nothing of its value: over many sequences, each key meets nearly every value.
    ids, _ = sequences(4000, 6, torch.Generator().manual_seed(2), held_out=False)
    met = {(k, v) for k, v in zip(ids[:, :12:2].flatten().tolist(), ids[:, 1:12:2].flatten().tolist())}
    assert len(met) > 0.99 * KEYS * VALUES
    # The order of the questions is not that of the pairs: each place is asked first equally often.
    first = (ids[:, :12:2] == ids[:, 12:13]).float().mean(0)
    assert (first - 1 / 6).abs().max() < 0.03


@pytest.mark.parametrize("pairs", (1, 2, 8, KEYS))
def test_held_out_sequences_are_never_trained_on(pairs):
    for seed in range(3):
        for held_out in (True, False):
            ids, answers = sequences(50, pairs, torch.Generator().manual_seed(seed), held_out=held_out)
            assert ids.shape == (50, 3 * pairs)
            assert (((answers - KEYS).sum(1) % 8 == 0) == held_out).all()


def test_sequences_refuse_more_pairs_than_keys():
    for pairs in (0, KEYS + 1):
        with pytest.raises(ValueError, match=f"pairs must .* to 32, got {pairs}"):
            sequences(1, pairs, torch.Generator(), held_out=False)


def test_accuracy_counts_answers_and_chance_is_known():
    ids, answers = sequences(300, 8, torch.Generator().manual_seed(5), held_out=True)
    other = answers.roll(1, 0)

    class Oracle(RecallNet):
        def forward(self, ids, positions, *, codec, absorbed, last):
            n = ids.shape[1] // 3
            k, v, asked = ids[:, : 2 * n : 2], ids[:, 1 : 2 * n : 2], ids[:, 2 * n :]
            said = v.gather(1, (asked[:, :, None] == k[:, None]).int().argmax(-1))
            return torch.nn.functional.one_hot(said, KEYS + VALUES).float()

    oracle = Oracle(VARIANTS["kv1"])
    assert accuracy(oracle, ids, answers) == 1.0
    assert accuracy(oracle, ids, other) == pytest.approx(1 / 32, abs=0.01)
    untrained = RecallNet(VARIANTS["kv1"]).eval()
    assert accuracy(untrained, ids, answers, chunk=64) < 0.1


def test_absorbing_needs_a_latent():
    with pytest.raises(ValueError, match="absorbed=True needs a latent; this net has 2"):
        net_of("kv2")(ids_of(), absorbed=True)


def test_weights_come_back_rounded_to_16_bits(tmp_path):
    path, nets = tmp_path / "w.safetensors", {n: net_of(n, torch.float32) for n in ("kv8", "latent32")}
    save_nets(nets, path)
    back = load_net("latent32", path)
    for key, w in nets["latent32"].state_dict().items():
        assert torch.equal(back.state_dict()[key], w.half().float())
    with pytest.raises(ValueError, match="net 'kv1' is not stored; there are: kv8, latent32"):
        load_net("kv1", path)


def test_training_stops_at_convergence_and_at_the_budget(monkeypatch):
    from benchmarks import recall_nets

    recipe = recall_nets.Recipe(pairs=2, start=2, batch=4, warmup=2, every=2, budget=12, validation=8)
    _, record = recall_nets.train("kv1", 0, recipe)
    assert (record["steps"], record["converged"], record["steps_to_converge"]) == (12, False, None)
    assert [c[0] for c in record["curve"]] == [2, 4, 6, 8, 10, 12]
    scores = iter([0.5, 0.95, 0.99, 0.98, 0.99, 1.0])
    monkeypatch.setattr(recall_nets, "accuracy", lambda *a: next(scores))
    _, record = recall_nets.train("kv1", 0, recipe)
    assert (record["steps_to_0.9"], record["steps_to_converge"], record["steps"]) == (4, 12, 12)
    assert record["converged"] and record["parameters"] == parameters(VARIANTS["kv1"])


def test_a_curriculum_rises_with_accuracy(monkeypatch):
    from benchmarks import recall_nets

    asked = []
    real = recall_nets.sequences
    monkeypatch.setattr(
        recall_nets, "sequences", lambda n, p, *a, **k: (asked.append((n, p)), real(n, p, *a, **k))[1]
    )
    recipe = recall_nets.Recipe(
        pairs=5, start=2, patience=3, ready=0.0, gap=9, batch=4, every=50, budget=50, validation=8, warmup=2
    )
    _, record = recall_nets.train("kv1", 0, recipe)
    assert record["raised"] == [3, 6]  # 2 -> 4 -> 5
    pairs = [p for n, p in asked if n == 4]
    assert set(pairs[:3]) == {2} and max(pairs[3:6]) <= 4 and set(pairs[6:]) == {2, 3, 4, 5}


@pytest.mark.parametrize("name", ("kv4", "kv2", "kv1"))
def test_pooling_equal_heads_changes_nothing_and_others_are_averaged(name):
    from benchmarks.recall_nets import pooled

    plain, few, ids = net_of("kv8", torch.float32), net_of(name, torch.float32), ids_of()
    kv, state = VARIANTS[name].kv_heads, few.state_dict()
    for key in [k for k in state if k.endswith(("key.weight", "value.weight"))]:
        state[key] = state[key].view(kv, 16, 64).repeat_interleave(8 // kv, 0).reshape(128, 64)
    plain.load_state_dict(state)
    torch.testing.assert_close(pooled(plain, name)(ids), few(ids), rtol=0, atol=1e-4)
    other = net_of("kv8", torch.float32)
    w = other.layers[1].attention.value.weight
    mean = torch.stack([w[16 * h : 16 * h + 16] for h in range(8 // kv)]).mean(0)
    torch.testing.assert_close(pooled(other, name).layers[1].attention.value.weight[:16], mean)


def test_one_seed_gives_one_net_and_learning_happens():
    from benchmarks.recall_nets import Recipe, train

    recipe = Recipe(pairs=2, start=2, gap=0, batch=32, warmup=5, every=20, budget=60, validation=64, lr=5e-3)
    (a, one), (b, two) = train("kv2", 1, recipe), train("kv2", 1, recipe)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert one["curve"] == two["curve"] and one["curve"][-1][2] < one["curve"][0][2]


def test_difference_decides_only_beyond_the_spread():
    from benchmarks.recall_trained import difference, mean_se

    assert difference([0.5, 0.51, 0.49], [0.1, 0.11, 0.09])["decided"] is True
    unsure = difference([0.02, 0.00, 0.04], [0.01, 0.03, 0.00])
    assert unsure["decided"] is False and unsure["seeds_to_decide"]["measured"] > 3
    assert difference([0.5], [0.1, 0.2])["decided"] is None
    assert mean_se([1.0, 2.0, 3.0]) == {"n": 3, "mean": 2.0, "se": round(1 / math.sqrt(3), 5)}
    assert mean_se([0.5])["se"] is None


def test_smoke(capsys, monkeypatch):
    from benchmarks import recall_trained

    def refuse(*args):
        raise AssertionError("a smoke run stores nothing")

    monkeypatch.setattr(recall_trained, "store", refuse)
    monkeypatch.setattr(recall_trained, "save_nets", refuse)
    result = recall_trained.main(["--smoke", "--seeds", "1"])
    out = capsys.readouterr().out
    assert "NOT in 4" in out and "latent32" in out
    assert result["complete"] and [n["converged"] for n in result["nets"]] == [False] * 3
    assert result["summary"]["kv1"]["not_converged_seeds"] == [0]
    assert [n["net"] for n in result["pooled_from_kv8"]] == ["kv1"] and result["kept"] == {}
    json.dumps(result, allow_nan=False)
