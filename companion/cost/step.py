"""Predicted time of a decode step and of a prefill, from bytes, FLOPs and a device.

    seconds = max(W / BW, 2 P B / F)  +  max(KV / BW, attention FLOPs / F)  +  overhead

Within a kernel, loading and multiplying overlap, so each term is the larger of its two times. The
products with the weights and the attention over the cache are different kernels that wait for each
other in every layer, so the two terms add. For plain attention the second is always its bytes, and
this is the formula of *How to Scale Your Model* (jax-ml.github.io/scaling-book, on inference).
Communication between devices is not in it.

Speculation makes a pass of gamma + 1 rows. If each of gamma drafts is accepted with probability alpha,
independently of the others, it yields

    E = 1 + alpha + ... + alpha**gamma = (1 - alpha**(gamma + 1)) / (1 - alpha)

tokens (Leviathan et al. 2023, equation 1). Whether that is a gain depends on what such a pass costs beside
one of a single row: nearly nothing where reading the weights is all that counts, more on a processor whose
products slow down from the second row on, and for experts, of which more rows touch more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Real

from ..checks import choice, number, positive, whole
from ..formats import bits_per_value, bytes_for
from .flops import LOGITS, decode_attention_flops, prefill_attention_flops, prefill_flops
from .memory import cached_values, matmul_parameters, share_of_cache, weight_bytes_read
from .registry import HardwareSpec, resolve_hardware, resolve_model
from .spec import ModelSpec


@dataclass(frozen=True)
class StepCost:
    """What one step reads and computes on all devices together, and how long that takes.

    bound_by is `"memory: weights"`, `"memory: cache"`, "compute" or "overhead": the largest share
    of the time.
    intensity is FLOPs per byte, weights and cache together.
    """

    batch: int
    context: int
    tokens: int
    devices: int
    weights_bytes: int
    kv_bytes: int
    matmul_flops: int
    attention_flops: int
    weights_seconds: float
    matmul_seconds: float
    kv_seconds: float
    attention_seconds: float
    overhead_seconds: float
    seconds: float
    bound_by: str

    @property
    def flops(self) -> int:
        """Of the products with the weights and of attention."""
        return self.matmul_flops + self.attention_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole batch."""
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        """The rate of the whole step: where it lies under a roofline."""
        return self.flops / self.seconds

    @property
    def intensity(self) -> float:
        """FLOPs per byte of weights and cache."""
        return self.flops / (self.weights_bytes + self.kv_bytes)

    def to_dict(self) -> dict:
        extra = {
            "flops": self.flops,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "intensity": self.intensity,
        }
        return {**asdict(self), **extra}


def _cost(
    owner, model, device, *, tokens, batch, context, held, products, attention, weights, experts,
    kv, compute_dtype, efficiency, compute_efficiency, devices, kv_sharding, overhead_seconds,
) -> StepCost:  # fmt: skip
    devices = whole("devices", devices, owner=owner)
    efficiency = positive("efficiency", efficiency, 1, owner=owner)
    reached = efficiency
    if compute_efficiency is not None:
        reached = positive("compute_efficiency", compute_efficiency, 1, owner=owner)
    overhead = number("overhead_seconds", overhead_seconds, 0, owner=owner)
    bandwidth = device.bandwidth * efficiency
    peak = device.peak(compute_dtype or device.default_compute) * reached
    read = weight_bytes_read(model, tokens, weights, experts=experts)
    kv_share = share_of_cache(model, devices, kv_sharding, batch)
    cache = bytes_for(held * kv_share * devices, kv, argument="kv")
    # Query heads are split over the devices even where what they read is copied.
    query_share = float(kv_share) if kv_sharding == "batch" else 1 / devices
    times = {
        "weights_seconds": read / devices / bandwidth,
        "matmul_seconds": products / devices / peak,
        "kv_seconds": cache / devices / bandwidth,
        "attention_seconds": attention * query_share / peak,
        "overhead_seconds": overhead,
    }
    labels = ("memory: weights", "compute", "memory: cache", "compute", "overhead")
    bound = max(zip(times.values(), labels), key=lambda pair: pair[0])[1]
    seconds = max(times["weights_seconds"], times["matmul_seconds"])
    seconds += max(times["kv_seconds"], times["attention_seconds"]) + overhead
    return StepCost(
        batch=batch, context=context, tokens=tokens, devices=devices, weights_bytes=read, kv_bytes=cache,
        matmul_flops=products, attention_flops=attention, **times, seconds=seconds, bound_by=bound,
    )  # fmt: skip


