"""The requests of the interactive parts: each is the library's own functions, called together."""

import json

import pytest

from companion.cost import active_parameters, decode_step, hardware, models, parameters, prefill, size
from companion.live.cost import _twins, live

MIXTURES = [name for name, m in models.items() if m.moe]


def ask(op, **arguments):
    return json.loads(live(json.dumps({"op": op, **arguments})))


@pytest.mark.parametrize("kv, devices", [("bf16", 1), ("fp8", 8), ("kivi2", 16)])
def test_a_bill_is_sizes(kv, devices):
    arguments = dict(hardware="h100-sxm", batch=6, context=5000, kv=kv, devices=devices)
    result = ask("bill", model="gemma-3-27b", contexts=[100, 200_000], **arguments)["result"]
    assert result["sizing"] == size("gemma-3-27b", **arguments).to_dict()
    for context, bar in zip((100, 200_000), result["bars"], strict=True):
        other = size("gemma-3-27b", **{**arguments, "context": context})
        assert bar == {name: getattr(other, name) for name in bar} and bar["context"] == context
        assert bar["fits"] == (bar["bytes_per_device"] <= other.device_bytes)


@pytest.mark.parametrize("device", ["h100-sxm", "t4", "desktop-cpu"])
def test_a_roofline_is_steps_under_a_roof(device):
    arguments = dict(model="qwen3-8b", hardware=device, batch=40, context=700)
    result = ask("roofline", batches=[1, 40], weights="fp8", kv="int8-g32", **arguments)["result"]
    formats = dict(weights="fp8", kv="int8-g32")
    assert result["decode"] == decode_step(**arguments, **formats).to_dict()
    assert result["prefill"] == prefill("qwen3-8b", device, 700, **formats).to_dict()
    spec = hardware[device]
    peak = spec.peak(spec.default_compute)
    assert result["device"]["peak"] == peak and result["ridge"] == peak / spec.bandwidth
    assert result["trace"][1]["intensity"] == result["decode"]["intensity"]
    assert (
        result["max_batch"] == size("qwen3-8b", device, context=700, weights="fp8", kv="int8-g32").max_batch
    )
    for point in (result["decode"], result["prefill"], *result["trace"]):
        roof = min(peak, point["intensity"] * spec.bandwidth)
        assert 0.4 * roof < point["flops_per_second"] <= roof * (1 + 1e-12)
    assert result["decode"]["flops_per_second"] * result["decode"]["seconds"] == pytest.approx(
        result["decode"]["flops"]
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_twins_have_the_parameters_that_they_are_named_for(name):
    active, total = _twins(models[name])
    assert parameters(total) == active_parameters(total) == parameters(name)
    assert parameters(active) == active_parameters(active)
    assert parameters(active) == pytest.approx(active_parameters(name), rel=0.006)  # a smaller router
    assert parameters(active) <= active_parameters(name)


@pytest.mark.parametrize("batch", [1, 3, 64, 4096])
def test_a_mixture_lies_between_its_twins(batch):
    arguments = dict(model="qwen3-30b-a3b", hardware="h200-sxm", context=1024, weights="bf16")
    result = ask("experts", batch=batch, batches=[1, batch], experts="fp8", **arguments)["result"]
    row = result["now"]
    assert result["curve"][1] == row and result["experts"] == 128 and result["top_k"] == 8
    low, middle, high = (row[k]["weights_bytes"] for k in ("active", "mixture", "total"))
    assert low <= middle * 1.001 and middle <= high
    mine = decode_step("qwen3-30b-a3b", "h200-sxm", batch, 1024, experts="fp8")
    assert row["mixture"]["seconds"] == mine.seconds and middle == mine.weights_bytes
    plan = size("qwen3-30b-a3b", "h200-sxm", context=1024, experts="fp8")
    assert result["held_bytes"] == plan.weights_bytes and result["max_batch"] == plan.max_batch
    assert middle < plan.weights_bytes


def test_the_chapters_numbers():
    """Chapter 13: 64 users read 59.5 GB, and a step takes 13.7 ms where the large twin's takes 13.9."""
    row = ask("experts", model="qwen3-30b-a3b", hardware="h200-sxm", batch=64, batches=[1])["result"]["now"]
    assert round(row["mixture"]["weights_bytes"] / 1e9, 1) == 59.5
    assert [round(1e3 * row[k]["seconds"], 1) for k in ("mixture", "total")] == [13.7, 13.9]


@pytest.mark.parametrize(
    "request_, words",
    [
        (dict(op="experts", model="phi-4", hardware="t4", batch=1, batches=[1]), "no experts"),
        (dict(op="experts", model="mixtral-8x7b", hardware="t4", batch=0, batches=[1]), "batch"),
        (dict(op="roofline", model="phi-4", hardware="t4", batch=1, context=1, batches=[0]), "batch"),
        (dict(op="roofline", model="phi-4", hardware="t4", batch=1, context=1, batches=1), "batches"),
        (dict(op="bill", model="phi-4", hardware="t4", contexts=[0]), "context"),
        (dict(op="bill", model="phi-4", hardware="t4", contexts="12"), "contexts"),
        (dict(op="bill", model="phi-4", hardware="t4"), "contexts"),
        (dict(op="bill", model="phi-4", hardware="t4", contexts=[1] * 10**5), "contexts"),
    ],
)
def test_mistakes_are_named(request_, words):
    reply = ask(**request_)
    assert reply["ok"] is False and words in reply["error"]
