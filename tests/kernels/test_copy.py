"""The copy: bit for bit, at every size around a block's, and what it refuses."""

import pytest
import torch

from companion.kernels.copy import BLOCK_BYTES, copy, copy_bytes, copy_reference


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("blocks", [0, 1, 2.5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_every_bit_arrives(dtype, blocks, more):
    n = max(0, int(blocks * BLOCK_BYTES) // dtype.itemsize + more)
    room = torch.full(((n + 64) * dtype.itemsize,), 7, dtype=torch.uint8)
    x = torch.randint(256, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype)  # NaN of all kinds
    out = room.view(dtype)[:n]
    assert copy(x, out) is out
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))
    assert (room[n * dtype.itemsize :] == 7).all()  # nothing beyond the end
    assert torch.equal(copy_reference(x).view(torch.uint8), copy(x).view(torch.uint8))


def test_the_shape_stays_and_the_source_too():
    x = torch.randn(3, 5, 7)
    before = x.clone()
    y = copy(x)
    assert y.shape == x.shape and torch.equal(x, before) and y.data_ptr() != x.data_ptr()
    assert copy(x[1:]).equal(x[1:])  # begins within memory


def test_a_copy_reads_once_and_writes_once():
    assert copy_bytes(torch.zeros(1000, dtype=torch.bfloat16)) == 4000


@pytest.mark.parametrize(
    "x, out, says",
    [
        (torch.zeros(4, 4).t(), None, "x has strides"),
        (torch.zeros(4, 4), torch.zeros(4, 4).t(), "out has strides"),
        (torch.zeros(4), torch.zeros(5), r"out is torch.float32 \(5,\)"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), "out is torch.int32"),
        (torch.zeros(4, dtype=torch.complex128), None, "x has dtype torch.complex128"),
        (torch.zeros(4), torch.zeros(4, device="meta"), "on cpu and meta"),
    ],
)
def test_what_does_not_fit_is_refused(x, out, says):
    with pytest.raises(ValueError, match=says):
        copy(x, out)
