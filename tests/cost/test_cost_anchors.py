"""Figures that papers and the anchors of the field print, re-derived: FLOPs, times, crossings, claims."""

import math

import pytest

from companion.cost import (
    HardwareSpec,
    ModelSpec,
    attention_crossover,
    attention_flops_per_key,
    attention_intensity,
    bits_per_value,
    budget,
    cache_equals_weights,
    compute_bound_context,
    crossings,
    decode_attention_flops,
    decode_flops,
    decode_step,
    experts_touched,
    hardware,
    intensity,
    kv_bytes,
    matmul_parameters,
    models,
    prefill,
    prefill_attention_flops,
    prefill_flops,
    share_of_cache,
    weight_bytes_read,
)

M8 = "llama-3.1-8b"


def test_decode_flops_of_llama():
    assert decode_flops(M8, 0) == 15_009_849_344
    assert decode_attention_flops(M8, 1) == 524_288
    assert decode_attention_flops(M8, 2_863) / decode_flops(M8, 0) == pytest.approx(0.1, rel=1e-3)
    assert int(attention_crossover(M8)) == 28_629
    assert decode_attention_flops(M8, 131_072) / decode_flops(M8, 0) == pytest.approx(4.6, abs=0.05)
    assert decode_flops(M8, 100, batch=3) == 3 * decode_flops(M8, 100)


@pytest.mark.parametrize("name, tokens", [(M8, 57_258), ("smollm2-135m", 7_784)])
def test_prefill_crossover(name, tokens):
    assert int(attention_crossover(name, phase="prefill")) == tokens
    attention = prefill_attention_flops(name, tokens)
    assert attention / (2 * matmul_parameters(name) * tokens) == pytest.approx(1, rel=1e-3)


def test_prefill_excess_is_linear_in_the_prompt():
    excess = prefill_flops("smollm2-135m", 2048) / (2 * matmul_parameters("smollm2-135m") * 2048) - 1
    assert excess == pytest.approx(2048 / 7784, rel=1e-3)  # 26 %


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-2-9b", "mistral-7b-v0.1", "gpt-oss-20b"])
@pytest.mark.parametrize("tokens, cached", [(1, 0), (7, 0), (300, 0), (5, 4094), (200, 4000), (9, 9000)])
def test_prefill_pairs_counted_one_by_one(name, tokens, cached):
    model = models[name]
    pairs = 0
    for kind in model.layer_types:
        window = model.window if kind == "sliding" else math.inf
        pairs += sum(min(cached + i + 1, window) for i in range(tokens))
    assert prefill_attention_flops(name, tokens, cached=cached) == pairs * 4 * model.heads * model.head_dim
    # A prompt in two chunks costs what it costs in one.
    two = prefill_attention_flops(name, tokens - 1, cached=cached) if tokens > 1 else 0
    two += prefill_attention_flops(name, 1, cached=cached + tokens - 1)
    assert two == prefill_attention_flops(name, tokens, cached=cached)


def test_a_prefill_of_one_token_is_a_decode_step():
    for name in (M8, "gemma-3-27b", "mixtral-8x7b"):
        assert prefill_flops(name, 1, cached=5_000) == decode_flops(name, 5_001)
        assert prefill_flops(name, 1, cached=5_000, logits="last") == decode_flops(name, 5_001)


def test_last_logits_leave_the_head_out():
    saved = prefill_flops(M8, 100) - prefill_flops(M8, 100, logits="last")
    assert saved == 99 * 2 * 128_256 * 4_096


def test_intensity_table():
    assert intensity(M8, 64, 1) == pytest.approx(64, rel=1e-3)
    assert round(intensity(M8, 128, 1024)) == 62
    assert round(intensity(M8, 512, 1024)) == 95
    assert round(intensity(M8, 128, 8192)) == 16
    assert round(intensity(M8, 10**7, 8192)) == 18
    assert int(compute_bound_context(M8, "h100-sxm")) == 393
    assert math.isinf(compute_bound_context("deepseek-v3", "a100-80gb-sxm"))  # ridge 153 < 241.8


