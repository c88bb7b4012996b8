"""What `companion bench --gpu` runs: heads of real models, formats, layouts and sizes, as plain data."""

from dataclasses import dataclass, replace

from ..cost import models

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
FORMATS = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "kivi4")


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
        for kv_format, paged in (("none", False), ("none", True), ("int8", False), ("int4", False)):
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
