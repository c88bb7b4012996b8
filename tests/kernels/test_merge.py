"""Stage two alone, against `companion.attention.merge_partials` in float64."""

import pytest
import torch

from companion.attention import merge_partials
from companion.kernels import merge_splits


def partials(splits, v_dim=64, queries=2, heads=3, B=2, empty=(), seed=0, spread=3.0):
    """outs and lses as the kernel wants them; what belongs to an empty split is NaN."""
    g = torch.Generator().manual_seed(seed)
    outs = torch.randn(B, queries, heads, splits, v_dim, generator=g)
    lses = spread * torch.randn(B, heads, queries, splits, generator=g)
    for s in empty:
        lses[..., s] = -torch.inf
        outs[:, :, :, s] = torch.nan
    return outs, lses


def expected(outs, lses, sinks=None):
    sinks = None if sinks is None else sinks.double()
    out, lse = merge_partials(outs.double().permute(3, 0, 2, 1, 4), lses.double().movedim(-1, 0), sinks=sinks)
    return out.transpose(1, 2), lse


def check(got, want):
    (out, lse), (true, true_lse) = got, want
    assert (out.double() - true).norm() <= 5e-6 * true.norm()
    torch.testing.assert_close(lse.double(), true_lse, rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("splits", [1, 2, 15, 16, 17, 40, 128])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, 30.0, -30.0])], ids=["plain", "sinks"])
def test_any_number_of_splits(splits, sinks):
    outs, lses = partials(splits, empty=range(0, splits - 1, 3))
    check(merge_splits(outs, lses, sinks=sinks), expected(outs, lses, sinks))


@pytest.mark.parametrize("v_dim", [1, 16, 59, 96, 128, 512])
def test_any_width(v_dim):
    outs, lses = partials(5, v_dim, empty=[4])
    check(merge_splits(outs, lses), expected(outs, lses))


@pytest.mark.parametrize("sinks", [None, torch.zeros(3), torch.full((3,), -torch.inf)])
def test_no_key_anywhere(sinks):
    outs, lses = partials(20, empty=range(20))
    out, lse = merge_splits(outs, lses, sinks=sinks)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_lses_far_apart():
    """e to the 3,000 is beyond any format: only differences may be taken to a power."""
    outs, lses = partials(40, spread=1000.0)
    check(merge_splits(outs, lses), expected(outs, lses))


def test_one_split_is_itself_bit_for_bit():
    outs, lses = partials(1)
    out, lse = merge_splits(outs, lses)
    assert torch.equal(out, outs[:, :, :, 0]) and torch.equal(lse, lses[..., 0])


@pytest.mark.parametrize("more", [1, 12, 30])
def test_empty_splits_behind_change_no_bit(more):
    outs, lses = partials(5)
    wide, wide_lse = partials(5 + more, empty=range(5, 5 + more))
    wide[:, :, :, :5], wide_lse[..., :5] = outs, lses
    sinks = torch.tensor([0.3, -1.0, 2.0])
    for a, b in zip(merge_splits(outs, lses, sinks=sinks), merge_splits(wide, wide_lse, sinks=sinks)):
        assert torch.equal(a, b)


def test_views():
    outs, lses = partials(6)
    wide = torch.full((2, 3, 4, 8, 70), torch.nan)
    wide[:, 1:, 1:, 1:7, 3:67] = outs
    other = torch.full((6, 2, 3, 2), torch.nan)
    other.movedim(0, -1).copy_(lses)
    got = merge_splits(wide[:, 1:, 1:, 1:7, 3:67], other.movedim(0, -1))
    assert all(torch.equal(a, b) for a, b in zip(got, merge_splits(outs, lses)))


def test_inputs_stay_as_they_were():
    outs, lses = partials(4)
    before = outs.clone(), lses.clone()
    merge_splits(outs, lses, sinks=torch.zeros(3))
    assert torch.equal(outs, before[0]) and torch.equal(lses, before[1])
