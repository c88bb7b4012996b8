"""What a configuration file leaves out, per family of models.

`defaults` are values that the family's configuration class fills in when a file omits them.
`fixed` are facts of the architecture that no file states: a norm on each query head, biases on the
query, key and value projections but not on the output, a feed-forward without a gate.
Sources: the configuration and modelling files of transformers 5; the parameter counts that follow
from these entries are compared with models built from those classes in the tests.

What a configuration may say that is not counted here stands below: each is an error that names the field. A
field with a familiar name in a model that is made otherwise would give a figure that looks right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


# Fields that are refused if they are set, whatever the family.
_STATES = "layers without a cache of their own aren't supported"
_PER_LAYER = "its layers differ in their heads, which is not counted"
_BESIDE = "its layers keep more than keys and values"
_FIELDS = {
    "attn_layer_indices": _STATES,
    "attn_layer_offset": _STATES,
    "attn_layer_period": _STATES,
    "block_types": _STATES,
    "full_attention_interval": _STATES,
    "hybrid_layer_ids": _STATES,
    "hybrid_override_pattern": _STATES,
    "layer_group_size": _STATES,
    "layers_block_type": _STATES,
    "state_size": _STATES,
    "attention_k_eq_v": _PER_LAYER,
    "block_configs": _PER_LAYER,
    "global_head_dim": _PER_LAYER,
    "hybrid_layer_pattern": _PER_LAYER,
    "num_global_key_value_heads": _PER_LAYER,
    "compress_ratios": _BESIDE,
    "index_topk": _BESIDE,
    "add_cross_attention": _BESIDE,
    "cross_attention_layers": _BESIDE,
    "use_bidirectional_attention": "its windows look ahead, which is not counted",
    "attention_out_bias": "a bias that is not counted",
}
_NAMES = re.compile(
    r"(^|_)(mamba|mamba2|ssm|rwkv|lru|xlstm|conv_l|linear_attn|linear_attention|linear_num)(_|$)"
)
_SHARED = re.compile(r"kv_shar|shared_kv|cross_layer")
_OWN_HEADS = re.compile(r"^swa_.*head|heads_per_layer|per_layer")


def refuse(config: Mapping[str, Any], family: str, owner: str) -> None:
    """Raise a ValueError for a configuration whose layers are not those that are counted here.

    config  the part that describes the language model; family: its model type, renamed ones resolved
    owner   how an error calls it
    """
    if family in NOT_COUNTED:
        raise ValueError(
            f"{owner}: model_type {family!r} is not counted: its layers differ from what its fields say"
        )
    for field, value in config.items():
        if not isinstance(field, str) or not _set(value):
            continue
        why = _FIELDS.get(field)
        if why is None and (_NAMES.search(field.lower()) or _SHARED.search(field)):
            why = _STATES
        if why is None and _OWN_HEADS.search(field):
            why = _PER_LAYER
        if why is None and "head" in field and isinstance(value, list | tuple) and field not in _INTEGERS:
            why = _PER_LAYER
        if why is not None:
            raise ValueError(f"{owner}: {field} is set; {why}")
    kinds = config.get("attn_type_list")  # MiniMax: 1 is attention, 0 a state
    if isinstance(kinds, list) and any(k != 1 for k in kinds):
        raise ValueError(f"{owner}: attn_type_list holds another type than 1; {_STATES}")
    if config.get("is_encoder_decoder") is not None:
        if not isinstance(config["is_encoder_decoder"], bool):
            raise ValueError(f"{owner}: is_encoder_decoder must be true or false")
        if config["is_encoder_decoder"]:
            raise ValueError(f"{owner}: is_encoder_decoder must be false; only decoders are counted")
    if config.get("multi_query") is True and config.get("num_key_value_heads") not in (None, 1):
        raise ValueError(
            f"{owner}: multi_query is true, but num_key_value_heads is {config['num_key_value_heads']!r}"
        )


# Read as integers elsewhere: a list there is refused with the field's own message.
_INTEGERS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "head_dim", "v_head_dim")


def _set(value: Any) -> bool:
    return (
        value is not None
        and value is not False
        and value != 0
        and value != []
        and value != {}
        and value != ""
    )
