"""Configurations of every family: counted as the model that transformers builds, or refused.

The models are made on torch's meta device: shapes without memory.
"""

import json

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from companion.cost import ModelSpec, models, parameters, size
from companion.cost.checkpoint import find_source
from companion.cost.families import CHECKED, LATENT, NOT_COUNTED, SAME_AS, SPARSE

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 320, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip
# Switches that change nothing of a model's shape.
IDLE = ("use_cache", "output_", "return_", "norm_topk_prob", "router_jitter", "tie_encoder")
# Parts that the count leaves out on purpose: a vision tower, and what is built around a language model.
OUTER = {"gemma3", "got_ocr2", "moss_transcribe_diarize", "llama4"}


def config_class(kind):
    return CONFIG_MAPPING[kind]


def elements(config) -> int:
    """Parameters of the model that transformers builds, each once, and DeepSeek's correction of scores."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    return count + sum(b.numel() for n, b in model.named_buffers() if "e_score_correction_bias" in n)


def sliding(config):
    """Layers with a window, and the windows, of the cache that transformers makes; None if it names none."""
    layers = transformers.DynamicCache(config=config).layers
    windows = [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]
    return (len(windows), set(windows)) if layers else None


def small(kind):
    defaults = config_class(kind)().to_dict()
    fields = {k: v for k, v in SMALL.items() if k in defaults or k in config_class(kind).attribute_map}
    if kind == "gpt2":
        fields = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 320}
    if "kv_lora_rank" in defaults:
        fields |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
    if defaults.get("head_dim") or kind in ("ministral", "hunyuan_v1_dense", "nemotron", "glm4_moe"):
        fields["head_dim"] = 16
    return fields | {"pad_token_id": 0}, defaults


def variants(kind):
    """Every switch of the family's own class turned, and every number that is usually none or zero set."""
    fields, defaults = small(kind)
    yield fields
    common = set(transformers.PretrainedConfig().to_dict()) - {"tie_word_embeddings"}
    for name, value in defaults.items():
        if name in common or name in fields or name.startswith(IDLE) or "token" in name:
            continue
        if isinstance(value, bool):
            yield fields | {name: not value}
        elif value in (None, 0):
            yield fields | {name: 2}


@pytest.mark.parametrize("kind", sorted(CHECKED))
def test_a_checked_family_is_counted_or_refused(kind):
    counted = 0
    for fields in variants(kind):
        try:
            config = config_class(kind)(**fields)
            theirs, cache = elements(config), sliding(config)
        except Exception:  # transformers itself cannot make such a model
            continue
        try:
            spec = ModelSpec.from_config(config.to_dict())
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        changed = {k: v for k, v in fields.items() if k not in small(kind)[0]}
        assert parameters(spec) == theirs, (kind, changed)
        if cache is not None:
            assert cache == (spec.sliding_layers, {spec.window} if spec.sliding_layers else set()), (
                kind,
                changed,
            )
        counted += 1
    assert counted > 0


def test_no_family_of_transformers_gives_a_wrong_number():
    """The default configuration of every causal model that transformers knows."""
    wrong, counted = [], []
    for kind in sorted(set(FAMILIES) - OUTER):
        try:
            config = config_class(kind)()
            theirs = elements(config)
        except Exception:  # its own defaults make no model
            continue
        try:
            spec = ModelSpec.from_config(config.to_dict())
        except ValueError:
            continue
        counted.append(kind)
        if parameters(spec) != theirs:
            wrong.append((kind, parameters(spec), theirs))
    assert wrong == [] and len(counted) > 35


def test_lists_of_families():
    assert not CHECKED & NOT_COUNTED
    assert LATENT < CHECKED and SPARSE < CHECKED
    assert set(SAME_AS.values()) <= CHECKED | {"mistral"}


BASE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip

