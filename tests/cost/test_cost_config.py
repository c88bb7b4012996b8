"""The parser against transformers' own configuration classes and models, and against hostile files."""

import json

import pytest

from companion.cost import ModelSpec, kv_bytes, models, parameters

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
MLA = dict(
    kv_lora_rank=32,
    q_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    num_key_value_heads=4,
)
DEEP = dict(n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=40)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=40)
BIASES = dict(attention_bias=True, mlp_bias=True)

# transformers' name of the family, and what differs from BASE
FAMILIES = [
    ("Llama", {}),
    ("Llama", dict(tie_word_embeddings=True, head_dim=32, **BIASES)),
    ("Mistral", dict(sliding_window=16, head_dim=16)),
    ("Mistral", dict(sliding_window=None, head_dim=16)),
    ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    ("Qwen2", {}),
    ("Qwen2", dict(use_sliding_window=True, sliding_window=16, max_window_layers=3)),
    ("Qwen2Moe", dict(shared_expert_intermediate_size=56, **EXPERTS)),
    ("Qwen3", dict(head_dim=32)),
    ("Qwen3", dict(head_dim=32, attention_bias=True, tie_word_embeddings=True)),
    ("Qwen3Moe", dict(head_dim=32, mlp_only_layers=[1], **EXPERTS)),
    ("Qwen3Moe", dict(head_dim=32, decoder_sparse_step=2, **EXPERTS)),
    ("Gemma", dict(head_dim=32)),
    ("Gemma2", dict(head_dim=32, sliding_window=16)),
    ("Gemma3Text", dict(head_dim=32, sliding_window=16, num_hidden_layers=8)),
    ("GptOss", dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)),
    ("DeepseekV2", dict(**MLA, **DEEP, first_k_dense_replace=1)),
    ("DeepseekV2", {**MLA, **DEEP, "q_lora_rank": None}),
    ("DeepseekV3", dict(**MLA, **DEEP, first_k_dense_replace=2, n_group=1, topk_group=1)),
    ("DeepseekV3", dict(**MLA, **DEEP, n_group=1, topk_group=1, attention_bias=True)),
    ("Olmo2", {}),
    ("Olmo3", {}),
    ("Olmoe", dict(num_experts=8, num_experts_per_tok=2)),
    ("Phi3", dict(sliding_window=None)),
    ("Glm4Moe", dict(head_dim=32, use_qk_norm=True, attention_bias=True, first_k_dense_replace=1, **DEEP)),
    ("Glm4", dict(head_dim=16)),
    ("Granite", BIASES),
    ("Cohere", {}),
    ("Cohere", dict(use_qk_norm=True)),
    ("Cohere2", dict(head_dim=16)),
    ("SmolLM3", {}),
    ("Starcoder2", {}),
    ("Exaone4", {}),
    ("GPT2", dict(n_embd=64, n_layer=4, n_head=4, n_positions=128)),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)]


def hf_config(name, changes):
    import transformers

    fields = {k: v for k, v in BASE.items() if k != "model_type"}
    if name == "GPT2":
        fields = {"vocab_size": 320}
    return getattr(transformers, f"{name}Config")(**{**fields, "pad_token_id": 0, **changes})


@pytest.fixture(scope="module", params=FAMILIES, ids=IDS)
def family(request):
    name, changes = request.param
    config = hf_config(name, changes)
    return config, ModelSpec.from_config(config.to_dict())


