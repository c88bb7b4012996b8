"""Many small products as one launch: rows sorted by expert, each under the weights of its expert.

    rows     0 .. offsets[1]   offsets[1] .. offsets[2]   ...
    weights  w[0]              w[1]                       ...

`form` says how rows are cut into tiles (`companion.kernels.moe.plan` counts both):

    "padded"     every expert begins a new tile; lanes of its last tile may have no row
    "straddle"   tiles follow one another without a gap; one with rows of several experts goes through them in
                 turn, with the rows of the others masked

Neither pads anything in memory. Both multiply whole tiles, so both waste lanes where experts have few rows;
the straddling form needs fewer programs and knows how many without knowing the counts, the padded form
multiplies less and gives a small batch more programs to run side by side. It is the default.

Sources: Gale et al. 2022 (MegaBlocks, grouped products without dropping); Tan et al. 2024 (ScatterMoE, tiles
over several experts).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from ..mode import capability, on, triton_for
from .plan import FORMS, GemmTile, gemm_tile, max_tiles


def launch_of(tile: GemmTile) -> dict[str, int]:
    """A tile as the kernel's constants and launch options."""
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    return blocks | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


COMBINE = {"BLOCK_T": 4, "BLOCK_D": 512, "num_warps": 4}


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def grouped_gemm(
    x: Float[Tensor, "S K"],
    w: Float[Tensor, "E N K"],
    offsets: Int[Tensor, " E_plus_1"],
    *,
    bias: Float[Tensor, "E N"] | None = None,
    form: str = "padded",
    tile: GemmTile | None = None,
) -> Float[Tensor, "S N"]:
    """Rows offsets[e] to offsets[e + 1] of x times w[e] transposed, for every expert e; in x's dtype.

    x: (S, K), any row stride. w: (E, N, K), any strides but the last, which is 1. offsets: (E + 1,) int32 or
        int64, from 0 to S, never falling. An expert may have no row, and S may be 0. bias: (E, N).
    form: how rows are cut into tiles.
        "padded"    every expert begins a new tile; lanes of its last tile may have no row
        "straddle"  tiles follow one another without a gap; one with rows of several experts goes through
                    them in turn, with the rows of the others masked
    tile: None chooses by size (`moe/plan.py`); with one given, a row's result does not
        depend on the other rows.

    Sums are in float32; float32 is multiplied exactly, not as TF32. NaN in a row or in the weights of an
    expert reaches that row, or that expert's rows, alone. Nothing is moved to the host: values of `offsets`
    are checked on a CPU only. There is no gradient.

    Raises ValueError for shapes, strides, dtypes and offsets that do not fit, with nothing launched.
    """
    interpreting = check_matrices(x, {"w": w}, {"bias": bias}, offsets)
    (S, K), (E, N, _) = x.shape, w.shape
    check_shape(w, "w", (E, N, K))
    check_shape(bias, "bias", (E, N))
    if tuple(offsets.shape) != (E + 1,) or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"offsets must be int32 or int64 of shape ({E + 1},), got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if interpreting:
        steps = offsets.tolist()
        if steps[0] != 0 or steps[-1] != S or steps != sorted(steps):
            raise ValueError(f"offsets must rise from 0 to the {S} rows of x, got {steps}")
    tile = tile or gemm_tile(S, E, element_bytes=x.element_size(), capability=capability(x))
    out = buffer(x, S, N, interpreting)
    inside = offsets.clamp(0, S).cummax(0).values  # unchecked on a GPU, but nothing outside is read
    plan = plan_rows(inside.to(torch.int32), S, tile.block_m, form)
    launch(x, w, out, plan, tile, bias=bias)
    return out.to(x.dtype)


@dataclass(frozen=True)
class Plan:
    """Where sorted rows begin and end, on the device.

    offsets  (E + 1,) expert e has rows offsets[e] to offsets[e + 1]
    expert   (S,) of each row; rows from offsets[E] on belong to none, and no tile has them
    tiles    (tiles, 2) first row and one past the last; equal where a reserved tile is not needed
    """

    offsets: Int32[Tensor, " E_plus_1"]
    expert: Int32[Tensor, " S"]
    tiles: Int32[Tensor, "tiles 2"]


