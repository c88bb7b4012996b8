"""What a configuration file leaves out, per family of models.

`defaults` are values that the family's configuration class fills in when a file omits them.
`fixed` are facts of the architecture that no file states: a norm on each query head, biases on the
query, key and value projections but not on the output, a feed-forward without a gate.
Sources: the configuration and modelling files of transformers 5; the parameter counts that follow
from these entries are compared with models built from those classes in the tests.
"""

from __future__ import annotations

# Gemma 3's multimodal files store only what differs from these (the smallest model's shape).
_GEMMA3_TEXT = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
}
_QWEN_WINDOWS = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_PLAIN_MLP = {"gated": False, "norm_bias": True}

DEFAULTS: dict[str, dict] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v2": {"kv_lora_rank": 512, "q_lora_rank": 1536},
    "deepseek_v3": {"kv_lora_rank": 512, "q_lora_rank": 1536},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": _GEMMA3_TEXT,
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"attention_bias": True, "mlp_bias": True},
    "gpt2": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_new",
        "use_bias": True,
    },
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "attention_bias": True, "head_dim": 64},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "ministral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen2": {**_QWEN_WINDOWS, "attention_bias": True},
    "qwen2_moe": {**_QWEN_WINDOWS, "qkv_bias": True},
    "qwen3": {**_QWEN_WINDOWS, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "sliding_window": 4096},
    "smollm3": {"tie_word_embeddings": True, "use_sliding_window": False},
    "starcoder2": {"tie_word_embeddings": True, "use_bias": True, "hidden_activation": "gelu_pytorch_tanh"},
}

FIXED: dict[str, dict] = {
    "arcee": {"gated": False},
    "cohere": {"norms_per_layer": 1},
    "cohere2": {"norms_per_layer": 1},
    "exaone4": {"qk_norm": "head", "post_norm": True},
    "gemma": {"norm_plus1": True},
    "gemma2": {"norms_per_layer": 4, "norm_plus1": True},
    "gemma3_text": {"norms_per_layer": 4, "norm_plus1": True, "qk_norm": "head"},
    "glm": {"o_bias": False},
    "glm4": {"o_bias": False, "norms_per_layer": 4},
    "glm4_moe": {"o_bias": False},
    "gpt2": _PLAIN_MLP,
    "gpt_neox": _PLAIN_MLP,
    "gpt_oss": {"sinks": True},
    "helium": {"o_bias": False},
    "hunyuan_v1_dense": {"qk_norm": "head"},
    "minimax_m2": {"qk_norm": "full"},
    "nemotron": _PLAIN_MLP,
    "olmo2": {"qk_norm": "full", "post_norm": True},
    "olmo3": {"qk_norm": "full", "post_norm": True},
    "olmoe": {"qk_norm": "full"},
    "palm": {"norms_per_layer": 1},
    "qwen2": {"o_bias": False},
    "qwen2_moe": {"o_bias": False},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "seed_oss": {"o_bias": False},
    "starcoder2": _PLAIN_MLP,
}

# Families in which a window without a pattern holds in every layer.
WINDOW_EVERYWHERE = ("mistral", "ministral", "ministral3", "mixtral", "phi3", "qwen3_moe", "starcoder2")

# Extra vectors beside the experts, by family.
MOE_FIXED: dict[str, dict] = {
    "arcee": {"gated": False},
    "deepseek_v3": {"correction_bias": True},
    "glm4_moe": {"correction_bias": True},
    "gpt_oss": {"router_bias": True, "expert_bias": True},
    "kimi_k2": {"correction_bias": True},
    "minimax_m2": {"correction_bias": True},
    "qwen2_moe": {"shared_gate": True},
}

# Files of these types hold a model of another one.
SAME_AS = {
    "gemma3": "gemma3_text",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
}

# Families whose counts equal those of the models that transformers 5 builds from the same configuration, with
# every switch of its class turned once (tests/cost/test_size_families.py).
CHECKED = frozenset(
    "arcee cohere cohere2 cwm deepseek_v2 deepseek_v3 emu3 ernie4_5 exaone exaone4 gemma gemma2 "
    "gemma3_text glm glm4 glm4_moe gpt2 gpt_neox gpt_oss granite granitemoe granitemoeshared helium "
    "hunyuan_v1_dense internlm3 iquestcoder llama llama4_text minicpm3 minimax_m2 ministral ministral3 "
    "mistral mixtral nemotron olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 "
    "starcoder2 vaultgemma youtu".split()
)
LATENT = frozenset({"deepseek_v2", "deepseek_v3", "minicpm3", "youtu"})
SPARSE = frozenset(
    "deepseek_v2 deepseek_v3 glm4_moe gpt_oss granitemoe granitemoeshared llama4_text minimax_m2 mixtral "
    "olmoe qwen2_moe qwen3_moe".split()
)

# Families whose fields have familiar names, and whose layers are made otherwise: counting them as usual would
# be wrong, by parts in a thousand (a bias, a norm) or by half (no gate, heads of two widths).
NOT_COUNTED = frozenset(
    "afmoe apertus apertus1p5_text aria_text axk1 beam bert bert-generation big_bird biogpt bitnet "
    "camembert cohere2_moe data2vec-text diffllama doge electra ernie ernie4_5_moe exaone_moe flex_olmo "
    "flint fuyu gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm4_moe_lite granite_swa "
    "granitemoe_swa hrm_text hy_v3 hyperclovax jais2 jetmoe laguna lfm2 lfm2_moe megatron-bert mellum "
    "mimo_v2_flash minimax_m3_vl_text mllama modernbert-decoder nanochat olmo persimmon phi phi4_multimodal "
    "phimoe "
    "recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer sarvam_mla sarvam_moe "
    "stablelm xlm-roberta xlm-roberta-xl xmod".split()
)