def test_fields_equal_the_configuration_class(family):
    config, spec = family
    assert spec.architecture == config.model_type
    assert spec.layers == config.num_hidden_layers
    assert spec.d_model == config.hidden_size
    assert spec.heads == config.num_attention_heads
    assert spec.vocab == config.vocab_size
    assert spec.tied is bool(config.tie_word_embeddings)
    assert spec.max_context == config.max_position_embeddings
    if spec.mla is None:
        assert spec.kv_heads == getattr(config, "num_key_value_heads", spec.heads)
        assert spec.head_dim == (getattr(config, "head_dim", None) or spec.d_model // spec.heads)
    else:
        assert spec.head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    ropes = getattr(config, "rope_parameters", None)
    if ropes:
        ropes = ropes.get("full_attention", ropes)
        assert spec.rope_theta == ropes["rope_theta"]
        assert spec.partial_rotary == ropes.get("partial_rotary_factor", 1.0)
    else:
        assert spec.rope_theta is None


def test_parameters_equal_the_model_that_transformers_builds(family):
    import torch
    import transformers

    config, spec = family
    with torch.device("meta"):  # shapes without memory
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = {p.data_ptr() or name: p.numel() for name, p in model.named_parameters()}
    buffers = sum(b.numel() for n, b in model.named_buffers() if "e_score_correction_bias" in n)
    assert parameters(spec) == sum(state.values()) + buffers


def test_cache_shape_equals_the_cache_that_transformers_allocates(family):
    """DynamicCache gives one layer per model layer, of which the sliding ones stop at the window."""
    import transformers

    config, spec = family
    layers = transformers.DynamicCache(config=config).layers
    if not layers:  # a family whose configuration names no layer types
        assert spec.sliding_layers == 0
        return
    sliding = ["sliding" if getattr(layer, "is_sliding", False) else "full" for layer in layers]
    assert tuple(sliding) == spec.layer_types
    windows = {layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)}
    assert windows == ({spec.window} if spec.sliding_layers else set())


def test_nested_language_model(tmp_path):
    """Gemma 3's multimodal files: a nested text_config that stores only what differs from its class."""
    import transformers

    inner = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    outer = {"model_type": "gemma3", "text_config": {**inner, "sliding_window": 1024}, "vision_config": {}}
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(outer))
    spec = ModelSpec.from_config(tmp_path / "gemma")
    config = transformers.Gemma3TextConfig(**outer["text_config"])
    assert spec.name == "gemma" and spec.architecture == "gemma3_text"
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (8, 4, 256)
    assert spec.vocab == config.vocab_size and spec.tied and spec.qk_norm == "head"
    assert [t.split("_")[0] for t in config.layer_types] == list(spec.layer_types)
    assert (spec.sliding_layers, spec.full_layers) == (29, 5)
    assert kv_bytes(spec, 10**5) == 2 * 2 * 4 * 256 * (29 * 1024 + 5 * 10**5)


