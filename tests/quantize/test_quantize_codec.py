"""The factory, real bits, layouts of scales, odd lengths, bad input; and why keys want scales per channel."""

import dataclasses
import inspect

import jaxtyping
import pytest
import torch

from companion import formats
from companion.cost import bits_per_value
from companion.quantize import NAMES, QuantizedTensor, codec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PARTS = ("codes", "scale", "zero", "tensor_scale")


def rand(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "c, D, bits, name",
    [
        (codec("int4", group=32), 64, 5.0, "kivi4"),
        (codec("int4", group=32, group_dim=-2), 64, 5.0, "kivi4"),
        (codec("int2", group=32), 64, 3.0, "kivi2"),
        (codec("int2", group=32, group_dim=-2), 64, 3.0, "kivi2"),
        (codec("int4", group=32, symmetric=True), 64, 4.5, "int4-g32"),
        (codec("int8", group=32), 64, 8.5, "int8-g32"),
        (codec("int8"), 64, 8.25, None),
        (codec("int8", symmetric=False), 128, 8.25, None),
        (codec("int4", group=32, scale_dtype=F32), 64, 6.0, None),
        (codec("int4"), 128, 4.25, None),
        (codec("fp8_e4m3"), 64, 8.0, "fp8_e4m3"),
        (codec("fp8_e5m2"), 64, 8.0, "fp8_e5m2"),
        (codec("fp8_e4m3", group=16), 64, 9.0, None),
        (codec("mxfp4"), 64, 4.25, "mxfp4"),
        (codec("mxfp4", group_dim=-2), 64, 4.25, "mxfp4"),
    ],
)
def test_real_bits_per_value(c, D, bits, name):
    qt = c.quantize(rand(2, 3, 64, D))
    assert qt.bits_per_value == bits
    assert qt.nbytes == 2 * 3 * 64 * D * bits / 8
    assert qt.nbytes == sum(
        t.numel() * t.element_size() for t in map(qt.__getattribute__, PARTS) if t is not None
    )
    if name:
        assert bits == bits_per_value(name)


def test_nvfp4_is_four_and_a_half_bits_and_one_number():
    qt = codec("nvfp4").quantize(rand(2, 3, 64, 64))
    n = 2 * 3 * 64 * 64
    assert qt.nbytes == n * float(bits_per_value("nvfp4")) / 8 + 4
    assert qt.bits_per_value == pytest.approx(4.5, abs=0.002) and 8 / 4.5 == pytest.approx(1.78, abs=0.003)


def test_nothing_stored_keeps_something_larger_alive():
    """A small view of a large tensor would be counted small and cost large."""
    x = rand(2, 64, 64).requires_grad_()
    for name in NAMES:
        for dim in (-1, -2):
            qt = codec(name, group=None if "fp4" in name else 32, group_dim=dim).quantize(x)
            for part in PARTS:
                t = getattr(qt, part)
                if t is not None:
                    assert t.untyped_storage().nbytes() == t.nbytes, (name, part)
                    assert not t.requires_grad and t.grad_fn is None


# --- layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group_dim", [-1, -2])
def test_shapes_of_codes_and_scales(name, group_dim):
    group = formats.get(name).group or 8
    c = codec(name, group=group, group_dim=group_dim)
    x = rand(2, 3, 64, 96)
    qt = c.quantize(x)
    assert qt.codes.shape == (2, 3, 64, 96 * c.bits // 8)
    scales = (64, 96 // group) if group_dim == -1 else (64 // group, 96)
    assert qt.scale.shape == (2, 3, *scales) and c.groups(64, 96) == scales
    assert (qt.zero is None) == (name not in ("int4", "int2"))
    assert qt.zero is None or qt.zero.shape == qt.scale.shape
    assert qt.shape == (2, 3, 64, 96) and qt.dtype == F32
    assert c.dequantize(qt).shape == x.shape and c.bound(qt).shape == x.shape


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "fp8_e4m3", "mxfp4"])
@pytest.mark.parametrize("group_dim", [-1, -2])
def test_a_group_stands_for_itself(name, group_dim):
    """Neighbouring groups, heads and sequences do not influence each other: pieces equal the whole."""
    group = 32
    c = codec(name, group=group, group_dim=group_dim)
    x = rand(2, 3, 64, 64) * torch.logspace(-3, 3, 64)
    whole = c.dequantize(c.quantize(x))
    pieces = [c.dequantize(c.quantize(part)) for part in x.split(group, dim=group_dim)]
    assert torch.equal(torch.cat(pieces, group_dim), whole)
    assert torch.equal(c.dequantize(c.quantize(x[1, 2])), whole[1, 2])


