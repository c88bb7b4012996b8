"""Does it fit, how many users, how long a context, how fast: one deployment from a model and a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction

from .counts import parameters
from .devices import HardwareSpec
from .dtypes import bits_per_value, bytes_for, dtype_name
from .layout import Layout, Link, check_devices, decode_time, even, prefill_time, ranks
from .memory import kv_bytes, kv_bytes_per_token, kv_fixed_bytes, kv_growth_per_token, weight_bytes
from .notes import assumptions, warnings
from .pages import BLOCK, Pages
from .registry import resolve_hardware, resolve_model
from .spec import ModelSpec, whole
from .step import SHARDINGS

CAPACITY = "memory: capacity"


@dataclass(frozen=True)
class Sizing:
    """One deployment. Bytes are integers; `total_bytes` is over all devices, `device_bytes` is one device's.

    max_batch          sequences of `context` tokens that fit; 0 if the weights alone do not
    max_context        tokens per sequence that fit at `batch`, whatever the model was trained for;
                       None if the memory never runs out (sliding layers only), 0 if nothing fits
    model_max_context  what the model was trained for, or None
    kv_bytes           the cache of the batch in whole blocks, each number once
    kv_needed_bytes    the same without rounding: what attention reads
    kv_allocated_bytes  what the engine's pages take for it; `kv_bytes` unless `pages` is another than "exact"
    *_per_device       on the fullest device, copies included
    cache_room_bytes   what one device has left for its cache; negative if the weights do not fit
    decode_tokens_per_second, ttft_seconds   bounds from the bandwidth and peak; None if it does not fit
    communication_seconds   of a decode step between devices, counted in decode_seconds; None if no link is
                            given
    bound_by           what a decode step waits for, or `"memory: capacity"` if it does not fit
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
    tensor: int | None
    expert: int | None
    kv_sharding: str
    compute_dtype: str
    pages: str
    block_size: int | None
    step_tokens: int
    kv_needed_bytes: int
    kv_allocated_bytes: int
    weights_bytes_per_device: int
    kv_bytes_per_device: int
    activation_bytes: int
    cache_room_bytes: int
    communication_seconds: float | None
    assumptions: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class _Room:
    """Bytes on one device, as a function of batch and context."""

    layout: Layout
    pages: Pages
    weights: int
    other: int
    kv: object
    capacity: int

    @property
    def free(self) -> int:
        return self.capacity - self.weights - self.other

    def per_slot(self, batch: int) -> Fraction:
        """Numbers that the fullest device holds for one slot of each of its sequences."""
        layout = self.layout
        return layout.sequences(batch) * layout.width * layout.model.cached_width

    def cache(self, batch: int, context: int) -> int:
        return bytes_for(self.pages.slots(context) * self.per_slot(batch), self.kv, argument="kv")

    def fits(self, batch: int, context: int) -> bool:
        return self.cache(batch, context) <= self.free

    def max_batch(self, context: int) -> int:
        if self.free < 0:
            return 0
        one = self.pages.slots(context) * self.per_slot(1) * bits_per_value(self.kv)
        return int(8 * self.free // one) * self.layout.groups

    def max_context(self, batch: int) -> int | None:
        if self.free < 0:
            return 0
        slots = int(8 * self.free // (self.per_slot(batch) * bits_per_value(self.kv)))
        return self.pages.most_tokens(slots)


def size(
    model: ModelSpec | str,
    hardware: HardwareSpec | str,
    *,
    batch: int = 1,
    context: int = 8192,
    weights="bf16",
    kv="bf16",
    devices: int | None = None,
    experts=None,
    overhead_bytes: int = 0,
    block_size: int | None = None,
    kv_sharding: str = "heads",
    efficiency: float = 1.0,
    compute_dtype=None,
    tensor: int | None = None,
    expert: int | None = None,
    pages: str = "exact",
    step_tokens: int = 1,
    activation_bytes: int = 0,
    weights_bytes: int | None = None,
    link_bandwidth: float | None = None,
    link_latency: float = 0.0,
    overhead_seconds: float = 0.0,
) -> Sizing:
    """Size a deployment.

    model, hardware  specs, or names in `companion.cost.models` and `companion.cost.hardware`
    batch, context   sequences at once and tokens cached for each, prompt and answer together
    weights, kv      formats, or bits per value; experts: another format for the routed experts
    devices          devices that hold it together (1 unless told); weights split evenly, the cache as
                     `kv_sharding` says: by key-value "heads" (copied where there are fewer heads than
                     devices) or by "batch"
    tensor, expert   instead of `devices`: ranks that divide heads and widths, and groups of them that divide
                     the routed experts and the batch; counted rank by rank, with what each holds whole
                     (`companion.cost.layout`)
    overhead_bytes   per device, for what is not counted here: runtime, fragmentation. 0 by default, so that
                     the result is what the formulas say; activation_bytes likewise, for activations
    weights_bytes    a figure instead of the counted one, e.g. of a checkpoint: all weights in as many bits
    block_size       tokens per block of a paged cache; each sequence is rounded up to whole blocks
    pages            how an engine stores sliding layers: "exact", "grouped" or "unified", the last two in
                     blocks of 16 unless told (`companion.cost.pages`). step_tokens: tokens that a step may
                     write
    efficiency       share of bandwidth and peak reached; 1 gives bounds
    link_bandwidth   bytes per second that leave a device for the others, link_latency: seconds per message.
                     None leaves the time between devices out
    overhead_seconds  per step, for launches and the scheduler

    Returns a `Sizing`; `.to_dict()` is the core of what `companion size --json` prints. A context beyond the
    model's own limit is a warning, not an error. Raises ValueError naming the argument.
    """
    model, device = resolve_model(model), resolve_hardware(hardware)
    batch, context = whole("size", "batch", batch), whole("size", "context", context)
    devices, tensor, expert = check_devices(devices, tensor, expert)
    overhead_bytes = whole("size", "overhead_bytes", overhead_bytes, zero=True)
    activation_bytes = whole("size", "activation_bytes", activation_bytes, zero=True)
    if block_size is None and pages != "exact":
        block_size = BLOCK
    store = Pages(model, pages, 1 if block_size is None else block_size, step_tokens)
    if weights_bytes is not None:
        if experts is not None:
            raise ValueError("size: weights_bytes is all weights in one figure; leave experts out")
        weights = Fraction(8 * whole("size", "weights_bytes", weights_bytes), parameters(model))
    for argument, dtype in (("weights", weights), ("kv", kv)):
        bits_per_value(dtype, argument=argument)
    if kv_sharding not in SHARDINGS:
        raise ValueError(f"kv_sharding must be one of {', '.join(SHARDINGS)}, got {kv_sharding!r}")
    if device.device_bytes is None:
        raise ValueError(f"hardware {device.name!r} has no device_bytes; measured() takes it")
    layout = (
        even(model, devices, kv_sharding) if tensor is None else _ranks(model, tensor, expert, kv_sharding)
    )
    other = overhead_bytes + activation_bytes
    room = _Room(layout, store, layout.weights(weights, experts), other, kv, device.device_bytes)
    link = None if link_bandwidth is None else Link(link_bandwidth, link_latency)
    if link is None and link_latency:
        raise ValueError("size: link_latency needs a link_bandwidth")
    fits = room.fits(batch, context)
    cache = room.cache(batch, context)
    options = dict(
        weight_dtype=weights, experts=experts, kv_dtype=kv, compute_dtype=compute_dtype,
        efficiency=efficiency, overhead_seconds=overhead_seconds,
    )  # fmt: skip
    step = decode_time(layout, device, batch, context, link=link, **options)
    first = prefill_time(layout, device, context, link=link, **options)
    result = Sizing(
        model=model.name,
        hardware=device.name,
        devices=devices,
        batch=batch,
        context=context,
        weights_dtype=_label(weights),
        experts_dtype=None if experts is None else _label(experts),
        kv_dtype=_label(kv),
        weights_bytes=weight_bytes(model, weights, experts=experts),
        kv_bytes=kv_bytes(model, store.rounded(context), batch=batch, dtype=kv),
        kv_bytes_per_token=kv_bytes_per_token(model, dtype=kv),
        kv_growth_bytes_per_token=kv_growth_per_token(model, dtype=kv),
        kv_fixed_bytes=kv_fixed_bytes(model, dtype=kv),
        overhead_bytes=overhead_bytes * devices,
        bytes_per_device=room.weights + other + cache,
        # On one device the total is exact; on several it counts copies and the rounding to whole bytes.
        total_bytes=(room.weights + other + cache) * devices,
        device_bytes=device.device_bytes,
        fits=fits,
        max_batch=room.max_batch(context),
        max_context=room.max_context(batch),
        model_max_context=model.max_context,
        decode_seconds=step.seconds if fits else None,
        decode_tokens_per_second=batch / step.seconds if fits else None,
        ttft_seconds=first.seconds if fits else None,
        bound_by=step.bound_by if fits else CAPACITY,
        tensor=tensor,
        expert=expert,
        kv_sharding=kv_sharding,
        compute_dtype=_label(compute_dtype or device.default_compute),
        pages=pages,
        block_size=block_size,
        step_tokens=step_tokens,
        kv_needed_bytes=kv_bytes(model, context, batch=batch, dtype=kv),
        kv_allocated_bytes=bytes_for(batch * store.slots(context) * model.cached_width, kv),
        weights_bytes_per_device=room.weights,
        kv_bytes_per_device=cache,
        activation_bytes=activation_bytes * devices,
        cache_room_bytes=room.free,
        communication_seconds=step.communication if fits else None,
    )
    enough = (
        None if fits or tensor is not None else _enough(room, kv_sharding, weights, experts, batch, context)
    )
    return replace(
        result,
        assumptions=assumptions(result, model, efficiency, overhead_seconds, link),
        warnings=warnings(result, model, device, enough),
    )


def _ranks(model: ModelSpec, tensor: int, expert: int, kv_sharding: str) -> Layout:
    if kv_sharding != "heads":
        raise ValueError(
            "size: kv_sharding goes with devices; with tensor and expert, expert divides the batch"
        )
    return ranks(model, tensor, expert)


def _enough(room: _Room, kv_sharding: str, weights, experts, batch: int, context: int) -> int | None:
    """The fewest devices, of those that divide the heads, that would hold it."""
    model = room.layout.model
    for n in range(1, model.heads + 1):
        if model.heads % n == 0:
            layout = even(model, n, kv_sharding)
            if replace(room, layout=layout, weights=layout.weights(weights, experts)).fits(batch, context):
                return n
    return None


def _label(dtype) -> str:
    """A format's name, or its bits per value in short."""
    return f"{float(dtype):.4g}" if isinstance(dtype, int | float | Fraction) else dtype_name(dtype)