def decode_step(
    model: ModelSpec | str,
    hardware: HardwareSpec | str,
    batch: int = 1,
    context: int = 1,
    *,
    weights="bf16",
    experts=None,
    kv="bf16",
    compute_dtype=None,
    efficiency: float = 1.0,
    compute_efficiency: float | None = None,
    devices: int = 1,
    kv_sharding: str = "heads",
    overhead_seconds: float = 0.0,
) -> StepCost:
    """One decode step: a token for each of `batch` sequences.

    context             cached tokens per sequence, the new one included
    weights             format in which weights are read; kv likewise for the cache
    experts             another format for the routed experts alone
    compute_dtype       format of the products; by default the device's bf16, else fp16, else fp32, whatever
                        the weights are stored in (weight-only quantisation)
    efficiency          share of the bandwidth (and of the peak) that is reached, 0 to 1
    compute_efficiency  share of the peak, if it differs
    devices             devices that split the weights evenly; see `share_of_cache` for the cache
    overhead_seconds    launches and whatever else is the same in every step

    With experts, the weights read are those that the batch is expected to touch.
    Raises ValueError naming the argument.
    """
    model, device = resolve_model(model), resolve_hardware(hardware)
    batch = whole("batch", batch, owner="decode_step")
    return _cost(
        "decode_step", model, device, tokens=batch, batch=batch, context=context,
        held=cached_values(model, context, batch=batch), products=2 * matmul_parameters(model) * batch,
        attention=decode_attention_flops(model, context, batch=batch), weights=weights,
        experts=experts, kv=kv, compute_dtype=compute_dtype, efficiency=efficiency,
        compute_efficiency=compute_efficiency, devices=devices, kv_sharding=kv_sharding,
        overhead_seconds=overhead_seconds,
    )  # fmt: skip


def prefill(
    model: ModelSpec | str,
    hardware: HardwareSpec | str,
    tokens: int,
    *,
    batch: int = 1,
    cached: int = 0,
    logits: str = "last",
    weights="bf16",
    experts=None,
    kv="bf16",
    compute_dtype=None,
    efficiency: float = 1.0,
    compute_efficiency: float | None = None,
    devices: int = 1,
    kv_sharding: str = "heads",
    overhead_seconds: float = 0.0,
) -> StepCost:
    """Reading a prompt: its `seconds` predict the time to the first token.

    tokens  new prompt tokens per sequence, at least 1
    cached  tokens before them that a prefix cache holds already; they are read, not computed
    logits  "last": the output head runs once per sequence, as when generating; "all": at every position

    The other arguments are those of `decode_step`. The cache's time counts one read of it.
    """
    model, device = resolve_model(model), resolve_hardware(hardware)
    tokens, batch = whole("tokens", tokens, owner="prefill"), whole("batch", batch, owner="prefill")
    cached = whole("cached", cached, 0, owner="prefill")
    choice("logits", logits, LOGITS)
    attention = prefill_attention_flops(model, tokens, cached=cached, batch=batch)
    total = prefill_flops(model, tokens, cached=cached, batch=batch, logits=logits)
    return _cost(
        "prefill", model, device, tokens=tokens * batch, batch=batch, context=cached + tokens,
        held=cached_values(model, cached + tokens, batch=batch, step=tokens), products=total - attention,
        attention=attention, weights=weights, experts=experts, kv=kv,
        compute_dtype=compute_dtype, efficiency=efficiency, compute_efficiency=compute_efficiency,
        devices=devices, kv_sharding=kv_sharding, overhead_seconds=overhead_seconds,
    )  # fmt: skip


