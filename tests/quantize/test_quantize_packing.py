"""Several codes in a byte: the order, every byte there and back, and what is refused."""

import inspect
import itertools

import pytest
import torch

from companion.quantize import pack, unpack


def u8(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_the_low_nibble_comes_first():
    assert pack(u8(1, 2), 4).tolist() == [0x21]
    assert pack(u8(15, 0, 0, 15), 4).tolist() == [0x0F, 0xF0]


def test_the_lowest_bits_come_first():
    assert pack(u8(1, 2, 3, 0), 2).tolist() == [0b00_11_10_01]
    assert pack(u8(3, 0, 0, 0, 0, 0, 0, 3), 2).tolist() == [3, 192]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_byte_survives(bits):
    bytes_ = torch.arange(256, dtype=torch.uint8)
    n = 8 // bits
    codes = unpack(bytes_, bits)
    assert codes.dtype == torch.uint8 and codes.shape == (256 * n,)
    assert codes.tolist() == [(b >> (bits * i)) & (2**bits - 1) for b in range(256) for i in range(n)]
    assert torch.equal(pack(codes, bits), bytes_)


@pytest.mark.parametrize("bits", [2, 4])
def test_every_combination_of_codes_survives(bits):
    """All 256 groups of codes that fill a byte, from the other side; each gives its own byte."""
    codes = torch.tensor(list(itertools.product(range(2**bits), repeat=8 // bits)), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (256, 1) and len(set(packed.flatten().tolist())) == 256
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 0, 8), (2, 3, 0), (1, 2, 3, 16)])
def test_only_the_last_axis_shrinks(bits, shape):
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], shape[-1] * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_strided_codes_and_no_change_of_the_input():
    base = torch.randint(0, 16, (6, 8), dtype=torch.uint8)
    before = base.clone()
    view = base.T  # (8, 6), not contiguous
    assert torch.equal(pack(view, 4), pack(view.contiguous(), 4))
    packed = pack(base, 4)
    packed.fill_(0)
    assert torch.equal(base, before)


raw_pack, raw_unpack = inspect.unwrap(pack), inspect.unwrap(unpack)


@pytest.mark.parametrize("bits", [0, 1, 3, 16, -4])
def test_other_widths_are_refused(bits):
    for f in (raw_pack, raw_unpack):
        with pytest.raises(ValueError, match=f"bits must .* got {bits}"):
            f(u8(0, 0), bits)


@pytest.mark.parametrize(
    "codes, bits, message",
    [
        (u8(1, 2, 3), 4, "codes must .* 2 divides, got 3"),
        (u8(1, 2), 2, "codes must .* 4 divides, got 2"),
        (u8(1, 16), 4, "codes must .* 0 to 15, got 16"),  # would spill into its neighbour
        (u8(4, 0, 0, 0), 2, "codes must .* 0 to 3, got 4"),
        (torch.zeros(2, dtype=torch.int8), 4, "codes must be uint8.* got torch.int8"),
        (torch.tensor(1, dtype=torch.uint8), 4, "codes must .* at least one axis, got torch.uint8 of 0"),
    ],
)
def test_bad_codes_are_refused(codes, bits, message):
    with pytest.raises(ValueError, match=message):
        raw_pack(codes, bits)


def test_signed_bytes_are_not_unpacked():
    """In int8 the high nibble of 0x80 would come back as 248, its sign dragged along."""
    with pytest.raises(ValueError, match="packed must be uint8.* got torch.int8"):
        raw_unpack(torch.tensor([-128], dtype=torch.int8), 4)
