"""What would change the answer: where cache and weights cross, where memory is full, what each lever buys.

Nothing is estimated: every row is the same deployment asked again with one field changed. The gain of a lever
is the throughput at the most sequences that fit, against the same without it, since that is what capacity is
for; what it does for the batch that was asked for stands beside it. A lever that cannot be pulled (a format
that is no smaller, a number of devices that divides nothing) has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..checks import whole
from ..formats import FP8, INT4_G128, MXFP4, NVFP4, bits_per_value
from .answer import Lever, Sizing
from .deployment import Deployment
from .memory import kv_bytes, weight_bytes
from .registry import HardwareSpec, resolve_model
from .sizing import sized
from .spec import ModelSpec
from .wire import rank_spec

_KV, _WEIGHTS, _EXPERTS = (FP8, NVFP4), (FP8, INT4_G128), (MXFP4,)


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
    batch = whole("batch", batch, owner="budget")
    device_bytes = whole("device_bytes", device_bytes, owner="budget")
    if weights_bytes is None:
        return model, batch, device_bytes, weight_bytes(model, weights)
    return model, batch, device_bytes, whole("weights_bytes", weights_bytes, owner="budget")


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


def first_context(reached: Callable[[int], bool]) -> int | None:
    """The fewest tokens at which `reached` holds, and stays true; None if it does not by 2^40."""
    low, high = 0, 1
    while not reached(high):
        low, high = high, 2 * high
        if high > 2**40:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def deployment_crossings(ask: Deployment, sizing: Sizing) -> dict[str, int | None]:
    """Tokens per sequence from which the cache is no smaller than the weights, and from which it is full."""

    def as_large(tokens: int) -> bool:
        s = sized(replace(ask, context=tokens))
        return s.kv_bytes_per_device >= s.weights_bytes_per_device

    full = None if sizing.max_context is None else sizing.max_context + 1
    return {"cache_equals_weights": first_context(as_large), "full": full}


def levers(model: ModelSpec | str, hardware: HardwareSpec | str, **options: Any) -> list[Lever]:
    """Every lever that can be pulled, the best first. options: the fields of `Deployment`."""
    return deployment_levers(Deployment(model, hardware, **options))


def deployment_levers(ask: Deployment) -> list[Lever]:
    """Every lever of a deployment that can be pulled, the best first."""
    base = sized(ask)
    before = throughput(ask, base)
    rows = []
    for name, change in _changes(ask, base):
        try:
            changed = replace(ask, **change)
            after = sized(changed)
        except ValueError:
            continue  # e.g. a layout that the link's collectives are not known for
        rate = throughput(changed, after)
        same = (
            "fits", "max_batch", "max_context", "decode_seconds", "decode_tokens_per_second",
            "bytes_per_device", "devices",
        )  # fmt: skip
        gain = rate / before if before else None
        rows.append(Lever(name, change, gain, rate, **{field: getattr(after, field) for field in same}))
    return sorted(rows, key=lambda lever: (-lever.throughput, -lever.max_batch, lever.bytes_per_device))


def throughput(ask: Deployment, sizing: Sizing) -> float:
    """Tokens per second at the most sequences that fit; 0 if none does."""
    if sizing.max_batch == 0:
        return 0.0
    return sized(replace(ask, batch=sizing.max_batch)).decode_tokens_per_second or 0.0


def _changes(ask: Deployment, base: Sizing) -> Iterator[tuple[str, dict[str, Any]]]:
    model, device = ask.model, ask.hardware

    def smaller(formats, now):
        return [f for f in formats if f.bits_per_value < bits_per_value(now)]

    for f in smaller(_KV, ask.kv):
        yield f"cache in {f.name}{_units(device, f.name)}", {"kv": f.name}
    if ask.weights_bytes is None:
        for f in smaller(_WEIGHTS, ask.weights):
            yield f"weights in {f.name}{_units(device, f.name)}", {"weights": f.name}
        for f in smaller(_EXPERTS, ask.weights if ask.experts is None else ask.experts):
            if model.moe:
                yield f"experts in {f.name}", {"experts": f.name}
    else:
        for f in _WEIGHTS:
            if base.weights_bytes > weight_bytes(model, f.name):
                yield (
                    f"weights in {f.name}{_units(device, f.name)}",
                    {"weights": f.name, "weights_bytes": None},
                )
    yield from _more_devices(model, base)
    if base.context > 1:
        half = base.context // 2
        yield f"context of {half:,} tokens", {"context": half}
    if model.sliding_layers and base.pages == "unified":
        yield "pages by kind of layer", {"pages": "grouped"}
    if base.tensor is None and base.kv_sharding == "heads" and base.devices > 1 and base.kv_bytes_per_device:
        copied = base.kv_bytes_per_device * base.devices > base.kv_allocated_bytes + base.devices
        if copied:
            yield "cache by sequences, no copies", {"kv_sharding": "batch"}


def _more_devices(model: ModelSpec, base: Sizing) -> Iterator[tuple[str, dict[str, Any]]]:
    """One device more, or as many as the model's shape takes."""
    if base.tensor is None:
        for n in range(base.devices + 1, model.heads + 1):
            if model.heads % n == 0:
                yield _devices(n), {"devices": n}
                return
        return
    for argument, now in (("tensor", base.tensor), ("expert", base.expert)):
        if argument == "expert" and model.moe is None:
            continue
        top = model.heads if argument == "tensor" else model.moe.experts
        for n in range(now + 1, top + 1):
            change = {"tensor": base.tensor, "expert": base.expert, argument: n}
            try:
                rank_spec(model, tensor=change["tensor"], expert=change["expert"])
            except ValueError:
                continue
            yield (
                f"{_devices(change['tensor'] * change['expert'])} ({argument} {n})",
                {"devices": None, **change},
            )
            break


def _units(device: HardwareSpec, dtype: str) -> str:
    """A remark where the device does not compute in the format: then it saves bytes, no arithmetic."""
    return "" if dtype not in (FP8.name, NVFP4.name) or dtype in device.flops else f" (no {dtype} units)"


def _devices(n: int) -> str:
    return f"{n} devices"
