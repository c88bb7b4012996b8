"""Every family's block against transformers' own, with the same weights; and every rule flipped once."""

from dataclasses import replace

import pytest
import torch
from hf_blocks import BLOCKS, choices, pair, run

from companion.cost import ModelSpec, RoutingSpec
from companion.moe import MoE


def tokens(n, width=24, seed=1, dtype=torch.float32):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(weights, ids, experts):
    """(T, E): the weight of every expert, 0 where it was not chosen. The order of choices is lost."""
    return torch.zeros(ids.shape[0], experts, dtype=weights.dtype).scatter_(1, ids, weights)


@pytest.fixture(scope="module", params=list(BLOCKS))
def blocks(request):
    return pair(request.param)


@pytest.mark.parametrize("n", [1, 2, 67])
def test_outputs_equal_transformers(blocks, n):
    _, ours, theirs = blocks
    x = tokens(n)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), run(theirs, x), atol=1e-5, rtol=0)


def test_router_choices_equal_transformers(blocks):
    _, ours, theirs = blocks
    x = tokens(200)
    with torch.no_grad():
        r = ours.route(x)
        weights, ids = choices(theirs, x)
    assert r.ids.sort(1).values.equal(ids.sort(1).values)
    scale = ours.routing.scaling
    mine, wanted = table(r.weights, r.ids, ours.experts), table(weights, ids, ours.experts)
    torch.testing.assert_close(mine, wanted, atol=1e-6 * max(scale, 1), rtol=0)


def test_choices_come_best_first(blocks):
    _, ours, _ = blocks
    with torch.no_grad():
        r = ours.route(tokens(50))
    if ours.correction_bias is None:  # else the bias has its say in the order
        assert (r.weights[:, :-1] >= r.weights[:, 1:]).all()


def test_gradients_equal_transformers(blocks):
    _, ours, theirs = blocks
    x, y = tokens(30).requires_grad_(), tokens(30).requires_grad_()
    direction = tokens(30, seed=5)
    (ours(x) * direction).sum().backward()
    (run(theirs, y) * direction).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-4)
    router = getattr(theirs, "router", getattr(theirs, "gate", None)).weight
    torch.testing.assert_close(ours.router.grad, router.grad, atol=1e-4, rtol=1e-4)


FLIPS = [
    ("mixtral", dict(renormalize=False)),
    ("mixtral", dict(score="sigmoid")),
    ("qwen3_moe", dict(renormalize=True)),
    ("qwen3_moe", dict(score="topk_softmax")),  # softmax over the chosen: the same only where renormalised
    ("qwen3_moe renormalised", dict(renormalize=False)),
    ("olmoe", dict(renormalize=True)),
    ("deepseek_v2 greedy", dict(scaling=1.0)),
    ("deepseek_v2 greedy", dict(renormalize=True)),
    ("deepseek_v2 groups", dict(groups=1, topk_groups=1)),
    ("deepseek_v2 groups", dict(topk_groups=3)),
    ("deepseek_v2 groups", dict(group_score="top2_sum")),
    ("deepseek_v2 groups", dict(renormalize=True)),
    ("deepseek_v3", dict(groups=1, topk_groups=1)),
    ("deepseek_v3", dict(topk_groups=1)),
    ("deepseek_v3", dict(group_score="max")),
    ("deepseek_v3", dict(renormalize=False)),
    ("deepseek_v3", dict(scaling=1.0)),
    ("deepseek_v3", dict(score="softmax")),
    ("glm4_moe", dict(groups=4, topk_groups=2)),
    ("glm4_moe groups", dict(groups=1, topk_groups=1)),
    ("gpt_oss", dict(score="sigmoid", renormalize=True)),
    ("gpt_oss", dict(score="softmax", renormalize=False)),
]


@pytest.mark.parametrize("name, flip", FLIPS, ids=[f"{n}-{'-'.join(f)}" for n, f in FLIPS])
def test_a_flipped_rule_is_seen(name, flip):
    _, ours, theirs = pair(name)
    x = tokens(67)
    ours.routing = replace(ours.routing, **flip)
    with torch.no_grad():
        assert (ours(x) - run(theirs, x)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name, change",
    [
        ("gpt_oss", dict(swiglu_limit=7.0)),
        ("gpt_oss", dict(swiglu_alpha=1.0)),
        ("gpt_oss", dict(swiglu_limit=None)),
        ("gpt_oss", dict(router_bias=None)),
        ("gpt_oss", dict(b1=None)),
        ("gpt_oss", dict(b2=None)),
        ("deepseek_v3", dict(correction_bias=None)),
        ("glm4_moe", dict(correction_bias=None)),
        ("glm4_moe", dict(shared_w1=None)),
        ("qwen2_moe", dict(shared_gate=None)),
        ("deepseek_v2 groups", dict(shared_w1=None)),
    ],
)
def test_a_missing_part_is_seen(name, change):
    _, ours, theirs = pair(name)
    x = tokens(67)
    for field, value in change.items():
        setattr(ours, field, value)
    with torch.no_grad():
        assert (ours(x) - run(theirs, x)).abs().max() > 1e-2


def test_renormalised_softmax_and_topk_softmax_are_one_rule():
    _, ours, theirs = pair("gpt_oss")
    ours.routing = RoutingSpec("softmax", renormalize=True)
    x = tokens(67)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), run(theirs, x), atol=1e-5, rtol=0)


def test_every_parameter_has_a_gradient(blocks):
    """A weight that is loaded and not used is a bug that no shape check finds."""
    _, ours, _ = blocks
    ours.zero_grad()
    (ours(tokens(100)) ** 2).sum().backward()
    for name, p in ours.named_parameters():
        assert p.grad is not None and (p.grad != 0).any(), name


def test_float64_agrees_with_float32(blocks):
    """Where no two scores are close, the choice is the same and the outputs differ by rounding alone."""
    spec, ours, _ = blocks
    double = MoE.from_spec(spec, dtype=torch.float64)
    double.load_state_dict(ours.state_dict())
    x = tokens(40)
    with torch.no_grad():
        a, ra = ours(x, return_routing=True)
        b, rb = double(x.double(), return_routing=True)
    assert b.dtype == rb.logits.dtype == rb.weights.dtype == torch.float64
    assert ra.ids.equal(rb.ids)
    torch.testing.assert_close(a.double(), b, atol=1e-5 * ours.routing.scaling, rtol=0)


def test_an_unknown_family_is_refused():
    fields = dict(model_type="someone_moe", num_experts=4, num_experts_per_tok=2, hidden_size=8)
    fields |= dict(num_hidden_layers=1, num_attention_heads=1, vocab_size=8, intermediate_size=8)
    spec = ModelSpec.from_config(fields)
    assert spec.moe.routing is None
    with pytest.raises(ValueError, match="how 'someone_moe' routes is not known"):
        MoE.from_spec(spec)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="has no experts"):
        MoE.from_spec(replace(pair("mixtral")[0], moe=None))
