"""From a checked decode call to its launches: tile, splits, and every argument of the two kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import KERNELS
from .. import mode
from .checks import Call, check_contents, check_device
from .splits import Splits, Tile, decode_tile, live_keys, parts, plan_splits

SPLITS_AT_ONCE = 16  # that stage two reads together; never of the batch, see `merge.py`
LOG2E = 1.4426950408889634


class Launch:
    """A checked call with its tile and its splits: one start of stage one."""

    def __init__(self, call: Call, tile: Tile, splits: Splits, interpreted: bool):
        self.call, self.tile, self.splits, self.interpreted = call, tile, splits, interpreted

    def run(self, out: Tensor, lse: Tensor) -> None:
        """Fill out (B, Sq, Hq, splits, Dv) and lse (B, Hq, Sq, splits)."""
        from .kernel import decode_kernel

        constants = constexprs(self.call, self.tile)
        rows = self.call.q.shape[1] * constants["GROUP"]
        grid = (self.call.q.shape[0], self.call.k.shape[2] * -(-rows // self.tile.rows), self.splits.count)
        with mode.on(self.call.q):
            decode_kernel[grid](
                **arguments(self.call, out, lse, self.splits),
                **constants,
                WIDE=not self.tile.dot or (self.interpreted and self.call.q.dtype == torch.bfloat16),
                num_warps=self.tile.warps,
                num_stages=self.tile.stages,
            )


def prepare(call: Call, num_splits=0, fixed_split_size=None, max_seqlen=None, check=None) -> Launch:
    """The last checks, then tile and splits."""
    for name, n, least in (
        ("num_splits", num_splits, 0),
        ("fixed_split_size", fixed_split_size, 1),
        ("max_seqlen", max_seqlen, 0),
    ):
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < least):
            raise ValueError(f"{name}={n!r}; need an integer of at least {least}")
    if num_splits and fixed_split_size is not None:
        raise ValueError(f"num_splits={num_splits} and fixed_split_size={fixed_split_size}: give one of them")
    if check not in (None, True, False):
        raise ValueError(f"check={check!r}; need True, False or None")
    interpreted = mode.triton_for(*call.tensors())
    capability = mode.capability(call.q)
    check_device(call, capability)
    longest = call.capacity
    if check or (check is None and call.seqlens.device.type == "cpu"):
        longest = check_contents(call)
        if max_seqlen is not None and longest > max_seqlen:
            raise ValueError(f"max_seqlen={max_seqlen}; cache_seqlens holds {longest}")
    if max_seqlen is not None:
        longest = min(max_seqlen, call.capacity)
    B, Sq, Hq, _ = call.q.shape
    Hkv = call.k.shape[2]
    rows = Sq * Hq // Hkv
    kivi = call.kv_format.startswith("kivi")
    tile = tile_for(call, capability)
    if kivi and fixed_split_size is not None and fixed_split_size % tile.keys:
        raise ValueError(
            f"fixed_split_size={fixed_split_size}; {call.kv_format} needs a multiple of {tile.keys}"
        )
    live = live_keys(longest, call.window, Sq)
    if kivi and call.window is not None:
        live += tile.keys - 1  # splits begin where a group does
    splits = plan_splits(
        live,
        tile.keys,
        programs=max(1, B * Hkv * -(-rows // tile.rows)),
        cores=mode.cores(call.q),
        count=num_splits,
        fixed=fixed_split_size,
    )
    if splits.count > 65535:
        raise ValueError(f"fixed_split_size={fixed_split_size} makes {splits.count} splits; at most 65,535")
    if Hkv * -(-rows // tile.rows) > 65535:
        raise ValueError(f"k_cache has {Hkv} heads and q {rows} rows for each: more than 65,535 programs")
    return Launch(call, tile, splits, interpreted)


def tile_for(call: Call, capability: tuple[int, int]) -> Tile:
    rows = call.q.shape[1] * call.q.shape[2] // call.k.shape[2]
    return decode_tile(
        call.q.shape[3],
        v_head_dim=call.v_dim,
        rows=max(1, rows),
        dtype=str(call.q.dtype),
        capability=capability,
        key_group=call.groups[0] if call.kv_format.startswith("kivi") else None,
    )


def join(launches: Sequence[Launch], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run stage one of every launch and merge. Returns (B, Sq, Hq, Dv) and (B, Hq, Sq)."""
    first = launches[0]
    q, v_dim = first.call.q, first.call.v_dim
    B, Sq, Hq, _ = q.shape
    # The interpreter cuts float32 to bfloat16 instead of rounding: there torch makes the cast.
    as_float = first.interpreted and q.dtype == torch.bfloat16
    out = q.new_empty(B, Sq, Hq, v_dim, dtype=torch.float32 if as_float else q.dtype)
    lse = q.new_empty(B, Hq, Sq, dtype=torch.float32)
    count = sum(launch.splits.count for launch in launches)
    if out.numel():
        if count == 1 and sinks is None:
            first.run(out.unsqueeze(3), lse.unsqueeze(3))  # one split is the result
        else:
            partial = q.new_empty(B, Sq, Hq, count, v_dim, dtype=torch.float32)
            partial_lse = q.new_empty(B, Hq, Sq, count, dtype=torch.float32)
            at = 0
            for launch in launches:
                end = at + launch.splits.count
                launch.run(partial[:, :, :, at:end], partial_lse[..., at:end])
                at = end
            merge(partial, partial_lse, sinks, out, lse)
    return out.to(q.dtype), lse


