"""What speculation promises: the formulas of the papers, against simulation by exact enumeration."""

from fractions import Fraction

import pytest

from companion.cost import HardwareSpec, decode_step, models, prefill
from companion.cost.step import (
    best_draft_length,
    expected_tokens,
    predicted_pass_cost,
    speculative_speedup,
    verify_pass,
)


def by_enumeration(alpha, gamma):
    """Mean of (accepted + 1): i drafts stand and the next does not, or all stand."""
    ends = [(alpha**i * (1 - alpha), i + 1) for i in range(gamma)] + [(alpha**gamma, gamma + 1)]
    return sum(chance * tokens for chance, tokens in ends)


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize("alpha", [Fraction(n, 10) for n in range(11)])
def test_expected_tokens(alpha, gamma):
    want = by_enumeration(alpha, gamma)
    assert expected_tokens(float(alpha), gamma) == pytest.approx(float(want), abs=1e-12)
    if alpha < 1:
        assert want == (1 - alpha ** (gamma + 1)) / (1 - alpha)


def test_published_figures():
    # DeepSeek-V3: one token ahead, accepted 85 to 90 % of the time: 1.85 to 1.90 tokens per pass.
    assert [expected_tokens(a, 1) for a in (0.85, 0.90)] == [1.85, 1.90]
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)


def test_no_loss_of_digits_next_to_1():
    assert expected_tokens(1 - 1e-16, 5) == pytest.approx(6, abs=1e-12) and expected_tokens(1, 5) == 6


def test_speedup():
    # Leviathan et al. 2023, theorem 3.8: (1 - a^(g+1)) / ((1 - a) (g c + 1)).
    assert speculative_speedup(0.8, 5, draft_cost=0.05) == pytest.approx(3.68928 / 1.25)
    assert speculative_speedup(0.5, 2, pass_cost=1.75) == 1.0
    assert speculative_speedup(0.5, 3, pass_cost=lambda rows: rows / 2) == 1.875 / 2
    assert speculative_speedup(0.9, 0) == 1


def test_the_best_length():
    assert best_draft_length(0.0) == 0 and best_draft_length(1.0, longest=6) == 6
    assert best_draft_length(0.3, pass_cost=1.5) == 0  # 1.43 tokens at most, for 1.5 passes
    assert best_draft_length(0.4, pass_cost=1.5) > 0
    assert best_draft_length(0.9, pass_cost=lambda rows: rows) == 0
    assert best_draft_length(0.9, longest=0) == 0
    for alpha in (0.2, 0.5, 0.8):
        gains = [speculative_speedup(alpha, g, draft_cost=0.1) for g in range(9)]
        best = best_draft_length(alpha, draft_cost=0.1)
        assert gains[best] == max(gains) and best == gains.index(max(gains))


def test_a_pass_of_one_row_is_a_decode_step():
    for name in ("llama-3.1-8b", "smollm2-135m", "deepseek-v3"):
        one, step = verify_pass(name, "h100-sxm", 1, 4096), decode_step(name, "h100-sxm", 1, 4096)
        assert (one.weights_bytes, one.kv_bytes) == (step.weights_bytes, step.kv_bytes)
        assert one.seconds == pytest.approx(step.seconds)


def test_a_few_rows_are_free_where_weights_are_read_and_cost_where_experts_are():
    dense = predicted_pass_cost("llama-3.1-8b", "h100-sxm", 4096)
    assert dense(1) == 1 and dense(8) == pytest.approx(1, abs=1e-9)
    experts = predicted_pass_cost("deepseek-v3", "h100-sxm", 4096)
    assert 1.4 < experts(2) < 1.7 < experts(4)  # two tokens touch nearly twice the routed experts
    slow = HardwareSpec.measured(bandwidth=30e9, flops=60e9)
    model = models["smollm2-135m"]
    cpu = predicted_pass_cost(model, slow, 512, weights="fp32", kv="fp32")
    assert cpu(1) == 1 and cpu(32) > 2 and cpu(600) > cpu(32)
    assert (
        verify_pass(model, slow, 5, 512).seconds == prefill(model, slow, 5, cached=507, logits="all").seconds
    )


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: expected_tokens(1.1, 2), "alpha"),
        (lambda: expected_tokens(-0.1, 2), "alpha"),
        (lambda: expected_tokens(float("nan"), 2), "alpha"),
        (lambda: expected_tokens(0.5, -1), "gamma"),
        (lambda: speculative_speedup(0.5, 2, pass_cost=0), "pass_cost"),
        (lambda: speculative_speedup(0.5, 2, draft_cost=-0.1), "draft_cost"),
        (lambda: speculative_speedup(0.5, 2, draft_cost=float("inf")), "draft_cost"),
        (lambda: best_draft_length(0.5, longest=-1), "longest"),
        (lambda: verify_pass("llama-3.1-8b", "h100-sxm", 0, 8), "rows"),
        (lambda: verify_pass("llama-3.1-8b", "h100-sxm", 9, 8), "context"),
    ],
)
def test_what_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
