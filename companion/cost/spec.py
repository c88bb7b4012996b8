"""The shape of a model: everything that a byte or a FLOP is counted from.

`ModelSpec` holds the integers of a decoder-only transformer, whatever file they came from.
It is frozen and hashable, so it can key a table; nothing in it depends on weights or on a device.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from .routing import RoutingSpec

LAYER_TYPES = ("full", "sliding")
QK_NORMS = (None, "head", "full")


def whole(owner: str, name: str, value: Any, *, zero: bool = False) -> int:
    """`value` as an int above zero (or zero, if allowed); else a ValueError naming owner and field."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < (0 if zero else 1):
        kind = "an integer of at least 0" if zero else "a positive integer"
        raise ValueError(f"{owner}: {name} must be {kind}, got {value!r}")
    return number


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention: what DeepSeek-V2, V3 and Kimi-K2 cache instead of keys and values.

    A layer caches one vector of `kv_rank + rope_dim` numbers per token, whatever the number of heads.
    `q_rank` is None where the query is projected directly (DeepSeek-V2-Lite).
    Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1 and Table 1.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None

    def __post_init__(self):
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            whole("MLASpec", name, getattr(self, name))
        if self.q_rank is not None:
            whole("MLASpec", "q_rank", self.q_rank)

    @property
    def width(self) -> int:
        """Numbers cached per token and layer: 512 + 64 = 576 in DeepSeek-V3."""
        return self.kv_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        """Width of one query or key head before absorption: 128 + 64 = 192 in DeepSeek-V3."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: `experts` routed ones of width `ffn`, `top_k` used per token.

    shared       always-on experts, `shared_ffn` wide in all (their widths added up)
    first_dense  the first so many layers have a dense feed-forward of the model's `ffn` instead
    dense_layers  further dense layers, by index (Qwen's mlp_only_layers and decoder_sparse_step)
    *_bias       extra vectors that some families keep: a bias on the router (gpt-oss), on the experts
                 (gpt-oss), a correction added to the scores for selection only (DeepSeek-V3), and
                 a gate on the shared expert (Qwen2-MoE)
    routing      how experts are chosen; None where the family's rule is not known
    swiglu_limit, swiglu_alpha  gpt-oss's activation: clamp(gate) sigmoid(alpha clamp(gate)) (1 + clamp(up));
                 a limit of None is the plain one, the model's `act`
    """

    experts: int
    top_k: int
    ffn: int
    shared: int = 0
    shared_ffn: int = 0
    first_dense: int = 0
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    expert_bias: bool = False
    correction_bias: bool = False
    shared_gate: bool = False
    routing: RoutingSpec | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def __post_init__(self):
        for name in ("experts", "top_k", "ffn"):
            whole("MoESpec", name, getattr(self, name))
        for name in ("shared", "shared_ffn", "first_dense"):
            whole("MoESpec", name, getattr(self, name), zero=True)
        if self.top_k > self.experts:
            raise ValueError(f"MoESpec: top_k must be at most experts={self.experts}, got {self.top_k}")
        if self.routing is not None:
            self.routing.check(self.experts, self.top_k)
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))

    def is_dense(self, layer: int) -> bool:
        """True where layer `layer` (from 0) has no experts."""
        return layer < self.first_dense or layer in self.dense_layers


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer as a set of integers.

    layers, d_model, vocab   depth, width of the residual stream, rows of the embedding
    heads, kv_heads, head_dim   query heads, key-value heads, width of a query or key head
    v_head_dim  width of a value head; differs from head_dim in latent attention only (0 means equal)
    ffn         hidden width of a dense feed-forward layer
    tied        the output head is the input embedding
    layer_types  "full" or "sliding", one per layer; () means: all sliding if `window` is set, else all full
    window      tokens that a sliding layer sees, itself included
    qk_norm     None, "head" (one weight per head width) or "full" (per projected width)
    norms_per_layer  2, or 4 where norms stand before and after each sublayer (Gemma)
    position_rows    rows of a learned position table (GPT-2); 0 with rotary positions
    norm_bias, gated, norm_plus1, post_norm   LayerNorm biases; gate projection in the feed-forward;
                Gemma's (1 + weight); norms after the sublayers only (OLMo-2)
    mtp_layers  multi-token-prediction layers shipped beside the model; not counted unless asked for
    extra       the configuration as read; takes no part in equality or hash
    """

    name: str
    architecture: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    max_context: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float | None = 10000.0
    rope_scaling: dict | None = field(default=None, hash=False)
    partial_rotary: float = 1.0
    window: int | None = None
    layer_types: tuple[str, ...] = ()
    v_head_dim: int = 0
    mla: MLASpec | None = None
    moe: MoESpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    sinks: bool = False
    act: str = "silu"
    gated: bool = True
    norms_per_layer: int = 2
    position_rows: int = 0
    norm_bias: bool = False
    norm_plus1: bool = False
    post_norm: bool = False
    mtp_layers: int = 0
    extra: dict = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __post_init__(self):
        owner = f"ModelSpec {self.name!r}"
        for name in ("layers", "d_model", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            whole(owner, name, getattr(self, name))
        for name in ("v_head_dim", "norms_per_layer", "position_rows", "mtp_layers"):
            whole(owner, name, getattr(self, name), zero=True)
        for name in ("max_context", "window"):
            if getattr(self, name) is not None:
                whole(owner, name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{owner}: heads must be a multiple of kv_heads={self.kv_heads}, got {self.heads}"
            )
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"{owner}: qk_norm must be one of {QK_NORMS}, got {self.qk_norm!r}")
        types = tuple(self.layer_types) or ("sliding" if self.window else "full",) * self.layers
        bad = [t for t in types if t not in LAYER_TYPES]
        if bad:
            raise ValueError(f"{owner}: layer_types may hold {LAYER_TYPES}, got {bad[0]!r}")
        if len(types) != self.layers:
            raise ValueError(f"{owner}: layer_types must have layers={self.layers} entries, got {len(types)}")
        if "sliding" in types and self.window is None:
            raise ValueError(f"{owner}: window must be set when layer_types holds 'sliding', got None")
        # A frozen dataclass is filled in through object.__setattr__.
        object.__setattr__(self, "layer_types", types)
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.mla.v_dim if self.mla else self.head_dim)

    @property
    def sliding_layers(self) -> int:
        """Layers whose cache stops growing at `window` tokens."""
        return self.layer_types.count("sliding")

    @property
    def full_layers(self) -> int:
        """Layers that see every earlier token."""
        return self.layers - self.sliding_layers

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts; 0 for a dense model."""
        if self.moe is None:
            return 0
        first = min(self.moe.first_dense, self.layers)
        return self.layers - first - sum(first <= i < self.layers for i in set(self.moe.dense_layers))

    @property
    def cached_width(self) -> int:
        """Numbers that one layer caches for one token: 2 h_kv d_h, or the latent's 512 + 64."""
        if self.mla:
            return self.mla.width
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @classmethod
    def from_config(cls, config, name: str | None = None) -> ModelSpec:
        """Read a Hugging Face configuration: a dict, or a path to `config.json` or to its folder.

        Raises ValueError, naming the field, for a missing, ill-typed or inconsistent one.
        """
        from .config import parse_config

        return parse_config(config, name=name)
