"""What some models have besides: latent attention, experts, and the rule by which a router chooses them.

A `ModelSpec` holds at most one of each. They are read out of a configuration here too, by the reader of
`companion.cost.config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checks import choice, number, require, whole
from .families import MOE_FIXED

SCORES = ("softmax", "sigmoid", "topk_softmax")
GROUP_SCORES = ("top2_sum", "max")


@dataclass(frozen=True)
class RoutingSpec:
    """From a row of logits to chosen experts and their weights.

    score        "softmax" over all experts; "sigmoid" of each; "topk_softmax": choose by logits, then softmax
                 over the chosen ones (gpt-oss)
    renormalize  the weights of the chosen experts are divided by their sum
    groups       experts stand in so many equal groups, of which a token may use `topk_groups`
    group_score  what ranks a group: "max" of its scores (DeepSeek-V2), or the sum of its two best (V3)
    scaling      factor on the weights, last
    """

    score: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"
    scaling: float = 1.0

    def check(self, experts: int, top_k: int) -> None:
        """Raise a ValueError, naming the field, if this rule cannot choose `top_k` of `experts`."""
        check_routing(
            experts, top_k, self.score, self.groups, self.topk_groups, self.group_score, self.scaling
        )


def check_routing(
    experts: int, top_k: int, score: str, groups: int, topk_groups: int, group_score: str, scaling: float
) -> None:
    """Raise a ValueError, naming the argument, for a rule that cannot choose `top_k` of `experts`."""
    choice("score", score, SCORES)
    choice("group_score", group_score, GROUP_SCORES)
    whole("top_k", top_k, 1, experts)
    require(experts % whole("groups", groups) == 0, "groups", f"a divisor of {experts} experts", groups)
    size = experts // groups
    whole("topk_groups", topk_groups, 1, groups)
    need = -(-top_k // size)
    require(topk_groups >= need, "topk_groups", f"at least {need} for top_k={top_k}", topk_groups)
    pairs = groups == 1 or group_score != "top2_sum" or size >= 2
    require(pairs, "groups", "of at least 2 experts each for group_score='top2_sum'", groups)
    number("scaling", scaling)


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
            whole(name, getattr(self, name), owner="MLASpec")
        if self.q_rank is not None:
            whole("q_rank", self.q_rank, owner="MLASpec")

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
        for name in ("experts", "ffn"):
            whole(name, getattr(self, name), owner="MoESpec")
        for name in ("shared", "shared_ffn", "first_dense"):
            whole(name, getattr(self, name), 0, owner="MoESpec")
        whole("top_k", self.top_k, 1, self.experts, owner="MoESpec")
        if self.routing is not None:
            self.routing.check(self.experts, self.top_k)
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))

    def is_dense(self, layer: int) -> bool:
        """True where layer `layer` (from 0) has no experts."""
        return layer < self.first_dense or layer in self.dense_layers


def mla_of(read: Any) -> MLASpec | None:
    """The latent attention of a configuration, or None."""
    if read.raw("kv_lora_rank") is None:
        return None
    return MLASpec(
        kv_rank=read.integer("kv_lora_rank"),
        nope_dim=read.integer("qk_nope_head_dim"),
        rope_dim=read.integer("qk_rope_head_dim"),
        v_dim=read.integer("v_head_dim"),
        q_rank=read.integer("q_lora_rank", None),
    )


def moe_of(read: Any, kind: str, ffn: int, layers: int) -> MoESpec | None:
    """The experts of a configuration, or None. read: its reader; kind: its family; ffn: its dense width."""
    experts = read.integer("num_experts", None, zero=True)
    if not experts:
        return None
    width = read.integer("moe_intermediate_size", ffn)
    shared, shared_ffn = read.integer("n_shared_experts", 0, zero=True), 0
    if shared:
        shared_ffn = shared * width
    elif kind == "llama4_text":
        shared, shared_ffn = 1, width
    elif read.raw("shared_expert_intermediate_size"):
        shared, shared_ffn = 1, read.integer("shared_expert_intermediate_size")
    top_k = whole("num_experts_per_tok", read.integer("num_experts_per_tok"), 1, experts, owner=read.owner)
    step, every = read.integer("decoder_sparse_step", 1), read.integer("moe_layer_freq", 1)
    dense = {i for i in range(layers) if (i + 1) % step or i % every}
    for field, keep in (("mlp_only_layers", True), ("moe_layers", False)):
        listed = read.raw(field)
        if listed is None:
            continue
        require(isinstance(listed, list | tuple), field, "a list of layers", listed, owner=read.owner)
        listed = {whole(field, i, 0, owner=read.owner) for i in listed}
        dense |= listed if keep else set(range(layers)) - listed
    return MoESpec(
        experts=experts,
        top_k=top_k,
        ffn=width,
        shared=shared,
        shared_ffn=shared_ffn,
        first_dense=min(read.integer("first_k_dense_replace", 0, zero=True), layers),
        dense_layers=tuple(sorted(i for i in dense if i < layers)),
        **MOE_FIXED.get(kind, {}),
        **routing_of(read, kind, experts, top_k),
    )


def routing_of(read: Any, family: str, experts: int, top_k: int) -> dict[str, Any]:
    """The fields `routing`, `swiglu_limit` and `swiglu_alpha` of a MoESpec, out of a configuration.

    read    the reader of the configuration (config.py)
    family  its model type; of one that is not listed here the rule is unknown, and `routing` None

    Defaults are those of the families' classes in transformers 5. Raises ValueError naming the field where
    the file contradicts itself or states a rule that its family does not have.
    """
    more: dict[str, Any] = {}
    if family == "mixtral":
        rule = RoutingSpec()
    elif family in ("qwen2_moe", "qwen3_moe", "olmoe"):
        rule = RoutingSpec(renormalize=read.flag("norm_topk_prob", False))
    elif family == "gpt_oss":
        rule = RoutingSpec("topk_softmax")
        more["swiglu_limit"] = _number(read, "swiglu_limit", 7.0)
        more["swiglu_alpha"] = _number(read, "swiglu_alpha", 1.702)
    elif family == "deepseek_v2":
        rule = _deepseek_v2(read)
    elif family in ("deepseek_v3", "glm4_moe"):
        _only(read, "scoring_func", "sigmoid")
        _only(read, "topk_method", "noaux_tc")
        groups, topk_groups, scaling = (8, 4, 2.5) if family == "deepseek_v3" else (1, 1, 1.0)
        rule = RoutingSpec(
            "sigmoid",
            renormalize=read.flag("norm_topk_prob", True),
            groups=read.integer("n_group", groups),
            topk_groups=read.integer("topk_group", topk_groups),
            scaling=_number(read, "routed_scaling_factor", scaling),
        )
    else:
        return {}
    try:
        rule.check(experts, top_k)
    except ValueError as error:
        raise ValueError(f"{read.owner}: {error}") from None
    return {"routing": rule, **more}


def _deepseek_v2(read: Any) -> RoutingSpec:
    """Softmax, never renormalised; groups only under its own method."""
    _only(read, "scoring_func", "softmax")
    normed = read.flag("norm_topk_prob", False)
    require(not normed, "norm_topk_prob", "false in this family", normed, owner=read.owner)
    scaling = _number(read, "routed_scaling_factor", 1.0)
    method = read.text("topk_method", "greedy")
    if method == "greedy":
        return RoutingSpec(renormalize=False, scaling=scaling)
    choice("topk_method", method, ("greedy", "group_limited_greedy"), owner=read.owner)
    groups, topk_groups = read.integer("n_group"), read.integer("topk_group")
    return RoutingSpec("softmax", False, groups, topk_groups, "max", scaling)


def _number(read: Any, field: str, default: float) -> float:
    value = read.raw(field)
    return default if value is None else read.number(field, value)


def _only(read: Any, field: str, accepted: str) -> None:
    text = read.text(field, accepted)
    require(text == accepted, field, f"{accepted!r} in this family", text, owner=read.owner)