def test_attention_intensity_of_heads_and_latents():
    for name, ratio in [("llama-2-7b", 1), (M8, 4), ("llama-3.1-70b", 8), ("llama-3.1-405b", 16)]:
        assert attention_intensity(name) == ratio
    assert attention_intensity("deepseek-v3") == pytest.approx(241.8, abs=0.05)
    assert attention_flops_per_key("deepseek-v3") == 2 * 128 * (576 + 512)
    assert attention_flops_per_key("deepseek-v3", absorbed=False) == 2 * 128 * (192 + 128)


def test_sliding_layers_bound_attention():
    full = attention_flops_per_key("gemma-3-27b")
    assert decode_attention_flops("gemma-3-27b", 131_072) == (10 * 131_072 + 52 * 1024) * full
    assert math.isinf(attention_crossover("mistral-7b-v0.1"))
    n = int(attention_crossover("gemma-3-27b"))
    below, at = (decode_attention_flops("gemma-3-27b", t) for t in (n - 1, n))
    assert below < 2 * matmul_parameters("gemma-3-27b") <= at


@pytest.mark.parametrize(
    "batch, touched, gigabytes", [(1, 8, 37.5), (8, 57, 164), (32, 163, 434), (64, 222, 585), (256, 256, 671)]
)
def test_experts_touched_of_deepseek(batch, touched, gigabytes):
    assert round(experts_touched("deepseek-v3", batch)) == touched
    read = weight_bytes_read("deepseek-v3", batch, "fp8", embedding=True) / 1e9
    assert read == pytest.approx(gigabytes, abs=0.06 if batch == 1 else 0.5)


def test_experts_touched_of_mixtral():
    assert [round(experts_touched("mixtral-8x7b", b), 1) for b in (1, 4, 8, 32)] == [2.0, 5.5, 7.2, 8.0]
    # Exact for two draws of one of two: 2 (1 - 1/4).
    tiny = ModelSpec.from_config({**models.rows["mixtral-8x7b"]["config"], "num_local_experts": 4})
    assert experts_touched(tiny, 2) == 3.0


def test_llama_on_h100():
    step = decode_step(M8, "h100-sxm", 1, 1)
    assert step.weights_bytes == 15_009_849_344
    assert step.weights_seconds * 1e3 == pytest.approx(4.48, abs=0.005)
    assert int(step.tokens_per_second) == 223
    assert step.bound_by == "memory: weights"
    for context, extra in [(8192, 0.32), (32_768, 1.28), (131_072, 5.13)]:
        assert decode_step(M8, "h100-sxm", 1, context).kv_seconds * 1e3 == pytest.approx(extra, abs=0.005)
    assert decode_step(M8, "h100-sxm", 1, 131_072).bound_by == "memory: cache"
    assert decode_step(M8, "h100-sxm", 512, 1).bound_by == "compute"
    assert int(cache_equals_weights(M8)) == 114_516
    assert int(cache_equals_weights("smollm2-135m")) == 11_676  # 11,676.65


def test_inter_token_latency_grows_with_context():
    base = decode_step(M8, "h100-sxm", 1, 1).seconds
    for context, percent in [(1024, 0.9), (8192, 7), (32_768, 29), (131_072, 114)]:
        grown = 100 * (decode_step(M8, "h100-sxm", 1, context).seconds / base - 1)
        assert grown == pytest.approx(percent, abs=0.5 if percent > 1 else 0.05)


def test_critical_batch_follows_the_weight_format():
    """Weight-only int8 halves the batch at which products take as long as reading the weights."""
    for dtype, batch in [("bf16", 295), ("int8", 148)]:
        step = decode_step(M8, "h100-sxm", batch, 1, weights=dtype)
        assert step.matmul_seconds / step.weights_seconds == pytest.approx(1, rel=5e-3)