def test_both_spellings_of_rope():
    old = ModelSpec.from_config(
        {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    new = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert old.rope_theta == ModelSpec.from_config({**BASE, "rope_parameters": new}).rope_theta == 5e5
    assert old.rope_scaling["factor"] == 2.0
    assert ModelSpec.from_config({**BASE, "rope_scaling": {"rope_type": "default"}}).rope_scaling is None
    assert ModelSpec.from_config({**BASE, "rope_scaling": None}).rope_scaling is None


def test_windows_by_pattern():
    spec = ModelSpec.from_config({**BASE, "sliding_window": 8, "sliding_window_pattern": 2})
    assert spec.layer_types == ("sliding", "full") * 2
    spec = ModelSpec.from_config({**BASE, "sliding_window": 8, "sliding_window_pattern": "LLG"})
    assert spec.layer_types == ("sliding", "sliding", "full", "sliding")
    # A family that is not known to use its window everywhere: the larger cache is counted.
    assert ModelSpec.from_config({**BASE, "model_type": "new", "sliding_window": 8}).sliding_layers == 0
    # Mistral v0.1 against later versions, whose files say null.
    assert ModelSpec.from_config({**BASE, "model_type": "mistral", "sliding_window": 8}).sliding_layers == 4
    assert (
        ModelSpec.from_config({**BASE, "model_type": "mistral", "sliding_window": None}).sliding_layers == 0
    )


def test_llama4_chunks_and_experts():
    import torch
    import transformers

    text = {**BASE, "model_type": "llama4_text", "intermediate_size_mlp": 160, "num_local_experts": 4}
    text |= {
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
    }
    text.pop("model_type")
    config = transformers.Llama4TextConfig(**text)
    spec = ModelSpec.from_config({"model_type": "llama4", "text_config": config.to_dict()})
    assert (spec.sliding_layers, spec.window, spec.moe_layers) == (3, 16, 2)
    with torch.device("meta"):
        model = transformers.Llama4ForCausalLM(config)
    assert parameters(spec) == sum(p.numel() for p in model.parameters())


def test_unknown_family_with_the_standard_fields():
    spec = ModelSpec.from_config({**BASE, "model_type": "tomorrow"})
    llama = ModelSpec.from_config(BASE)
    assert parameters(spec) == parameters(llama)
    assert spec.head_dim == 16 and spec.name == "tomorrow" and spec.extra["vocab_size"] == 320


def test_spec_is_hashable_and_extra_takes_no_part():
    one = ModelSpec.from_config({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}}, name="x")
    two = ModelSpec.from_config({**one.extra, "torch_dtype": "float16"}, name="x")
    assert one == two and hash(one) == hash(two) and one.extra != two.extra
    assert len({models["llama-3.1-8b"], models["Llama_3.1 8B"]}) == 1


HOSTILE = [
    ("hidden_size", ...),
    ("num_hidden_layers", ...),
    ("num_attention_heads", ...),
    ("intermediate_size", ...),
    ("vocab_size", ...),
    ("hidden_size", -64),
    ("hidden_size", 64.0),
    ("hidden_size", "64"),
    ("hidden_size", True),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", [2]),
    ("head_dim", 0),
    ("head_dim", "16"),
    ("vocab_size", -1),
    ("max_position_embeddings", "long"),
    ("sliding_window", -4),
    ("layer_types", ["full_attention"]),
    ("layer_types", ["linear_attention"] * 4),
    ("layer_types", "full"),
    ("layer_types", [["full_attention"]] * 4),
    ("tie_word_embeddings", "yes"),
    ("attention_bias", 1),
    ("rope_theta", -1.0),
    ("rope_theta", "1e6"),
    ("rope_theta", float("nan")),
    ("rope_scaling", [1]),
    ("rms_norm_eps", -1e-6),
    ("model_type", 3),
    ("text_config", 7),
    ("hidden_act", 5),
    ("full_attention_interval", 4),
    ("is_encoder_decoder", True),
]


@pytest.mark.parametrize("field, value", HOSTILE, ids=[f"{f}={v!r}" for f, v in HOSTILE])
def test_a_bad_field_is_named(field, value):
    config = dict(BASE)
    if value is ...:
        del config[field]
    else:
        config[field] = value
    with pytest.raises(ValueError, match=field) as caught:
        ModelSpec.from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(num_local_experts=4), "num_experts_per_tok"),
        (dict(num_local_experts=4, num_experts_per_tok=5), "num_experts_per_tok"),
        (dict(num_local_experts=-4, num_experts_per_tok=1), "num_experts"),
        (dict(kv_lora_rank=32, q_lora_rank=None), "qk_nope_head_dim"),
        (dict(kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim="8"), "v_head_dim"),
        (dict(hidden_size=66), "head_dim"),
        (dict(layer_types=["sliding_attention"] * 4), "window"),
        (dict(num_experts=4, num_experts_per_tok=1, mlp_only_layers=[-1]), "mlp_only_layers"),
    ],
)
def test_inconsistent_fields_are_named(changes, field):
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_config({**BASE, **changes})


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        ModelSpec.from_config(tmp_path / "none.json")
    for text, message in [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ("\xff\xfe", "not JSON"),
        ("", "not JSON"),
    ]:
        path = tmp_path / "config.json"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=message):
            ModelSpec.from_config(str(path))
