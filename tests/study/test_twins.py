"""The twins: equal in what they should be, honest about what is held out, and a script that runs."""

import json

import pytest
import torch

from companion.attention import sdpa
from companion.moe import dense_experts
from companion.study import stored, text
from companion.study import twins as module
from companion.study.twins import (
    EXPERTS,
    LENGTH,
    TOP_K,
    VARIANTS,
    Book,
    Dense,
    Reader,
    characters,
    feed_forward,
    held_out,
    learn,
    load_reader,
    pieces,
    read,
    save_readers,
    split,
    windows,
)

MIXTURES = [v for v in VARIANTS if v.startswith("moe")]


def numbers(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("kind", (Reader, Book))
def test_twins_match_but_for_the_router(kind):
    mixture, active, total = kind("moe none"), kind("active"), kind("total")
    router = sum(m.router.numel() for m in mixture.mixtures)
    experts = sum(m.w1.numel() + m.w2.numel() for m in mixture.mixtures)
    assert numbers(mixture) - router == numbers(total)
    assert numbers(mixture) - router - experts * (EXPERTS - TOP_K) // EXPERTS == numbers(active)


def test_mixtures_of_one_seed_start_equal():
    states = []
    for v in MIXTURES:
        torch.manual_seed(5)
        states.append({k: t for k, t in Reader(v).state_dict().items() if "correction" not in k})
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(other[k], t) for k, t in states[0].items())


def test_a_dense_one_is_a_mixture_of_one():
    torch.manual_seed(0)
    dense, x = Dense(8, 5), torch.randn(7, 8)
    ids, ones = torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1)
    want = dense_experts(x, dense.w1.weight[None], dense.w2.weight[None], ids, ones)
    torch.testing.assert_close(dense(x)[0], want)


def test_the_reader_looks_back_only(monkeypatch):
    torch.manual_seed(0)
    net, ids = Reader("moe bias").eval(), split()[1][: 3 * LENGTH].view(3, LENGTH)
    later = ids.clone()
    later[:, 40:] = (later[:, 40:] + 1) % len(characters())
    a, b = net(ids)[0], net(later)[0]
    torch.testing.assert_close(a[:, :40], b[:, :40], rtol=0, atol=1e-5)
    assert (a[:, 40:] - b[:, 40:]).abs().max() > 0.01
    monkeypatch.setattr(
        module.F, "scaled_dot_product_attention", lambda q, k, v, is_causal: sdpa(q, k, v, causal=is_causal)
    )
    torch.testing.assert_close(net(ids)[0], a, rtol=0, atol=1e-5)


def test_the_held_out_text_is_every_tenth_paragraph():
    training, held = split()
    lines = text().splitlines(keepends=True)
    assert "".join(characters()[i] for i in held.tolist()) == "".join(lines[9::10])
    assert len(training) + len(held) == len(text())
    p = pieces()
    assert p.shape[1] == LENGTH + 1 and torch.equal(p[:-1, -1], p[1:, 0])
    assert torch.equal(p[:, :-1].flatten(), held[: len(p) * LENGTH])
    drawn = windows(torch.arange(1000), 50, torch.Generator().manual_seed(0))
    assert drawn.shape == (50, LENGTH + 1) and (drawn.diff() == 1).all() and drawn.max() < 1000


def test_held_out_does_not_depend_on_the_chunk_and_tells_who_was_chosen():
    torch.manual_seed(1)
    net = Reader("moe none")
    loss, chosen = held_out(net, chunk=50)
    assert chosen.shape == (2, len(pieces()), LENGTH, TOP_K)
    again, same = held_out(net, chunk=64)
    assert loss == pytest.approx(again, abs=1e-5) and (chosen == same).double().mean() > 0.999
    with torch.no_grad():
        logits, said = net(pieces()[:2, :-1])
    assert torch.equal(said[1].ids.view(2, LENGTH, TOP_K), chosen[1, :2])
    assert held_out(Reader("active"))[1].shape == (0, len(pieces()), LENGTH, TOP_K)


