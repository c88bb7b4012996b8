"""Bad input: a ValueError that names the argument, before anything is launched."""

import inspect

import pytest
import torch
from kernel_inputs import ABSURD, make

from companion.kernels import attend_with_tail, decode_attention, merge_splits, mode
from companion.kernels.decode.launch import Launch


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    def launched(*args):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(Launch, "run", launched)
    monkeypatch.setattr("companion.kernels.decode.launch.merge", launched)


def call(change, **made):
    """A good call of two sequences with one thing changed: change(arguments) edits the dict."""
    case = make([33, 20], (4, 2), 64, **{"block_size": 16, **made})
    args = {"q": case.q, **case.cache, **case.options}
    change(args)
    plain(args.pop("q"), args.pop("k_cache"), args.pop("v_cache"), args.pop("cache_seqlens"), **args)


plain = inspect.unwrap(decode_attention)  # without the run-time types that the tests add, which speak first


def put(**values):
    return lambda args: args.update(values)


def edit(name, function):
    return lambda args: args.update({name: function(args[name])})


def at(name, index, value):
    def change(args):
        args[name] = args[name].clone()
        args[name][index] = value

    return change


def turned(x, a, b):
    """The same numbers with two axes exchanged in memory."""
    return x.transpose(a, b).contiguous().transpose(a, b)


BAD = {
    "q as a matrix": (edit("q", lambda q: q[0]), "q"),
    "q in float64": (edit("q", lambda q: q.double()), "q"),
    "q in another dtype than the cache": (edit("q", lambda q: q.half()), "k_cache"),
    "q with other channels": (edit("q", lambda q: q[..., :32]), "k_cache"),
    "q not readable": (edit("q", lambda q: turned(q, 1, 2)), "q"),
    "k_cache of three axes": (edit("k_cache", lambda k: k[0]), "k_cache"),
    "k_cache not readable": (
        edit("k_cache", lambda k: k.transpose(2, 3).contiguous().transpose(2, 3)),
        "k_cache",
    ),
    "v_cache not readable": (
        edit("v_cache", lambda v: v.transpose(2, 3).contiguous().transpose(2, 3)),
        "v_cache",
    ),
    "v_cache of other heads": (edit("v_cache", lambda v: v[:, :, :1]), "v_cache"),
    "v_cache of other pages": (edit("v_cache", lambda v: v[1:]), "v_cache"),
    "v_cache in another dtype": (edit("v_cache", lambda v: v.half()), "v_cache"),
    "v_cache of no channel": (edit("v_cache", lambda v: v[..., :0]), "v_cache"),
    "heads that do not divide": (edit("q", lambda q: q[:, :3]), "q has 3 heads"),
    "no table for pages": (put(block_table=None), "k_cache"),
    "cache_seqlens in int64": (edit("cache_seqlens", lambda n: n.long()), "cache_seqlens"),
    "cache_seqlens of three": (put(cache_seqlens=torch.zeros(3, dtype=torch.int32)), "cache_seqlens"),
    "cache_seqlens not readable": (
        put(cache_seqlens=torch.zeros(4, dtype=torch.int32)[::2]),
        "cache_seqlens",
    ),
    "a negative length": (at("cache_seqlens", 1, -1), "cache_seqlens"),
    "block_table in int64": (edit("block_table", lambda t: t.long()), "block_table"),
    "block_table of one row": (edit("block_table", lambda t: t[:1]), "block_table"),
    "block_table too short": (edit("block_table", lambda t: t[:, :2]), "block_table"),
    "block_table names a page of nobody": (at("block_table", (0, 2), ABSURD), "block_table"),
    "block_table with -1 in use": (at("block_table", (1, 0), -1), "block_table"),
    "softmax_scale nan": (put(softmax_scale=float("nan")), "softmax_scale"),
    "softcap negative": (put(softcap=-1.0), "softcap"),
    "softcap infinite": (put(softcap=float("inf")), "softcap"),
    "window of three": (put(window_size=(1, 0, 0)), "window_size"),
    "window to the right": (put(window_size=(4, 1)), "window_size"),
    "window below -1": (put(window_size=(-2, 0)), "window_size"),
    "sinks of another number": (put(sinks=torch.zeros(2)), "sinks"),
    "kv_format unknown": (put(kv_format="int3"), "kv_format"),
    "scales without a format": (put(k_scale=torch.ones(2, 16, 2)), "k_scale"),
    "head_dim_v that is not v_cache's": (put(head_dim_v=32), "head_dim_v"),
    "no values at all": (put(v_cache=None), "head_dim_v"),
    "more values than the latent has": (put(v_cache=None, head_dim_v=65), "head_dim_v"),
    "num_splits negative": (put(num_splits=-1), "num_splits"),
    "num_splits and fixed": (put(num_splits=2, fixed_split_size=64), "num_splits"),
    "fixed_split_size zero": (put(fixed_split_size=0), "fixed_split_size"),
    "max_seqlen too small": (put(max_seqlen=20), "max_seqlen"),
    "check is a word": (put(check="yes"), "check"),
    "tail_seqlens negative": (put(tail_seqlens=torch.tensor([1, -1], dtype=torch.int32)), "tail_seqlens"),
    "tensors on two devices": (edit("q", lambda q: q.to("meta")), "the tensors are on cpu and meta"),
}


@pytest.mark.parametrize("what", BAD)
def test_full_precision(what):
    change, name = BAD[what]
    with pytest.raises(ValueError, match=f"^{name}"):
        call(change)


