"""By Numba on a CPU in float32: attention of decode steps and products of few rows, the rest by torch.

Nothing here imports Numba before it computes; `companion.kernels.use("compiled")` has asked for it.
"""

import torch
from torch import Tensor

from ..kernels import cpu
from ..kernels.cpu import run
from ..kernels.cpu.rows import ROWS, linear
from .by_torch import TorchBackend
from .step import Step


class NumbaBackend(TorchBackend):
    """See `companion.attend.Backend`."""

    name = "numba"
    whole_steps = True

    def decode(self, q, k, v, step: Step, *, window, softmax_scale, softcap, sinks, return_lse):
        options = dict(softmax_scale=softmax_scale, softcap=softcap)
        if self.fits(q, k, v, step, window):
            lay = (1, 2, 0, 3) if step.table is not None else (0, 2, 1, 3)
            out, lse = run(
                q[:, :, 0], k.permute(lay), v.permute(lay), step.stops, step.table,
                window=window, sinks=sinks, **options,
            )  # fmt: skip
            return (out[:, :, None], lse[:, :, None]) if return_lse else out[:, :, None]
        return super().decode(q, k, v, step, window=window, sinks=sinks, return_lse=return_lse, **options)

    def fits(self, q: Tensor, k: Tensor, v: Tensor, step: Step, window: int | None) -> bool:
        """Whether the loops take this step, and it reads enough to be worth them."""
        if not step.ordered or not step.n or not step.one_each or not _floats(q, k, v):
            return False
        if any(t.stride(-1) != 1 for t in (q, k, v)):
            return False
        if step.table is not None:  # torch would have to gather the pages first
            return True
        keys = sum(step.stops) if window is None else sum(min(n, window) for n in step.stops)
        per_key = k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
        return keys * per_key >= cpu.LEAST_BYTES

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None):
        """Here for up to ROWS rows, and a weight without gaps."""
        if x.dtype == torch.float32 and 0 < x.numel() <= ROWS * weight.shape[1]:
            kind = torch.float32 if scale is None else torch.int8
            fits = weight.dtype == kind and weight.is_contiguous() and x.is_cpu and weight.is_cpu
            fits = fits and (scale is None or scale.dtype == torch.float32)
            if fits and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
                return linear(x, weight, bias, scale)
        return super().linear(x, weight, bias, scale)


def _floats(*tensors: Tensor) -> bool:
    """Whether these are float32 on a CPU, and no gradient is asked for."""
    if any(t.dtype != torch.float32 or not t.is_cpu for t in tensors):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
