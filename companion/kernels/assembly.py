"""Reading what the compiler wrote: how wide loads are, which instructions multiply, what spilled.

Every count is over the text, so an instruction in a loop counts once. Pure functions of strings: nothing here
needs Triton or a device.
"""

import re

# ld.global.L1::evict_first.v4.b32: modifiers in any order, then an optional vector and the type.
_PTX_LOAD = re.compile(r"\bld\.global(?:\.[a-zA-Z_]\w*(?:::\w+)*)*?(?:\.v([248]))?\.[busf](8|16|32|64|128)\b")
_PTX_ASYNC = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^\]]*\]\s*,\s*\[[^\]]*\]\s*,\s*(0x\w+|\d+)"
)
_PTX_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_PTX_FMA = re.compile(r"\bfma\.rn\.(?:ftz\.)?f32(x2)?\b")
_PTXAS_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_RESOURCES = re.compile(r"\bREG:(\d+) STACK:(\d+)")

_GCN_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_GCN_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_GCN_SCRATCH = re.compile(r"\bscratch_(load|store)_(\w+)")
_GCN_FMA = re.compile(r"\bv_(?:pk_)?fmac?_f32")


def ptx_loads(ptx: str) -> dict[int, int]:
    """Bytes per lane of a load from global memory -> how many such stand in `ptx`, asynchronous ones too."""
    sizes = [int(v or 1) * int(bits) // 8 for v, bits in _PTX_LOAD.findall(ptx)]
    return _count(sizes + [int(n, 0) for n in _PTX_ASYNC.findall(ptx)])


def ptx_matrix(ptx: str) -> dict[str, int]:
    """Matrix instructions by kind: mma.sync (from sm_80), wgmma.mma_async (sm_90), tcgen05.mma (sm_100)."""
    return _count(_PTX_MATRIX.findall(ptx))


def ptx_fma(ptx: str) -> int:
    """Fused multiply-adds of float32 outside matrix instructions; a packed pair counts twice."""
    return sum(2 if pair else 1 for pair in _PTX_FMA.findall(ptx))


def ptxas_spills(log: str) -> tuple[int, int]:
    """(bytes stored, bytes loaded) by spills, from what `ptxas -v` says."""
    found = _PTXAS_SPILL.search(log)
    if not found:
        raise ValueError(f"log must be that of ptxas -v, got {log[:200]!r}")
    return int(found[1]), int(found[2])


def cubin_resources(text: str) -> tuple[int, int]:
    """(registers per thread, bytes of stack) from `cuobjdump --dump-resource-usage`; no stack, no spill."""
    found = _RESOURCES.search(text)
    if not found:
        raise ValueError(f"text must be cuobjdump's resource usage, got {text[:200]!r}")
    return int(found[1]), int(found[2])


def gcn_loads(asm: str) -> dict[int, int]:
    """As `ptx_loads`, of AMD's assembly. Loads into scalar registers (arguments) are not counted."""
    return _count([_gcn_bytes(kind) for kind in _GCN_LOAD.findall(asm)])


def gcn_matrix(asm: str) -> dict[str, int]:
    """Matrix instructions: v_mfma."""
    return _count(re.findall(r"\bv_mfma(?=_)", asm))


def gcn_fma(asm: str) -> int:
    """As `ptx_fma`, of AMD's assembly."""
    return sum(2 if "_pk_" in name else 1 for name in _GCN_FMA.findall(asm))


def gcn_spills(asm: str) -> tuple[int, int]:
    """(bytes stored, bytes loaded) per lane through scratch memory, where registers are spilled."""
    moved = {"store": 0, "load": 0}
    for way, kind in _GCN_SCRATCH.findall(asm):
        moved[way] += _gcn_bytes(kind)
    return moved["store"], moved["load"]


def gcn_registers(asm: str) -> int:
    """Vector registers per lane, those of accumulation included."""
    found = re.search(r"\.vgpr_count:\s+(\d+)", asm)
    if not found:
        raise ValueError("asm has no .vgpr_count")
    return int(found[1])


def wide_share(loads: dict[int, int]) -> float:
    """The share of all bytes in `loads` that instructions of 16 bytes or more move; 1 if there are none."""
    total = sum(size * n for size, n in loads.items())
    return sum(size * n for size, n in loads.items() if size >= 16) / total if total else 1.0


def _gcn_bytes(kind: str) -> int:
    return _GCN_BYTES.get(kind) or (1 if "byte" in kind else 2)  # ushort, short_d16, ubyte ..


def _count(items: list) -> dict:
    return {key: items.count(key) for key in sorted(set(items))}
