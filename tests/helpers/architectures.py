"""Thirteen tiny transformers models in which every rule binds, and the rules, each with a way to break it.

Sizes are chosen so that nothing is idle: windows shorter than the texts, clamps and caps within the range of
the activations, more experts per token (3) than the allowed groups (2) have best ones, a rotary scaling that
moves every pair, epsilons large enough to show, and norms, biases, sinks and corrections that are random.
"""

from dataclasses import dataclass, field, replace

import torch
import transformers

transformers.logging.set_verbosity_error()

TOLERANCE = 1e-4  # of logits, absolute, float32
BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
DEEP = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2}
LOCAL_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

# architecture: (transformers' class prefix, what differs from BASE)
TINY = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,  # tied, an untrained Gemma only repeats its last token
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "layer_types": LOCAL_LAYERS,
            "rope_parameters": LINEAR,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,  # tied, an untrained Gemma only repeats its last token
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 32, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1], **MOE},
    ),
    "olmoe": ("Olmoe", {"clip_qkv": 1.0, "intermediate_size": 24, "norm_topk_prob": False, **MOE}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            **DEEP,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, **DEEP, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "swiglu_limit": 1.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **DEEP,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_shared_experts": 1,
        },
    ),
}


def tiny(architecture, seed=0, **changes):
    """A transformers model with its norms, biases, sinks and corrections random too."""
    name, own = TINY[architecture]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **own, **changes})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for what, p in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in what for part in ("norm", "bias", "sinks")):
                p.add_(torch.randn_like(p) * 0.3)
    model.set_attn_implementation("eager")  # the only one that caps scores
    return model


def ids(*shape, seed=1):
    return torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Rule:
    """One rule of one architecture, and the change that breaks it while every tensor keeps its shape.

    config: fields of the configuration. spec, moe, routing: fields of the ModelSpec and of what it holds.
    family: fields of the Family. patch: (module of companion.model, name, value).
    """

    architecture: str
    name: str
    config: dict = field(default_factory=dict)
    spec: dict = field(default_factory=dict)
    moe: dict = field(default_factory=dict)
    routing: dict = field(default_factory=dict)
    family: dict = field(default_factory=dict)
    patch: tuple | None = None

    def broken(self, spec):
        """The ModelSpec with the changes below the configuration."""
        moe = spec.moe
        if self.routing:
            moe = replace(moe, routing=replace(moe.routing, **self.routing))
        if self.moe:
            moe = replace(moe, **self.moe)
        return replace(spec, moe=moe, **self.spec)


def from_spec(hf, **changes):
    """The ModelSpec of a transformers model, its configuration changed."""
    from companion.cost import ModelSpec

    return ModelSpec.from_config(hf.config.to_dict() | changes)
