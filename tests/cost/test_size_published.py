"""`companion size` against what others printed: articles, reports, the start-up logs of vLLM and SGLang."""

import json

import pytest

from companion.cli import main
from companion.cost import HardwareSpec, kv_bytes, rank_spec, size, weight_bytes

GiB = 2**30
K = 1024


@pytest.fixture
def ask(capsys):
    """ask("llama-3.1-8b", "--hardware", "l4") -> the JSON that the command prints."""

    def run(*args):
        assert main(["size", *map(str, args), "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return run


def test_the_first_articles_crossings(ask):
    """A 70B model with "140 GB" of weights, batch 8, a node of 640 GB: about 53 and 191 thousand tokens."""
    node = ("llama-3.1-70b", "--hardware", "h100-sxm", "--devices", 8, "--batch", 8)
    found = ask(*node, "--weights-bytes", "140GB")
    assert found["crossings"] == {"cache_equals_weights": 53_406, "full": 190_735}
    assert found["kv_bytes_per_token"] * 8 == 2_621_440 and found["max_context"] == 190_734
    # Its bars, in GB: cache and total at 4K to 256K tokens.
    for context, cache, total in [
        (4, 11, 151),
        (16, 43, 183),
        (64, 172, 312),
        (128, 344, 484),
        (256, 687, 827),
    ]:
        bar = ask(*node, "--weights-bytes", "140GB", "--context", context * K)
        assert (round(bar["kv_bytes"] / 1e9), round(bar["total_bytes"] / 1e9)) == (cache, total)
        assert bar["fits"] is (total <= 640)
    # With the weights counted instead of rounded, and "80 GB" read as GiB.
    assert ask(*node)["crossings"] == {"cache_equals_weights": 53_829, "full": 190_313}
    wide = ask(*node, "--weights-bytes", "140GB", "--memory", "80GiB")
    assert wide["crossings"]["full"] == 208_739


def test_deepseek_v3_of_its_own_table(ask):
    """70.272 kB per token beside 516.096 of Llama-3.1-405B (2505.09343, Table 1)."""
    assert ask("deepseek-v3", "--hardware", "b200", "--devices", 8)["kv_bytes_per_token"] == 70_272
    assert ask("llama-3.1-405b", "--hardware", "b200", "--devices", 8)["kv_bytes_per_token"] == 516_096


def test_gpt_oss_needs_half_of_what_one_table_allocates(ask):
    """Twelve of 24 layers see 128 tokens: 3.0 GiB needed at 128K; one block table for all holds 6.0."""
    base = ("gpt-oss-20b", "--hardware", "h100-sxm", "--experts", "mxfp4", "--context", 128 * K)
    exact, grouped, unified = (ask(*base, "--pages", kind) for kind in ("exact", "grouped", "unified"))
    for found in (exact, grouped, unified):
        assert found["kv_needed_bytes"] == 24_576 * 131_072 + 3_145_728
        assert found["bytes_per_device"] - found["weights_bytes"] == found["kv_allocated_bytes"]
    assert exact["kv_allocated_bytes"] == exact["kv_needed_bytes"]
    assert unified["kv_allocated_bytes"] == 49_152 * 131_072 == 6 * GiB
    # Two groups of twelve layers: 8,192 blocks, and (127 + 1) / 16 + 1 = 9 for the window.
    assert grouped["kv_allocated_bytes"] == (8192 + 9) * 12 * 16 * 2048
    assert unified["max_batch"] < grouped["max_batch"] <= exact["max_batch"]
    # While a prompt is read 8,192 tokens at a time the window's blocks are (127 + 8192) / 16 + 1 = 521.
    chunked = ask(*base, "--pages", "grouped", "--step-tokens", 8192)
    assert chunked["kv_allocated_bytes"] == (8192 + 521) * 12 * 16 * 2048


def shown(nbytes: int) -> str:
    return f"{nbytes / GiB:.2f}"


def test_vllm_on_a_3090():
    """github.com/vllm-project/vllm/issues/10517, comment of 2 December 2024: Llama-3.1-8B, vLLM 0.6, a 3090.

    "kv_cache_size=3.81GiB", "GPU blocks: 1952", "Maximum concurrency for 20000 tokens per request: 1.56x";
    with 29,000 tokens 2.89 GiB, 1478 blocks, 0.82x, "that can be stored in KV cache (23648)".
    """
    for blocks, printed, length, concurrency in [
        (1952, "3.81", 20_000, "1.56"),
        (1478, "2.89", 29_000, "0.82"),
    ]:
        room = blocks * 16 * 131_072
        card = HardwareSpec("RTX 3090", weight_bytes("llama-3.1-8b") + room, 936e9, {"bf16": 71e12})
        found = size("llama-3.1-8b", card, context=16, block_size=16)
        assert found.cache_room_bytes == room and shown(room) == printed
        assert found.max_context == blocks * 16 and found.max_batch == blocks
        assert f"{found.max_context / length:.2f}" == concurrency
    assert 1478 * 16 == 23_648
    # "Loading model weights took 14.9888 GB" (they are GiB): the weights, and a table of cosines and sines
    # of 131,072 positions x 128 in bf16.
    held = size("llama-3.1-8b", "l4").weights_bytes + 131_072 * 128 * 2
    assert f"{held / GiB:.4f}" == "14.9888"


def test_vllm_says_what_a_request_needs():
    """vllm-project/vllm issue 34076: Qwen3-Coder-30B-A3B, the shape of Qwen3-30B-A3B.

    "max seq len (262144), (24.0 GiB KV cache is needed, which is larger than the available (3.18 GiB). [...]
    the estimated maximum model length is 34736".
    """
    found = size("qwen3-30b-a3b", "b200", context=262_144, block_size=16)
    assert found.kv_allocated_bytes == 24 * GiB
    for room, fits in [(3.175 * GiB, False), (3.185 * GiB, True)]:  # 3.18, rounded
        card = HardwareSpec("rest", weight_bytes("qwen3-30b-a3b") + int(room), 1e12, {"bf16": 1e15})
        longest = size("qwen3-30b-a3b", card, block_size=16).max_context
        assert (longest >= 34_736) is fits and abs(longest - 34_736) <= 64


def test_sglang_on_four_ranks():
    """vllm-project/vllm issue 21348: Qwen3-235B-A22B on four H100 in SGLang with --tp 4.

    "KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB", per rank, and in GiB.
    """
    found = size("qwen3-235b-a22b", "h100-sxm", tensor=4, context=367_404)
    assert shown(found.kv_bytes_per_device // 2) == "8.23"
    assert found.kv_bytes_per_device == kv_bytes(rank_spec("qwen3-235b-a22b", tensor=4), 367_404)
    assert found.kv_bytes_per_device * 4 == found.kv_bytes  # four heads on four ranks: no copies


def test_weights_of_the_released_gpt_oss(ask):
    """The cards say 12.8 and 60.8 GiB."""
    for name, gib in [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)]:
        found = ask(name, "--hardware", "h100-sxm", "--experts", "mxfp4")
        assert found["weights_bytes"] / GiB == pytest.approx(gib, rel=2e-3)
