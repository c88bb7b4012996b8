"""Several devices and pages: what each holds, whole or in part; limits; time between devices."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.cost import (
    HardwareSpec,
    ModelSpec,
    Pages,
    decode_step,
    kv_bytes,
    models,
    parallel_bytes,
    rank_parameters,
    rank_spec,
    size,
    weight_bytes,
)
from companion.cost.engines import group_layers

M70 = "llama-3.1-70b"

RANKED = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            ["llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3", "gemma-3-27b", "mistral-7b-v0.1"]
        ),
        "hardware": st.sampled_from(["h200-sxm", "b200"]),
        "tensor": st.sampled_from([1, 2, 8, 16]),
        "expert": st.sampled_from([1, 8]),
        "batch": st.integers(1, 300),
        "context": st.integers(1, 300_000),
        "weights": st.sampled_from(["bf16", "int4-g128"]),
        "kv": st.sampled_from(["bf16", "nvfp4", 6]),
        "pages": st.sampled_from(["exact", "grouped", "unified"]),
        "block_size": st.sampled_from([None, 16, 64]),
        "step_tokens": st.sampled_from([1, 2048]),
        "activation_bytes": st.sampled_from([0, 10**9]),
    }
)


@settings(max_examples=60, deadline=None)
@given(RANKED)
def test_limits_are_limits(options):
    model = models[options["model"]]
    if model.moe is None:
        options["expert"] = 1
    result = size(**options)
    assert result.fits == (result.max_batch >= options["batch"])
    assert result.fits == (result.bytes_per_device <= result.device_bytes)
    if result.max_batch:
        assert size(**{**options, "batch": result.max_batch}).fits
    assert not size(**{**options, "batch": result.max_batch + 1}).fits
    if result.max_context is None:
        assert model.full_layers == 0 and size(**{**options, "context": 10**9}).fits
        return
    if result.max_context:
        assert size(**{**options, "context": result.max_context}).fits
    assert not size(**{**options, "context": result.max_context + 1}).fits


@settings(max_examples=40, deadline=None)
@given(RANKED)
def test_bytes_of_a_rank(options):
    model = models[options["model"]]
    if model.moe is None:
        options["expert"] = 1
    r = size(**options)
    assert r.devices == options["tensor"] * options["expert"]
    assert (
        r.bytes_per_device == r.weights_bytes_per_device + r.kv_bytes_per_device + options["activation_bytes"]
    )
    assert r.kv_needed_bytes <= r.kv_bytes
    if options["pages"] != "grouped":  # its blocks may be fewer, and are padded
        assert r.kv_bytes <= r.kv_allocated_bytes
    assert r.kv_bytes_per_device * r.devices >= r.kv_allocated_bytes
    assert r.weights_bytes_per_device * r.devices >= r.weights_bytes


def test_a_rank_of_llama_by_hand():
    """Tensor by tensor: eight of 64 query heads, one of eight key heads, an eighth of width and rows."""
    d, rows, head, ffn = 8192, 128_256 // 8, 128, 28_672 // 8
    layer = d * 8 * head + 2 * d * head + 8 * head * d + 3 * d * ffn + 2 * d
    by_hand = 2 * (2 * rows * d + 80 * layer + d)
    assert size(M70, "h100-sxm", tensor=8).weights_bytes_per_device == by_hand
    # What all hold whole are the norms.
    assert 8 * by_hand - weight_bytes(M70) == 2 * 7 * (80 * 2 + 1) * d


def test_a_rank_of_deepseek_by_hand():
    """Eight groups, each with a rank: everything but the routed experts is whole, and 32 of 256 experts."""
    expert = 3 * 7168 * 2048
    dense = 671_026_419_200 - 58 * 256 * expert
    found = size("deepseek-v3", "h200-sxm", expert=8, weights="fp8", batch=8)
    assert found.weights_bytes_per_device == dense + 58 * 32 * expert
    # Of tensor ranks each holds the whole latent; of expert groups each its own sequences.
    one = kv_bytes("deepseek-v3", 8192)
    assert found.kv_bytes_per_device == one
    assert size("deepseek-v3", "h200-sxm", tensor=8, weights="fp8", batch=8).kv_bytes_per_device == 8 * one
    # Down-projections of the latent are whole on tensor ranks too, up-projections are divided.
    part = rank_spec("deepseek-v3", tensor=8)
    assert (part.heads, part.mla) == (16, models["deepseek-v3"].mla)


def test_split_vocabulary():
    whole, split = (rank_parameters(M70, tensor=8, split_vocab=s) for s in (False, True))
    assert whole - split == 2 * (128_256 - 16_032) * 8192
    odd = ModelSpec("odd", "llama", 1, 8, 4, 4, 2, 8, 10)
    assert rank_spec(odd, tensor=4, split_vocab=True).vocab == 3  # rounded up


def test_key_heads_are_copied_beyond_their_number():
    for tensor, copies in [(8, 1), (16, 2), (32, 4), (64, 8)]:
        found = size(M70, "h200-sxm", tensor=tensor, batch=8)
        assert found.kv_bytes_per_device * tensor == copies * found.kv_bytes
        assert any("each is copied" in w for w in found.warnings) is (copies > 1)


def test_groups_share_a_batch_unevenly():
    nine = size("deepseek-v3", "h200-sxm", expert=8, weights="fp8", batch=9)
    assert nine.kv_bytes_per_device == 2 * kv_bytes("deepseek-v3", 8192)
    few = size("deepseek-v3", "h200-sxm", expert=8, weights="fp8", batch=3)
    assert "8 groups, but 3 sequences" in few.warnings[-1]


def test_ranks_and_equal_parts_agree_where_nothing_is_whole():
    """The difference is the norms, in bytes and in time."""
    for options in (dict(batch=1), dict(batch=64, context=32_768), dict(batch=600, context=100)):
        even, ranks = (size(M70, "b200", **s, **options) for s in (dict(devices=8), dict(tensor=8)))
        assert ranks.decode_seconds == pytest.approx(even.decode_seconds, rel=1e-3)
        assert ranks.ttft_seconds == pytest.approx(even.ttft_seconds, rel=1e-3)
        assert (ranks.bound_by, ranks.kv_bytes_per_device) == (even.bound_by, even.kv_bytes_per_device)
    one, same = (size("mixtral-8x7b", "b200", batch=4, **s) for s in (dict(devices=1), dict(tensor=1)))
    assert one.decode_seconds == same.decode_seconds == decode_step("mixtral-8x7b", "b200", 4, 8192).seconds


def test_experts_of_a_rank_are_read_for_all_groups():
    """64 tokens in all, eight a group: 222 of 256 experts are touched, of which a rank reads an eighth."""
    device = HardwareSpec("plain", 10**12, 1e12, {"bf16": 1e18})
    found = size("deepseek-v3", device, expert=8, weights="fp8", batch=64, context=1)
    touched = 256 * (1 - (1 - 8 / 256) ** 64) * 58 * 3 * 7168 * 2048 / 8
    dense = 671_026_419_200 - 58 * 256 * 3 * 7168 * 2048 - 129_280 * 7168
    cache = 8 * 61 * 576 * 2
    assert found.decode_seconds == pytest.approx((dense + touched + cache) / 1e12, rel=1e-9)


def test_time_between_devices_by_hand():
    """Two all-reduces a layer of 8192 bf16 numbers; a ring of eight sends 2 x 7/8 of each, in 14 messages."""
    plain = size(M70, "h100-sxm", tensor=8)
    assert plain.communication_seconds is None and "not counted" in " ".join(plain.assumptions)
    for split in (dict(tensor=8), dict(devices=8)):
        found = size(M70, "h100-sxm", **split, link_bandwidth=450e9, link_latency=1e-6)
        sent = 2 * 80 * 8192 * 2 * 2 * 7 / 8
        assert found.communication_seconds == pytest.approx(sent / 450e9 + 2 * 80 * 14 * 1e-6)
        before = size(M70, "h100-sxm", **split).decode_seconds
        assert found.decode_seconds == pytest.approx(before + found.communication_seconds)
    slow = size(M70, "h100-sxm", tensor=8, link_bandwidth=1e6)
    assert slow.bound_by == "communication"
    both = size("mixtral-8x7b", "h100-sxm", tensor=2, expert=4, batch=8, link_bandwidth=1e9)
    wire = parallel_bytes("mixtral-8x7b", tokens=2, tensor=2, expert=4).wire
    assert both.communication_seconds == pytest.approx(wire / 1e9)
    assert size("phi-4", "h100-sxm", link_bandwidth=1e9).communication_seconds == 0.0
    by_sequences = size(M70, "h100-sxm", devices=8, kv_sharding="batch", batch=8, link_bandwidth=1e9)
    assert by_sequences.communication_seconds is None


def test_stated_assumptions_are_counted_and_shown():
    base = size("phi-4", "h100-sxm", batch=2)
    more = size(
        "phi-4", "h100-sxm", batch=2, activation_bytes=2**30, overhead_bytes=3 * 2**30, overhead_seconds=1e-3
    )
    assert more.bytes_per_device - base.bytes_per_device == 4 * 2**30
    assert more.decode_seconds == pytest.approx(base.decode_seconds + 1e-3)
    text = " ".join(more.assumptions)
    assert "1,073,741,824 B (1.00 GiB, 1.07 GB)" in text and "3.00 GiB" in text and "1 ms a step" in text
    assert "activations: 0 B, not counted" in base.assumptions
    assert base.max_batch > more.max_batch


def test_weights_as_a_figure():
    found = size("phi-4", "h100-sxm", weights_bytes=9_000_000_001)
    assert found.weights_bytes == 9_000_000_001 and found.weights == "4.911"
    ratio = found.decode_seconds / size("phi-4", "h100-sxm").decode_seconds
    assert ratio < 0.45  # fewer bytes are read, too


# full and sliding layers: layers of a group, groups
# (from vLLM 0.32.0's _get_kv_cache_groups_uniform_page_size)
GROUPS = {
    (12, 12): (12, 2),
    (10, 52): (10, 7),
    (13, 12): (13, 2),
    (1, 3): (1, 4),
    (16, 48): (16, 4),
    (9, 39): (9, 6),
    (10, 15): (10, 3),
    (20, 30): (20, 3),
}


@pytest.mark.parametrize("full, sliding", GROUPS)
def test_groups_of_pages(full, sliding):
    layers, groups = GROUPS[full, sliding]
    assert group_layers(full, sliding) == layers
    assert math.ceil(full / layers) + math.ceil(sliding / layers) == groups


def hybrid(full: int, sliding: int, window: int) -> ModelSpec:
    types = ("full",) * full + ("sliding",) * sliding
    return ModelSpec("hybrid", "llama", full + sliding, 8, 1, 1, 8, 8, 8, window=window, layer_types=types)


def test_vllms_worked_example():
    """docs/design/hybrid_kv_cache_manager.md: 10 full and 20 sliding layers, blocks of 16, window 32, 112
    tokens: seven blocks, and two for each of two sliding groups; we reserve the third that it may touch."""
    model = hybrid(10, 20, 32)
    assert Pages(model, "grouped", 16).slots(112) == (7 + 2 * 3) * 10 * 16
    assert Pages(model, "exact", 16).slots(112) == 10 * 112 + 20 * 32
    assert Pages(model, "unified", 16).slots(100) == 30 * 112
    # Gemma 3 27B: ten layers a group, of which the last sliding one is padded with eight.
    gemma = Pages(models["gemma-3-27b"], "grouped", 16)
    assert gemma.slots(131_072) == (8192 + 6 * (1024 // 16 + 1)) * 10 * 16


def test_pages_of_models_with_one_kind_of_layer():
    full, windows = Pages(models["phi-4"], "grouped", 16), Pages(models["mistral-7b-v0.1"], "grouped", 16)
    assert full.slots(100) == 40 * 112
    assert windows.slots(10**6) == windows.slots(10**7) == 32 * (4096 // 16 + 1) * 16
    assert windows.most_tokens(windows.slots(10**6)) is None
    assert windows.most_tokens(windows.slots(10**6) - 1) < 4096
    assert Pages(models["mistral-7b-v0.1"], "unified", 16).most_tokens(32 * 160) == 160


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 12), st.integers(0, 12), st.integers(1, 300), st.integers(1, 20_000),
    st.sampled_from([1, 3, 16]), st.integers(1, 200), st.sampled_from(["exact", "grouped", "unified"]),
)  # fmt: skip
def test_most_tokens_is_the_inverse_of_slots(full, sliding, window, slots, block, step, kind):
    if full + sliding == 0:
        return
    pages = Pages(hybrid(full, sliding, window), kind, block, step)
    most = pages.most_tokens(slots)
    if most is None:
        assert full == 0 and pages.slots(10**7) <= slots
        return
    assert most % block == 0 and pages.slots(most + 1) > slots
    if most:
        assert pages.slots(most) <= slots


REFUSED = [
    (dict(tensor=3), "tensor must .* heads=64, got 3"),
    (dict(tensor=128), "tensor must .* heads=64, got 128"),
    (dict(expert=2), "expert must .* without experts, got 2"),
    (dict(tensor=8, devices=4), "devices=4, but tensor=8 x expert=1 are 8"),
    (dict(tensor=0), "tensor must be a positive integer, got 0"),
    (dict(tensor=2, kv_sharding="batch"), "kv_sharding goes with devices"),
    (dict(pages="paged"), "pages must be one of exact, grouped, unified, got 'paged'"),
    (dict(step_tokens=0), "step_tokens must be a positive integer"),
    (dict(activation_bytes=-1), "activation_bytes must be an integer of at least 0"),
    (dict(weights_bytes=0), "weights_bytes must be a positive integer"),
    (dict(weights_bytes=1, experts="fp8"), "leave experts out"),
    (dict(devices=2, link_bandwidth=0.0), "link_bandwidth must be a positive finite number"),
    (dict(devices=2, link_bandwidth=1e9, link_latency=-1.0), "link_latency must .* at least 0, got -1"),
    (dict(link_latency=1.0), "link_latency needs a link_bandwidth"),
    (dict(devices=3, link_bandwidth=1e9), "tensor must .* heads=64, got 3"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        size(M70, "h100-sxm", **options)
    assert "\n" not in str(caught.value)


def test_shares_are_exact():
    """No rounding on the way: 6-bit numbers over 16 ranks of eight heads."""
    found = size("llama-3.1-8b", "h100-sxm", tensor=16, kv=6, context=7)
    numbers = Fraction(7 * 32 * 2 * 128)
    assert found.kv_bytes_per_device == math.ceil(numbers * 6 / 8)
