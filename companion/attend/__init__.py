"""Who computes: attention, products and experts of one pass through a model, by torch, Triton or Numba.

A `Backend` takes tensors, never a cache. It is chosen once, at the start of a pass, by what
`companion.kernels.use` says, the device and the dtype; whoever is called outside of a pass chooses for that
call. Each backend is written on top of torch's, which does what the others cannot.
"""

from .by_torch import TorchBackend
from .choose import Backend, backend, choose, one_pass
from .step import Step

__all__ = ["Backend", "Step", "TorchBackend", "backend", "choose", "one_pass"]
