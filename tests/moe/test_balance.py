"""Load statistics by hand, the auxiliary loss against transformers, the bias that evens the load out."""

import math

import pytest
import torch

from companion.cost import experts_touched, models
from companion.moe import aux_loss, load, route, updated_bias


def test_load_by_hand():
    found = load(torch.tensor([[0, 1], [0, 3], [0, -1]]), 5)
    assert found.tokens.tolist() == [3, 1, 0, 1, 0]
    assert found.share.tolist() == pytest.approx([0.6, 0.2, 0.0, 0.2, 0.0])
    assert found.max_over_mean == pytest.approx(3.0) and found.distinct == 3
    assert found.entropy == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.2)))


def test_load_of_an_even_and_of_a_collapsed_router():
    even = load(torch.arange(8).repeat(3)[:, None], 8)
    assert even.max_over_mean == pytest.approx(1.0) and even.entropy == pytest.approx(math.log(8))
    assert even.distinct == 8
    collapsed = load(torch.full((9, 1), 2), 8)
    assert (
        collapsed.max_over_mean == pytest.approx(8.0) and collapsed.entropy == 0 and collapsed.distinct == 1
    )


@pytest.mark.parametrize("ids", [torch.zeros(0, 2, dtype=torch.int64), torch.full((3, 2), -1)])
def test_load_of_nothing(ids):
    found = load(ids, 4)
    assert found.tokens.tolist() == [0] * 4 and found.share.tolist() == [0.0] * 4
    assert found.max_over_mean == found.entropy == found.distinct == 0


def test_load_takes_any_leading_shape():
    ids = torch.randint(0, 6, (2, 5, 3), generator=torch.Generator().manual_seed(0))
    assert load(ids, 6).tokens.equal(load(ids.view(10, 3), 6).tokens)


def test_ids_out_of_range_are_refused():
    for bad in (4, -2):
        with pytest.raises(ValueError, match=r"ids must be in 0..3, or -1; got"):
            load(torch.tensor([[0, bad]]), 4)


def test_distinct_experts_follow_the_prediction_for_an_even_router():
    """The count that the cost model predicts: E (1 - (1 - k/E)^B)."""
    spec, g = models["qwen3-30b-a3b"], torch.Generator().manual_seed(0)
    E, k = spec.moe.experts, spec.moe.top_k
    for batch in (1, 8, 32):
        draws = [
            load(route(torch.rand(batch, E, generator=g), top_k=k, renormalize=True)[1], E)
            for _ in range(100)
        ]
        mean = sum(d.distinct for d in draws) / 100
        assert mean == pytest.approx(experts_touched(spec, batch), rel=0.02)


def routed(T, E, k, seed=0):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return logits, torch.softmax(logits, -1), route(logits, top_k=k, renormalize=True)[1]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_aux_loss_per_token_equals_transformers(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits, probs, ids = routed(33, 8, k)
    mine, theirs = aux_loss(probs, ids, per="token"), load_balancing_loss_func((logits,), 8, k)
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5)
    keep = torch.arange(33) % 3 != 0
    mine = aux_loss(probs, ids, per="token", keep=keep)
    torch.testing.assert_close(
        mine, load_balancing_loss_func((logits,), 8, k, keep[None].long()), atol=1e-6, rtol=1e-6
    )


def test_the_two_conventions_differ_by_k():
    _, probs, ids = routed(50, 8, 3)
    torch.testing.assert_close(aux_loss(probs, ids, per="token"), 3 * aux_loss(probs, ids, per="choice"))


@pytest.mark.parametrize("k", [1, 2])
def test_an_even_router_has_loss_one_and_a_collapsed_one_more(k):
    E = 6
    even = torch.stack([(torch.arange(E) + j) % E for j in range(k)], 1)
    assert aux_loss(torch.full((E, E), 1 / E), even).item() == pytest.approx(1.0)
    certain = torch.zeros(E, E)
    certain[:, 0] = 1.0
    assert aux_loss(certain, torch.zeros(E, 1, dtype=torch.int64)).item() == pytest.approx(E)


def test_padding_of_nan_does_not_reach_the_loss():
    logits, _, ids = routed(10, 4, 2)
    keep = torch.arange(10) < 7
    dirty = logits.detach().clone()
    dirty[7:] = float("nan")
    dirty.requires_grad_()
    ids = ids.masked_fill(~keep[:, None], -1)
    loss = aux_loss(torch.softmax(dirty, -1), ids, keep=keep)
    torch.testing.assert_close(loss, aux_loss(torch.softmax(logits[:7], -1), ids[:7]))
    assert torch.autograd.grad(loss, dirty)[0][:7].isfinite().all()


def test_loss_of_no_tokens_is_zero_and_differentiable():
    probs = torch.zeros(0, 4, requires_grad=True)
    loss = aux_loss(probs, torch.zeros(0, 2, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0
    assert aux_loss(torch.ones(3, 4) / 4, torch.ones(3, 1).long(), keep=torch.zeros(3).bool()).item() == 0.0


def test_loss_refuses_other_conventions():
    with pytest.raises(ValueError, match="per must be one of choice, token, got 'batch'"):
        aux_loss(torch.ones(2, 4) / 4, torch.ones(2, 1).long(), per="batch")


def test_bias_update_by_hand():
    tokens = torch.tensor([4, 0, 2, 2])
    got = updated_bias(torch.tensor([0.0, 0.0, 1.0, -1.0]), tokens, rate=0.5)
    assert got.tolist() == [-0.5, 0.5, 1.0, -1.0]  # the last two have exactly the mean
    thirds = updated_bias(torch.zeros(3), torch.tensor([2, 1, 1]), rate=1.0)  # a mean of 4/3
    assert thirds.tolist() == [-1.0, 1.0, 1.0]
    assert updated_bias(torch.ones(3), torch.zeros(3).long()).tolist() == [1.0] * 3


def test_the_bias_evens_out_a_skewed_router():
    g = torch.Generator().manual_seed(0)
    skew = torch.linspace(-2, 2, 8)
    bias, seen = torch.zeros(8), []
    for _ in range(400):
        logits = torch.randn(64, 8, generator=g) + skew
        _, ids = route(logits, top_k=2, score="sigmoid", renormalize=True, correction_bias=bias)
        seen.append(load(ids, 8))
        bias = updated_bias(bias, seen[-1].tokens, rate=0.01)
    late = torch.stack([s.tokens for s in seen[-50:]]).sum(0).double()
    assert seen[0].max_over_mean > 2.5
    assert float(late.max() / late.mean()) < 1.1


@pytest.mark.parametrize("rate", [-0.1, float("nan")])
def test_bias_update_refuses(rate):
    with pytest.raises(ValueError, match="rate must be a finite number of at least 0"):
        updated_bias(torch.zeros(3), torch.zeros(3).long(), rate=rate)