def test_which_numbers_share_a_scale():
    x = torch.ones(4, 4)
    x[0, 1] = 100.0
    per_token = codec("int8", group_dim=-1).quantize(x).scale[:, 0] > 0.1
    per_channel = codec("int8", group_dim=-2).quantize(x).scale[0] > 0.1
    assert per_token.tolist() == [True, False, False, False]
    assert per_channel.tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("S", [0, 1, 3, 31, 33])
def test_odd_numbers_of_tokens(name, S):
    c = codec(name)
    x = rand(2, S, 64)
    y = c.dequantize(c.quantize(x))
    assert y.shape == x.shape
    if S:
        one_by_one = [c.dequantize(c.quantize(x[:, i : i + 1])) for i in range(S)]
        if name != "nvfp4":  # which looks at the whole tensor for its scale
            assert torch.equal(torch.cat(one_by_one, 1), y)
        assert ((y - x).abs() <= c.bound(c.quantize(x))).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group_dim", [-1, -2])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 2, 32, 64), (2, 32, 0)])
def test_empty_tensors(name, group_dim, shape):
    c = codec(name, group_dim=group_dim)
    qt = c.quantize(torch.zeros(shape))
    assert c.dequantize(qt).shape == shape == c.bound(qt).shape
    assert qt.nbytes == (4 if name == "nvfp4" else 0)


def test_integers_without_a_group_take_the_whole_axis():
    x = rand(5, 12)
    assert codec("int4").quantize(x).scale.shape == (5, 1)
    assert codec("int4", group_dim=-2).quantize(x).scale.shape == (1, 12)
    assert codec("fp8_e4m3").quantize(x).scale is None


@pytest.mark.parametrize("name", NAMES)
def test_strided_input_and_twice_the_same(name):
    base = rand(32, 2, 64).transpose(0, 1)  # (2, 32, 64), tokens far apart
    c = codec(name)
    a, b, again = c.quantize(base), c.quantize(base.contiguous()), c.quantize(base)
    for part in PARTS:
        for other in (b, again):
            x, y = getattr(a, part), getattr(other, part)
            assert (x is None and y is None) or torch.equal(x.float(), y.float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, torch.float64])
def test_the_dtype_comes_back(name, dtype):
    x = rand(2, 32, 64).to(dtype)
    before = x.clone()
    c = codec(name)
    qt = c.quantize(x)
    assert c.dequantize(qt).dtype == dtype == qt.dtype and torch.equal(x, before)


