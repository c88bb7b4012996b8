"""The shape of a model: everything that a byte or a FLOP is counted from.

`ModelSpec` holds the integers of a decoder-only transformer, whatever file they came from.
It is frozen and hashable, so it can key a table; nothing in it depends on weights or on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checks import choice, require, whole
from .config import read_fields
from .parts import MLASpec, MoESpec

LAYER_TYPES = ("full", "sliding")
QK_NORMS = (None, "head", "full")


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
            whole(name, getattr(self, name), owner=owner)
        for name in ("v_head_dim", "norms_per_layer", "position_rows", "mtp_layers"):
            whole(name, getattr(self, name), 0, owner=owner)
        for name in ("max_context", "window"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), owner=owner)
        grouped, shared = self.heads % self.kv_heads == 0, f"a multiple of kv_heads={self.kv_heads}"
        require(grouped, "heads", shared, self.heads, owner=owner)
        choice("qk_norm", self.qk_norm, QK_NORMS, owner=owner)
        types = tuple(self.layer_types) or ("sliding" if self.window else "full",) * self.layers
        for i, kind in enumerate(types):
            choice(f"layer_types[{i}]", kind, LAYER_TYPES, owner=owner)
        entries = f"of layers={self.layers} entries"
        require(len(types) == self.layers, "layer_types", entries, len(types), owner=owner)
        if "sliding" in types:
            require(self.window, "window", "set when layer_types holds 'sliding'", self.window, owner=owner)
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
        return cls(**read_fields(config, name=name))
