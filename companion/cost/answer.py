"""What `size` answers: its fields with their units, what they rest on, what is odd, the schema of the JSON.

The number in "schema" changes when a field goes or means something else; new fields may come without that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..formats import BF16, FP16
from .deployment import Deployment
from .registry import HardwareSpec
from .spec import ModelSpec

VERSION = 2
_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "None": "null"}
_TYPES |= {"list[str]": "array", "dict[str, Any]": "object"}
_ASKED = {asked.name: asked.metadata for asked in fields(Deployment)}


def figure(means: str, **more: Any) -> Any:
    """A field of an answer: what it is, and in which unit."""
    return field(metadata={"means": means}, **more)


def asked(name: str) -> Any:
    """A field that repeats what was asked."""
    return figure(_ASKED[name]["means"])


@dataclass(frozen=True)
class Sizing:
    """One deployment, answered. Bytes are integers; what a field means stands in its metadata.

    On the command line it is `companion size --schema` that prints them.
    """

    model: str = figure("name of the model")
    hardware: str = figure("name of the device")
    devices: int = figure("devices that hold the model together")
    batch: int = asked("batch")
    context: int = asked("context")
    weights: str = asked("weights")
    experts: str | None = asked("experts")
    kv: str = asked("kv")
    weights_bytes: int = figure("bytes; all weights, once")
    kv_bytes: int = figure("bytes; the batch's cache in whole blocks, each number once")
    kv_bytes_per_token: int = figure("bytes; one token in all layers, while no window is full")
    kv_growth_bytes_per_token: int = figure("bytes; one more token once the windows are full")
    kv_fixed_bytes: int = figure("bytes; full windows of one sequence, 0 without windows")
    overhead_bytes: int = figure("bytes; as stated, over all devices")
    bytes_per_device: int = figure("bytes; all of it on the fullest device, copies included")
    total_bytes: int = figure("bytes; bytes_per_device times devices")
    device_bytes: int = figure("bytes; memory of one device, the vendor's decimal figure")
    fits: bool = figure("bytes_per_device is no more than device_bytes")
    max_batch: int = figure("sequences of this context that fit; 0 if the weights do not")
    max_context: int | None = figure("tokens per sequence that fit at this batch; null: any number")
    model_max_context: int | None = figure("tokens the model was made for")
    decode_seconds: float | None = figure("seconds per decode step; null if it does not fit")
    decode_tokens_per_second: float | None = figure("tokens per second of the whole batch")
    ttft_seconds: float | None = figure("seconds until the first token of one prompt of `context` tokens")
    bound_by: str = figure(
        "what a step waits for: memory: weights, memory: cache, compute, overhead, communication; "
        "memory: capacity if it does not fit"
    )
    tensor: int | None = asked("tensor")
    expert: int | None = asked("expert")
    kv_sharding: str = asked("kv_sharding")
    compute_dtype: str = asked("compute_dtype")
    pages: str = asked("pages")
    block_size: int | None = asked("block_size")
    step_tokens: int = asked("step_tokens")
    kv_needed_bytes: int = figure("bytes; the batch's cache without rounding: what attention reads")
    kv_allocated_bytes: int = figure("bytes; what pages take for it, once")
    weights_bytes_per_device: int = figure("bytes")
    kv_bytes_per_device: int = figure("bytes; on the fullest device, copies included")
    activation_bytes: int = figure("bytes; as stated, over all devices")
    cache_room_bytes: int = figure("bytes left for one device's cache; negative if the weights do not fit")
    communication_seconds: float | None = figure("seconds of a step between devices; null: not counted")
    assumptions: list[str] = field(
        default_factory=list, metadata={"means": "what the figures rest on, a line each"}
    )
    warnings: list[str] = field(default_factory=list, metadata={"means": "what is wrong or odd, a line each"})

    def to_dict(self) -> dict:
        return asdict(self)


_SIZED = {f.name: f.metadata["means"] for f in fields(Sizing)}


@dataclass(frozen=True)
class Lever:
    """One change and what follows from it. The fields from `fits` on are those of `Sizing`."""

    name: str = figure("the change, for people")
    change: dict[str, Any] = figure("the arguments of companion.cost.size that differ")
    gain: float | None = figure("throughput relative to before; null if nothing fitted before")
    throughput: float = figure("tokens per second at max_batch sequences; 0 if none fits")
    fits: bool = figure(_SIZED["fits"])
    max_batch: int = figure(_SIZED["max_batch"])
    max_context: int | None = figure(_SIZED["max_context"])
    decode_seconds: float | None = figure(_SIZED["decode_seconds"])
    decode_tokens_per_second: float | None = figure(_SIZED["decode_tokens_per_second"])
    bytes_per_device: int = figure(_SIZED["bytes_per_device"])
    devices: int = figure(_SIZED["devices"])

    def to_dict(self) -> dict:
        return asdict(self)


def units(count: int) -> str:
    """Bytes with both units: "16,060,522,496 B (14.96 GiB, 16.06 GB)"."""
    return f"{count:,} B ({count / 2**30:,.2f} GiB, {count / 1e9:,.2f} GB)"


def warnings(sizing: Sizing, model: ModelSpec, device: HardwareSpec, enough: int | None) -> list[str]:
    """What is wrong with the deployment, or odd. enough: devices that would hold it, if it does not fit."""
    notes, devices = [], sizing.devices
    if model.max_context is not None and sizing.context > model.max_context:
        notes.append(f"context {sizing.context:,} is beyond the {model.max_context:,} tokens of {model.name}")
    if not sizing.fits:
        what = "the weights alone do" if sizing.cache_room_bytes < 0 else "this batch and context do"
        hint = f"; {enough} devices would hold it" if enough else ""
        notes.append(f"{what} not fit in {devices} x {device.name}{hint}")
    ranks = devices if sizing.tensor is None else sizing.tensor
    if sizing.kv_sharding == "heads" and ranks > 1:
        if model.mla:
            other = "kv_sharding='batch' would not" if sizing.tensor is None else "expert ranks do not"
            notes.append(f"every device holds a copy of the latent cache; {other}")
        elif ranks > model.kv_heads:
            notes.append(f"{ranks} devices share {model.kv_heads} key-value heads: each is copied")
    if model.heads % ranks:
        notes.append(f"{model.heads} heads do not divide over {ranks} devices; servers refuse that")
    if sizing.expert and sizing.expert > sizing.batch:
        notes.append(f"{sizing.expert} groups, but {sizing.batch} sequences: some groups have nothing to do")
    if sizing.weights == BF16.name and BF16.name not in device.flops and FP16.name in device.flops:
        notes.append(f"{device.name} does not compute in bf16: serve in fp16, which takes the same bytes")
    return notes


def assumptions(
    sizing: Sizing, model: ModelSpec, efficiency: float, overhead_seconds: float, link: Any
) -> list[str]:
    """What the figures rest on, with units. link: a `companion.cost.layout.Link`, or None."""
    share = "peak bandwidth and arithmetic: times are bounds"
    if efficiency != 1:
        share = f"{efficiency:.0%} of peak bandwidth and arithmetic"
    notes = [f"{share}; products in {sizing.compute_dtype}"]
    devices = sizing.devices
    for label, count in (("activations", sizing.activation_bytes), ("runtime", sizing.overhead_bytes)):
        notes.append(
            f"{label}: {units(count // devices)} per device" if count else f"{label}: 0 B, not counted"
        )
    if overhead_seconds:
        notes.append(f"{overhead_seconds * 1e3:g} ms a step beside memory and arithmetic")
    if devices > 1:
        if sizing.tensor is None:
            notes.append(
                "weights in equal parts; what ranks hold whole is counted with --tensor and --expert"
            )
        else:
            notes.append(
                "norms and routers whole on every rank, the vocabulary's rows divided"
                + (", a latent copied" if model.mla and sizing.tensor > 1 else "")
            )
        if sizing.communication_seconds is None and (link is None or sizing.fits):
            notes.append(
                "time between devices: not counted" + ("; --link-bandwidth does" if link is None else "")
            )
        elif link is not None:
            notes.append(
                f"between devices: rings, {link.bandwidth / 1e9:,.4g} GB/s out of each, "
                f"{link.latency * 1e6:g} us a message, nothing overlaps"
            )
    if model.moe:
        notes.append("experts: uniform and independent routing")
    if sizing.pages == "grouped" and model.sliding_layers:
        notes.append(
            f"pages of {sizing.block_size} tokens in groups of equal size, as vLLM 0.32 does; a step writes "
            f"up to {sizing.step_tokens:,} {'token' if sizing.step_tokens == 1 else 'tokens'} of a sequence"
        )
    elif sizing.pages == "unified" and model.sliding_layers:
        notes.append(
            f"one block table for all layers: sliding layers keep every token ({sizing.block_size} a block)"
        )
    elif sizing.block_size:
        notes.append(f"each sequence rounded up to blocks of {sizing.block_size} tokens")
    return notes


def described(kind: type) -> dict[str, tuple[tuple[str, ...], str]]:
    """The fields of an answer: name -> (types of JSON, meaning)."""
    return {f.name: (_types(f.type), f.metadata["means"]) for f in fields(kind)}


def _types(annotation: str) -> tuple[str, ...]:
    return tuple(_TYPES[part] for part in annotation.split(" | "))


def _object(described_fields: dict[str, tuple[tuple[str, ...], str]], **more: Any) -> dict:
    properties: dict[str, Any] = {}
    for name, (types, means) in described_fields.items():
        properties[name] = {"type": types[0] if len(types) == 1 else list(types), "description": means}
        if types == ("array",):
            properties[name]["items"] = {"type": "string"}
    required = [*described_fields, *more]
    return {"type": "object", "properties": {**properties, **more}, "required": required}


def schema() -> dict:
    """The schema of one sizing, or of two with --compare."""
    lines = {"type": "array", "items": {"type": "string"}}
    count = ("integer", "null")
    crossings = {
        "cache_equals_weights": (
            count,
            "tokens per sequence at which the cache is no smaller than the weights",
        ),
        "full": (count, "tokens per sequence that no longer fit; null: any number fits"),
    }
    vllm = {
        "command": (("string",), "the command line"),
        "notes": (("array",), "what no flag does, a line each"),
        "version": (("string",), "version of vLLM whose flags these are"),
    }
    one = _object(
        described(Sizing),
        schema={"const": VERSION},
        notes={**lines, "description": "where the model's figures come from"},
        crossings=_object(crossings),
        levers={"type": "array", "items": _object(described(Lever)), "description": "best first"},
        vllm={"oneOf": [_object(vllm), {"type": "null"}], "description": "null if it does not fit"},
    )
    two = {
        "type": "object",
        "properties": {
            "schema": {"const": VERSION},
            "a": _object(described(Sizing)),
            "b": _object(described(Sizing)),
            "ratios": {
                "type": "object",
                "additionalProperties": {"type": ["number", "null"]},
                "description": "b over a",
            },
        },
        "required": ["schema", "a", "b", "ratios"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "companion size",
        "oneOf": [one, two],
    }
