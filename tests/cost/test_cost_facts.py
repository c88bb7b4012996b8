"""Every row of the model and hardware tables against figures published elsewhere."""

import json

import pytest

from companion.cli import main
from companion.cost import (
    active_parameters,
    hardware,
    kv_bytes,
    kv_bytes_per_token,
    kv_fixed_bytes,
    kv_growth_per_token,
    matmul_parameters,
    models,
    parameter_count,
    parameters,
    weight_bytes,
)

GiB = 2**30

# name, bytes per token over all layers, growth, fixed, GiB at 131,072 tokens
CACHE = [
    ("llama-2-7b", 524_288, 524_288, 0, 64),
    ("llama-3.1-8b", 131_072, 131_072, 0, 16),
    ("llama-3.1-70b", 327_680, 327_680, 0, 40),
    ("llama-3.1-405b", 516_096, 516_096, 0, 63),
    ("mistral-7b-v0.1", 131_072, 0, 512 * 2**20, 0.5),
    ("mistral-7b-v0.2", 131_072, 131_072, 0, 16),
    ("mixtral-8x7b", 131_072, 131_072, 0, 16),
    ("qwen3-8b", 147_456, 147_456, 0, 18),
    ("qwen3-30b-a3b", 98_304, 98_304, 0, 12),
    ("qwen3-235b-a22b", 192_512, 192_512, 0, 23.5),
    ("gemma-2-9b", 344_064, 172_032, 704_643_072, 21.7),
    ("gemma-3-27b", 507_904, 81_920, 436_207_616, 10.4),
    ("deepseek-v2", 69_120, 69_120, 0, 8.44),
    ("deepseek-v3", 70_272, 70_272, 0, 8.58),
    ("kimi-k2", 70_272, 70_272, 0, 8.58),
    ("gpt-oss-20b", 49_152, 24_576, 3_145_728, 3.0),
    ("gpt-oss-120b", 73_728, 36_864, 4_718_592, 4.5),
    ("smollm2-135m", 23_040, 23_040, 0, 2.8),
    ("phi-4", 204_800, 204_800, 0, 25),
    ("glm-4.5", 376_832, 376_832, 0, 46),
    ("glm-4.5-air", 188_416, 188_416, 0, 23),
    ("deepseek-67b", 389_120, 389_120, 0, 47.5),
    ("palm-540b", 120_832, 120_832, 0, 14.75),
]

EXACT_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984,
    "smollm2-135m": 134_515_008,
    "phi-4": 14_659_507_200,
}

# name, total, active, input embedding in the active count; to the digits printed by their authors or known
ROUNDED = [
    ("qwen3-30b-a3b", "30.53e9", "3.35e9", True),
    ("qwen3-235b-a22b", "235.09e9", "22.19e9", True),
    ("gemma-3-27b", "27.0e9", "27.0e9", True),
    ("deepseek-v2", "235.7e9", "21.4e9", True),
    ("deepseek-v3", "671.03e9", "37.55e9", True),
    ("kimi-k2", "1.026e12", "32.9e9", True),
    ("gpt-oss-20b", "20.91e9", "3.61e9", False),
    ("gpt-oss-120b", "116.83e9", "5.13e9", False),
    ("glm-4.5", "352.8e9", "33.6e9", True),
    ("glm-4.5-air", "107e9", "13e9", False),
    ("deepseek-67b", "67e9", "67e9", True),
    ("palm-540b", "540e9", "540e9", True),
]


def rounds_to(value: float, printed: str) -> bool:
    digits, exponent = printed.split("e")
    places = len(digits.partition(".")[2])
    return f"{value / 10 ** int(exponent):.{places}f}" == digits


def test_every_row_is_checked():
    assert [row[0] for row in CACHE] == list(models)
    assert set(EXACT_PARAMETERS) | {row[0] for row in ROUNDED} == set(models) - {"mistral-7b-v0.2"}


@pytest.mark.parametrize("name, every, growth, fixed, gib", CACHE)
def test_cache_bytes(name, every, growth, fixed, gib):
    assert kv_bytes_per_token(name) == kv_bytes(name, 1) == every
    assert kv_growth_per_token(name) == kv_bytes(name, 131_073) - kv_bytes(name, 131_072) == growth
    assert kv_fixed_bytes(name) == fixed
    assert kv_bytes(name, 131_072) == growth * 131_072 + fixed
    places = len(str(gib).partition(".")[2])
    assert round(kv_bytes(name, 131_072) / GiB, places) == gib