# What configurations of other people's models say (family in the comment), and what the error has to name.
HOSTILE = [
    ({"layers_block_type": ["attention", "mamba"] * 2}, "layers_block_type"),  # Jamba, Zamba
    ({"attn_layer_period": 2, "attn_layer_offset": 1}, "attn_layer"),  # Jamba
    ({"mamba_d_state": 128, "mamba_expand": 2}, "mamba"),  # Bamba, Falcon-H1
    ({"ssm_state_size": 128}, "ssm_state_size"),  # Nemotron-H
    ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    ({"hybrid_layer_ids": [1, 3]}, "hybrid_layer_ids"),  # Zamba 2
    ({"lru_width": 64, "block_types": ["recurrent", "attention"]}, "lru_width|block_types"),  # RecurrentGemma
    ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config"),  # Kimi Linear
    ({"linear_num_value_heads": 32}, "linear_num_value_heads"),  # Qwen3-Next
    ({"attn_type_list": [0, 1, 1, 1]}, "attn_type_list"),  # MiniMax-01
    ({"layer_group_size": 8}, "layer_group_size"),  # Ring-linear
    ({"conv_L_cache": 3}, "conv_L_cache"),  # LFM2
    ({"layer_types": ["conv", "full_attention"] * 2}, "layer_types.* must be one of full_attention, .* got"),
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),  # Gemma 3n
    ({"num_attention_heads": [4, 4, 8, 8]}, "num_attention_heads"),  # OpenELM
    ({"num_query_heads": [4, 4, 8, 8]}, "num_query_heads"),
    ({"num_key_value_heads_per_layer": [2, 2, 1, 1]}, "num_key_value_heads_per_layer"),  # DeciLM
    ({"block_configs": [{"attention": {"n_heads_in_group": 4}}]}, "block_configs"),  # Nemotron-NAS
    ({"num_global_key_value_heads": 1, "global_head_dim": 32}, "global"),  # Gemma 4
    ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),  # MiMo-V2-Flash
    ({"index_topk": 2048, "index_head_dim": 128}, "index_topk"),  # DeepSeek-V3.2
    ({"compress_ratios": [4, 128]}, "compress_ratios"),  # DeepSeek-V4
    ({"cross_attention_layers": [1]}, "cross_attention_layers"),  # Mllama
    ({"num_attention_heads": 3}, "num_attention_heads=3|num_key_value_heads"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim is missing"),
    ({"num_key_value_heads": 8}, "num_key_value_heads must .* num_attention_heads=4, got 8"),
    ({"n_head": 8}, "num_attention_heads is 4, but n_head is 8"),
    ({"num_kv_heads": 4}, "num_key_value_heads is 2, but num_kv_heads is 4"),
    ({"multi_query": True}, "multi_query is true, but num_key_value_heads is 2"),
    ({"num_attention_heads": None}, "num_attention_heads is missing"),
    ({"intermediate_size": None}, "intermediate_size is missing"),
    ({"model_type": "phi"}, "'phi' is not counted"),
    ({"model_type": "gemma4_text"}, "'gemma4_text' is not counted"),
    ({"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}, "caches no latent"),
    ({"num_experts": 4, "num_experts_per_tok": 2}, "'llama' has none"),
    ({"model_type": "tomorrow"}, "'tomorrow' is not a family whose layers are known here"),
    ({"model_type": "qwen3_mo"}, "near: qwen3_moe"),
    ({"model_type": None}, "model_type 'unknown'"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "says 'awq', whose bits are not known"),
]


@pytest.mark.parametrize("changes, message", HOSTILE, ids=[m[:45] for _, m in HOSTILE])
def test_a_configuration_that_cannot_be_counted_is_refused(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, **changes}))
    with pytest.raises(ValueError, match=message) as caught:
        find_source(str(path))
    assert "\n" not in str(caught.value)
    path.write_text(json.dumps({"model_type": "some_vision_model", "text_config": {**BASE, **changes}}))
    if changes.get("model_type", "") is not None:  # without one, the outer file's type stands in
        with pytest.raises(ValueError, match=message):
            find_source(str(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_type_list": [1, 1, 1, 1]},
        {"mamba_d_state": None, "num_kv_shared_layers": 0, "block_configs": [], "add_cross_attention": False},
        {"n_head": 4, "num_kv_heads": 2},
        {"multi_query": True, "num_key_value_heads": 1},
        {"num_experts": 0, "kv_lora_rank": None},
        {"auto_map": {"AutoConfig": "x.y"}, "unsloth_version": "1", "bos_token_id": 1, "head_dim": None},
    ],
)
def test_harmless_fields_are_read_over(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    assert find_source(str(tmp_path)).spec.layers == 4


def test_an_unknown_family_that_is_like_a_known_one(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "model_type": "tomorrow"}))
    found = find_source(str(path), like="llama")
    assert parameters(found.spec) == parameters(ModelSpec.from_config(BASE))
    assert "counted as a llama, as told: 'tomorrow' is not known here" in found.notes[0]
    for like, message in [("lama", "near: llama"), ("phi", "is not a known family")]:
        with pytest.raises(ValueError, match=message):
            find_source(str(path), like=like)
    with pytest.raises(ValueError, match="--like goes with a configuration"):
        find_source("phi-4", like="llama")


def test_how_weights_are_stored(tmp_path):
    config, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    config.write_text(json.dumps(BASE))
    assert find_source(str(tmp_path)).stored == {}
    count = parameters(ModelSpec.from_config(BASE))
    index.write_text(json.dumps({"metadata": {"total_size": 2 * count}, "weight_map": {}}))
    found = find_source(str(tmp_path))
    assert found.stored == {"weights_bytes": 2 * count} and len(found.notes) == 1
    assert size(found.spec, "t4", **found.stored).weights_bytes == 2 * count
    index.write_text(json.dumps({"metadata": {"total_size": 3 * count}}))
    assert "1.50 times" in find_source(str(tmp_path)).notes[1]  # something is in the file that is not counted
    for bad in ('{"metadata": {}}', "{", '{"metadata": {"total_size": -1}}', "[]"):
        index.write_text(bad)
        with pytest.raises(ValueError, match="total_size"):
            find_source(str(tmp_path))
    index.unlink()
    config.write_text(json.dumps({**BASE, "quantization_config": {"quant_method": "fp8"}}))
    assert find_source(str(tmp_path)).stored == {"weights": "fp8"}
    oss = {**models.rows["gpt-oss-20b"]["config"], "quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(oss))
    assert find_source(str(tmp_path)).stored == {"experts": "mxfp4"}


def test_a_vision_tower_is_said_to_be_left_out(tmp_path):
    outer = {"model_type": "some_vision_model", "text_config": BASE, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert "a vision tower is not counted" in find_source(str(tmp_path)).notes[0]


def test_folders_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        find_source(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="2 GGUF files; name one"):
        find_source(str(tmp_path))
    with pytest.raises(ValueError, match="cannot read"):
        find_source(str(tmp_path / "config.json"))
