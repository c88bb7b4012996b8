"""How devices share a model: what each holds of the weights and of the cache, and how long its step takes.

Two ways to count:

    even    `devices` devices, each with an equal part of all weights: an ideal that no engine reaches quite,
            and a cache divided by key-value heads or by sequences
    ranks   `tensor` x `expert` devices, each with what `rank_spec` gives it. Divided over the tensor ranks:
            heads, widths, the rows of the embedding and of the head. Whole on every rank: norms and routers;
            a key-value head once there are more ranks than heads; a latent. The `expert` groups divide the
            routed experts and the sequences, and hold the rest each for itself
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..checks import number, positive
from ..formats import BF16, FP16, FP32, bytes_for
from .memory import (
    expert_parameters,
    experts_touched,
    matmul_parameters,
    parameter_count,
    share_of_cache,
    weight_bytes,
)
from .registry import HardwareSpec
from .spec import ModelSpec
from .step import StepCost, decode_step, prefill
from .wire import parallel_bytes, rank_spec


@dataclass(frozen=True)
class Layout:
    """A model over devices.

    groups    groups of devices with sequences of their own; a batch is dealt out among them
    width     part of each token's numbers that one device of a group holds
    tensor, expert   ranks, or None where the devices share evenly
    """

    model: ModelSpec
    devices: int
    groups: int
    width: Fraction
    kv_sharding: str
    tensor: int | None = None
    expert: int | None = None

    @property
    def part(self) -> ModelSpec:
        """One rank's part of the model; the model itself where devices share evenly."""
        if self.tensor is None:
            return self.model
        return rank_spec(self.model, tensor=self.tensor, expert=self.expert, split_vocab=True)

    def sequences(self, batch: int) -> int:
        """Sequences of a batch whose cache the fullest device holds (its part of)."""
        return -(-batch // self.groups)

    def weights(self, dtype, experts=None) -> int:
        """Bytes of weights on one device."""
        if self.tensor is None:
            return -(-weight_bytes(self.model, dtype, experts=experts) // self.devices)
        count = parameter_count(self.part)
        held = bytes_for(count.total - count.experts, dtype)
        share = Fraction(count.experts, self.expert)
        return held + bytes_for(share, dtype if experts is None else experts, argument="experts")


def even(model: ModelSpec, devices: int, kv_sharding: str = "heads") -> Layout:
    """Equal parts of the weights; the cache by "heads" or by "batch"."""
    by_batch = kv_sharding == "batch"
    width = Fraction(1) if by_batch else share_of_cache(model, devices, kv_sharding)
    return Layout(model, devices, devices if by_batch else 1, width, kv_sharding)


def ranks(model: ModelSpec, tensor: int, expert: int) -> Layout:
    """What ranks hold that divide heads and widths (`tensor`) and routed experts (`expert`)."""
    part = rank_spec(model, tensor=tensor, expert=expert)
    width = Fraction(part.cached_width, model.cached_width)
    return Layout(model, tensor * expert, expert, width, "heads", tensor, expert)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, and what takes most of them. `communication` is None if no link is known."""

    seconds: float
    bound_by: str
    communication: float | None


@dataclass(frozen=True)
class Link:
    """What joins devices: bytes per second that leave one, and seconds that a message takes besides."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        positive("link_bandwidth", self.bandwidth, owner="size")
        number("link_latency", self.latency, 0, owner="size")

    def seconds(self, layout: Layout, tokens: int, dtype) -> float | None:
        """All exchanges of a step of `tokens` tokens per group, one after another: nothing overlaps.

        Bytes and messages of each collective by its first algorithm in `companion.cost.wire`, a ring. None
        for an even share by sequences: what travels there is not settled by the share.
        """
        tensor, expert = layout.tensor, layout.expert
        if tensor is None:
            if layout.kv_sharding == "batch":
                return None
            tensor, expert = layout.devices, 1
        sent = parallel_bytes(layout.model, tokens=tokens, tensor=tensor, expert=expert, dtype=dtype)
        messages = sum(e.wire().steps for e in sent.exchanges)
        return sent.wire / self.bandwidth + messages * self.latency


def decode_time(
    layout: Layout, device: HardwareSpec, batch: int, context: int, *, link: Link | None = None, **options
) -> Timing:
    """A decode step of `batch` sequences in all. options: those of `companion.cost.decode_step`."""
    if layout.tensor is None:
        step = decode_step(
            layout.model,
            device,
            batch,
            context,
            devices=layout.devices,
            kv_sharding=layout.kv_sharding,
            **options,
        )
    else:
        step = decode_step(layout.part, device, layout.sequences(batch), context, **options)
    return _timed(layout, device, step, layout.sequences(batch), batch, link, options)


def prefill_time(
    layout: Layout, device: HardwareSpec, tokens: int, *, link: Link | None = None, **options
) -> Timing:
    """Reading one prompt of `tokens` tokens, in each group at the same time."""
    if layout.tensor is None:
        step = prefill(
            layout.model, device, tokens, devices=layout.devices, kv_sharding=layout.kv_sharding, **options
        )
    else:
        step = prefill(layout.part, device, tokens, **options)
    return _timed(layout, device, step, tokens, tokens * layout.groups, link, options)


def _timed(
    layout: Layout,
    device: HardwareSpec,
    step: StepCost,
    own: int,
    everyone: int,
    link: Link | None,
    options: dict,
) -> Timing:
    """own: tokens of the step on one device; everyone: on all groups together, who share the experts."""
    compute = options["compute_dtype"] or device.default_compute
    times = {
        "memory: weights": step.weights_seconds,
        "compute": step.matmul_seconds,
        "memory: cache": step.kv_seconds,
        "overhead": step.overhead_seconds,
    }
    if layout.expert is not None and layout.expert > 1:
        read = _expert_rank_reads(layout, everyone, options["weights"], options["experts"])
        times["memory: weights"] = read / (device.bandwidth * options["efficiency"])
    seconds = max(times["memory: weights"], times["compute"])
    seconds += max(times["memory: cache"], step.attention_seconds) + times["overhead"]
    times["compute"] = max(times["compute"], step.attention_seconds)
    communication = None
    if layout.devices == 1:
        communication = 0.0
    elif link is not None:
        wide = compute if compute in (FP16.name, BF16.name, FP32.name) else BF16.name
        communication = link.seconds(layout, own, wide)
        times["communication"] = communication or 0.0
        seconds += times["communication"]
    return Timing(seconds, max(times, key=lambda name: times[name]), communication)


def _expert_rank_reads(layout: Layout, tokens: int, dtype, experts) -> int:
    """Bytes of weights that a rank reads: its dense part, and those of its experts that any token reaches."""
    part = layout.part
    rest = matmul_parameters(part, active=False) - parameter_count(part).experts
    touched = round(experts_touched(part, tokens) * part.moe_layers * expert_parameters(part) / layout.expert)
    return bytes_for(rest, dtype) + bytes_for(touched, dtype if experts is None else experts)