def test_the_bias_moves_and_the_others_have_none():
    net, losses = read("moe bias", seed=2, steps=3)
    assert len(losses) == 3 and all(m.correction_bias.abs().max() > 5e-4 for m in net.mixtures)
    assert all(m.correction_bias is None for m in read("moe aux", seed=2, steps=1)[0].mixtures)


def test_the_auxiliary_loss_is_trained_on_but_not_reported():
    (aux, a), (none, b) = read("moe aux", seed=3, steps=2), read("moe none", seed=3, steps=2)
    assert a[0] == b[0]
    assert not torch.equal(aux.mixtures[0].router, none.mixtures[0].router)


def test_one_seed_gives_one_net_and_training_may_end_early():
    seen = []

    def tell(net, step):
        seen.append(step)
        return step == 4

    (a, one), (b, two) = (read("active", 1, 9, every=2, tell=tell) for _ in range(2))
    assert seen == [2, 4] * 2 and one == two and len(one) == 4
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def test_a_book_is_learned():
    _, before, _ = learn("total", 0, steps=1)
    _, right, loss = learn("total", 0, steps=150)
    assert before < 0.05 < right and loss < 4.1


def test_readers_are_stored_and_found(tmp_path):
    torch.manual_seed(0)
    net = Reader("moe bias")
    net.mixtures[0].correction_bias.fill_(0.25)
    save_readers({"moe bias": net.state_dict()}, tmp_path / "w.safetensors")
    again = load_reader("moe bias", tmp_path / "w.safetensors")
    for k, t in net.state_dict().items():
        assert torch.equal(again.state_dict()[k], t.half().float()), k
    with pytest.raises(ValueError, match="'active' is not stored; there are: moe bias"):
        load_reader("active", tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="variant must be one of moe bias, .* got 'sparse'"):
        feed_forward("sparse", 8, 4)


def test_the_stored_study_is_whole():
    study = stored("moe_twin")
    assert study["complete"]
    for what in ("books", "readers"):
        runs = study[what]
        assert len({(r["variant"], r["seed"]) for r in runs}) == len(runs)
        assert {r["seed"] for r in runs} == set(study["seeds"])
    for r in study["readers"]:
        assert r["loss"] == min(x for _, x in r["curve"]) == dict(r["curve"])[r["step"]]
        assert all(sum(x["tokens"]) == TOP_K * study["task"]["text"]["held_out"] for x in r["load"])
    for variant, kept in study["kept"].items():
        assert held_out(load_reader(variant))[0] == pytest.approx(kept["loss"], abs=1e-3)


def test_smoke(capsys, monkeypatch):
    from benchmarks import moe_twin

    def refuse(*args):
        raise AssertionError("a smoke run stores nothing")

    monkeypatch.setattr(moe_twin, "store", refuse)
    monkeypatch.setattr(moe_twin, "save_readers", refuse)
    monkeypatch.setattr(module, "pieces", lambda: pieces()[:3])
    result = moe_twin.main(["--smoke", "--seeds", "1"])
    assert result["complete"] and result["kept"] == {}
    assert [r["variant"] for r in result["readers"]] == list(VARIANTS)
    assert "reader total" in capsys.readouterr().out
    json.dumps(result, allow_nan=False)


def test_the_best_evaluation_counts(monkeypatch):
    from benchmarks import moe_twin

    losses = iter([2.0, 1.5, 1.6, 1.55, 1.7, 1.4])
    real = held_out

    def fake(net):
        return next(losses), real(net)[1]

    monkeypatch.setattr(module, "pieces", lambda: pieces()[:2])
    monkeypatch.setattr(moe_twin, "held_out", fake)
    record, state = moe_twin.reader("moe none", 0, steps=20, every=1)
    assert (record["step"], record["loss"], record["steps"]) == (2, 1.5, 5)
    net, _ = read("moe none", 0, 2)
    assert all(torch.equal(state[k], t) for k, t in net.state_dict().items())
    assert record["active"] < record["total"]
