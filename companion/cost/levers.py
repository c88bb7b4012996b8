"""What each lever would buy: the same sizing with one argument changed, in order of gain.

Nothing is estimated: every row is `size` asked again. The gain of a lever is the throughput at the most
sequences that fit, against the same without it, since that is what capacity is for; what it does for the
batch that was asked for stands beside it. A lever that cannot be pulled (a format that is no smaller, a
number of devices that divides nothing) has no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .devices import HardwareSpec
from .dtypes import bits_per_value
from .registry import resolve_hardware, resolve_model
from .sharding import rank_spec
from .sizing import Sizing, size
from .spec import ModelSpec

_KV = ("fp8", "nvfp4")
_WEIGHTS = ("fp8", "int4-g128")
_EXPERTS = ("mxfp4",)


@dataclass(frozen=True)
class Lever:
    """One change and what follows from it.

    name        for people
    change      the arguments of `size` that differ
    gain        throughput at the most sequences that fit, relative to before; None if nothing fitted before
    throughput  tokens per second at `max_batch` sequences, 0 if none fits

    The other fields are those of `Sizing`, with the change.
    """

    name: str
    change: dict[str, Any]
    gain: float | None
    throughput: float
    fits: bool
    max_batch: int
    max_context: int | None
    decode_seconds: float | None
    decode_tokens_per_second: float | None
    bytes_per_device: int
    devices: int

    def to_dict(self) -> dict:
        return asdict(self)


def levers(model: ModelSpec | str, hardware: HardwareSpec | str, **arguments) -> list[Lever]:
    """Every lever that can be pulled, the best first. arguments: those of `size`."""
    model, device = resolve_model(model), resolve_hardware(hardware)
    base = size(model, device, **arguments)
    before = throughput(model, device, base, arguments)
    rows = []
    for name, change in _changes(model, device, base, arguments):
        changed = {**arguments, **change}
        try:
            after = size(model, device, **changed)
        except ValueError:
            continue  # e.g. a layout that the link's collectives are not known for
        rate = throughput(model, device, after, changed)
        gain = rate / before if before else None
        rows.append(
            Lever(
                name,
                change,
                gain,
                rate,
                after.fits,
                after.max_batch,
                after.max_context,
                after.decode_seconds,
                after.decode_tokens_per_second,
                after.bytes_per_device,
                after.devices,
            )  # fmt: skip
        )
    return sorted(rows, key=lambda lever: (-lever.throughput, -lever.max_batch, lever.bytes_per_device))


def throughput(model: ModelSpec, device: HardwareSpec, sizing: Sizing, arguments: dict) -> float:
    """Tokens per second at the most sequences that fit; 0 if none does."""
    if sizing.max_batch == 0:
        return 0.0
    full = size(model, device, **{**arguments, "batch": sizing.max_batch})
    return full.decode_tokens_per_second or 0.0


def _changes(
    model: ModelSpec, device: HardwareSpec, base: Sizing, arguments: dict
) -> Iterator[tuple[str, dict[str, Any]]]:
    kv, weights = arguments.get("kv", "bf16"), arguments.get("weights", "bf16")
    for dtype in _KV:
        if bits_per_value(dtype) < bits_per_value(kv):
            yield f"cache in {dtype}{_units(device, dtype)}", {"kv": dtype}
    if arguments.get("weights_bytes") is None:
        for dtype in _WEIGHTS:
            if bits_per_value(dtype) < bits_per_value(weights):
                yield f"weights in {dtype}{_units(device, dtype)}", {"weights": dtype}
        experts = arguments.get("experts")
        for dtype in _EXPERTS:
            if model.moe and bits_per_value(dtype) < bits_per_value(weights if experts is None else experts):
                yield f"experts in {dtype}", {"experts": dtype}
    else:
        for dtype in _WEIGHTS:
            if base.weights_bytes > size(model, device, weights=dtype).weights_bytes:
                yield f"weights in {dtype}{_units(device, dtype)}", {"weights": dtype, "weights_bytes": None}
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
    return "" if dtype not in ("fp8", "nvfp4") or dtype in device.flops else f" (no {dtype} units)"


def _devices(n: int) -> str:
    return f"{n} devices"
