"""route: hand-made examples, every rule against a loop over Python floats, hostile logits, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.moe import route

INF, NAN = math.inf, math.nan


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_hand(row, top_k, score, renormalize, bias, groups, topk_groups, group_score, scaling):
    """One row in Python floats: sorting by (-value, index) is "ties to the lower index". Shares no code."""
    E = len(row)
    if score == "softmax":
        high = max(row)
        total = sum(math.exp(v - high) for v in row)
        scores = [math.exp(v - high) / total for v in row]
    elif score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in row]
    else:
        scores = list(row)
    choice = [s + b for s, b in zip(scores, bias)]
    size = E // groups
    rank = []
    for g in range(groups):
        inside = sorted(choice[g * size : (g + 1) * size], reverse=True)
        rank.append(inside[0] if group_score == "max" or groups == 1 else inside[0] + inside[1])
    best = sorted(range(groups), key=lambda g: (-rank[g], g))[:topk_groups]
    allowed = [e for e in range(E) if e // size in best]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
    weights = [scores[e] for e in ids]
    if score == "topk_softmax":
        high = max(weights)
        weights = [math.exp(w - high) for w in weights]
        weights = [w / sum(weights) for w in weights]
    elif renormalize:
        weights = [w / sum(weights) for w in weights]
    return [w * scaling for w in weights], ids


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_rule_equals_the_loop(data):
    groups = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    size = data.draw(st.integers(2 if groups > 1 else 1, 4))
    topk_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, topk_groups * size))
    E, T = groups * size, data.draw(st.integers(1, 4))
    # Halves: many ties, and sums without rounding.
    coarse = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    rows = (torch.randint(-4, 5, (T, E), generator=coarse) / 2).tolist()
    biased = data.draw(st.booleans())
    bias = (torch.randint(-4, 5, (E,), generator=coarse) / 2).tolist() if biased else [0.0] * E
    score = data.draw(st.sampled_from(["softmax", "sigmoid", "topk_softmax"]))
    rule = (score, data.draw(st.booleans()))
    more = (groups, topk_groups, data.draw(st.sampled_from(["max", "top2_sum"])), 2.5)
    weights, ids = route(
        torch.tensor(rows, dtype=torch.float64),
        top_k=top_k,
        score=rule[0],
        renormalize=rule[1],
        correction_bias=torch.tensor(bias, dtype=torch.float64) if biased else None,
        groups=more[0],
        topk_groups=more[1],
        group_score=more[2],
        scaling=more[3],
    )
    for t, row in enumerate(rows):
        want_weights, want_ids = by_hand(row, top_k, *rule, bias, *more)
        choice = ids[t].tolist()
        if choice != want_ids and score != "topk_softmax":
            # The two sides may round a score differently, and so break a near tie the other way.
            assert sorted(weights[t].tolist()) == pytest.approx(sorted(want_weights), abs=1e-12)
        else:
            assert choice == want_ids
            assert weights[t].tolist() == pytest.approx(want_weights, abs=1e-12)


def test_without_and_with_renormalisation():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, ids = route(logits, top_k=2, renormalize=False)
    assert plain[0].tolist() == pytest.approx([0.64391, 0.23688], abs=1e-5) and ids.tolist() == [[0, 1]]
    renormalised, _ = route(logits, top_k=2, renormalize=True)
    assert renormalised[0].tolist() == pytest.approx([0.73106, 0.26894], abs=1e-5)


def test_renormalised_softmax_equals_softmax_of_the_chosen_and_sigmoid_does_not():
    logits = rand(100, 16)
    a, ids = route(logits, top_k=4, renormalize=True)
    b, same = route(logits, top_k=4, score="topk_softmax", renormalize=False)
    assert ids.equal(same)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    c, still = route(logits, top_k=4, score="sigmoid", renormalize=True)
    assert ids.equal(still)
    assert (a - c).abs().max() > 0.01


def test_masked_groups_are_out_even_if_every_score_is_negative():
    """Filled with 0 instead of -inf, the masked group would win: -0.1 < 0."""
    bias = torch.tensor([-0.1, -0.2, -0.5, -0.6]) - 0.5  # sigmoid(0) = 0.5
    rule = dict(top_k=2, score="sigmoid", renormalize=True, groups=2, topk_groups=1)
    for group_score in ("top2_sum", "max"):
        _, ids = route(torch.zeros(1, 4), correction_bias=bias, group_score=group_score, **rule)
        assert ids.tolist() == [[0, 1]]


def test_the_correction_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[0.0, 0.0, 3.0]]), torch.tensor([0.0, 5.0, 0.0])
    weights, ids = route(logits, top_k=1, score="sigmoid", renormalize=False, correction_bias=bias)
    assert ids.tolist() == [[1]] and weights.tolist() == [[0.5]]


def test_the_rank_of_a_group_is_its_best_or_its_two_best():
    logits = torch.tensor([[4.0, -9.0, 3.0, 2.9]])
    rule = dict(top_k=1, score="sigmoid", renormalize=True, groups=2, topk_groups=1)
    assert route(logits, group_score="max", **rule)[1].tolist() == [[0]]
    assert route(logits, group_score="top2_sum", **rule)[1].tolist() == [[2]]


def test_saturated_sigmoids_give_weights_of_zero_not_nan():
    rule = dict(top_k=2, score="sigmoid", renormalize=True)
    weights, ids = route(torch.full((1, 4), -200.0), **rule)
    assert weights.tolist() == [[0.0, 0.0]] and ids.tolist() == [[0, 1]]
    assert route(torch.full((1, 4), 200.0), **rule)[0].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("E", [4, 64, 200, 257])
def test_ties_go_to_the_lower_index(score, E):
    _, ids = route(torch.zeros(3, E), top_k=4, score=score, renormalize=True)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    logits = torch.zeros(1, E)
    logits[0, E - 1] = 1.0
    assert route(logits, top_k=3, score=score, renormalize=True)[1].tolist() == [[E - 1, 0, 1]]


def test_ties_between_groups_go_to_the_lower_group():
    rule = dict(top_k=3, renormalize=True, groups=8, topk_groups=3)
    for group_score in ("max", "top2_sum"):
        _, ids = route(torch.zeros(1, 16), group_score=group_score, **rule)
        assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_are_computed_in_float32(dtype):
    logits = rand(20, 8).to(dtype)
    got = route(logits, top_k=3, renormalize=True)
    want = route(logits.float(), top_k=3, renormalize=True)
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.int64
    assert got[0].equal(want[0]) and got[1].equal(want[1])


def test_float64_stays():
    assert route(rand(5, 8), top_k=3, score="sigmoid", renormalize=True)[0].dtype == torch.float64


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_no_tokens(score):
    for groups in (1, 4):
        weights, ids = route(
            torch.zeros(0, 8), top_k=2, score=score, renormalize=True, groups=groups, topk_groups=1
        )
        assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_row_of_nan_touches_no_other(score, groups):
    clean = rand(6, 16, dtype=torch.float32)
    dirty = clean.clone()
    dirty[2], dirty[4] = NAN, INF
    rule = dict(top_k=3, score=score, renormalize=True, groups=groups, topk_groups=min(2, groups))
    weights, ids = route(dirty, **rule)
    want_weights, want_ids = route(clean, **rule)
    others = [0, 1, 3, 5]
    assert weights[others].equal(want_weights[others]) and ids[others].equal(want_ids[others])
    assert weights[2].isnan().all()
    assert ((ids >= 0) & (ids < 16)).all() and all(len(set(row)) == 3 for row in ids.tolist())


def test_an_expert_switched_off_by_minus_infinity():
    logits = torch.tensor([[1.0, -INF, 0.5]])
    for score in ("softmax", "sigmoid", "topk_softmax"):
        weights, ids = route(logits, top_k=2, score=score, renormalize=True)
        assert ids.tolist() == [[0, 2]] and weights.isfinite().all()


def test_gradients_flow_through_the_weights():
    logits = rand(4, 6)
    for score in ("softmax", "sigmoid", "topk_softmax"):

        def weights(x, score=score):
            return route(x, top_k=2, score=score, renormalize=True, scaling=1.5)[0]

        assert torch.autograd.gradcheck(weights, (logits.clone().requires_grad_(),))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(top_k=9), "top_k must be an integer from 1 to 8, got 9"),
        (dict(top_k=0), "top_k must be an integer from 1 to 8, got 0"),
        (dict(score="relu"), "score must be one of softmax, sigmoid, topk_softmax, got 'relu'"),
        (dict(group_score="mean"), "group_score must be one of top2_sum, max, got 'mean'"),
        (dict(groups=3), "groups must be a divisor of 8 experts, got 3"),
        (dict(groups=0), "groups must be a positive integer, got 0"),
        (dict(groups=2, topk_groups=3), "topk_groups must be an integer from 1 to 2, got 3"),
        (dict(topk_groups=2), "topk_groups must be an integer from 1 to 1, got 2"),
        (dict(groups=4, topk_groups=1, top_k=3), "topk_groups must be at least 2 for top_k=3, got 1"),
        (dict(groups=8, topk_groups=4), "groups must be of at least 2 experts each"),
        (dict(scaling=NAN), "scaling must be a finite number, got nan"),
    ],
)
def test_a_rule_that_cannot_choose_is_refused(change, message):
    with pytest.raises(ValueError) as caught:
        route(torch.zeros(2, 8), **{"top_k": 2, "renormalize": True, **change})
    assert message in str(caught.value)


def test_a_bias_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"correction_bias must be of shape \(8,\), got \(7,\)"):
        route.__wrapped__(torch.zeros(2, 8), top_k=2, renormalize=True, correction_bias=torch.zeros(7))


def test_logits_of_another_kind_are_refused():
    for wrong in (torch.zeros(8), torch.zeros(2, 3, 8), torch.zeros(2, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"logits must be floats of shape \(T, E\)"):
            route.__wrapped__(wrong, top_k=2, renormalize=True)
