"""What `companion bench --gpu` runs: heads of real models, formats, layouts and sizes, as plain data."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import sdpa
from ...cost import models
from ...formats import INT4
from ...quantize import unpack
from .report import BEYOND

MIB = 2**20
PAGE = {"kivi4": 32}  # tokens of a page: a multiple of kivi's groups
KIVI_GROUP = 32


@dataclass(frozen=True)
class Heads:
    """A model's attention. v_head_dim is head_dim's front if `latent`."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool = False

    @classmethod
    def of(cls, name: str) -> "Heads":
        """Of one of `companion.cost.models`; latent attention as absorbed: all heads over one key."""
        m = models[name]
        if m.mla is not None:
            return cls(name, m.heads, 1, m.mla.width, m.mla.kv_rank, latent=True)
        return cls(name, m.heads, m.kv_heads, m.head_dim, m.v_head_dim)

    def token_bytes(self) -> int:
        """Keys and values of one token and layer in 16 bits."""
        return 2 * self.kv_heads * (self.head_dim + (0 if self.latent else self.v_head_dim))


LLAMA = Heads.of("llama-3.1-8b")
SMOLLM2 = Heads.of("smollm2-135m")
QWEN3 = Heads.of("qwen3-235b-a22b")  # groups of 16
MLA = Heads.of("deepseek-v3")  # 128 heads over one of 576


@dataclass(frozen=True)
class DecodeCase:
    """One decode step of one layer: `batch` sequences of `length` tokens."""

    heads: Heads
    batch: int
    length: int
    dtype: str = "bf16"
    kv_format: str = "none"
    paged: bool = False

    @property
    def block_size(self) -> int | None:
        return PAGE.get(self.kv_format, 16) if self.paged else None

    @property
    def kv_bytes(self) -> int:
        """Keys and values as they would be in 16 bits: what the goals' 64 MiB are about."""
        return self.batch * self.length * self.heads.token_bytes()

    @property
    def layout(self) -> str:
        return "paged" if self.paged else "contiguous"

    @property
    def name(self) -> str:
        size = f"b{self.batch} n{self.length}"
        return f"decode {self.heads.model} {size} {self.dtype} {self.kv_format} {self.layout}"


@dataclass(frozen=True)
class MoECase:
    """One layer of experts under `tokens` tokens, sent evenly at random."""

    model: str
    experts: int
    top_k: int
    d_model: int
    ffn: int
    tokens: int
    dtype: str = "bf16"

    @classmethod
    def of(cls, name: str, tokens: int, dtype: str) -> "MoECase":
        m = models[name]
        return cls(name, m.moe.experts, m.moe.top_k, m.d_model, m.moe.ffn, tokens, dtype)

    @property
    def name(self) -> str:
        return f"moe {self.model} t{self.tokens} {self.dtype}"


SIZES = ((64, 1), (64, 16), (512, 32))  # MiB of keys and values in 16 bits, sequences
FORMATS = ("none", "int8", INT4.kernel, "fp8_e4m3", "fp8_e5m2", "kivi4")


