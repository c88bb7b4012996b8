"""`product` is F.linear by another way: every shape, any number of threads, both memory orders."""

import pytest
import torch
import torch.nn.functional as F

from companion.model.products import FEW, matrix, pieces, product


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


def test_matrix_order_and_stacking():
    parts = [torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4)]
    tall, flat = matrix(parts), matrix([torch.arange(6.0).view(2, 3)])
    assert torch.equal(tall, torch.cat(parts)) and not tall.is_contiguous()
    assert flat.is_contiguous()
    assert matrix([p.double() for p in parts]).is_contiguous()


def test_pieces_divide(threads):
    for n in (1, 2, 5, 6, 576):
        assert n % pieces(n) == 0 and 1 <= pieces(n) <= threads
    assert pieces(576) == threads
