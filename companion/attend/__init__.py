"""Who computes: attention, products and experts of one pass through a model, by torch, Triton or Numba.

A `Backend` takes tensors, never a cache. It is chosen once, at the start of a pass, by what
`companion.kernels.use` says, the device and the dtype:

    with one_pass(x):          # the decoder does this; what runs inside asks nobody again
        ...

`use` may change between two passes, whenever model and cache were made; whoever is called outside of a pass
chooses for that call. Each backend is written on top of torch's, which does what the others cannot.
"""

import functools
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels.mode import choice, runs_on
from .by_kernels import NumbaBackend, TritonBackend
from .by_torch import TorchBackend
from .step import Step

__all__ = ["Backend", "Step", "TorchBackend", "backend", "choose", "one_pass"]

Result = Tensor | tuple[Tensor, Tensor]


@runtime_checkable
class Backend(Protocol):
    """What a pass computes with. Attention's options are those of `companion.attention.sdpa`."""

    name: str

    def decode(self, q: Tensor, k: Tensor, v: Tensor, step: Step, *, window: int | None, **options) -> Result:
        """Attention of one query per row, q (B, Hq, 1, D), over k (B, Hkv, n, D) and v (B, Hkv, n, Dv).

        With a table in `step`, k and v are pages, (Hkv, num_blocks, block_size, D). Returns out (B, Hq, 1,
        Dv), or (out, lse).
        """

    def extend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, *, window: int | None, **options) -> Result:
        """The same for S queries per row, causal: query i of row b stands at step.starts[b] + i."""

    def append(
        self, k: Tensor, v: Tensor | None, k_store: Tensor, v_store: Tensor | None, step: Step
    ) -> None:
        """New tokens k, v (B, Hkv, S, D) into a layer's stores, which lie as in `decode`; v: or None."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        """F.linear(x, weight, bias), x (..., in), weight (out, in); with a scale (out,) weight is int8."""

    def experts(self, by_torch: Callable[..., Tensor], x: Tensor, w1: Tensor, w2: Tensor, *more) -> Tensor:
        """`companion.moe.grouped_experts`, whose torch form, `by_torch`, lies in the room above."""


class _Now(threading.local):
    backend: TorchBackend | None = None
    device: torch.device | None = None


_now = _Now()
_TORCH = TorchBackend()
_NUMBA = NumbaBackend()
_triton = functools.lru_cache(maxsize=8)(TritonBackend)


class one_pass:
    """`with one_pass(x) as backend`: one backend for what is computed inside, chosen for x.

    A pass inside a pass on the same device goes on with what was chosen.
    """

    def __init__(self, like: Tensor):
        self.like = like

    def __enter__(self) -> TorchBackend:
        self.outer = _now.backend, _now.device
        if self.outer[0] is None or self.outer[1] != self.like.device:
            _now.backend, _now.device = choose(self.like.device, self.like.dtype), self.like.device
        return _now.backend

    def __exit__(self, *error) -> None:
        _now.backend, _now.device = self.outer


def backend(like: Tensor) -> TorchBackend:
    """That of the pass; outside of one, chosen for this tensor."""
    found = _now.backend
    return choose(like.device, like.dtype) if found is None else found


def choose(device: torch.device, dtype: torch.dtype) -> TorchBackend:
    """What `companion.kernels.use` says for tensors of this kind; asks it and, on a GPU, the device.

    Triton for 16 and 32 bits on a GPU that runs it ("always": on a CPU too, in its interpreter); Numba for
    float32 on a CPU under "compiled"; torch otherwise.
    """
    how = choice()
    if how == "compiled" and device.type == "cpu":
        return _NUMBA if dtype == torch.float32 else _TORCH
    if how == "never" or device.type not in ("cpu", "cuda") or (how != "always" and device.type == "cpu"):
        return _TORCH
    floats = (torch.float16, torch.bfloat16, torch.float32)
    if how != "always":
        capability = torch.cuda.get_device_capability(device)
        floats = tuple(d for d in floats if runs_on(capability, {d}))
    return _triton(device, floats) if dtype in floats or dtype.itemsize == 1 else _TORCH