def plan_rows(offsets: Int32[Tensor, " E_plus_1"], rows: int, block_m: int, form: str) -> Plan:
    """Cut rows into tiles without asking the device how many there are: the launch reserves the most."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}; got {form!r}")
    device, E = offsets.device, offsets.numel() - 1
    begins, ends = offsets[:-1], offsets[1:].contiguous()
    expert = torch.searchsorted(ends, _count(rows, device), right=True, out_int32=True)
    t = _count(max_tiles(rows, E, block_m, form), device)
    if form == "straddle":
        first = (t * block_m).clamp(max=offsets[-1])
        last = (first + block_m).clamp(max=offsets[-1])
    else:
        each = (ends - begins + block_m - 1) // block_m  # tiles of each expert
        total = each.cumsum(0, dtype=torch.int32)
        e = torch.searchsorted(total, t, right=True).clamp(max=E - 1)
        first = torch.minimum(begins[e] + (t - (total - each)[e]) * block_m, ends[e])
        last = torch.minimum(first + block_m, ends[e])
    return Plan(offsets, expert, torch.stack([first, last], dim=1).to(torch.int32))


def _count(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=device)


def launch(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    plan: Plan,
    tile: GemmTile,
    *,
    bias: Tensor | None = None,
    order: Tensor | None = None,
    gather: int = 0,
    scatter: Tensor | None = None,
    gated: bool = False,
    clamp: tuple[float, float] | None = None,
) -> None:
    """Run the kernel: all that `grouped_gemm` and `fused_moe` differ in.

    gather: choices to a token, rows come from x[order // gather]; 0: from x itself. scatter: weights; rows go
    to out[order], times scatter[order]. gated: w has gate and up rows. clamp: gpt-oss's (limit, alpha).
    """
    from .kernel import grouped_kernel

    N = w.shape[1] // 2 if gated else w.shape[1]
    limit, alpha = clamp or (0.0, 1.0)
    grid = (plan.tiles.shape[0], -(-N // tile.block_n))
    if not all(grid):
        return
    with on(x):
        grouped_kernel[grid](
            x, w, w if bias is None else bias, out,
            plan.offsets if order is None else order, out if scatter is None else scatter,
            plan.expert, plan.offsets, plan.tiles,
            N, w.shape[2], x.stride(0), w.stride(0), w.stride(1), N * w.stride(1),
            0 if bias is None else bias.stride(0), out.stride(0), limit, alpha,
            TOP_K=gather or 1, GATHER=gather > 0, SCATTER=scatter is not None, GATED=gated,
            CLAMP=clamp is not None, HAS_BIAS=bias is not None,
            UPCAST=x.device.type == "cpu" and x.dtype == torch.bfloat16,
            **launch_of(tile),
        )  # fmt: skip


def buffer(x: Tensor, rows: int, width: int, interpreting: bool) -> Tensor:
    """(rows, width) for a kernel to write, in x's dtype; float32 where the interpreter rounds wrongly."""
    wrong = interpreting and x.dtype == torch.bfloat16
    return x.new_empty(rows, width, dtype=torch.float32 if wrong else x.dtype)


def check_matrices(
    x: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor | None], *others: Tensor
) -> bool:
    """What the kernel can read, checked before anything is launched; True if the interpreter will run it."""
    interpreting = triton_for(x, *weights.values(), *biases.values(), *others)
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}")
    everything = {"x": x} | weights | biases
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in everything.values()):
        raise ValueError("kernels have no gradient, and a tensor asks for one: use torch.no_grad()")
    if x.dtype == torch.bfloat16 and capability(x) < (8, 0):
        raise ValueError("x is bfloat16, which needs compute capability 8.0; this device takes float16")
    for name, tensor in (weights | biases).items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name} must have x's dtype {x.dtype}, got {tensor.dtype}")
    for name, tensor in everything.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 in its last dim, got strides {tensor.stride()}")
    if x.shape[1] == 0 or any(0 in w.shape for w in weights.values()):
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in ({"x": x} | weights).items())
        raise ValueError(f"only x may be empty, and only in rows; got {shapes}")
    return interpreting


def check_shape(tensor: Tensor | None, name: str, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
