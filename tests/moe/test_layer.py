"""companion.moe.MoE: padding, precision of the router, shared expert, capacity, loading, bad sizes."""

import doctest

import pytest
import torch

import companion.moe
from companion.cost import RoutingSpec, models
from companion.moe import MoE, dense_experts

NAN = float("nan")


def layer(seed=0, **changes):
    torch.manual_seed(seed)
    fields = dict(d_model=10, ffn=6, experts=8, top_k=2, shared_ffn=9)
    return MoE(**{**fields, **changes})


def rand(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_docstring_runs():
    assert doctest.testmod(companion.moe).failed == 0


@pytest.mark.parametrize("shape", [(10,), (0, 10), (1, 10), (7, 10), (2, 3, 10), (2, 0, 10), (2, 3, 4, 10)])
def test_any_leading_shape(shape):
    moe, x = layer(), rand(*shape)
    out, routing = moe(x, return_routing=True)
    assert out.shape == x.shape and routing.ids.shape == (x.numel() // 10, 2)
    flat = x.reshape(-1, 10) if x.numel() else x.new_zeros(0, 10)
    want = dense_experts(flat, moe.w1, moe.w2, routing.ids, routing.weights) + moe.shared(flat)
    torch.testing.assert_close(out.reshape(want.shape), want, atol=1e-6, rtol=0)


def test_no_tokens_has_gradients_of_zero():
    moe = layer(expert_bias=True, router_bias=True, shared_gate=True)
    moe(torch.zeros(0, 10)).sum().backward()
    for name, p in moe.named_parameters():
        assert p.grad is None or (p.grad == 0).all(), name


def test_padding_of_nan_is_sent_nowhere():
    moe, x = layer(), rand(2, 5, 10).requires_grad_()
    keep = torch.tensor([[True] * 5, [True, True, False, False, False]])
    dirty = x.detach().clone()
    dirty[~keep] = NAN
    dirty.requires_grad_()
    out, routing = moe(dirty, keep=keep, return_routing=True)
    want = moe(x[keep])
    torch.testing.assert_close(out[keep], want, atol=1e-6, rtol=0)
    assert (out[~keep] == 0).all()
    assert (routing.ids.view(2, 5, 2)[~keep] == -1).all()
    assert int(routing.load.tokens.sum()) == 2 * int(keep.sum())
    direction = rand(2, 5, 10, seed=3)
    (out * direction).sum().backward()
    gradients = {n: p.grad.clone() for n, p in moe.named_parameters()}
    assert dirty.grad[keep].isfinite().all() and (dirty.grad[~keep] == 0).all()
    moe.zero_grad()
    (moe(x[keep]) * direction[keep]).sum().backward()
    for n, p in moe.named_parameters():
        torch.testing.assert_close(gradients[n], p.grad, atol=1e-5, rtol=1e-5)


def test_padding_without_a_mask_still_reaches_no_other_token():
    moe, x = layer(), rand(9, 10)
    want = moe(x)
    x[3] = NAN
    got = moe(x)
    others = [t for t in range(9) if t != 3]
    torch.testing.assert_close(got[others], want[others], atol=1e-6, rtol=0)
    assert got[3].isnan().all()


def test_the_router_does_not_tie_in_bfloat16():
    """Logits 1 and 1 + 2^-9 are one number in bfloat16; in float32 the second expert is chosen."""
    moe = MoE(2, 4, 2, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        moe.router.copy_(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        _, routing = moe(torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16), return_routing=True)
    assert routing.logits.dtype == torch.float32 and routing.ids.tolist() == [[1]]


def test_bfloat16_layer_is_near_the_float32_one():
    exact = layer(shared_gate=True, correction_bias=True)
    low = layer(shared_gate=True, correction_bias=True, dtype=torch.bfloat16)
    low.load_state_dict(exact.state_dict())
    exact.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    x = rand(40, 10).bfloat16()
    out, want = low(x), exact(x.float())
    assert out.dtype == torch.bfloat16 and low.correction_bias.dtype == torch.float32
    assert (out.float() - want).norm() / want.norm() < 2e-2


def test_a_shared_gate_of_zero_halves_the_shared_expert():
    moe = layer(shared_gate=True)
    with torch.no_grad():
        moe.shared_gate.zero_()
        x = rand(6, 10)
        halved = moe.shared(x)
        moe.shared_gate = None
        torch.testing.assert_close(halved, moe.shared(x) / 2)


def test_routed_takes_a_routing_of_ones_own():
    moe, x = layer(shared_ffn=0), rand(5, 10)
    routing = moe.route(x)
    torch.testing.assert_close(moe(x), moe.routed(x, routing))


def test_capacity_factor_drops_the_latest_tokens():
    moe = layer(shared_ffn=0, top_k=1, capacity_factor=1.0)
    x = rand(1, 10).expand(16, 10)  # all to one expert, which takes ceil(16 / 8) = 2
    out = moe(x)
    assert (out[:2] != 0).any(1).all() and (out[2:] == 0).all()


def test_rebalance_moves_the_bias_and_then_the_choice():
    moe = layer(correction_bias=True, router_bias=True, routing=RoutingSpec("sigmoid"))
    x = rand(200, 10)
    with torch.no_grad():
        moe.router_bias.copy_(torch.linspace(-2, 2, 8))
    first = moe.route(x)
    for _ in range(300):
        moe.rebalance(moe.route(x).ids, rate=0.005)
    assert first.load.max_over_mean > 2.5
    assert moe.route(x).load.max_over_mean < 1.25
    with pytest.raises(ValueError, match="rebalance needs correction_bias=True"):
        layer().rebalance(first.ids)


def test_probabilities_are_of_the_rule():
    for score in ("softmax", "topk_softmax", "sigmoid"):
        moe = layer(routing=RoutingSpec(score))
        routing = moe.route(rand(5, 10))
        torch.testing.assert_close(routing.probs.sum(-1), torch.ones(5))
        rule = torch.sigmoid if score == "sigmoid" else torch.exp
        ratio = rule(routing.logits)
        torch.testing.assert_close(routing.probs, ratio / ratio.sum(-1, keepdim=True))


def test_loading_without_filling_the_memory_first():
    moe = layer(shared_gate=True, router_bias=True, expert_bias=True, correction_bias=True)
    empty = layer(shared_gate=True, router_bias=True, expert_bias=True, correction_bias=True, device="meta")
    empty.load_state_dict(moe.state_dict(), assign=True)
    x = rand(12, 10)
    assert moe(x).equal(empty(x))
    assert set(moe.state_dict()) == {
        *("router", "router_bias", "correction_bias", "w1", "b1", "w2", "b2"),
        *("shared_w1", "shared_w2", "shared_gate"),
    }


@pytest.mark.parametrize("name", [n for n in models if models[n].moe])
def test_parameters_equal_the_count_of_every_known_model(name):
    """Tensors that take no memory, against the cost model's formula."""
    spec = models[name]
    moe = MoE.from_spec(spec, device="meta")
    d, m = spec.d_model, spec.moe
    ours = sum(t.numel() for t in moe.state_dict().values())
    expert = 3 * d * m.ffn + (2 * m.ffn + d if m.expert_bias else 0)
    extra = m.experts * (m.router_bias + m.correction_bias) + d * m.shared_gate
    assert ours == m.experts * (expert + d) + 3 * d * m.shared_ffn + extra
    assert moe.routing == m.routing and moe.swiglu_limit == m.swiglu_limit


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(top_k=9), "top_k must be an integer from 1 to 8, got 9"),
        (dict(routing=RoutingSpec(groups=3)), "groups must be a divisor of 8 experts, got 3"),
        (dict(experts=0), "experts must be a positive integer, got 0"),
        (dict(ffn=0), "ffn must be a positive integer, got 0"),
        (dict(shared_ffn=-1), "shared_ffn must be an integer of at least 0, got -1"),
        (dict(shared_ffn=0, shared_gate=True), "shared_ffn must be a positive integer, got 0"),
        (dict(swiglu_limit=0.0), "swiglu_limit must be a positive finite number, got 0.0"),
        (dict(capacity_factor=0.0), "factor must be a positive finite number, got 0.0"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(ValueError) as caught:
        layer(**change)
    assert message in str(caught.value)


def test_input_of_another_width_is_refused():
    moe = layer()
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., 10\), got \(3, 9\)"):
        MoE.forward.__wrapped__(moe, torch.zeros(3, 9))
    with pytest.raises(ValueError, match=r"keep must be bool \(3,\), got"):
        MoE.forward.__wrapped__(moe, torch.zeros(3, 10), keep=torch.ones(2, dtype=torch.bool))
