"""Everything that can be asked of `size`, once: each field with its meaning, its unit and its check.

The options of the command, the schema of its JSON, the levers, the comparison and the form of the pages are
derived from it. A new option is a field here, and its use in `companion.cost.sizing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from ..checks import choice, number, positive, whole
from ..formats import BF16, FORMATS, bits_per_value
from .memory import SHARDINGS, parameters
from .registry import HardwareSpec, hardware, models, resolve_hardware, resolve_model
from .spec import ModelSpec

PAGES = ("exact", "grouped", "unified")  # how an engine stores sliding layers: `companion.cost.engines`
BLOCK = 16  # tokens per block where an engine has pages and no other number is given: vLLM's default
_AMOUNT = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*$", re.IGNORECASE)
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _amount(text: str, endings: tuple[str, ...], example: str) -> float:
    match = _AMOUNT.match(text)
    if match:
        number, unit = float(match[1].replace("_", "").replace(",", "")), match[2].lower()
        for ending in sorted(endings, key=len, reverse=True):
            prefix = unit.removesuffix(ending) if unit.endswith(ending) else None
            if prefix in _PREFIXES and math.isfinite(number * _PREFIXES[prefix]):
                return number * _PREFIXES[prefix]
    raise ValueError(f"{text!r} is not an amount like {example}")


def bytes_of(text: str) -> int:
    """Bytes: 80GB = 80 * 10^9, 80GiB = 80 * 2^30, a bare number is bytes. ValueError for anything else.

    >>> bytes_of("1.5GiB"), bytes_of("640 GB"), bytes_of("8_000")
    (1610612736, 640000000000, 8000)
    """
    amount = _amount(text, ("b", "bytes", ""), "80GB, 1.5GiB or 2000000000")
    if amount != int(amount):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(amount)


def rate_of(text: str) -> float:
    """Bytes per second: 3.35TB/s, 900GB/s; a bare number is bytes per second."""
    return _amount(text, ("b/s", ""), "3.35TB/s or 900GB/s")


def flops_of(text: str) -> float:
    """Operations per second: 989TFLOPS, 65T; a bare number is operations per second."""
    return _amount(text, ("flops", "flop/s", "ops", ""), "989TFLOPS")


def format_of(text: str) -> str | float:
    """A format's name, or a number of bits per value."""
    try:
        return float(text)
    except ValueError:
        return text


def _count(least: int = 1) -> Callable[[str, Any], int]:
    return lambda name, value: whole(name, value, least, owner="size")


def _seconds(name: str, value: Any) -> float:
    return number(name, value, 0, owner="size")


def _rate(name: str, value: Any) -> float:
    return positive(name, value, owner="size")


def _stored(name: str, value: Any) -> Any:
    bits_per_value(value, argument=name)
    return value


def ask(default: Any, means: str, *, group: str, read: Any, unit: str = "", **more: Any) -> Any:
    """A field that can be asked.

    means, unit   what it is, for people; group: the heading under which the command lists it
    read          from the command's text to the value; check: (name, value) -> value, or a ValueError
    choices       what is accepted, if that is a few words
    flag          the command's option where it is another than the name
    unset         True: the command must know whether it was given, so its default there is None
    note          what holds where it is not asked, if the default alone doesn't say it
    label         a page's word for it, where that is another than the name
    levels        where a page has a slider, what it walks through
    offered       what a page has to choose from, if more than that is accepted
    """
    return field(
        default=default, metadata={"means": means, "group": group, "read": read, "unit": unit, **more}
    )


def _named(label: str, table: Any) -> Any:
    """What has no default: a name in a table."""
    means = f"a {label.lower()} that is known by name"
    return field(metadata={"means": means, "note": "", "label": label, "offered": table})


def note(asked: Any) -> str:
    """What holds where a field is not asked; "" where there is no more to say."""
    default = f"{asked.default:g}" if isinstance(asked.default, float) else asked.default
    return asked.metadata.get("note", "" if default is None else f"default {default}")


_LOAD, _FORMATS, _DEVICES, _ENGINE = "load", "formats", "several devices", "the engine, as assumptions"
_BYTES = {"read": bytes_of, "unit": "BYTES"}
_RATE = {"read": rate_of, "unit": "BYTES/s", "check": _rate}
_SECONDS = {"read": float, "unit": "SECONDS", "check": _seconds}
_COUNT = {"read": int, "check": _count()}
_STORED = {"group": _FORMATS, "read": format_of, "offered": FORMATS}
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_TOKENS = (64, 128, 256, 512, *(1024 * n for n in _BATCHES if n <= 1024))