def test_pope_ideal_times():
    """PaLM-540B on 64 TPU v4, batch 64, int8 weights, 2048 tokens: 7.03, 3.93 and 0.21 of 28.4 ms."""
    options = dict(weights="int8", devices=64, kv_sharding="batch")
    step = decode_step("palm-540b", "tpu-v4", 64, 2048, **options)
    assert step.weights_seconds * 1e3 == pytest.approx(7.03, rel=1e-3)
    assert step.matmul_seconds * 1e3 == pytest.approx(3.93, rel=1e-3)
    assert step.kv_seconds * 1e3 == pytest.approx(0.21, abs=0.005)
    assert step.matmul_seconds / 28.4e-3 == pytest.approx(0.14, abs=0.005)
    assert step.kv_seconds / 28.4e-3 < 0.01


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, sharding, tokens128, tokens512",
    [
        (64, 64, 128, "heads", 1333, 333),  # printed as 1,320 and 330
        (64, 1, 256, "heads", 666, 167),  # multi-query by heads: half of multi-head
        (64, 1, 256, "batch", 42_654, 10_663),  # the gain is in the partitioning
    ],
)
def test_pope_maximum_context(heads, kv_heads, head_dim, sharding, tokens128, tokens512):
    model = ModelSpec("palm-like", "palm", 118, 18432, heads, kv_heads, head_dim, 73728, 256000)
    room = 0.3 * 32 * 2**30
    for batch, tokens in [(128, tokens128), (512, tokens512)]:
        each = kv_bytes(model, 1, batch=batch) * share_of_cache(model, 64, sharding, batch)
        assert round(room / each) == tokens


def test_multi_query_saves_flops_at_fixed_width():
    """4 d^2 becomes 2 d^2 + 2 d d_h: 48.4 % of the projections, not almost nothing."""
    from companion.cost.memory import attention_parameters

    def projections(kv_heads):
        return attention_parameters(ModelSpec("m", "llama", 1, 4096, 32, kv_heads, 128, 1, 1))

    assert projections(32) == 4 * 4096**2
    assert 1 - projections(1) / projections(32) == pytest.approx(0.484, abs=5e-4)
    assert (projections(32) - projections(1)) / (12 * 4096**2) == pytest.approx(0.161, abs=5e-4)
    assert (projections(32) - projections(8)) / (12 * 4096**2) == pytest.approx(0.125, abs=5e-4)


def test_claims_about_cache_sizes():
    v2, dense = kv_bytes("deepseek-v2", 1, dtype=6), kv_bytes("deepseek-67b", 1)
    assert 1 - v2 / dense == pytest.approx(0.9334, abs=5e-5)
    assert 1 - kv_bytes("deepseek-v2", 1) / dense == pytest.approx(0.822, abs=5e-4)
    v3, expanded = kv_bytes("deepseek-v3", 1), 61 * 128 * (192 + 128) * 2
    assert expanded == 4_997_120 and round(expanded / v3, 1) == 71.1
    assert round(kv_bytes("llama-3.1-405b", 1) / v3, 2) == 7.34  # printed as 7.28 in the source
    assert 8 / bits_per_value("nvfp4") == pytest.approx(1.78, abs=5e-3)
    assert 1 - kv_bytes(M8, 1000, dtype="nvfp4") / kv_bytes(M8, 1000, dtype="fp8") == 0.4375
    assert bits_per_value("mxfp4") == 4.25 and bits_per_value("kivi2") == 3
    assert kv_bytes("deepseek-v3", 1, dtype=656 * 8 / 576) == 40_016  # FlashMLA's fp8 layout
    assert kv_bytes("llama-3.1-70b", 32_768) == 10 * 2**30  # 10.737 GB


