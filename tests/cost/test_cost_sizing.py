"""Sizing: what it promises holds for any model, device and format, and what it refuses is said plainly."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.cost import (
    HardwareSpec,
    ModelSpec,
    bits_per_value,
    decode_step,
    experts_touched,
    hardware,
    kv_bytes,
    models,
    prefill,
    size,
    weight_bytes,
)
from companion.formats import FORMATS

NAMES = sorted(set(models) - {"palm-540b"})
FITTING = st.fixed_dictionaries(
    {
        "model": st.sampled_from(NAMES),
        "hardware": st.sampled_from(["h100-sxm", "h200-sxm", "b200", "l4"]),
        "devices": st.sampled_from([1, 2, 3, 8, 64]),
        "batch": st.integers(1, 300),
        "context": st.integers(1, 300_000),
        "weights": st.sampled_from(["bf16", "fp8", "int4-g128"]),
        "kv": st.sampled_from(["bf16", "fp8", "nvfp4", 6, "kivi2"]),
        "kv_sharding": st.sampled_from(["heads", "batch"]),
        "overhead_bytes": st.sampled_from([0, 1, 5 * 10**9]),
        "block_size": st.sampled_from([None, 16, 64]),
    }
)


def again(options, **changes):
    return size(**{**options, **changes})


@settings(max_examples=60, deadline=None)
@given(FITTING)
def test_limits_are_limits(options):
    result = size(**options)
    assert result.fits == (result.max_batch >= options["batch"])
    if result.max_batch:
        assert again(options, batch=result.max_batch).fits
    assert not again(options, batch=result.max_batch + 1).fits
    if result.max_context is None:
        assert models[options["model"]].full_layers == 0
        assert again(options, context=10**9).fits
        return
    block = options["block_size"] or 1
    assert result.fits == (result.max_context >= math.ceil(options["context"] / block) * block)
    if result.max_context:
        assert again(options, context=result.max_context).fits
    assert not again(options, context=result.max_context + 1).fits


@settings(max_examples=40, deadline=None)
@given(FITTING)
def test_bytes_add_up(options):
    result = size(**options)
    assert result.total_bytes == result.bytes_per_device * options["devices"]
    assert result.fits == (result.bytes_per_device <= result.device_bytes)
    assert result.total_bytes >= result.weights_bytes + result.kv_bytes + result.overhead_bytes
    if options["devices"] == 1:
        assert result.total_bytes == result.weights_bytes + result.kv_bytes + result.overhead_bytes
    assert (result.decode_seconds is None) == (not result.fits)
    block = options["block_size"] or 1
    rounded = math.ceil(options["context"] / block) * block
    assert result.kv_bytes == kv_bytes(options["model"], rounded, batch=options["batch"], dtype=options["kv"])


def test_the_documented_example():
    result = size("llama-3.1-8b", "h100-sxm", batch=8, context=32_768).to_dict()
    expected = {
        "weights_bytes": 16_060_522_496,
        "kv_bytes": 34_359_738_368,
        "kv_bytes_per_token": 131_072,
        "total_bytes": 50_420_260_864,
        "device_bytes": 80_000_000_000,
        "fits": True,
        "max_batch": 14,
        "max_context": 60_977,
        "model_max_context": 131_072,
        "bound_by": "memory: cache",
        "warnings": [],
    }
    assert expected.items() <= result.items()
    # (15.01e9 + 34.36e9) B / 3.35e12 B/s is 14.74 ms for eight tokens.
    assert result["decode_tokens_per_second"] == pytest.approx(8 / 14.737e-3, rel=1e-4)


def test_too_large_a_model():
    result = size("llama-3.1-405b", "h100-sxm")
    assert (result.fits, result.max_batch, result.max_context) == (False, 0, 0)
    assert result.bound_by == "memory: capacity" and result.decode_tokens_per_second is None
    assert "weights alone do not fit" in result.warnings[0] and "16 devices" in result.warnings[0]
    assert size("llama-3.1-405b", "h100-sxm", devices=16).fits


def test_weights_that_just_fit_leave_no_user():
    model = models["smollm2-135m"]
    device = HardwareSpec("exact", weight_bytes(model), 1e9, {"bf16": 1e12})
    result = size(model, device, context=1)
    assert (result.fits, result.max_batch, result.max_context) == (False, 0, 0)
    one_more = HardwareSpec("one token", weight_bytes(model) + 23_040, 1e9, {"bf16": 1e12})
    result = size(model, one_more, context=1)
    assert (result.fits, result.max_batch, result.max_context) == (True, 1, 1)


def test_warnings():
    assert "beyond the 131,072" in size("llama-3.1-8b", "h100-sxm", context=200_000).warnings[0]
    assert any("copied" in w or "copy" in w for w in size("deepseek-v3", "b200", devices=8).warnings)
    assert any("each is copied" in w for w in size("llama-3.1-8b", "h100-sxm", devices=16).warnings)
    assert any("do not divide" in w for w in size("llama-3.1-8b", "h100-sxm", devices=3).warnings)
    assert any("fp16" in w for w in size("smollm2-135m", "t4").warnings)
    assert size("smollm2-135m", "t4", weights="fp16").warnings == []


def test_copied_heads_are_paid_for():
    eight, sixteen = (size("llama-3.1-70b", "h100-sxm", devices=n, batch=16) for n in (8, 16))
    assert sixteen.total_bytes - eight.total_bytes == eight.kv_bytes
    by_batch = size("llama-3.1-70b", "h100-sxm", devices=16, batch=16, kv_sharding="batch")
    assert by_batch.total_bytes == eight.total_bytes


def test_experts_in_another_format():
    plain, mixed = (size("gpt-oss-20b", "h100-sxm", experts=e) for e in (None, "mxfp4"))
    assert mixed.weights_bytes < plain.weights_bytes / 2 and mixed.experts == "mxfp4"
    assert mixed.decode_tokens_per_second > plain.decode_tokens_per_second


def test_bits():
    known = dict(fp32=32, bf16=16, fp16=16, fp8=8, fp8_e4m3=8, fp8_e5m2=8, int8=8, int4=4, int2=2)
    known |= {"nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32, "mxfp8": 8 + 8 / 32, "kivi4": 5, "kivi2": 3}
    known |= {"int8-g32": 8 + 16 / 32, "int4-g32": 4 + 16 / 32, "int4-g128": 4 + 20 / 128}
    assert {name: bits_per_value(name) for name in FORMATS} == known
    assert bits_per_value(8.5) == bits_per_value("int8-g32") == 8.5
    for spelling in ("bfloat16", "torch.bfloat16", "BF16", "half", "float16"):
        assert bits_per_value(spelling) == 16
    # 4.25 bits of an odd count round up to whole bytes.
    odd = ModelSpec("odd", "llama", 1, 3, 1, 1, 3, 1, 1)
    assert kv_bytes(odd, 1, dtype="mxfp4") == math.ceil(6 * 4.25 / 8) == 4
    assert kv_bytes(odd, 0) == 0


def test_a_torch_dtype_is_accepted():
    import torch

    for dtype, bits in [(torch.bfloat16, 16), (torch.float32, 32), (torch.float8_e4m3fn, 8), (torch.int8, 8)]:
        assert bits_per_value(dtype) == bits


M, H = "llama-3.1-8b", "h100-sxm"
REFUSED = [
    (lambda: size("llama-3.1-8", H), "near: llama-3.1-8b"),
    (lambda: size(M, "h100"), "near: h100-sxm, h100-pcie"),
    (lambda: size("zzzz", H), f"known: {next(iter(models))}"),
    (lambda: size(M, H, batch=0), "batch must be a positive integer, got 0"),
    (lambda: size(M, H, context=0), "context must be a positive integer"),
    (lambda: size(M, H, devices=-1), "devices"),
    (lambda: size(M, H, weights="float7"), "weights must be one of fp32"),
    (lambda: size(M, H, kv=0), "kv: bits per value"),
    (lambda: size(M, H, kv=float("nan")), "kv: bits per value"),
    (lambda: size(M, H, overhead_bytes=-5), "overhead_bytes must be an integer of at least 0"),
    (lambda: size(M, H, block_size=0), "block_size"),
    (lambda: size(M, H, kv_sharding="rows"), "kv_sharding must be one of heads, batch"),
    (lambda: size(M, HardwareSpec.measured(bandwidth=1e9, flops=1e9)), "device_bytes"),
    (lambda: size(M, H, efficiency=1.5), "efficiency must be above 0 and at most 1"),
    (lambda: size(M, "t4", compute_dtype="bf16"), "t4: compute_dtype must .* int4, got 'bf16'"),
    (lambda: kv_bytes(M, -1), "tokens must be an integer of at least 0, got -1"),
    (lambda: kv_bytes(M, True), "tokens"),
    (lambda: kv_bytes(M, 1, batch=0), "batch"),
    (lambda: kv_bytes(M, 1, step=0), "step"),
    (lambda: kv_bytes(M, 1, dtype="bf17"), "dtype must be one of"),
    (lambda: weight_bytes("gpt-oss-20b", experts="fp3"), "experts must be one of"),
    (lambda: experts_touched(M, 1), "has no experts"),
    (lambda: experts_touched("mixtral-8x7b", 0), "batch"),
    (lambda: decode_step(M, H, 1, -1), "tokens|context"),
    (lambda: decode_step(M, H, overhead_seconds=-1.0), "overhead_seconds"),
    (lambda: decode_step(M, H, efficiency=0), "efficiency"),
    (lambda: decode_step(M, H, compute_efficiency=float("nan")), "compute_efficiency"),
    (lambda: prefill(M, H, 0), "tokens must be a positive integer"),
    (lambda: prefill(M, H, 1, logits="first"), "logits must be one of all, last"),
    (lambda: HardwareSpec("h", 1, 0.0, {"bf16": 1.0}), "bandwidth"),
    (lambda: HardwareSpec("h", 1, 1.0, {}), "flops"),
    (lambda: HardwareSpec("h", 1, 1.0, {"bf16": float("inf")}), "flops"),
    (lambda: HardwareSpec("h", 0, 1.0, {"bf16": 1.0}), "device_bytes"),
    (lambda: ModelSpec("m", "llama", 0, 1, 1, 1, 1, 1, 1), "layers"),
    (lambda: ModelSpec("m", "llama", 1, 1, 3, 2, 1, 1, 1), "kv_heads"),
    (lambda: ModelSpec("m", "llama", 1, 1, 1, 1, 1, 1, 1, layer_types=("sliding",)), "window"),
    (lambda: ModelSpec("m", "llama", 1, 1, 1, 1, 1, 1, 1, layer_types=("full",) * 2), "layer_types"),
    (lambda: ModelSpec("m", "llama", 1, 1, 1, 1, 1, 1, 1, qk_norm="rows"), "qk_norm"),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# The tests check annotations on every call; these run without that, as in a reader's session.
ILL_TYPED = {
    "models[3]": f"unknown model 3; known: {next(iter(models))}",
    "size(3, 't4')": "model must be a ModelSpec or a name, got <class 'int'>",
    "size('phi-4', None)": "hardware must be a HardwareSpec or a name, got <class 'NoneType'>",
    "size('phi-4', 't4', context=8.5)": "size: context must be a positive integer, got 8.5",
    "size('phi-4', 't4', batch='8')": "size: batch must be a positive integer, got '8'",
    "size('phi-4', 't4', kv=None)": "kv must be one of fp32",
    "size('phi-4', 't4', efficiency='all')": "size: efficiency must be above 0 and at most 1, got 'all'",
    "kv_bytes('phi-4', True)": "kv_bytes: tokens must be an integer of at least 0, got True",
    "prefill_flops('phi-4', 1, logits=None)": "logits must be one of all, last, got None",
    "HardwareSpec('h', 8e10, 1.0, {'bf16': 1.0})": "HardwareSpec 'h': device_bytes must be a",
    "HardwareSpec('h', 1, '1', {'bf16': 1.0})": "HardwareSpec 'h': bandwidth must be a",
    "HardwareSpec('h', 1, 1.0, 5)": "HardwareSpec 'h': flops must be a map of formats",
    "ModelSpec.from_config(3)": "config must be a dict or a path to config.json, got <class 'int'>",
}


def test_ill_typed_arguments_are_named():
    code = f"""
from companion.cost import *
from companion.cost import models
from companion.live.cost import live
for call in {list(ILL_TYPED)!r}:
    try:
        print(eval(call))
    except ValueError as error:
        print(error)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for printed, (call, message) in zip(done.stdout.splitlines(), ILL_TYPED.items(), strict=True):
        assert printed.startswith(message), call


def test_unknown_name_is_a_key_error_too():
    with pytest.raises(KeyError):
        models["nope"]
    assert "nope" not in models
    assert models.get("nope") is None
    assert len(hardware) == len(list(hardware)) == len(hardware.rows) and "h100-sxm" in hardware