def test_k_and_v_of_different_widths():
    for width in (12, 8, 576):
        x = rand(1, 2, 10, width)
        for c in (codec("int4", group=4), codec("int2", group=4)):
            assert ((c.dequantize(c.quantize(x)) - x).abs() <= c.bound(c.quantize(x))).all()


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(name="int3"), "codec must .* int8, int4.* got 'int3'"),
        (dict(name="fp8"), "codec must .* fp8_e4m3.* got 'fp8'"),
        (dict(name="int4", group=0), "group must .* got 0"),
        (dict(name="int4", group=-32), "group must .* got -32"),
        (dict(name="int4", group=True), "group must .* got True"),
        (dict(name="int4", group=32.0), "group must .* got 32.0"),
        (dict(name="int4", group_dim=0), "group_dim must .* got 0"),
        (dict(name="int4", group_dim=1), "group_dim must .* got 1"),
        (dict(name="int4", scale_dtype=torch.int8), "scale_dtype must .* got torch.int8"),
        (dict(name="int4", scale_dtype=torch.float8_e4m3fn), "scale_dtype must .* got torch.float8"),
        (dict(name="nvfp4", scale_dtype=F32), "scale_dtype must .* nvfp4, got torch.float32"),
        (dict(name="nvfp4", group=32), "group must be 16 .* nvfp4, got 32"),
        (dict(name="mxfp4", group=16), "group must be 32 .* mxfp4, got 16"),
        (dict(name="nvfp4", symmetric=True), "symmetric must .* nvfp4, got True"),
        (dict(name="fp8_e4m3", symmetric=False), "symmetric must .* fp8_e4m3, got False"),
        (dict(name="int8", tensor_scale=1.0), "tensor_scale must .* int8, got 1.0"),
        (dict(name="mxfp4", tensor_scale=1.0), "tensor_scale must .* mxfp4, got 1.0"),
        (dict(name="nvfp4", tensor_scale=0.0), "tensor_scale must .* got 0.0"),
        (dict(name="nvfp4", tensor_scale=-1.0), "tensor_scale must .* got -1.0"),
        (dict(name="nvfp4", tensor_scale=float("nan")), "tensor_scale must .* got nan"),
        (dict(name="nvfp4", tensor_scale=float("inf")), "tensor_scale must .* got inf"),
        (dict(name="nvfp4", tensor_scale=1e-60), "tensor_scale must .* got 1e-60"),  # 0 in float32
        (dict(name="nvfp4", tensor_scale=1e39), "tensor_scale must .* got 1e\\+39"),  # infinity in float32
        (dict(name="nvfp4", tensor_scale="1"), "tensor_scale must .* got '1'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(codec)(**options)


def raw_quantize(c, x):
    """As a user calls it: without the tests' check of shapes at the door."""
    return inspect.unwrap(type(c).quantize)(c, x)


@pytest.mark.parametrize(
    "c, shape, message",
    [
        (codec("int4", group=64), (2, 96), "group=64 does not divide 96 channels"),
        (codec("int4", group=32, group_dim=-2), (33, 96), "group=32 does not divide 33 tokens"),
        (codec("int8", group=7), (2, 8), "group=7 does not divide 8 channels"),
        (codec("fp8_e4m3", group=32), (2, 48), "group=32 does not divide 48 channels"),
        (codec("nvfp4"), (2, 72), "group=16 does not divide 72 channels"),
        (codec("nvfp4", group_dim=-2), (24, 64), "group=16 does not divide 24 tokens"),
        (codec("mxfp4"), (2, 48), "group=32 does not divide 48 channels"),
        (codec("int4"), (4, 63), "x must be of a multiple of 2 channels in int4, got 63"),
        (codec("int2"), (4, 62), "x must be of a multiple of 4 channels in int2, got 62"),
        (codec("nvfp4", group_dim=-2), (16, 63), "x must be of a multiple of 2 channels in nvfp4, got 63"),
        (codec("int8"), (64,), r"x must be .* got \(64,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(c, shape, message):
    with pytest.raises(ValueError, match=message):
        raw_quantize(c, torch.zeros(shape))


def test_a_group_longer_than_the_axis_is_refused_too():
    with pytest.raises(ValueError, match="group=128 does not divide 64"):
        codec("int4", group=128).quantize(torch.zeros(2, 64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
def test_numbers_without_a_scale_are_refused(name, bad):
    x = rand(4, 64)
    x[3, 63] = bad
    with pytest.raises(ValueError, match="x holds NaN, infinity or a number beyond"):
        codec(name).quantize(x)


def test_what_is_too_large_for_float32_is_not_turned_into_infinity():
    with pytest.raises(ValueError, match="x holds"):
        codec("int4").quantize(torch.full((1, 8), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"x must be .* floating point, got .* of {dtype}"):
        raw_quantize(codec("int8"), torch.zeros(2, 4, dtype=dtype))


def test_shapes_are_checked_at_the_door():
    """That the tests' run-time check of annotations is on, for this room as well."""
    with pytest.raises(jaxtyping.TypeCheckError):
        codec("int8").quantize(torch.zeros(4, dtype=torch.int32))


def test_a_quantized_tensor_cannot_be_edited():
    qt = codec("int8").quantize(rand(2, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        qt.codes = None
    assert isinstance(qt, QuantizedTensor) and qt == qt  # no comparison of tensors behind it


# --- the axis that matters ------------------------------------------------------------------------------


def attended(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def errors(q, k, v, c):
    """(mean squared error of the keys, mean error of the scores, error of the output), against float64."""
    kept = c.dequantize(c.quantize(k))
    out = attended(q, k, v)
    scores = ((q @ kept.mT) - (q @ k.mT)).abs().mean()
    return (kept - k).square().mean(), scores, (attended(q, kept, v) - out).norm() / out.norm()


def layouts(name):
    return codec(name, group=64), codec(name, group=32, group_dim=-2)


@pytest.fixture
def qkv():
    q, k, v = (rand(1, n, 64, seed=n).double() for n in (32, 256, 257))
    return q, k, v[:, :256]


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_a_channel_far_from_zero_wants_scales_per_channel(qkv, name):
    q, k, v = qkv
    k[..., 3] += 50
    token, channel = (errors(q, k, v, c) for c in layouts(name))
    assert channel[1] < token[1] / 4 and channel[2] < token[2] / 2


def test_a_channel_of_fifty_times_the_size_in_int4(qkv):
    q, k, v = qkv
    k[..., 3] *= 50
    token, channel = (errors(q, k, v, c) for c in layouts("int4"))
    assert channel[1] < token[1] and channel[2] < token[2] / 4
    rest = [i for i in range(64) if i != 3]
    lost = [(c.dequantize(c.quantize(k)) - k)[..., rest].abs().mean() for c in layouts("int4")]
    assert lost[1] < lost[0] / 8  # the other 63 pay for the outlier only where they share its scale


def test_the_smaller_error_of_the_keys_can_be_the_larger_error_of_the_output(qkv):
    """In int2 a scale per token keeps the huge channel and flattens the rest: a better mean square."""
    q, k, v = qkv
    k[..., 3] *= 50
    q[..., 3] = 0  # no query reads the channel that decides the mean square
    token, channel = (errors(q, k, v, c) for c in layouts("int2"))
    assert token[0] < channel[0] and token[2] > 4 * channel[2]
