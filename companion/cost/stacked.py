"""The stacked budget: weights below, cache on top, a line for the memory; and where the lines cross."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .memory import kv_bytes, weight_bytes
from .registry import resolve_model
from .spec import ModelSpec, whole


@dataclass(frozen=True)
class Bar:
    """One bar: bytes at one context. `over_bytes` is what exceeds the memory, 0 if it fits."""

    context: int
    weights_bytes: int
    kv_bytes: int
    total_bytes: int
    over_bytes: int

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Crossings:
    """First contexts, in whole tokens per sequence, at which the cache is no smaller than the weights,
    and at which weights and cache exceed the memory. None if that never happens (sliding layers only).
    """

    cache_equals_weights: int | None
    full: int | None


def _checked(model, batch, device_bytes, weights_bytes, weights):
    model = resolve_model(model)
    batch = whole("budget", "batch", batch)
    device_bytes = whole("budget", "device_bytes", device_bytes)
    if weights_bytes is None:
        return model, batch, device_bytes, weight_bytes(model, weights)
    return model, batch, device_bytes, whole("budget", "weights_bytes", weights_bytes)


def budget(
    model: ModelSpec | str,
    device_bytes: int,
    contexts: Iterable[int],
    *,
    batch: int = 1,
    weights="bf16",
    kv="bf16",
    weights_bytes: int | None = None,
) -> list[Bar]:
    """One bar for each of `contexts`.

    device_bytes   memory of the device or of the node, e.g. 640 * 10**9
    weights, kv    formats; weights_bytes overrides the former with a figure, e.g. a rounded 140 * 10**9
    """
    model, batch, capacity, held = _checked(model, batch, device_bytes, weights_bytes, weights)
    bars = []
    for context in contexts:
        cache = kv_bytes(model, context, batch=batch, dtype=kv)
        bars.append(Bar(context, held, cache, held + cache, max(0, held + cache - capacity)))
    return bars


def crossings(
    model: ModelSpec | str,
    device_bytes: int,
    *,
    batch: int = 1,
    weights="bf16",
    kv="bf16",
    weights_bytes: int | None = None,
) -> Crossings:
    """The two crossings of `budget`'s bars: 53,406 and 190,735 tokens for a 70B model with 140 GB of
    weights, batch 8, on a node of 640 GB.
    """
    model, batch, capacity, held = _checked(model, batch, device_bytes, weights_bytes, weights)

    def first(target: int) -> int | None:
        """Smallest context whose cache takes at least `target` bytes."""
        low, high = 0, 1
        while kv_bytes(model, high, batch=batch, dtype=kv) < target:
            low, high = high, 2 * high
            if high > 2**50:
                return None
        while low < high:
            middle = (low + high) // 2
            reached = kv_bytes(model, middle, batch=batch, dtype=kv) >= target
            low, high = (low, middle) if reached else (middle + 1, high)
        return low

    return Crossings(first(held), first(capacity - held + 1))