def merge(parts: Tensor, part_lse: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Fill out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) from parts with splits, as `Launch.run` fills them."""
    from .kernel import merge_kernel

    B, Sq, Hq = out.shape[:3]
    with mode.on(out):
        merge_kernel[(B, Sq * Hq)](**merge_arguments(parts, part_lse, sinks, out, lse))


def merge_arguments(parts, part_lse, sinks, out, lse) -> dict:
    """What `merge_kernel` takes, constants included."""
    splits, v_dim = parts.shape[3:]
    return dict(
        PARTS=parts,
        PART_LSE=part_lse,
        SINKS=part_lse if sinks is None else sinks,
        OUT=out,
        LSE=lse,
        splits=splits,
        heads=out.shape[2],
        **strides("parts", parts, "bshn"),
        **strides("part_lse", part_lse, "bhsn"),
        **strides("out", out, "bsh"),
        **strides("lse", lse, "bhs"),
        DV=v_dim,
        BLOCK_D=max(16, 1 << (v_dim - 1).bit_length()),
        BLOCK_S=SPLITS_AT_ONCE,
        HAS_SINKS=sinks is not None,
    )


def strides(name: str, x: Tensor | None, axes: str) -> dict[str, int]:
    """x's strides as the kernels' arguments: k_stride_b, k_stride_s and so on."""
    return {f"{name}_stride_{a}": 0 if x is None else x.stride(i) for i, a in enumerate(axes)}


def arguments(call: Call, out: Tensor, lse: Tensor, splits: Splits) -> dict:
    """What `decode_kernel` takes at run time. An argument that it will not read is some other tensor."""
    scale, softcap = _factors(call.scale, call.softcap)
    k_scale, k_zero = call.scales.get("k_scale"), call.scales.get("k_zero")
    v_scale, v_zero = call.scales.get("v_scale"), call.scales.get("v_zero")
    if call.latent:
        v_scale, v_zero = k_scale, k_zero
    return dict(
        Q=call.q,
        K=call.k,
        V=call.v,
        K_SCALE=_or(k_scale, call.k),
        K_ZERO=_or(k_zero, call.k),
        V_SCALE=_or(v_scale, call.v),
        V_ZERO=_or(v_zero, call.v),
        SEQLENS=call.seqlens,
        TAIL=_or(call.tail, call.seqlens),
        TABLE=_or(call.table, call.seqlens),
        OUT=out,
        LSE=lse,
        scale=scale,
        softcap=softcap,
        left=0 if call.left is None else call.left,
        split_size=splits.size,
        **strides("q", call.q, "bsh"),
        **strides("k", call.k, "bsh"),
        **strides("v", call.v, "bsh"),
        **strides("k_scale", k_scale, "bsh"),
        **strides("v_scale", v_scale, "bsh"),
        table_stride=0 if call.table is None else call.table.stride(0),
        **strides("out", out, "bshn"),
        **strides("lse", lse, "bhsn"),
    )


def constexprs(call: Call, tile: Tile) -> dict:
    """What `decode_kernel` is compiled for."""
    stored = KERNELS.get(call.kv_format)  # None for numbers as they are
    pairs = stored is not None and stored.per_byte > 1
    D = call.q.shape[3]
    KA, KB = parts(D, pairs=pairs, first=call.v_dim if call.latent else None)
    VA, VB = (KA, 0) if call.latent else parts(call.v_dim, pairs=pairs)
    token = stored is not None and stored.scales == "token"
    return dict(
        SQ=call.q.shape[1],
        GROUP=call.q.shape[2] // call.k.shape[2],
        D=D,
        DV=call.v_dim,
        KA=KA,
        KB=KB,
        VA=VA,
        VB=VB,
        BLOCK_SIZE=call.block_size,
        WINDOW=call.left is not None,
        SOFTCAP=call.softcap > 0,
        HAS_TAIL=call.tail is not None,
        LATENT=call.latent,
        FORMAT=call.kv_format,
        K_GROUP=call.groups[0],
        V_GROUP=call.groups[1],
        K_SCALED=token and "k_scale" in call.scales,
        V_SCALED=token and "k_scale" in call.scales,
        K_OFFSET=token and "k_zero" in call.scales,
        V_OFFSET=token and ("k_zero" if call.latent else "v_zero") in call.scales,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        DOT=tile.dot,
    )


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """On scores, so that they become powers of 2; with a softcap for cap * (2 * sigmoid(2 * s / cap) - 1)."""
    return (2 * scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x
