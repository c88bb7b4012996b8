"""What each architecture does that another does not, each as one change that must show in the logits."""

from architectures import LINEAR, LLAMA3, YARN, Rule

from companion.model.attention import Attention
from companion.model.blocks import RMSNorm, interleaved, mixtral, separate
from companion.rope import Rope

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_FULL = ["full_attention"] * 3
_FASTER = LINEAR["full_attention"] | {"rope_theta": 100000.0}


def _upside_down(read):
    """Experts read with up rows where gate rows belong."""

    def other(take, experts, width, d):
        w = read(take, experts, width, d)
        return w._replace(w1=w.w1.roll(width, dims=1))

    return other


def _halves(take, experts, width, d):
    """gpt-oss's experts as if gate and up stood one after the other, as everybody else stores them."""
    w = interleaved(take, experts, width, d)
    return w._replace(
        w1=take("experts.gate_up_proj", experts, d, 2 * width).mT.contiguous(),
        b1=take("experts.gate_up_proj_bias", experts, 2 * width).clone(),
    )


def _halved(head_dim, **options):
    """A rotation that pairs the two halves of a head, whatever it is asked for."""
    return Rope(head_dim, **(options | {"interleaved": False}))


def _of_latent(spec):
    """The scale that the 48 numbers of the latent would have."""
    return spec.mla.width**-0.5


def _attention(spec, layer, take, norm=RMSNorm, *, clip=None, **scoring):
    """Attention without the norms over the width."""
    return Attention(spec, layer, take, norm, **scoring)


def _common(architecture, *, theta=True):
    rules = [Rule(architecture, "epsilon of the norms", config={"rms_norm_eps": 1e-6})]
    if theta:
        rules.append(Rule(architecture, "rope_theta", spec={"rope_theta": 5000.0}))
    return rules


def _window(architecture, wider=9):
    return [
        Rule(architecture, "window wider", config={"sliding_window": wider}),
        Rule(architecture, "window narrower", config={"sliding_window": wider - 5}),
    ]


def _without(scaling, *fields, **changes):
    return {"rope_parameters": {k: v for k, v in scaling.items() if k not in fields} | changes}


def _yarn(architecture, scaling):
    return [
        Rule(architecture, "no YaRN", config={"rope_parameters": _PLAIN | {"rope_theta": 100.0}}),
        Rule(architecture, "YaRN's factor", config=_without(scaling, factor=4.0)),
        Rule(architecture, "YaRN's beta_fast", config=_without(scaling, beta_fast=2.0)),
        Rule(
            architecture,
            "YaRN's trained length",
            config=_without(scaling, original_max_position_embeddings=64),
        ),
        Rule(architecture, "YaRN's temperature", config=_without(scaling, attention_factor=1.4)),
    ]


def _experts(architecture, read, *, top_k=1):
    return [
        Rule(architecture, "experts per token", config={"num_experts_per_tok": top_k}),
        Rule(architecture, "gate and up change places", family={"experts": _upside_down(read)}),
    ]


def _deepseek(architecture, scaling, other_group_score):
    return [
        *_common(architecture),
        *_yarn(architecture, scaling),
        *_experts(architecture, separate, top_k=2),
        Rule(architecture, "YaRN's mscale_all_dim on the scores", config=_without(scaling, "mscale_all_dim")),
        Rule(architecture, "epsilon of the inner norms", patch=("attention", "INNER_EPS", 0.05)),
        Rule(architecture, "scale of the scores", patch=("families", "score_scale", lambda spec: None)),
        Rule(architecture, "scale of the latent's width", patch=("families", "score_scale", _of_latent)),
        Rule(architecture, "groups", routing={"groups": 1, "topk_groups": 1}),
        Rule(architecture, "groups per token", config={"topk_group": 3}),
        Rule(architecture, "score of a group", routing={"group_score": other_group_score}),
        Rule(architecture, "scaling of the weights", config={"routed_scaling_factor": 1.0}),
        Rule(architecture, "shared experts", moe={"shared": 0, "shared_ffn": 0}),
    ]


