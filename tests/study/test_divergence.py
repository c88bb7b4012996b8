"""KL, agreement and likelihood against torch's own in float64, and against numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from companion.study import Divergence, compare

B, S, V = 3, 5, 17


def logits(seed, scale=3.0):
    return scale * torch.randn(B, S, V, generator=torch.Generator().manual_seed(seed))


def targets(seed=9):
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_against_torch(scale):
    a, b, t = logits(0, scale), logits(1, scale), targets()
    d = compare(a, b, t)
    la, lb = a.double().log_softmax(-1), b.double().log_softmax(-1)
    kl = F.kl_div(lb, la, log_target=True, reduction="none").sum(
        -1
    )  # kl_div(input, target) is KL(target || input)
    torch.testing.assert_close(d.kl, kl, rtol=1e-12, atol=1e-12)
    for got, x in ((d.nll, b), (d.nll_reference, a)):
        nll = F.cross_entropy(x.double().flatten(0, 1), t.flatten(), reduction="none").view(B, S)
        torch.testing.assert_close(got, nll, rtol=1e-12, atol=1e-12)
    assert torch.equal(d.agree, a.argmax(-1) == b.argmax(-1))


def test_the_first_is_the_reference():
    """KL is not symmetric: p = (1/2, 1/2), q = (3/4, 1/4)."""
    p, q = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[math.log(3.0), 0.0]]])
    zero = torch.zeros(1, 1, dtype=torch.long)
    assert float(compare(p, q, zero).kl) == pytest.approx(0.5 * math.log(4 / 3), rel=1e-6)
    assert float(compare(q, p, zero).kl) == pytest.approx(0.75 * math.log(3) - math.log(2), rel=1e-6)
    assert float(compare(p, q, zero).nll) == pytest.approx(math.log(4 / 3), rel=1e-6)


def test_the_same_logits_are_at_no_distance_at_all():
    a = logits(0, 20.0)
    d = compare(a, a.clone(), targets())
    assert d.kl.tolist() == [[0.0] * S] * B and d.agree.all() and torch.equal(d.nll, d.nll_reference)
    assert {k: (e.mean, e.se) for k, e in d.summary().items()} == {
        "kl": (0, 0),
        "agree": (1, 0),
        "dnll": (0, 0),
    }


def test_a_constant_added_to_the_logits_changes_nothing():
    d = compare(logits(0), logits(0) + 7.25, targets())
    assert d.kl.max() < 1e-12 and d.kl.min() >= 0


def test_distances_that_float32_can_not_tell_from_zero():
    """For logits a and a + e x, KL is e**2 / 2 times the variance of x under p; in float32 noise hides it."""
    a, e = logits(0).double(), 1e-5
    x = logits(1).double()
    p = a.softmax(-1)
    variance = (p * x**2).sum(-1) - (p * x).sum(-1) ** 2
    torch.testing.assert_close(
        compare(a, a + e * x, targets()).kl, e**2 / 2 * variance, rtol=1e-3, atol=1e-15
    )


def test_a_token_that_has_no_chance_left_is_no_nan():
    a = torch.zeros(1, 1, 3)
    a[..., 2] = -2000.0  # its probability is 0 in float64 too
    d = compare(a, torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.long))
    assert float(d.kl) == pytest.approx(math.log(1.5))


def test_standard_errors_are_over_chunks_and_not_over_tokens():
    kl = torch.tensor([[0.0, 2.0], [3.0, 3.0], [4.0, 6.0]], dtype=torch.float64)
    agree = torch.tensor([[True, False], [True, True], [False, False]])
    d = Divergence(kl, agree, kl + 1, kl)
    s = d.summary()
    # means of chunks 1, 3, 5: mean 3, standard deviation 2
    assert s["kl"].mean == 3 and s["kl"].se == pytest.approx(2 / 3**0.5) and s["kl"].n == 3
    assert s["agree"].mean == 0.5 and s["agree"].se == pytest.approx(0.5 / 3**0.5)
    assert s["dnll"].mean == 1 and s["dnll"].se == 0
    assert d.per_chunk()["agree"] == [0.5, 1.0, 0.0]


def test_parts_join_along_the_tokens():
    a, b, t = logits(0), logits(1), targets()
    whole = compare(a, b, t)
    joined = Divergence.join([compare(a[:, i], b[:, i], t[:, i]) for i in (slice(0, 2), slice(2, 5))])
    for name in ("kl", "agree", "nll", "nll_reference"):
        assert torch.equal(getattr(joined, name), getattr(whole, name))


def test_one_chunk_has_no_standard_error():
    d = compare(logits(0)[:1], logits(1)[:1], targets()[:1])
    assert d.summary()["kl"].se is None


@pytest.mark.parametrize(
    "other, wanted, what",
    [
        ((B, S, V - 1), (B, S), "logits"),
        ((B, S, V), (B, S - 1), "targets"),
        ((B, S - 1, V), (B, S), "logits"),
    ],
)
def test_shapes_that_do_not_fit(other, wanted, what):
    with pytest.raises(Exception, match=what):  # the type check of the tests may come first
        compare(torch.zeros(B, S, V), torch.zeros(other), torch.zeros(wanted, dtype=torch.long))
