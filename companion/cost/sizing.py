"""Does it fit, how many users, how long a context, how fast: one deployment from a model and a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction

from .devices import HardwareSpec
from .dtypes import bits_per_value, bytes_for, dtype_name
from .memory import (
    cached_values,
    kv_bytes,
    kv_bytes_per_token,
    kv_fixed_bytes,
    kv_growth_per_token,
    weight_bytes,
)
from .registry import resolve_hardware, resolve_model
from .spec import ModelSpec, whole
from .step import SHARDINGS, decode_step, prefill, share_of_cache

CAPACITY = "memory: capacity"


@dataclass(frozen=True)
class Sizing:
    """One deployment. Bytes are integers; `total_bytes` is over all devices, `device_bytes` is one device's.

    max_batch          sequences of `context` tokens that fit; 0 if the weights alone do not
    max_context        tokens per sequence that fit at `batch`, whatever the model was trained for;
                       None if the memory never runs out (sliding layers only), 0 if nothing fits
    model_max_context  what the model was trained for, or None
    decode_tokens_per_second, ttft_seconds   bounds from the bandwidth and peak; None if it does not fit
    bound_by           what a decode step waits for, or "memory: capacity" if it does not fit
    """

    model: str
    hardware: str
    devices: int
    batch: int
    context: int
    weights_dtype: str
    experts_dtype: str | None
    kv_dtype: str
    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_growth_bytes_per_token: int
    kv_fixed_bytes: int
    overhead_bytes: int
    bytes_per_device: int
    total_bytes: int
    device_bytes: int
    fits: bool
    max_batch: int
    max_context: int | None
    model_max_context: int | None
    decode_seconds: float | None
    decode_tokens_per_second: float | None
    ttft_seconds: float | None
    bound_by: str
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class _Room:
    """Bytes on one device, as a function of batch and context."""

    model: ModelSpec
    devices: int
    kv_sharding: str
    weights: int
    overhead: int
    kv: object
    block: int
    capacity: int

    @property
    def free(self) -> int:
        return self.capacity - -(-self.weights // self.devices) - self.overhead

    def rounded(self, context: int) -> int:
        return -(-context // self.block) * self.block

    def share(self, batch: int) -> Fraction:
        return share_of_cache(self.model, self.devices, self.kv_sharding, batch)

    def cache(self, batch: int, context: int) -> int:
        values = cached_values(self.model, self.rounded(context), batch=batch) * self.share(batch)
        return bytes_for(values, self.kv, argument="kv")

    def fits(self, batch: int, context: int) -> bool:
        return self.cache(batch, context) <= self.free

    def max_batch(self, context: int) -> int:
        if self.free < 0:
            return 0
        one = cached_values(self.model, self.rounded(context)) * self.share(1)  # a sequence, on a device
        sequences = int(8 * self.free // (one * bits_per_value(self.kv)))
        return sequences * (self.devices if self.kv_sharding == "batch" else 1)

    def max_context(self, batch: int) -> int | None:
        if self.free < 0:
            return 0
        model = self.model
        per_slot = batch * self.share(batch) * model.cached_width * bits_per_value(self.kv)
        slots = int(8 * self.free // per_slot)  # of one token in one layer
        tokens = slots // model.layers
        if model.sliding_layers and tokens >= model.window:
            if not model.full_layers:
                return None
            tokens = (slots - model.sliding_layers * model.window) // model.full_layers
        return tokens // self.block * self.block


def size(
    model: ModelSpec | str,
    hardware: HardwareSpec | str,
    *,
    batch: int = 1,
    context: int = 8192,
    weights="bf16",
    kv="bf16",
    devices: int = 1,
    experts=None,
    overhead_bytes: int = 0,
    block_size: int | None = None,
    kv_sharding: str = "heads",
    efficiency: float = 1.0,
    compute_dtype=None,
) -> Sizing:
    """Size a deployment.

    model, hardware  specs, or names in `companion.cost.models` and `companion.cost.hardware`
    batch, context   sequences at once and tokens cached for each, prompt and answer together
    weights, kv      formats, or bits per value; experts: another format for the routed experts
    devices          devices that hold it together; weights split evenly, the cache as `kv_sharding` says:
                     by key-value "heads" (copied where there are fewer heads than devices) or by "batch"
    overhead_bytes   per device, for what is not counted here: activations, runtime, fragmentation. 0 by
                     default, so that the result is what the formulas say
    block_size       tokens per block of a paged cache; each sequence is rounded up to whole blocks
    efficiency       share of bandwidth and peak reached; 1 gives bounds

    Returns a `Sizing`; `.to_dict()` is what `companion size --json` prints. A context beyond the model's
    own limit is a warning, not an error. Raises ValueError naming the argument.
    """
    model, device = resolve_model(model), resolve_hardware(hardware)
    batch, context = whole("size", "batch", batch), whole("size", "context", context)
    devices = whole("size", "devices", devices)
    overhead_bytes = whole("size", "overhead_bytes", overhead_bytes, zero=True)
    block = 1 if block_size is None else whole("size", "block_size", block_size)
    for argument, dtype in (("weights", weights), ("kv", kv)):
        bits_per_value(dtype, argument=argument)
    if kv_sharding not in SHARDINGS:
        raise ValueError(f"kv_sharding must be one of {', '.join(SHARDINGS)}, got {kv_sharding!r}")
    if device.device_bytes is None:
        raise ValueError(f"hardware {device.name!r} has no device_bytes; measured() takes it")
    held = weight_bytes(model, weights, experts=experts)
    room = _Room(model, devices, kv_sharding, held, overhead_bytes, kv, block, device.device_bytes)
    fits = room.fits(batch, context)
    per_device = device.device_bytes - room.free + room.cache(batch, context)
    options = dict(
        weight_dtype=weights, experts=experts, kv_dtype=kv, compute_dtype=compute_dtype,
        efficiency=efficiency, devices=devices, kv_sharding=kv_sharding,
    )  # fmt: skip
    step = decode_step(model, device, batch, context, **options)
    first = prefill(model, device, context, **options)
    return Sizing(
        model=model.name,
        hardware=device.name,
        devices=devices,
        batch=batch,
        context=context,
        weights_dtype=dtype_name(weights),
        experts_dtype=None if experts is None else dtype_name(experts),
        kv_dtype=dtype_name(kv),
        weights_bytes=held,
        kv_bytes=kv_bytes(model, room.rounded(context), batch=batch, dtype=kv),
        kv_bytes_per_token=kv_bytes_per_token(model, dtype=kv),
        kv_growth_bytes_per_token=kv_growth_per_token(model, dtype=kv),
        kv_fixed_bytes=kv_fixed_bytes(model, dtype=kv),
        overhead_bytes=overhead_bytes * devices,
        bytes_per_device=per_device,
        # On one device the total is exact; on several it counts copies and the rounding to whole bytes.
        total_bytes=per_device * devices,
        device_bytes=device.device_bytes,
        fits=fits,
        max_batch=room.max_batch(context),
        max_context=room.max_context(batch),
        model_max_context=model.max_context,
        decode_seconds=step.seconds if fits else None,
        decode_tokens_per_second=step.tokens_per_second if fits else None,
        ttft_seconds=first.seconds if fits else None,
        bound_by=step.bound_by if fits else CAPACITY,
        warnings=_warnings(room, device, batch, context, fits, weights),
    )


def _warnings(room: _Room, device: HardwareSpec, batch: int, context: int, fits: bool, weights) -> list[str]:
    model, notes = room.model, []
    if model.max_context is not None and context > model.max_context:
        notes.append(f"context {context:,} is beyond the {model.max_context:,} tokens of {model.name}")
    if not fits:
        what = "the weights alone do" if room.free < 0 else "this batch and context do"
        enough = next((n for n in _counts(model) if replace(room, devices=n).fits(batch, context)), None)
        hint = f"; {enough} devices would hold it" if enough else ""
        notes.append(f"{what} not fit in {room.devices} x {device.name}{hint}")
    if room.kv_sharding == "heads" and room.devices > 1:
        if model.mla:
            notes.append("every device holds a copy of the latent cache; kv_sharding='batch' would not")
        elif room.devices > model.kv_heads:
            notes.append(f"{room.devices} devices share {model.kv_heads} key-value heads: each is copied")
    if model.heads % room.devices:
        notes.append(f"{model.heads} heads do not divide over {room.devices} devices; servers refuse that")
    if dtype_name(weights) == "bf16" and "bf16" not in device.flops and "fp16" in device.flops:
        notes.append(f"{device.name} does not compute in bf16: serve in fp16, which takes the same bytes")
    return notes


def _counts(model: ModelSpec) -> list[int]:
    """Numbers of devices that tensor parallelism can use: those that divide the heads."""
    return [n for n in range(1, model.heads + 1) if model.heads % n == 0]
