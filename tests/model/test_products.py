"""`product` is F.linear by another way: every shape, any number of threads, both memory orders."""

import pytest
import torch
import torch.nn.functional as F

from companion.attend.products import FEW, SIDES, pieces
from companion.model.products import matrix, product


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("out, width", [(96, 60), (60, 96), (7, 5), (5, 7), (49, 6), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(threads, out, width, bias):
    g = torch.Generator().manual_seed(0)
    weight = matrix([torch.randn(out, width, generator=g)])
    b = torch.randn(out, generator=g) if bias else None
    for rows in (0, 1, 2, 3, FEW, FEW + 1):
        for shape in ((rows, width), (1, rows, width), (rows, 1, width)):
            x = torch.randn(shape, generator=g)
            y = product(x, weight, b)
            assert y.shape == (*shape[:-1], out)
            exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
            assert (y - exact).norm() <= 1e-6 * exact.norm()


def test_rows_that_are_no_contiguous_tensor(threads):
    x = torch.randn(60, 8).t()[::2]  # (4, 60), strided
    for weight in (matrix([torch.randn(96, 60)]), matrix([torch.randn(6, 60)])):
        exact = F.linear(x.double(), weight.double())
        assert (product(x, weight) - exact).norm() <= 1e-6 * exact.norm()


def test_rows_by_every_way_are_the_same_rows(threads):
    """On both sides of every limit between the ways, and for weights that lie transposed."""
    g = torch.Generator().manual_seed(1)
    for out, width in ((96, 60), (60, 96), (64, 64)):
        weight = matrix([torch.randn(out, width, generator=g)])
        x = torch.randn(FEW + 1, width, generator=g)
        exact = F.linear(x.double(), weight.double())
        for rows in (1, 2, SIDES, SIDES + 1, FEW, FEW + 1):
            for w in (weight, weight.t().contiguous().t()):
                y = product(x[:rows], w)
                assert y.is_contiguous()
                assert (y - exact[:rows]).norm() <= 1e-6 * exact[:rows].norm()


def test_matrix_stacks_into_its_own_memory():
    parts = [torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4)]
    for given in (parts, [p.t().contiguous().t() for p in parts], parts[:1], [parts[0].double()]):
        weight = matrix(given)
        assert torch.equal(weight, torch.cat(given)) and weight.is_contiguous()
        assert not weight.requires_grad
        before = weight.clone()
        given[0].add_(1)
        assert torch.equal(weight, before)


def test_pieces_divide(threads):
    for n in (1, 2, 5, 6, 576):
        assert n % pieces(n) == 0 and 1 <= pieces(n) <= max(2, threads)
    assert pieces(576) == max(2, threads)  # two even on one thread: a batch goes another way
