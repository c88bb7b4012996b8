"""FLOPs of prefill and decode: 2 per parameter and token, and the attention term that this leaves out.

One multiplication and one addition are two FLOPs. Scores and the weighted sum of values cost
`2 h (d_h + d_v)` per query and visible key in each layer, `4 h d_h` in the usual case.
"""

from __future__ import annotations

from ..checks import choice, whole
from .memory import kv_bytes, matmul_parameters, weight_bytes_read
from .registry import HardwareSpec, resolve_hardware, resolve_model
from .spec import ModelSpec

PHASES = ("decode", "prefill")
LOGITS = ("all", "last")


def attention_flops_per_key(model: ModelSpec | str, *, absorbed: bool = True) -> int:
    """FLOPs that one query position spends on one visible key, in one layer.

    absorbed  latent attention only: True is decode, where the 128 heads read the latent itself,
              2 h (576 + 512); False is prefill, where keys and values are expanded, 2 h (192 + 128)
    """
    model = resolve_model(model)
    if model.mla and absorbed:
        return 2 * model.heads * (model.mla.width + model.mla.kv_rank)
    return 2 * model.heads * (model.head_dim + model.v_head_dim)


def decode_attention_flops(model: ModelSpec | str, context: int, *, batch: int = 1) -> int:
    """Attention FLOPs of one decode step over `context` cached tokens, the new one included."""
    model = resolve_model(model)
    context = whole("context", context, 0, owner="decode_flops")
    batch = whole("batch", batch, owner="decode_flops")
    keys = model.full_layers * context
    if model.sliding_layers:
        keys += model.sliding_layers * min(context, model.window)
    return batch * keys * attention_flops_per_key(model)


def decode_flops(model: ModelSpec | str, context: int, *, batch: int = 1) -> int:
    """FLOPs of one decode step: `2 P` and attention, for each sequence.

    context  cached tokens that the step attends to, the new one included
    """
    model = resolve_model(model)
    attention = decode_attention_flops(model, context, batch=batch)
    return 2 * matmul_parameters(model) * batch + attention


def _visible_pairs(tokens: int, cached: int, window: int | None) -> int:
    """Sum over the new positions of the keys that each may see."""
    last = cached + tokens
    if window is None or last <= window:
        return tokens * cached + tokens * (tokens + 1) // 2
    growing = max(0, window - cached)  # positions that still see everything before them
    return _visible_pairs(growing, cached, None) + (tokens - growing) * window


def prefill_attention_flops(model: ModelSpec | str, tokens: int, *, cached: int = 0, batch: int = 1) -> int:
    """Attention FLOPs of reading `tokens` new prompt tokens after `cached` ones, under the causal mask."""
    model = resolve_model(model)
    tokens = whole("tokens", tokens, 0, owner="prefill_flops")
    cached = whole("cached", cached, 0, owner="prefill_flops")
    batch = whole("batch", batch, owner="prefill_flops")
    pairs = model.full_layers * _visible_pairs(tokens, cached, None)
    pairs += model.sliding_layers * _visible_pairs(tokens, cached, model.window)
    return batch * pairs * attention_flops_per_key(model, absorbed=False)


def prefill_flops(
    model: ModelSpec | str, tokens: int, *, cached: int = 0, batch: int = 1, logits: str = "all"
) -> int:
    """FLOPs of reading a prompt: `2 P` per token and causal attention.

    tokens  new tokens per sequence
    cached  tokens before them whose keys and values are stored already
    logits  "all": the output head runs at every position, the textbook's 2P per token;
            "last": only at the last one, as when generating
    """
    model = resolve_model(model)
    choice("logits", logits, LOGITS)
    attention = prefill_attention_flops(model, tokens, cached=cached, batch=batch)
    products = 2 * matmul_parameters(model) * batch * tokens
    if logits == "last" and tokens:
        products -= 2 * model.vocab * model.d_model * batch * (tokens - 1)
    return products + attention


def attention_crossover(model: ModelSpec | str, *, phase: str = "decode") -> float:
    """Tokens at which attention costs as many FLOPs as the products with the weights.

    phase: "decode" gives 28,629 for Llama-3.1-8B; "prefill" twice that, since under the causal mask a token
        sees half of the prompt on average. Excess over linear at n tokens is n / this.

    With sliding layers it is the first whole number of tokens, found by bisection; infinite if the windows
    keep attention below forever.
    """
    model = resolve_model(model)
    choice("phase", phase, PHASES)
    products = 2 * matmul_parameters(model)

    def per_token(context: int) -> float:
        if phase == "decode":
            return decode_attention_flops(model, context)
        return prefill_attention_flops(model, context) / context

    if not model.sliding_layers:
        share = 1.0 if phase == "decode" else 0.5
        per_key = attention_flops_per_key(model, absorbed=phase == "decode")
        return products / (model.layers * per_key * share)
    low, high = 1, 2**40
    if per_token(high) < products:
        return float("inf")
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if per_token(middle) >= products else (middle + 1, high)
    return float(low)


def intensity(model: ModelSpec | str, batch: int, context: int, *, weights="bf16", kv="bf16") -> float:
    """FLOPs per byte of a decode step, weights and cache together.

    B (2P + 4 L h d_h n) / (W + B kv n): B at short context, bounded by the cache at long ones.
    """
    model = resolve_model(model)
    read = weight_bytes_read(model, batch, weights)
    read += kv_bytes(model, context, batch=batch, dtype=kv)
    return decode_flops(model, context, batch=batch) / read


def attention_intensity(model: ModelSpec | str, *, kv="bf16") -> float:
    """FLOPs per cached byte of decode attention: h_q / h_kv in bf16; 241.8 for DeepSeek-V3's latent."""
    model = resolve_model(model)
    return attention_flops_per_key(model) / (kv_bytes(model, 1, dtype=kv) / model.layers)


def compute_bound_context(
    model: ModelSpec | str, hardware: HardwareSpec | str, *, kv="bf16", compute_dtype=None
) -> float:
    """Context beyond which no batch makes a decode step compute-bound; infinite if attention itself is.

    As the batch grows the weights' bytes vanish per sequence and (2P + a n) / (kv n) is left, with a
    FLOPs and kv bytes per cached token. It equals the ridge at n = 2P / (ridge kv - a): 393 tokens for
    Llama-3.1-8B on H100. Full-attention models only.
    """
    model, device = resolve_model(model), resolve_hardware(hardware)
    if model.sliding_layers:
        raise ValueError(
            f"model {model.name!r} has sliding layers; its intensity has no single limit in context"
        )
    ridge = device.ridge(compute_dtype or device.default_compute)
    per_token = decode_attention_flops(model, 1)
    slack = ridge * kv_bytes(model, 1, dtype=kv) - per_token
    return 2 * matmul_parameters(model) / slack if slack > 0 else float("inf")
