"""The backends that have kernels; what these cannot do is torch's.

    Triton   on a GPU: few queries per row, writes into pages, and mixtures of experts
    Numba    on a CPU in float32: attention of decode steps and products of few rows

Nothing here imports Triton or Numba before a kernel is called.
"""

import torch
from torch import Tensor

from ..formats import KERNELS, get
from ..kernels import cpu
from ..kernels.cpu import ROWS, linear, run
from ..quantize import Codec
from ..quantize.integers import IntCodec
from .by_torch import Coded, TorchBackend
from .step import Step

MOST_QUERIES = 16  # tokens of a row that still count as decoding; a prompt's chunks are torch's


class TritonBackend(TorchBackend):
    """See `companion.attend.Backend`. floats: dtypes that the device computes in."""

    name = "triton"

    def __init__(self, device: torch.device, floats: tuple[torch.dtype, ...]):
        self.device, self.floats = device, floats

    def __repr__(self) -> str:
        return f"TritonBackend({self.device})"

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether kernels run on these; None is passed over.

        Never for float64, which no kernel takes, and never where a gradient is asked for: kernels have none.
        """
        real = [t for t in tensors if t is not None]
        for t in real:
            floats = t.is_floating_point() and t.element_size() > 1  # float8 codes are bytes to a kernel
            if t.device != self.device or (floats and t.dtype not in self.floats):
                return False
        return not (torch.is_grad_enabled() and any(t.requires_grad for t in real))

    def decode(self, q, k, v, step: Step, *, window, sinks, return_lse, **options):
        if self._few(q, step) and self.takes(q, k, v, sinks):
            if not step.ordered:
                k, v, step, window = step.pages(k), step.pages(v), step.in_view, None
            else:
                k, v = _kernel_layout(k, step), _kernel_layout(v, step)
            return self._kernel(q, k, v, step, window, sinks, return_lse, **options)
        return super().decode(q, k, v, step, window=window, sinks=sinks, return_lse=return_lse, **options)

    def extend(self, q, k, v, step: Step, *, window, sinks, return_lse, **options):
        if step.ordered and self._few(q, step) and self.takes(q, k, v, sinks):
            if step.packed:  # a chunk of one row, gathered as for torch
                k, v = step.gathered(k, v)
                step = Step(step.starts, step.stops, step.device)
            k, v = _kernel_layout(k, step), _kernel_layout(v, step)
            return self._kernel(q, k, v, step, window, sinks, return_lse, **options)
        return super().extend(q, k, v, step, window=window, sinks=sinks, return_lse=return_lse, **options)

    def _few(self, q: Tensor, step: Step) -> bool:
        return 0 < q.shape[2] <= MOST_QUERIES and step.n > 0

    def _kernel(self, q, k_cache, v_cache, step: Step, window, sinks, return_lse, **options):
        from ..kernels import decode_attention

        if v_cache.data_ptr() == k_cache.data_ptr():  # a latent: values are its front
            options["head_dim_v"], v_cache = v_cache.shape[3], None
        if (ahead := step.ahead(q.shape[2])) is not None:
            options["tail_seqlens"] = ahead
        out, lse = decode_attention(
            _rows(q),
            k_cache,
            v_cache,
            step.seqlens,
            block_table=step.table,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            sinks=sinks,
            max_seqlen=step.n,
            return_lse=True,
            **options,
        )
        out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    def over_codes(self, q, coded: Coded, step: Step, *, window, softmax_scale, softcap) -> list:
        kv_format = kernel_format(*coded.codecs, coded.widths)
        options = dict(softmax_scale=softmax_scale, softcap=softcap)
        if kv_format is None or not self._few(q, step):
            return super().over_codes(q, coded, step, window=window, **options)
        caches, fields = [], {}
        per_token, per_tensor = not kv_format.startswith("kivi"), kv_format.startswith("fp8")
        for name, views, codec in zip("kv", coded.views(), coded.codecs):
            caches.append(views.pop("codes"))
            fields |= {f"{name}_{field}": x[..., 0] if per_token else x for field, x in views.items()}
            if per_tensor and codec.fixed is not None:
                fields[f"{name}_scale"] = codec.fixed
        if not self.takes(q, *caches):
            return super().over_codes(q, coded, step, window=window, **options)
        step.table = coded.table()
        return [self._kernel(q, *caches, step, window, None, True, kv_format=kv_format, **options, **fields)]

    def append(self, k: Tensor, v: Tensor | None, k_store: Tensor, v_store: Tensor | None, step: Step):
        if step.table is None or not self.takes(k, v, k_store, v_store):
            return super().append(k, v, k_store, v_store, step)
        self._write(k, v, k_store, v_store, step, slot_mapping=step.slot_mapping(k.shape[2]))

    def append_rows(self, x: Tensor, store: Tensor, step: Step) -> None:
        if x.ndim != 4 or not self.takes(x, store):
            return super().append_rows(x, store, step)
        self._write(x, None, store, None, step, cache_seqlens=step.seqlens, new_tokens=step.new_tokens)

    def append_packed(self, k, v, k_store, v_store, slots: Tensor, tails: Tensor | None) -> None:
        if not self.takes(k, v, k_store, v_store):
            return super().append_packed(k, v, k_store, v_store, slots, tails)
        stores = (s.permute(1, 2, 0, 3) for s in (k_store, v_store))
        from ..kernels.append import append

        append(_rows(k), _rows(v), *stores, slot_mapping=slots[:, None])

    def _write(self, k, v, k_store, v_store, step: Step, **places) -> None:
        from ..kernels.append import append

        stores = (None if s is None else _kernel_layout(s, step) for s in (k_store, v_store))
        append(_rows(k), None if v is None else _rows(v), *stores, **places)

    def experts(self, by_torch, x, w1, w2, ids, weights, **options):
        b1, b2, limit = (options.get(name) for name in ("b1", "b2", "limit"))
        real = [t for t in (x, w1, w2, b1, b2) if t is not None]
        fits = all(t.dtype == x.dtype and t.numel() and t.stride(-1) == 1 for t in real)
        fits = fits and weights.dtype == torch.float32 and ids.numel() > 0 and options["capacity"] is None
        if not fits or not self.takes(*real, weights, ids):
            return super().experts(by_torch, x, w1, w2, ids, weights, **options)
        from ..kernels import fused_moe

        clamp = {} if limit is None else {"activation": "gpt_oss", "limit": limit, "alpha": options["alpha"]}
        return fused_moe(x, w1, w2, weights, ids, b1=b1, b2=b2, **clamp)


def kernel_format(k: Codec, v: Codec, widths: tuple[int, int]) -> str | None:
    """The kernels' name for caches of these codecs and head widths, or None if they have none."""
    if k.name != v.name:
        return None
    per_token = all(c.group_dim == -1 and c.group in (None, w) for c, w in zip((k, v), widths))
    own = get(k.name).kernel
    if k.name.startswith("fp8"):  # no scale, one for all, or one per token
        scales = {(c.group is None, c.fixed is None) for c in (k, v)}
        return own if per_token and len(scales) == 1 and (False, False) not in scales else None
    if per_token and own is not None:
        return own
    groups = isinstance(k, IntCodec) and all(c.group in (16, 32, 64, 128) and not c.symmetric for c in (k, v))
    kivi = f"kivi{k.bits}" if groups and (k.group_dim, v.group_dim) == (-2, -1) else None
    return kivi if kivi in KERNELS else None


def _kernel_layout(store: Tensor, step: Step) -> Tensor:
    """A store as kernels read it: (B, n, Hkv, D), or pages (num_blocks, block_size, Hkv, D)."""
    return store.transpose(1, 2) if step.table is None else store.permute(1, 2, 0, 3)


def _rows(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B, S, H, D), with channels side by side."""
    x = x.transpose(1, 2)
    return x if x.stride(3) == 1 else x.contiguous()


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
