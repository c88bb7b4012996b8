"""Configurations as files of before transformers 5 have them: read raw here, by its own class there."""

import pytest
import torch
import transformers
from architectures import BASE, DEEP, LATENT, TOLERANCE, ids

from companion.cost import ModelSpec
from companion.model import Decoder, load

_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
_SHAPE = {k: v for k, v in BASE.items() if not k.endswith("_token_id") and k != "initializer_range"}
# What such files say beside their sizes: rope_theta and rope_scaling at the top, "type" for "rope_type".
PUBLISHED = {
    "llama": {"rope_theta": 500000.0, "rope_scaling": None},
    "gemma2": {"head_dim": 32, "sliding_window": 5, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 32,
    },
    "deepseek_v2": {
        **LATENT,
        **DEEP,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "rope_theta": 10000,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **LATENT,
        **DEEP,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "rope_theta": 10000,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "head_dim": 32,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "rope_theta": 150000,
        "rope_scaling": {**_YARN, "rope_type": "yarn", "truncate": False},
    },
    "glm4_moe": {**DEEP, "head_dim": 32, "use_qk_norm": True, "rope_theta": 1000000, "rope_scaling": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 48,
        "rope_theta": 1000000.0,
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
@torch.inference_mode()
def test_a_published_style_means_here_what_it_means_there(name):
    config = {**_SHAPE, **PUBLISHED[name]}
    torch.manual_seed(3)
    theirs = transformers.AutoConfig.for_model(name, **config, initializer_range=0.15, pad_token_id=None)
    hf = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    for what, p in [*hf.named_parameters(), *hf.named_buffers()]:
        if any(part in what for part in ("norm", "bias", "sinks")):
            p.add_(torch.randn_like(p) * 0.3)
    decoder = Decoder(ModelSpec.from_config({"model_type": name, **config}), hf.state_dict())
    x = ids(2, 24)
    torch.testing.assert_close(decoder(x), hf(x).logits, rtol=0, atol=TOLERANCE)


def test_gguf_of_other_families_is_refused(tiny_gguf):
    """Gemma's norms are stored with the one added there, and experts under other names."""
    path, _ = tiny_gguf(meta={"general.architecture": "gemma2"})
    with pytest.raises(ValueError, match=r"'gemma2' is not supported in GGUF; accepted: llama, mistral"):
        load(path)
