"""Mixture-of-experts blocks of transformers with tiny random weights, and ours around the same numbers."""

import importlib

import torch

from companion.cost import ModelSpec
from companion.moe import MoE, split_interleaved

# family: (class of the configuration, module, class of the block, what differs from BASE)
BASE = dict(hidden_size=24, num_hidden_layers=1, vocab_size=32, intermediate_size=20)
BASE |= dict(num_attention_heads=2, num_key_value_heads=2)
GROUPS = dict(n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=20, n_group=4, topk_group=2)
DEEP = dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
QWEN = dict(num_experts=9, num_experts_per_tok=3, moe_intermediate_size=20, head_dim=12)
BLOCKS = {
    "mixtral": ("Mixtral", "SparseMoeBlock", dict(num_local_experts=8, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2Moe", "SparseMoeBlock", dict(QWEN, shared_expert_intermediate_size=28)),
    "qwen3_moe": ("Qwen3Moe", "SparseMoeBlock", dict(QWEN, norm_topk_prob=False)),
    "qwen3_moe renormalised": ("Qwen3Moe", "SparseMoeBlock", dict(QWEN, norm_topk_prob=True)),
    "olmoe": ("Olmoe", "SparseMoeBlock", dict(num_experts=8, num_experts_per_tok=4)),
    "deepseek_v2 greedy": (
        "DeepseekV2",
        "Moe",
        dict(DEEP, **{**GROUPS, "n_group": 1, "topk_group": 1}, routed_scaling_factor=2.0),
    ),
    "deepseek_v2 groups": (
        "DeepseekV2",
        "Moe",
        dict(DEEP, **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    ),
    "deepseek_v3": ("DeepseekV3", "MoE", dict(DEEP, **GROUPS)),
    "glm4_moe": ("Glm4Moe", "MoE", {**GROUPS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}),
    "glm4_moe groups": ("Glm4Moe", "MoE", GROUPS),
    "gpt_oss": ("GptOss", "MLP", dict(num_local_experts=8, num_experts_per_tok=3, swiglu_limit=1.0)),
}


def pair(name: str, *, seed: int = 0):
    """(spec, our layer, transformers' block), the weights of both equal; every rule of the family binds."""
    camel, kind, fields = BLOCKS[name]
    family = name.split()[0]
    transformers = importlib.import_module("transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{camel}Config")(**{**BASE, **fields})
    config._experts_implementation = "eager"
    block = getattr(module, f"{camel}{kind}")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in [*block.named_parameters(), *block.named_buffers()]:
            spread = 1.0 if key.startswith(("gate.", "router.")) else 0.2
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    spec = ModelSpec.from_config(config.to_dict(), name=name)
    ours = MoE.from_spec(spec, device="meta")
    ours.load_state_dict(converted(block), assign=True)
    return spec, ours, block


def converted(block) -> dict[str, torch.Tensor]:
    """State dict of a transformers block under our names."""
    theirs = {k: v.detach().clone() for k, v in block.state_dict().items()}
    router = "router" if "router.weight" in theirs else "gate"
    out = {"router": theirs.pop(f"{router}.weight")}
    if f"{router}.bias" in theirs:
        out["router_bias"] = theirs.pop(f"{router}.bias")
    if "gate.e_score_correction_bias" in theirs:
        out["correction_bias"] = theirs.pop("gate.e_score_correction_bias")
    out["w1"], out["w2"] = theirs.pop("experts.gate_up_proj"), theirs.pop("experts.down_proj")
    if "experts.gate_up_proj_bias" in theirs:  # gpt-oss: interleaved, and (E, in, out)
        out["w1"] = split_interleaved(out["w1"], -1).transpose(1, 2).contiguous()
        out["w2"] = out["w2"].transpose(1, 2).contiguous()
        out["b1"] = split_interleaved(theirs.pop("experts.gate_up_proj_bias"), -1)
        out["b2"] = theirs.pop("experts.down_proj_bias")
    for shared in ("shared_expert", "shared_experts"):
        if f"{shared}.gate_proj.weight" in theirs:
            parts = [theirs.pop(f"{shared}.{p}_proj.weight") for p in ("gate", "up", "down")]
            out["shared_w1"], out["shared_w2"] = torch.cat(parts[:2]), parts[2]
    if "shared_expert_gate.weight" in theirs:
        out["shared_gate"] = theirs.pop("shared_expert_gate.weight")
    assert not theirs, list(theirs)
    return out


def run(block, x: torch.Tensor) -> torch.Tensor:
    """Output of a transformers block for x (T, K)."""
    out = block(x[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


def choices(block, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of a transformers block's router."""
    return getattr(block, "router", getattr(block, "gate", None))(x)[1:]
