"""The tables of models and of devices, read from JSON files that carry their sources."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..checks import choice, near_names, plain, positive, require, whole
from ..formats import BF16, FP16, FP32, dtype_name
from .spec import ModelSpec

# A format a device lacks is computed in the first of these that it has.
_FALLBACKS = (BF16.name, FP16.name, FP32.name)


@dataclass(frozen=True)
class HardwareSpec:
    """One device.

    device_bytes  memory; the vendor's decimal figure (80 GB = 80e9), which drivers report a little above
                  or below (see the entry's notes). None for a measured machine of unknown size
    bandwidth     bytes per second between memory and the processor
    flops         dense operations per second by format, e.g. {"bf16": 989.4e12}. Vendors print twice
                  that for 2:4 sparse matrices
    capability    CUDA compute capability, e.g. "9.0", else None
    """

    name: str
    device_bytes: int | None
    bandwidth: float
    flops: dict = field(hash=False)
    capability: str | None = None
    memory: str = ""
    status: str = ""
    source: str = ""
    notes: str = ""

    def __post_init__(self):
        owner = f"HardwareSpec {self.name!r}"
        if self.device_bytes is not None:
            object.__setattr__(self, "device_bytes", whole("device_bytes", self.device_bytes, owner=owner))
        object.__setattr__(self, "bandwidth", positive("bandwidth", self.bandwidth, owner=owner))
        listed = isinstance(self.flops, Mapping) and bool(self.flops)
        require(listed, "flops", "a map of formats to operations per second", self.flops, owner=owner)
        rates = {dtype_name(k): positive(f"flops[{k!r}]", v, owner=owner) for k, v in self.flops.items()}
        object.__setattr__(self, "flops", rates)

    @classmethod
    def measured(
        cls, name: str = "this machine", *, bandwidth: float, flops, device_bytes: int | None = None
    ) -> HardwareSpec:
        """A machine from its own measurements, to predict with what it really does.

        bandwidth  bytes per second that a large read reaches
        flops      {"fp32": operations per second of a large product}, or one number for fp32
        """
        if not isinstance(flops, Mapping):
            flops = {"fp32": flops}
        return cls(name, device_bytes, bandwidth, flops, status="measured", source="measured here")

    def with_measured(
        self, *, device_bytes: int | None = None, bandwidth: float | None = None, flops=None, dtype=None
    ) -> HardwareSpec:
        """The same device with some of its figures replaced; None keeps the row's.

        flops  operations per second in `dtype`, or in the device's default format
        """
        if device_bytes is None and bandwidth is None and flops is None:
            return self
        rates = dict(self.flops)
        if flops is not None:
            rates[dtype_name(dtype or self.default_compute)] = flops
        return replace(
            self,
            device_bytes=self.device_bytes if device_bytes is None else device_bytes,
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            flops=rates,
        )

    def peak(self, dtype="bf16") -> float:
        """Operations per second in `dtype`; ValueError if the device has no such units."""
        return self.flops[choice("compute_dtype", dtype_name(dtype), self.flops, owner=self.name)]

    def ridge(self, dtype="bf16") -> float:
        """FLOPs per byte above which the device is limited by arithmetic, not by memory."""
        return self.peak(dtype) / self.bandwidth

    @property
    def default_compute(self) -> str:
        """The format that products run in unless told: bf16, else fp16 (T4), else fp32 (most CPUs)."""
        for name in _FALLBACKS:
            if name in self.flops:
                return name
        return next(iter(self.flops))


Spec = TypeVar("Spec")
_DATA = Path(__file__).parent / "data"


class UnknownName(KeyError, ValueError):
    """A name that no table holds. Its message lists the near ones."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return self.args[0]


class Table(Mapping, Generic[Spec]):
    """A read-only mapping from names to specs; case and underscores don't matter in a look-up."""

    def __init__(self, file: str, what: str, build: Callable[[str, dict], Any]):
        self._file, self._what, self._build = file, what, build
        self._built: dict[str, Spec] = {}

    def row(self, name: str) -> dict:
        """The row of one name as stored; an unknown one raises like a look-up."""
        self[name]
        return self.rows[plain(name)]

    @property
    def rows(self) -> dict[str, dict]:
        """The rows as stored: fields with their sources, marks and notes."""
        return _rows(self._file)

    def __getitem__(self, name: str) -> Spec:
        key = plain(name) if isinstance(name, str) else None
        if key not in self.rows:
            raise UnknownName(self._unknown(name))
        if key not in self._built:
            self._built[key] = self._build(key, self.rows[key])
        return self._built[key]

    def _unknown(self, name) -> str:
        known = list(self.rows)
        near = near_names(name, known) if isinstance(name, str) else []
        hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(known)}"
        return f"unknown {self._what} {name!r}; {hint}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} {self._what} entries: {', '.join(self)}>"


@cache
def _rows(file: str) -> dict[str, dict]:
    return json.loads((_DATA / file).read_text(encoding="utf-8"))["rows"]


def _model(name: str, row: dict) -> ModelSpec:
    return ModelSpec.from_config(row["config"], name=name)


def _hardware(name: str, row: dict) -> HardwareSpec:
    return HardwareSpec(name=name, **{k: v for k, v in row.items() if k != "reported_bytes"})


models: Table[ModelSpec] = Table("models.json", "model", _model)
hardware: Table[HardwareSpec] = Table("hardware.json", "hardware", _hardware)


def resolve_model(model: ModelSpec | str) -> ModelSpec:
    """A ModelSpec from one or from a name of `companion.cost.models`."""
    if isinstance(model, ModelSpec):
        return model
    require(isinstance(model, str), "model", "a ModelSpec or a name", type(model))
    return models[model]


def resolve_hardware(device: HardwareSpec | str) -> HardwareSpec:
    """A HardwareSpec from one or from a name of `companion.cost.hardware`."""
    if isinstance(device, HardwareSpec):
        return device
    require(isinstance(device, str), "hardware", "a HardwareSpec or a name", type(device))
    return hardware[device]
