"""Bytes that must be held and bytes that must be read: the cache and the weights.

The cache, per layer: keys and values of every earlier token, `2 h_kv d_h` numbers each. A sliding
layer stops at its window; latent attention stores one vector of 576 numbers instead.
"""

from __future__ import annotations

from .counts import expert_parameters, experts_touched, matmul_parameters, parameter_count
from .dtypes import bytes_for
from .registry import resolve_model
from .spec import ModelSpec, whole


def cached_values(model: ModelSpec | str, tokens: int, *, batch: int = 1, step: int = 1) -> int:
    """How many numbers a cache of `tokens` tokens per sequence holds, over all layers."""
    model = resolve_model(model)
    tokens = whole("kv_bytes", "tokens", tokens, zero=True)
    batch, step = whole("kv_bytes", "batch", batch), whole("kv_bytes", "step", step)
    slots = model.full_layers * tokens
    if model.sliding_layers:
        # A step of several tokens must not overwrite what its first token still sees.
        slots += model.sliding_layers * min(tokens, model.window + step - 1)
    return batch * slots * model.cached_width


def kv_bytes(model: ModelSpec | str, tokens: int, *, batch: int = 1, dtype="bf16", step: int = 1) -> int:
    """Bytes of the key-value cache.

    model   a ModelSpec or a name
    tokens  cached tokens per sequence, at least 0
    batch   sequences, each with its own cache
    dtype   format of a stored number (see `companion.cost.dtypes`), or bits per value
    step    tokens written per step: a sliding layer holds min(tokens, window + step - 1)

    Equals the bytes of the tensors that a cache of this shape allocates. A server may allocate more:
    whole blocks, or the full length in sliding layers too.
    """
    return bytes_for(cached_values(model, tokens, batch=batch, step=step), dtype)


def kv_bytes_per_token(model: ModelSpec | str, *, dtype="bf16") -> int:
    """Bytes that one token adds while no window is full: the sum over all layers."""
    model = resolve_model(model)
    return bytes_for(model.layers * model.cached_width, dtype)


def kv_growth_per_token(model: ModelSpec | str, *, dtype="bf16") -> int:
    """Bytes that one more token adds once the windows are full: the sum over the full layers."""
    model = resolve_model(model)
    return bytes_for(model.full_layers * model.cached_width, dtype)


def kv_fixed_bytes(model: ModelSpec | str, *, dtype="bf16") -> int:
    """Bytes that the sliding layers hold per sequence once their windows are full; 0 without windows."""
    model = resolve_model(model)
    return bytes_for(model.sliding_layers * (model.window or 0) * model.cached_width, dtype)


def linear_state_bytes(
    model: ModelSpec | str, *, batch: int = 1, dtype="fp32", normaliser: bool = True
) -> int:
    """Bytes of the state that linear attention keeps instead of keys and values, for a text of any length.

    A matrix of d_h x d_v numbers per layer and key head, and with the normaliser another d_h.
    """
    model = resolve_model(model)
    batch = whole("linear_state_bytes", "batch", batch)
    per_head = model.head_dim * (model.v_head_dim + bool(normaliser))
    return bytes_for(batch * model.layers * model.kv_heads * per_head, dtype)


def weight_bytes(model: ModelSpec | str, dtype="bf16", *, experts=None) -> int:
    """Bytes of all weights, every parameter in `dtype`.

    experts  another format for the routed experts alone: gpt-oss keeps those in "mxfp4" and the rest
             in "bf16".
    """
    count = parameter_count(model)
    if experts is None:
        return bytes_for(count.total, dtype)
    rest = bytes_for(count.total - count.experts, dtype)
    return rest + bytes_for(count.experts, experts, argument="experts")


def weight_bytes_read(
    model: ModelSpec | str, batch: int = 1, dtype="bf16", *, experts=None, embedding: bool = False
) -> int:
    """Bytes of weights that one step of `batch` tokens reads.

    All of a dense model but its input embedding, of which a step reads `batch` rows (embedding=True
    counts the table whole). Of the routed experts, the expected number that the batch touches.
    """
    model = resolve_model(model)
    batch = whole("weight_bytes_read", "batch", batch)
    count = parameter_count(model)
    rest = (count.total if embedding else matmul_parameters(model, active=False)) - count.experts
    total = bytes_for(rest, dtype)
    if model.moe:
        touched = round(experts_touched(model, batch) * model.moe_layers * expert_parameters(model))
        total += bytes_for(touched, dtype if experts is None else experts, argument="experts")
    return total
