"""A device as three numbers: bytes it holds, bytes it reads per second, operations per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

from .dtypes import dtype_name
from .spec import whole

# A format a device lacks is computed in the first of these that it has.
_FALLBACKS = ("bf16", "fp16", "fp32")


def _rate(owner: str, name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{owner}: {name} must be a positive finite number, got {value!r}")
    return float(value)


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
            object.__setattr__(self, "device_bytes", whole(owner, "device_bytes", self.device_bytes))
        object.__setattr__(self, "bandwidth", _rate(owner, "bandwidth", self.bandwidth))
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ValueError(f"{owner}: flops must map formats to operations per second, got {self.flops!r}")
        rates = {dtype_name(k): _rate(owner, f"flops[{k!r}]", v) for k, v in self.flops.items()}
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
        name = dtype_name(dtype)
        if name not in self.flops:
            raise ValueError(f"compute_dtype: {self.name} computes in {', '.join(self.flops)}; got {dtype!r}")
        return self.flops[name]

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
