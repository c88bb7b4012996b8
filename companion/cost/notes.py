"""What a sizing assumes, and what it warns of, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .devices import HardwareSpec
from .spec import ModelSpec

if TYPE_CHECKING:
    from .layout import Link
    from .sizing import Sizing


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
    if sizing.weights_dtype == "bf16" and "bf16" not in device.flops and "fp16" in device.flops:
        notes.append(f"{device.name} does not compute in bf16: serve in fp16, which takes the same bytes")
    return notes


def assumptions(
    sizing: Sizing, model: ModelSpec, efficiency: float, overhead_seconds: float, link: Link | None
) -> list[str]:
    """What the figures rest on, with units."""
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
