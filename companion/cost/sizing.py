"""Does it fit, how many users, how long a context, how fast: one deployment from a model and a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ..formats import bits_per_value, bytes_for, label
from .answer import Sizing, assumptions, warnings
from .deployment import Deployment
from .engines import Pages
from .layout import Layout, Link, decode_time, even, prefill_time, ranks
from .memory import kv_bytes, kv_bytes_per_token, kv_fixed_bytes, kv_growth_per_token, weight_bytes
from .registry import HardwareSpec
from .spec import ModelSpec

CAPACITY = "memory: capacity"


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


def size(model: ModelSpec | str, hardware: HardwareSpec | str, **options: Any) -> Sizing:
    """Size a deployment.

    model, hardware  specs, or names in `companion.cost.models` and `companion.cost.hardware`
    options          the fields of `companion.cost.Deployment`: `batch` and `context`; `weights`, `kv` and
                     `experts`, formats or bits per value; `devices`, or `tensor` and `expert` ranks; what an
                     engine adds

    Returns a `Sizing`; `.to_dict()` is the core of what `companion size --json` prints. A context beyond the
    model's own limit is a warning, not an error. Raises ValueError naming the argument.
    """
    return sized(Deployment(model, hardware, **options))


def sized(ask: Deployment) -> Sizing:
    """The answer to one deployment."""
    model, device, batch, context = ask.model, ask.hardware, ask.batch, ask.context
    devices, tensor, expert = ask.ranks
    weights, kv = ask.weight_format, ask.kv
    store = Pages(model, ask.pages, 1 if ask.block is None else ask.block, ask.step_tokens)
    layout = even(model, devices, ask.kv_sharding) if tensor is None else ranks(model, tensor, expert)
    other = ask.overhead_bytes + ask.activation_bytes
    room = _Room(layout, store, layout.weights(weights, ask.experts), other, kv, device.device_bytes)
    link = None if ask.link_bandwidth is None else Link(ask.link_bandwidth, ask.link_latency)
    fits, cache = room.fits(batch, context), room.cache(batch, context)
    options = dict(
        weights=weights, experts=ask.experts, kv=kv, compute_dtype=ask.compute_dtype,
        efficiency=ask.efficiency, overhead_seconds=ask.overhead_seconds,
    )  # fmt: skip
    step = decode_time(layout, device, batch, context, link=link, **options)
    first = prefill_time(layout, device, context, link=link, **options)
    result = Sizing(
        model=model.name,
        hardware=device.name,
        devices=devices,
        batch=batch,
        context=context,
        weights=label(weights),
        experts=None if ask.experts is None else label(ask.experts),
        kv=label(kv),
        weights_bytes=weight_bytes(model, weights, experts=ask.experts),
        kv_bytes=kv_bytes(model, store.rounded(context), batch=batch, dtype=kv),
        kv_bytes_per_token=kv_bytes_per_token(model, dtype=kv),
        kv_growth_bytes_per_token=kv_growth_per_token(model, dtype=kv),
        kv_fixed_bytes=kv_fixed_bytes(model, dtype=kv),
        overhead_bytes=ask.overhead_bytes * devices,
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
        kv_sharding=ask.kv_sharding,
        compute_dtype=label(ask.compute_dtype or device.default_compute),
        pages=ask.pages,
        block_size=ask.block,
        step_tokens=ask.step_tokens,
        kv_needed_bytes=kv_bytes(model, context, batch=batch, dtype=kv),
        kv_allocated_bytes=bytes_for(batch * store.slots(context) * model.cached_width, kv),
        weights_bytes_per_device=room.weights,
        kv_bytes_per_device=cache,
        activation_bytes=ask.activation_bytes * devices,
        cache_room_bytes=room.free,
        communication_seconds=step.communication if fits else None,
    )
    enough = None if fits or tensor is not None else _enough(room, ask)
    return replace(
        result,
        assumptions=assumptions(result, model, ask.efficiency, ask.overhead_seconds, link),
        warnings=warnings(result, model, device, enough),
    )


def _enough(room: _Room, ask: Deployment) -> int | None:
    """The fewest devices, of those that divide the heads, that would hold it."""
    for n in range(1, ask.model.heads + 1):
        if ask.model.heads % n == 0:
            layout = even(ask.model, n, ask.kv_sharding)
            weights = layout.weights(ask.weight_format, ask.experts)
            if replace(room, layout=layout, weights=weights).fits(ask.batch, ask.context):
                return n
    return None