def test_a_contiguous_cache_that_is_too_short():
    with pytest.raises(ValueError, match="^cache_seqlens"):
        call(at("cache_seqlens", 0, 500), block_size=None)
    with pytest.raises(ValueError, match="^k_cache"):
        call(put(q=torch.zeros(3, 4, 64), cache_seqlens=torch.zeros(3, dtype=torch.int32)), block_size=None)


QUANTIZED = {
    "codes in another dtype": ("int8", edit("k_cache", lambda k: k.float()), "k_cache"),
    "int4 codes as int8": ("int4", edit("k_cache", lambda k: k.view(torch.int8)), "k_cache"),
    "no scale": ("int8", lambda args: args.pop("v_scale"), "v_scale"),
    "scales of other tokens": ("int8", edit("k_scale", lambda s: s[:, 1:]), "k_scale"),
    "scales of integers": ("int8", edit("k_scale", lambda s: s.to(torch.int32)), "k_scale"),
    "unsigned without a zero": ("uint8", lambda args: args.pop("k_zero"), "k_zero"),
    "signed with a zero": ("int8", lambda args: args.update(v_zero=args["v_scale"]), "v_zero"),
    "a zero of another layout": (
        "int4",
        edit("k_zero", lambda z: z.transpose(0, 1).contiguous().transpose(0, 1)),
        "k_zero",
    ),
    "a zero for fp8": (
        "fp8_e4m3",
        lambda args: args.update(k_scale=1.0, v_scale=1.0, k_zero=torch.ones(9, 16, 2)),
        "k_zero",
    ),
    "one scale of two for fp8": ("fp8_e5m2", put(k_scale=0.5), "k_scale"),
    "an infinite scale": ("fp8_e5m2", put(k_scale=float("inf"), v_scale=1.0), "k_scale"),
    "kivi without zeros": ("kivi4", lambda args: args.pop("k_zero"), "k_zero"),
    "kivi with scales per token": ("kivi4", edit("k_scale", lambda s: s[..., 0]), "k_scale"),
    "kivi with a number": ("kivi4", put(k_scale=1.0), "k_scale"),
    "kivi with a group that does not divide": (
        "kivi4",
        edit("v_scale", lambda s: s.repeat(1, 1, 1, 2)[..., :3]),
        "v_scale",
    ),
    "kivi with a split within a group": ("kivi4", put(fixed_split_size=40), "fixed_split_size"),
    "a latent of int4": ("int4", put(v_cache=None, head_dim_v=32), "v_cache"),
    "a latent with a scale for values": ("int8", put(v_cache=None, head_dim_v=32), "v_scale"),
}


@pytest.mark.parametrize("what", QUANTIZED)
def test_quantized(what):
    kv_format, change, name = QUANTIZED[what]
    with pytest.raises(ValueError, match=f"^{name}"):
        call(change, block_size=32, kv_format=kv_format)


def test_channels_that_do_not_fill_bytes():
    codes = torch.zeros(1, 32, 1, 8, dtype=torch.uint8)
    scale = torch.ones(1, 32, 1)
    with pytest.raises(ValueError, match="^k_cache"):
        decode_attention(
            torch.zeros(1, 1, 17),
            codes,
            codes,
            torch.ones(1, dtype=torch.int32),
            kv_format="int4",
            k_scale=scale,
            v_scale=scale,
        )


def test_bfloat16_needs_a_device_that_has_it(monkeypatch):
    monkeypatch.setattr(mode, "capability", lambda tensor: (7, 5))
    with pytest.raises(ValueError, match=r"^q has dtype torch.bfloat16.*capability 7.5.*use float16"):
        call(put(), dtype=torch.bfloat16)


def test_contents_are_not_read_when_told_so():
    """On a GPU reading them waits for it; here the launch that follows shows that nothing was refused."""
    with pytest.raises(AssertionError, match="launched"):
        call(put(check=False, max_seqlen=33))
    with pytest.raises(AssertionError, match="launched"):
        call(lambda args: (at("cache_seqlens", 1, -1)(args), args.update(check=False)))


def test_a_tail_that_does_not_fit():
    case = make([64, 32], (4, 2), 64, block_size=32, kv_format="kivi4", behind=[1, 2])
    good = torch.zeros(2, 4, 2, 64)
    tail = inspect.unwrap(attend_with_tail)
    for name, k_tail, v_tail in (
        ("k_tail and v_tail", good[:, :, :1], good[:, :, :1]),
        ("tail: k_cache has dtype", good.half(), good),
        ("tail: k_cache has shape", good[..., :32], good),
        ("tail: v_cache has shape", good, good[:, :2]),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            case.run(tail, k_tail=k_tail, v_tail=v_tail)
    case.cache["tail_seqlens"] = torch.tensor([1, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="^cache_seqlens"):
        case.run(tail, k_tail=good, v_tail=good)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"lses": torch.zeros(2, 3, 4)}, "lses"),
        ({"lses": torch.zeros(2, 3, 1, 5)}, "lses"),
        ({"outs": torch.zeros(2, 1, 3, 4, 8).double(), "lses": torch.zeros(2, 3, 1, 4).double()}, "outs"),
        ({"outs": torch.zeros(2, 1, 3, 8, 4).transpose(3, 4)}, "outs"),
        ({"outs": torch.zeros(2, 1, 3, 0, 8), "lses": torch.zeros(2, 3, 1, 0)}, "lses"),
        ({"sinks": torch.zeros(4)}, "sinks"),
    ],
)
def test_merging(change, name):
    args = {"outs": torch.zeros(2, 1, 3, 4, 8), "lses": torch.zeros(2, 3, 1, 4), "sinks": None, **change}
    with pytest.raises(ValueError, match=f"^{name}"):
        inspect.unwrap(merge_splits)(args["outs"], args["lses"], sinks=args["sinks"])