RULES = [
    *_common("llama"),
    Rule("llama", "no scaling", config={"rope_parameters": _PLAIN}),
    Rule("llama", "low_freq_factor", config={"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}),
    Rule("llama", "factor", config={"rope_parameters": LLAMA3 | {"factor": 2.0}}),
    Rule("llama", "attention biases", config={"attention_bias": False}),
    Rule("llama", "feed-forward biases", config={"mlp_bias": False}),
    *_common("mistral"),
    *_window("mistral"),
    Rule("mistral", "no window", config={"sliding_window": None}),
    Rule("mistral", "activation", config={"hidden_act": "gelu_pytorch_tanh"}),
    *_common("qwen2"),
    *_window("qwen2", 8),
    Rule("qwen2", "first layers full", config={"max_window_layers": 2, "layer_types": None}),
    Rule("qwen2", "windows at all", config={"use_sliding_window": False, "layer_types": None}),
    Rule("qwen2", "biases", config={"attention_bias": False}),
    *_common("qwen3"),
    Rule("qwen3", "norms of heads", spec={"qk_norm": None}),
    *_common("gemma2"),
    *_window("gemma2"),
    Rule("gemma2", "layer types", config={"layer_types": _FULL}),
    Rule("gemma2", "cap of scores", config={"attn_logit_softcapping": None}),
    Rule("gemma2", "cap of logits", config={"final_logit_softcapping": None}),
    Rule("gemma2", "query_pre_attn_scalar", config={"query_pre_attn_scalar": 32}),
    Rule("gemma2", "activation", config={"hidden_activation": "silu"}),
    Rule("gemma2", "one plus the norms' weights", family={"norm": RMSNorm}),
    Rule("gemma2", "norms behind the parts", family={"sandwich": False}),
    Rule("gemma2", "embedding times sqrt(d)", family={"embedding_scaled": False}),
    *_common("gemma3_text", theta=False),
    *_window("gemma3_text"),
    Rule("gemma3_text", "layer types", config={"layer_types": _FULL}),
    Rule(
        "gemma3_text",
        "theta of full layers",
        config={"rope_parameters": LINEAR | {"full_attention": _FASTER}},
    ),
    Rule(
        "gemma3_text",
        "theta of windowed layers",
        config={"rope_parameters": LINEAR | {"sliding_attention": _PLAIN | {"rope_theta": 1000.0}}},
    ),
    Rule(
        "gemma3_text",
        "linear scaling",
        config={"rope_parameters": LINEAR | {"full_attention": _PLAIN | {"rope_theta": 1000.0}}},
    ),
    Rule(
        "gemma3_text",
        "no scaling of windowed layers",
        config={
            "rope_parameters": LINEAR
            | {"sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}
        },
    ),
    Rule("gemma3_text", "norms of heads", spec={"qk_norm": None}),
    Rule("gemma3_text", "cap of logits", config={"final_logit_softcapping": None}),
    Rule("gemma3_text", "query_pre_attn_scalar", config={"query_pre_attn_scalar": 32}),
    Rule("gemma3_text", "one plus the norms' weights", family={"norm": RMSNorm}),
    Rule("gemma3_text", "norms behind the parts", family={"sandwich": False}),
    Rule("gemma3_text", "embedding times sqrt(d)", family={"embedding_scaled": False}),
    *_common("mixtral"),
    *_window("mixtral"),
    *_experts("mixtral", mixtral),
    Rule("mixtral", "renormalization", routing={"renormalize": False}),
    Rule("mixtral", "softmax scores", routing={"score": "sigmoid"}),
    *_common("qwen3_moe"),
    *_experts("qwen3_moe", separate),
    Rule("qwen3_moe", "renormalization", config={"norm_topk_prob": False}),
    Rule("qwen3_moe", "norms of heads", spec={"qk_norm": None}),
    *_common("olmoe"),
    *_experts("olmoe", separate),
    Rule("olmoe", "no renormalization", config={"norm_topk_prob": True}),
    Rule("olmoe", "bound of queries, keys and values", config={"clip_qkv": None}),
    Rule("olmoe", "norms over the width", patch=("families", "WidthNormAttention", _attention)),
    *_deepseek("deepseek_v2", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "top2_sum"),
    Rule("deepseek_v2", "no renormalization", routing={"renormalize": True}),
    Rule("deepseek_v2", "method", config={"topk_method": "greedy"}),
    Rule("deepseek_v2", "neighbours are pairs", patch=("families", "Rope", _halved)),
    *_deepseek("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "max"),
    Rule("deepseek_v3", "renormalization", config={"norm_topk_prob": False}),
    Rule("deepseek_v3", "sigmoid scores", routing={"score": "softmax"}),
    Rule("deepseek_v3", "correction", moe={"correction_bias": False}),
    Rule("deepseek_v3", "neighbours are pairs", config={"rope_interleave": False}),
    *_common("gpt_oss"),
    *_window("gpt_oss"),
    *_yarn("gpt_oss", YARN | {"truncate": False}),
    *_experts("gpt_oss", interleaved, top_k=2),
    Rule("gpt_oss", "YaRN's truncation", config={"rope_parameters": YARN | {"truncate": True}}),
    Rule("gpt_oss", "layer types", config={"layer_types": _FULL}),
    Rule("gpt_oss", "sinks", spec={"sinks": False}),
    Rule("gpt_oss", "limit of the activation", config={"swiglu_limit": 7.0}),
    Rule("gpt_oss", "alpha of the activation", config={"swiglu_alpha": 1.0}),
    Rule("gpt_oss", "the activation", moe={"swiglu_limit": None}),
    Rule("gpt_oss", "gate and up take turns", family={"experts": _halves}),
    Rule("gpt_oss", "weights that add up to 1", routing={"score": "softmax", "renormalize": False}),
    Rule("gpt_oss", "bias of the router", moe={"router_bias": False}),
    Rule("gpt_oss", "biases of attention", config={"attention_bias": False}),
    *_common("glm4_moe"),
    *_experts("glm4_moe", separate, top_k=2),
    Rule("glm4_moe", "partial rotation", spec={"partial_rotary": 1.0}),
    Rule("glm4_moe", "norms of heads", config={"use_qk_norm": False}),
    Rule("glm4_moe", "biases", config={"attention_bias": False}),
    Rule("glm4_moe", "renormalization", config={"norm_topk_prob": False}),
    Rule("glm4_moe", "scaling of the weights", config={"routed_scaling_factor": 1.0}),
    Rule("glm4_moe", "sigmoid scores", routing={"score": "softmax"}),
    Rule("glm4_moe", "correction", moe={"correction_bias": False}),
    Rule("glm4_moe", "groups", config={"n_group": 1, "topk_group": 1}),
    Rule("glm4_moe", "score of a group", routing={"group_score": "max"}),
    Rule("glm4_moe", "shared experts", moe={"shared": 0, "shared_ffn": 0}),
]