def sized(heads: Heads, mib: int, batch: int, **options) -> DecodeCase:
    """At least so many MiB: the length is rounded up to whole pages of any format."""
    length = -(-mib * MIB // (batch * heads.token_bytes()))
    return DecodeCase(heads, batch, -(-length // KIVI_GROUP) * KIVI_GROUP, **options)


def first_cases(dtype: str) -> list[DecodeCase]:
    """What has to be there when time runs out: one model, the three formats, both layouts."""
    cases = []
    for paged in (False, True):
        for kv_format in FORMATS[:3]:
            cases += [sized(LLAMA, *size, dtype=dtype, kv_format=kv_format, paged=paged) for size in SIZES]
    return cases


def more_cases(dtype: str, other: str | None) -> list[DecodeCase]:
    """Other models, formats and types. dtype: the device's 16-bit type; other: its second one."""
    cases = []
    for heads in (SMOLLM2, QWEN3):
        for kv_format, paged in (("none", False), ("none", True), ("int8", False), (INT4.kernel, False)):
            cases += [sized(heads, *size, dtype=dtype, kv_format=kv_format, paged=paged) for size in SIZES]
    cases += [sized(MLA, *size, dtype=dtype, paged=paged) for paged in (False, True) for size in SIZES[:2]]
    for kv_format in FORMATS[3:]:
        cases += [sized(LLAMA, 64, 16, dtype=dtype, kv_format=kv_format, paged=p) for p in (False, True)]
    if other:
        cases.append(sized(LLAMA, 64, 16, dtype=other))
    cases.append(sized(LLAMA, 64, 16, dtype="fp32"))
    return cases


def moe_cases(dtype: str) -> list[MoECase]:
    """Qwen3-30B-A3B: many small experts; Mixtral-8x7B: few large ones."""
    small = [MoECase.of("qwen3-30b-a3b", tokens, dtype) for tokens in (1, 16, 256)]
    return [*small, MoECase.of("mixtral-8x7b", 16, dtype)]


def tiny_decode(case: DecodeCase) -> DecodeCase:
    """The same case for a dry run: its group of heads and its format, over a few tokens."""
    h = case.heads
    heads = replace(h, heads=min(16, h.heads // h.kv_heads), kv_heads=1)
    if h.latent:
        heads = replace(heads, head_dim=h.head_dim // 8, v_head_dim=h.v_head_dim // 8)
    return replace(case, heads=heads, batch=min(2, case.batch), length=64)


def tiny_moe(case: MoECase) -> MoECase:
    """The same for a dry run."""
    return replace(case, experts=4, top_k=2, d_model=32, ffn=32, tokens=min(3, case.tokens))


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOLERANCE = {"fp32": 5e-6, "fp16": 1e-3, "bf16": 8e-3}  # relative Frobenius error


def decode_inputs(case: DecodeCase, device: torch.device, seed: int = 0) -> dict:
    """Arguments of `decode_attention` by name: q, k_cache, v_cache, cache_seqlens and the options."""
    g = torch.Generator(device).manual_seed(seed)
    h, B, n = case.heads, case.batch, case.length
    to = {"generator": g, "device": device}
    shape = (B, n)
    out = {
        "cache_seqlens": torch.full((B,), n, dtype=torch.int32, device=device),
        "kv_format": case.kv_format,
    }
    if case.paged:
        blocks = -(-n // case.block_size)
        shape = (B * blocks, case.block_size)
        out["block_table"] = torch.randperm(B * blocks, **to).view(B, blocks).int()
    out["q"] = torch.randn(B, h.heads, h.head_dim, dtype=DTYPES[case.dtype], **to)
    for side, width in (("k", h.head_dim), ("v", h.v_head_dim)):
        if side == "v" and h.latent:
            out |= {"v_cache": None, "head_dim_v": width}
            continue
        codes, fields = _stored(case, (*shape, h.kv_heads, width), side, to)
        out |= {f"{side}_cache": codes} | {f"{side}_{name}": x for name, x in fields.items()}
    return out


def _stored(
    case: DecodeCase, shape: tuple[int, ...], side: str, to: dict
) -> tuple[Tensor, dict[str, Tensor]]:
    """A cache of this shape in the case's format, with its scale and zero."""
    *lead, D = shape
    if case.kv_format == "none":
        return torch.randn(shape, dtype=DTYPES[case.dtype], **to), {}
    if case.kv_format in FLOAT8:
        return torch.randn(shape, **to).to(FLOAT8[case.kv_format]).view(torch.uint8), {}
    if case.kv_format == "int8":
        scale = torch.rand(lead, **to).add_(0.5).mul_(0.02).half()
        return torch.randint(-127, 128, shape, dtype=torch.int8, **to), {"scale": scale}
    pages, tokens, heads = lead
    groups = tuple(lead)
    if case.kv_format == "kivi4":
        per_channel, per_group = (pages, tokens // KIVI_GROUP, heads, D), (*lead, D // KIVI_GROUP)
        groups = per_channel if side == "k" else per_group
    scale = torch.rand(groups, **to).add_(0.5).mul_(0.3).half()
    codes = torch.randint(0, 256, (*lead, D // 2), dtype=torch.uint8, **to)
    return codes, {"scale": scale, "zero": scale * -7.5}


def decode_exact(case: DecodeCase, inputs: dict, row: int) -> tuple[Tensor, Tensor]:
    """out (Hq, Dv) and LSE (Hq,) of one sequence in float64, from the numbers that the cache stands for."""
    k = _row(case, inputs, row, "k")
    v = k[..., : case.heads.v_head_dim] if case.heads.latent else _row(case, inputs, row, "v")
    q = inputs["q"][row, None, :, None].double()  # (1, Hq, 1, D)
    out, lse = sdpa(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], return_lse=True)
    return out[0, :, 0], lse[0, :, 0]


def _row(case: DecodeCase, inputs: dict, row: int, side: str) -> Tensor:
    """One sequence's keys or values, (n, Hkv, D) float64."""

    def of_row(x):  # (tokens or groups of them, Hkv, ...)
        if "block_table" not in inputs:
            return x[row]
        return x[inputs["block_table"][row].long()].flatten(0, 1)

    x = of_row(inputs[f"{side}_cache"])
    if case.kv_format == "none":
        return x[: case.length].double()
    if case.kv_format in FLOAT8:
        return x[: case.length].view(FLOAT8[case.kv_format]).float().double()
    scale = of_row(inputs[f"{side}_scale"]).double()
    zero = of_row(inputs[f"{side}_zero"]).double() if f"{side}_zero" in inputs else torch.zeros_like(scale)
    codes = (x if case.kv_format == "int8" else unpack(x, 4)).double()
    if case.kv_format == "kivi4":
        dim, each = (0, KIVI_GROUP) if side == "k" else (2, KIVI_GROUP)
        scale, zero = (s.repeat_interleave(each, dim=dim) for s in (scale, zero))
    else:
        scale, zero = scale[..., None], zero[..., None]
    return (codes * scale + zero)[: case.length]


def moe_inputs(case: MoECase, device: torch.device) -> tuple[Tensor, ...]:
    """x, w1, w2, weights, ids of a layer: every token to top_k experts at random."""
    g = torch.Generator(device).manual_seed(4)
    E, K, N, to = case.experts, case.d_model, case.ffn, {"generator": g, "device": device}
    x = torch.randn(case.tokens, K, **to).to(DTYPES[case.dtype])
    w1, w2 = (
        torch.randn(shape, dtype=DTYPES[case.dtype], **to).mul_(shape[-1] ** -0.5)
        for shape in ((E, 2 * N, K), (E, K, N))
    )
    ids = torch.rand(case.tokens, E, **to).topk(case.top_k).indices
    weights = torch.rand(case.tokens, case.top_k, **to).softmax(-1)
    return x, w1, w2, weights, ids


def moe_exact(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A layer's result for a few tokens in float64, a choice a time: all experts in float64 would not fit."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            gate, up = (w1[e].double() @ x[t].double()).chunk(2)
            out[t] += weights[t, j].double() * (w2[e].double() @ (F.silu(gate) * up))
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error; infinite where NaN or infinity stand in one of the two alone."""
    got, want = got.double().cpu(), want.double().cpu()
    strange = got.isnan() != want.isnan()
    strange |= (got.isinf() | want.isinf()) & (got != want)
    if got.shape != want.shape or strange.any():
        return float("inf")
    live = want.isfinite()
    return float((got[live] - want[live]).norm() / want[live].norm().clamp_min(1e-30))


def judge(row: dict, error: float, tolerance: float) -> None:
    """Note the error, and whether it will do."""
    error = error if math.isfinite(error) else BEYOND
    row |= {"error": error, "tolerance": tolerance, "ok": error <= tolerance}