def test_stacked_budget():
    """The node of 640 GB with a 70B model, batch 8, whose figure prints these bars."""
    options = dict(batch=8, kv="fp16", weights_bytes=140 * 10**9)
    contexts = [k * 1024 for k in (4, 16, 32, 64, 128, 256)]
    bars = budget("llama-3.1-70b", 640 * 10**9, contexts, **options)
    assert [round(b.kv_bytes / 1e9) for b in bars] == [11, 43, 86, 172, 344, 687]
    assert [round(b.total_bytes / 1e9) for b in bars] == [151, 183, 226, 312, 484, 827]
    assert [round(b.over_bytes / 1e9) for b in bars] == [0, 0, 0, 0, 0, 187]
    both = crossings("llama-3.1-70b", 640 * 10**9, **options)
    assert (both.cache_equals_weights, both.full) == (53_406, 190_735)
    # If the node's "80 GB" are GiB, and with the weights counted instead of rounded.
    assert crossings("llama-3.1-70b", 640 * 2**30, **options).full == 208_739  # the first that does not fit
    assert crossings("llama-3.1-70b", 640 * 10**9, batch=8).cache_equals_weights == 53_829


def test_crossings_are_first_and_exact():
    for name in ("llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b"):
        capacity = 100 * 10**9
        both = crossings(name, capacity, batch=4)
        for tokens, beyond in [(both.cache_equals_weights, False), (both.full, True)]:
            before, at = budget(name, capacity, [tokens - 1, tokens], batch=4)
            if beyond:
                assert before.over_bytes == 0 < at.over_bytes
            else:
                assert before.kv_bytes < before.weights_bytes <= at.kv_bytes
    assert crossings("mistral-7b-v0.1", 80 * 10**9).full is None
    assert crossings("llama-3.1-405b", 80 * 10**9).full == 0


def test_prefill_time():
    cost = prefill(M8, "h100-sxm", 8192)
    assert cost.bound_by == "compute"
    assert cost.seconds > cost.matmul_seconds > cost.weights_seconds
    # A warm prefix: the cost of the suffix alone, and of reading the prefix.
    warm = prefill(M8, "h100-sxm", 92, cached=8100)
    assert warm.seconds < cost.seconds / 25
    assert prefill(M8, "h100-sxm", 16).bound_by == "memory: weights"  # short prompts are not compute-bound


def test_measured_machine_and_efficiency():
    machine = HardwareSpec.measured("bench", bandwidth=16.3e9, flops=104e9)
    step = decode_step("smollm2-135m", machine, weights="fp32", kv="fp32")
    assert step.seconds * 1e3 == pytest.approx(33, abs=0.05)
    assert step.matmul_seconds * 1e3 == pytest.approx(2.6, abs=0.05)
    half = decode_step("smollm2-135m", machine, weights="fp32", kv="fp32", efficiency=0.5)
    assert half.seconds == pytest.approx(2 * step.seconds)
    launched = decode_step("smollm2-135m", machine, overhead_seconds=1.0)
    assert launched.bound_by == "overhead"


def test_time_is_the_documented_formula():
    for batch, context in [(1, 10), (64, 9000), (2000, 100)]:
        s = decode_step("mixtral-8x7b", "h100-sxm", batch, context, devices=4)
        assert s.seconds == max(s.weights_seconds, s.matmul_seconds) + max(s.kv_seconds, s.attention_seconds)
        assert s.flops == decode_flops("mixtral-8x7b", context, batch=batch)
        assert s.kv_bytes == kv_bytes("mixtral-8x7b", context, batch=batch)
        assert s.intensity == pytest.approx(intensity("mixtral-8x7b", batch, context))


def test_devices_split_or_copy_the_cache():
    assert share_of_cache(M8, 4) == share_of_cache(M8, 4, "batch", 8) == 0.25
    assert share_of_cache(M8, 16) == 1 / 8  # eight heads over sixteen devices: copies
    assert share_of_cache("deepseek-v3", 8) == 1
    assert share_of_cache(M8, 4, "batch", 6) == pytest.approx(1 / 3)  # the fullest holds two of six


def test_sliding_window_with_steps_of_several_tokens():
    per_layer = 2 * 8 * 128 * 2
    for tokens, step, slots in [(4095, 1, 4095), (9000, 1, 4096), (9000, 512, 4607), (100, 512, 100)]:
        assert kv_bytes("mistral-7b-v0.1", tokens, step=step) == 32 * slots * per_layer


def test_h200_is_a_step_back_in_ridge():
    assert hardware["h200-sxm"].ridge() < hardware["h100-sxm"].ridge()