@pytest.mark.parametrize("name, every, growth, fixed, gib", CACHE)
def test_the_command_says_the_same_at_128k(name, every, growth, fixed, gib, capsys):
    asked = ["size", name, "--hardware", "h200-sxm", "--memory", "10TB", "--context", "131072", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_token"] == every and found["fits"] is True
    assert found["kv_growth_bytes_per_token"] == growth and found["kv_fixed_bytes"] == fixed
    cache = 131_072 * growth + fixed
    assert found["kv_bytes"] == found["kv_needed_bytes"] == found["kv_allocated_bytes"] == cache
    places = len(str(gib).partition(".")[2])
    assert f"{cache / GiB:.{places}f}" == str(gib)


@pytest.mark.parametrize("name, count", EXACT_PARAMETERS.items())
def test_parameters_exact(name, count):
    assert parameters(name) == count
    assert weight_bytes(name) == 2 * count


def test_mixtral_active_exact():
    assert active_parameters("mixtral-8x7b") == 12_879_925_248


@pytest.mark.parametrize("name, total, active, embedding", ROUNDED)
def test_parameters_to_the_printed_digits(name, total, active, embedding):
    assert rounds_to(parameters(name), total)
    assert rounds_to(active_parameters(name, embedding=embedding), active)


def test_gpt_oss_without_its_biases_is_the_other_figure_in_circulation():
    """116.79e9 leaves out the experts' biases; the mxfp4 experts are 114.66e9 of them."""
    count = parameter_count("gpt-oss-120b")
    biases = 36 * 128 * (2 * 2880 + 2880)
    assert rounds_to(count.total - biases, "116.79e9")
    assert rounds_to(count.experts - biases, "114.66e9")
    # The released checkpoints: 60.8 and 12.8 GiB.
    assert weight_bytes("gpt-oss-120b", experts="mxfp4") / GiB == pytest.approx(60.8, rel=2e-3)
    assert weight_bytes("gpt-oss-20b", experts="mxfp4") / GiB == pytest.approx(12.8, rel=2e-3)


def test_parts_sum_to_the_total():
    for name in models:
        count = parameter_count(name)
        assert sum(v for k, v in count.to_dict().items() if k != "total") == count.total
        assert (count.head == 0) == models[name].tied


def test_head_dim_is_not_the_width_over_the_heads():
    naive_widths = {"qwen3-30b-a3b": 64, "gemma-2-9b": 224, "gemma-3-27b": 168, "gpt-oss-20b": 45}
    for name, naive in naive_widths.items():
        model = models[name]
        assert model.d_model // model.heads == naive != model.head_dim


def test_layers_of_each_type():
    for name, sliding, full in [("gemma-2-9b", 21, 21), ("gemma-3-27b", 52, 10), ("gpt-oss-120b", 18, 18)]:
        assert (models[name].sliding_layers, models[name].full_layers) == (sliding, full)
    assert models["gemma-2-9b"].layer_types[0] == models["gpt-oss-20b"].layer_types[0] == "sliding"
    assert models["gemma-3-27b"].layer_types[:6] == ("sliding",) * 5 + ("full",)


def test_matmul_parameters_leave_the_lookup_out():
    assert 2 * matmul_parameters("llama-3.1-8b") == 15_009_849_344
    assert matmul_parameters("smollm2-135m") == parameters("smollm2-135m")  # tied: the table is the head


# name, bytes, bytes per second, flops, ridge of the 16-bit (CPU: fp32) format and of the 8-bit one
DEVICES = [
    ("t4", 16e9, 320e9, {"fp16": 65e12, "int8": 130e12}, "fp16", 203, "int8", 406),
    ("l4", 24e9, 300e9, {"bf16": 121e12, "fp8": 242.5e12}, "bf16", 403, "fp8", 808),
    ("a100-40gb-sxm", 40e9, 1555e9, {"bf16": 312e12, "int8": 624e12}, "bf16", 201, "int8", 401),
    ("a100-80gb-sxm", 80e9, 2039e9, {"bf16": 312e12, "int8": 624e12}, "bf16", 153, "int8", 306),
    ("a100-80gb-pcie", 80e9, 1935e9, {"bf16": 312e12, "int8": 624e12}, "bf16", 161, "int8", 322),
    ("h100-sxm", 80e9, 3350e9, {"bf16": 989.4e12, "fp8": 1978.9e12}, "bf16", 295, "fp8", 591),
    ("h100-pcie", 80e9, 2000e9, {"bf16": 756e12, "fp8": 1513e12}, "bf16", 378, "fp8", 757),
    ("h200-sxm", 141e9, 4800e9, {"bf16": 989.4e12, "fp8": 1978.9e12}, "bf16", 206, "fp8", 412),
    ("b200", 180e9, 8000e9, {"bf16": 2250e12, "fp8": 4500e12, "nvfp4": 9000e12}, "bf16", 281, "fp8", 563),
    ("mi300x", 192e9, 5300e9, {"bf16": 1307.4e12, "fp8": 2614.9e12}, "bf16", 247, "fp8", 493),
    ("tpu-v4", 32e9, 1200e9, {"bf16": 275e12, "int8": 275e12}, "bf16", 229, "int8", 229),
    ("tpu-v5e", 16e9, 819e9, {"bf16": 197e12, "int8": 394e12}, "bf16", 241, "int8", 481),
    ("desktop-cpu", 64e9, 83.2e9, {"fp32": 2.3e12}, "fp32", 28, "fp32", 28),
]


def test_every_device_is_checked():
    assert [row[0] for row in DEVICES] == list(hardware)


@pytest.mark.parametrize("name, memory, bandwidth, flops, wide, ridge, narrow, ridge8", DEVICES)
def test_hardware(name, memory, bandwidth, flops, wide, ridge, narrow, ridge8):
    device = hardware[name]
    assert (device.device_bytes, device.bandwidth) == (memory, bandwidth)
    assert flops.items() <= device.flops.items()
    assert device.default_compute == wide
    # The half of a ridge such as 562.5 is printed upwards in the tables.
    assert int(device.ridge(wide) + 0.5) == ridge
    assert int(device.ridge(narrow) + 0.5) == ridge8


def test_rows_carry_a_source_and_a_mark():
    for table in (models, hardware):
        for name, row in table.rows.items():
            assert row.get("sources") or row.get("source"), name
            assert row["status"] in ("primary", "primary and secondary", "secondary", "memory"), name
            for field in row.get("unverified", ()):
                config = row["config"].get("text_config", row["config"])
                assert field in config, (name, field)