@dataclass(frozen=True)
class Deployment:
    """A model on devices under a load, with an engine's assumptions: what `size` is asked.

    `model` and `hardware` are specs, or names in `companion.cost.models` and `companion.cost.hardware`, and
    specs once it is made. What the other fields mean stands in their metadata, which `companion size --help`
    prints. Raises ValueError naming the argument.
    """

    model: ModelSpec | str = _named("Model", models)
    hardware: HardwareSpec | str = _named("Device", hardware)
    batch: int = ask(1, "sequences at once", group=_LOAD, label="Sequences", levels=_BATCHES, **_COUNT)
    context: int = ask(
        8192, "tokens cached for each, prompt and answer", group=_LOAD, unit="TOKENS", label="Tokens of each",
        levels=_TOKENS, **_COUNT,
    )  # fmt: skip
    weights: Any = ask(
        BF16.name, "format of the weights, or bits per value", unset=True, label="Weights in", **_STORED,
        note="default: as the file says, else bf16",
    )  # fmt: skip
    weights_bytes: int | None = ask(
        None, "this figure instead of the counted one, e.g. 140GB: all weights in as many bits",
        group=_FORMATS, check=_count(), label="Weights, as a figure", **_BYTES,
    )  # fmt: skip
    experts: Any = ask(
        None, "another format for the routed experts, e.g. mxfp4", check=_stored, label="Experts in",
        note="default: as the weights are", **_STORED,
    )  # fmt: skip
    kv: Any = ask(
        BF16.name, "format of the cache, or bits per value", check=_stored, label="Cache in", **_STORED
    )
    devices: int | None = ask(
        None, "devices that hold it together, each an equal part", group=_DEVICES, read=int, note="default 1",
        label="How many", offered=(1, 2, 4, 8, 16),
    )  # fmt: skip
    tensor: int | None = ask(
        None, "instead: tensor-parallel ranks, counted one by one", group=_DEVICES, read=int,
        label="Tensor ranks",
    )  # fmt: skip
    expert: int | None = ask(
        None, "groups of them that divide experts and batch", group=_DEVICES, label="Expert groups", read=int
    )
    kv_sharding: str = ask(
        "heads", "where devices are given: how they divide the cache", group=_DEVICES, read=str,
        choices=SHARDINGS, label="Cache divided by",
    )  # fmt: skip
    link_bandwidth: float | None = ask(
        None, "that leave a device for others; without it exchanges take no time", group=_DEVICES, **_RATE
    )
    link_latency: float = ask(0.0, "of each message", group=_DEVICES, **_SECONDS)
    block_size: int | None = ask(None, "tokens per block of a paged cache", group=_ENGINE, **_COUNT)
    pages: str = ask(
        "exact", "sliding layers take what they need, grouped pages (vLLM), or one table for all",
        group=_ENGINE, read=str, choices=PAGES,
    )  # fmt: skip
    step_tokens: int = ask(1, "tokens of a sequence that a step may write", group=_ENGINE, **_COUNT)
    activation_bytes: int = ask(0, "per device", group=_ENGINE, check=_count(0), **_BYTES)
    overhead_bytes: int = ask(
        0, "per device, for the runtime and the rest", group=_ENGINE, check=_count(0), **_BYTES
    )
    overhead_seconds: float = ask(0.0, "per step, for launches", group=_ENGINE, **_SECONDS)
    efficiency: float = ask(
        1.0, "share of the peak reached; 1 gives bounds", group=_ENGINE, read=float,
        check=lambda name, value: positive(name, value, 1, owner="size"),
    )  # fmt: skip
    compute_dtype: Any = ask(
        None, "format of the products", group=_ENGINE, read=str, unit="FORMAT", flag="--compute",
        note="default: the device's", label="Products in",
    )  # fmt: skip

    def __post_init__(self) -> None:
        put = object.__setattr__  # a frozen dataclass is filled in through it
        put(self, "model", resolve_model(self.model))
        put(self, "hardware", resolve_hardware(self.hardware))
        for asked in fields(self):
            check, value = asked.metadata.get("check"), getattr(self, asked.name)
            if "choices" in asked.metadata:
                choice(asked.name, value, asked.metadata["choices"])
            if check is not None and not (value is None and asked.default is None):
                put(self, asked.name, check(asked.name, value))
        if self.weights_bytes is None:
            _stored("weights", self.weights)
        elif self.experts is not None:
            raise ValueError("size: weights_bytes is all weights in one figure; leave experts out")
        if self.hardware.device_bytes is None:
            raise ValueError(f"hardware {self.hardware.name!r} has no device_bytes; measured() takes it")
        if self.link_latency and self.link_bandwidth is None:
            raise ValueError("size: link_latency needs a link_bandwidth")
        if self.ranks[1] is not None and self.kv_sharding != "heads":
            raise ValueError(
                "size: kv_sharding goes with devices; with tensor and expert, expert divides the batch"
            )

    @property
    def ranks(self) -> tuple[int, int | None, int | None]:
        """(devices, tensor, expert), ranks None where only `devices` was asked. ValueError if they clash."""
        asked = {"devices": self.devices, "tensor": self.tensor, "expert": self.expert}
        counts = {name: 1 if n is None else whole(name, n, owner="size") for name, n in asked.items()}
        devices, tensor, expert = counts.values()
        if self.tensor is None and self.expert is None:
            return devices, None, None
        if self.devices is not None and devices != tensor * expert:
            raise ValueError(
                f"size: devices={devices}, but tensor={tensor} x expert={expert} are {tensor * expert}; "
                "leave devices out"
            )
        return tensor * expert, tensor, expert

    @property
    def block(self) -> int | None:
        """Tokens per block; None for a cache without blocks."""
        return BLOCK if self.block_size is None and self.pages != "exact" else self.block_size

    @property
    def weight_format(self) -> Any:
        """The format in which weights are counted: bits per value where a figure of bytes was given."""
        if self.weights_bytes is None:
            return self.weights
        return Fraction(8 * self.weights_bytes, parameters(self.model))


@dataclass(frozen=True)
class Own:
    """What the command takes besides: how to read a configuration, and figures of a device of one's own."""

    like: str | None = ask(
        None, "the layers of a configuration are like this family's, e.g. llama", group=_FORMATS, read=str,
        unit="FAMILY",
    )  # fmt: skip
    memory: int | None = ask(None, "of one device, instead of its row's", group=_ENGINE, **_BYTES)
    bandwidth: float | None = ask(None, "likewise, e.g. 3.35TB/s", group=_ENGINE, **_RATE)
    flops: float | None = ask(
        None, "likewise, e.g. 989TFLOPS, in --compute", group=_ENGINE, read=flops_of, unit="FLOP/s"
    )


def options(kind: type = Deployment) -> list[Any]:
    """The fields that are options: all but the model and the device."""
    return [asked for asked in fields(kind) if "group" in asked.metadata]