def cache_equals_weights(model: ModelSpec | str, *, weights="bf16", kv="bf16") -> float:
    """Cached tokens, summed over the batch, that take as many bytes to read as the weights.

    114,516 for Llama-3.1-8B in bf16; full-attention models only, where every token counts alike.
    """
    model = resolve_model(model)
    if model.sliding_layers:
        raise ValueError(f"model {model.name!r} has sliding layers; its cache is not linear in tokens")
    read = bytes_for(matmul_parameters(model, active=False), weights, argument="weights")
    per_token = model.layers * model.cached_width * bits_per_value(kv, argument="kv")
    return float(8 * read / per_token)


PassCost = Callable[[int], Real]  # rows -> time of a pass, in passes of one row


def expected_tokens(alpha: Real, gamma: int) -> float:
    """Tokens per pass, 1 to gamma + 1, at acceptance alpha (0 to 1) of each of gamma drafts.

    >>> expected_tokens(0.8, 4)
    3.3616
    """
    gamma = whole("gamma", gamma, 0, owner="expected_tokens")
    number("alpha", alpha, 0, 1, owner="expected_tokens")
    return float(math.fsum(alpha**i for i in range(gamma + 1)))  # the sum has no 0 / 0 at alpha = 1


def speculative_speedup(
    alpha: Real, gamma: int, *, pass_cost: PassCost | Real = 1.0, draft_cost: Real = 0.0
) -> float:
    """How many times faster than plain decoding: tokens per pass over the price of a pass.

    pass_cost   time of the target's pass of gamma + 1 rows, in its passes of one row: a number, or a
                function of the rows. 1 is the ideal of the papers
    draft_cost  time of one drafted token in the same unit; 0 for a look-up

    With pass_cost 1 this is theorem 3.8 of Leviathan et al. 2023.
    """
    rows = whole("gamma", gamma, 0, owner="speculative_speedup") + 1
    price = pass_cost(rows) if callable(pass_cost) else pass_cost
    positive("pass_cost", price, owner="speculative_speedup")
    number("draft_cost", draft_cost, 0, owner="speculative_speedup")
    return expected_tokens(alpha, gamma) / (price + gamma * draft_cost)


def best_draft_length(
    alpha: Real, *, pass_cost: PassCost | Real = 1.0, draft_cost: Real = 0.0, longest: int = 8
) -> int:
    """The draft length, 0 to `longest`, of the largest speed-up; the shortest among equals."""
    lengths = range(whole("longest", longest, 0, owner="best_draft_length") + 1)
    price = pass_cost if callable(pass_cost) else lambda rows: 1.0 if rows == 1 else pass_cost
    gains = [speculative_speedup(alpha, n, pass_cost=price, draft_cost=draft_cost) for n in lengths]
    return gains.index(max(gains))


def verify_pass(
    model: ModelSpec | str, hardware: HardwareSpec | str, rows: int, context: int, **options
) -> StepCost:
    """One pass of the target over `rows` tokens of one sequence, all of whose logits are wanted.

    context  tokens in the cache behind it, these included. options: those of `prefill`, which this is:
             weights and cache are read once, products are made for every row, and with experts the weights
             are those that so many tokens are expected to touch.
    """
    rows = whole("rows", rows, owner="verify_pass")
    whole("context", context, rows, owner="verify_pass")
    return prefill(model, hardware, rows, cached=context - rows, logits="all", **options)


def predicted_pass_cost(
    model: ModelSpec | str, hardware: HardwareSpec | str, context: int, **options
) -> PassCost:
    """The price of a pass as a function of its rows, from bytes and FLOPs: `verify_pass` over that of one."""
    one = verify_pass(model, hardware, 1, context, **options).seconds
    return lambda rows: verify_pass(model, hardware, rows, max(context, rows), **options).seconds / one
