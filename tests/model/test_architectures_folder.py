"""Folders of safetensors for every architecture: as transformers saves them, as it holds them; quantized,
damaged, and with configurations that contradict themselves.
"""

import json
import re

import pytest
import torch
from architectures import TINY, TOLERANCE, ids, tiny
from safetensors import safe_open
from safetensors.torch import save_file

from companion.cost import ModelSpec
from companion.model import Decoder, from_transformers, load
from companion.model.load import SafeTensors
from tests.model.test_folder import backend

X = ids(2, 12)
SPARSE = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe"]


@pytest.fixture
def folder(tmp_path):
    """save(hf, tensors=None, shard=...) -> folder; tensors: what to store instead of what is saved."""

    def save(hf, tensors=None, shard="50GB"):
        path = tmp_path / "model"
        hf.save_pretrained(path, max_shard_size=shard)
        if tensors is not None:
            for file in path.glob("*.safetensors*"):
                file.unlink()
            save_file({k: v.clone().contiguous() for k, v in tensors.items()}, path / "model.safetensors")
        backend().save(str(path / "tokenizer.json"))
        return path

    return save


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def stored(path):
    names = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            names |= set(f.keys())
    return names


def logits(model):
    with torch.inference_mode():
        return model(X)


@pytest.mark.parametrize("shard", ["50GB", "60KB"])
@pytest.mark.parametrize("name", list(TINY))
def test_what_transformers_saves_is_loaded_as_it_was(folder, name, shard):
    hf = tiny(name)
    path = folder(hf, shard=shard)
    assert (len(list(path.glob("*.safetensors"))) > 1) is (shard == "60KB")
    decoder, _ = load(path)
    assert torch.equal(logits(decoder), logits(from_transformers(hf)))
    assert decoder.spec.architecture == name
    assert not any(p.requires_grad for p in decoder.parameters())


@pytest.mark.parametrize("name", SPARSE)
def test_experts_are_loaded_as_files_name_them_and_as_memory_does(folder, name):
    hf = tiny(name)
    path = folder(hf)
    on_disk = {n for n in stored(path) if "experts." in n and "shared" not in n}
    part = {"mixtral": "experts.7.w1.weight", "gpt_oss": "experts.gate_up_proj_bias"}
    assert any(n.endswith(part.get(name, "experts.7.gate_proj.weight")) for n in on_disk)
    want = logits(load(path)[0])
    assert torch.equal(logits(load(folder(hf, hf.state_dict()))[0]), want)  # fused, as in memory


def test_mixtrals_own_names(folder):
    """block_sparse_moe.gate, and w1, w3, w2 of each expert: no other family's reader would find them."""
    path = folder(tiny("mixtral"))
    names = {n.removeprefix("model.layers.0.block_sparse_moe.") for n in stored(path) if "layers.0.b" in n}
    assert names == {"gate.weight"} | {f"experts.{e}.w{i}.weight" for e in range(8) for i in (1, 2, 3)}


@pytest.mark.parametrize("name", SPARSE)
def test_a_router_stays_in_float32(folder, name):
    """A rounded score may choose another expert; everything else becomes what is asked for."""
    hf = tiny(name)
    decoder, _ = load(folder(hf), dtype=torch.bfloat16)
    ffn = decoder.blocks[2].ffn
    assert ffn.router.dtype == torch.float32 and ffn.w1.dtype == torch.bfloat16
    kept = {"router", "router_bias", "correction_bias"}
    named = {n.rsplit(".", 1)[-1]: p for n, p in [*ffn.named_parameters(), *ffn.named_buffers()]}
    assert all((p.dtype == torch.float32) is (n in kept) for n, p in named.items())
    state = hf.state_dict()
    place = "router" if name == "gpt_oss" else "gate"
    assert torch.equal(ffn.router, state[f"model.layers.2.mlp.{place}.weight"])
    off = (logits(decoder) - logits(from_transformers(hf))).norm(dim=-1).median()
    assert 0 < off < 3


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma_3_beside_a_vision_tower(folder, prefix):
    """The file that most people have: a nested configuration, prefixed names, and tensors of no concern."""
    hf = tiny("gemma3_text", tie_word_embeddings=True)
    tensors = {n.replace("model.", prefix, 1): t for n, t in hf.state_dict().items() if n != "lm_head.weight"}
    path = folder(hf, tensors | {"vision_tower.patch.weight": torch.zeros(3)})
    text = json.loads((path / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (path / "config.json").write_text(json.dumps(outer))
    torch.testing.assert_close(logits(load(path)[0]), logits(from_transformers(hf)), rtol=0, atol=0)


def test_layers_beyond_the_last_are_left_alone(folder):
    """DeepSeek-V3 and GLM-4.5 ship a layer for multi-token prediction behind the model's own."""
    hf = tiny("deepseek_v3")
    state = hf.state_dict()
    extra = {n.replace("layers.2.", "layers.3."): t for n, t in state.items() if "layers.2." in n}
    decoder, _ = load(folder(hf, state | extra))
    assert decoder.spec.mtp_layers == 1 and len(decoder.blocks) == 3
    assert torch.equal(logits(decoder), logits(from_transformers(hf)))


def test_tied_gemma(folder):
    decoder, _ = load(folder(tiny("gemma2", tie_word_embeddings=True)))
    assert decoder.output is decoder.embedding


# --- what is not read, and what contradicts itself -------------------------------------------------


def one_line(error):
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_mxfp4_is_refused(folder):
    hf = tiny("gpt_oss")
    state = hf.state_dict()
    path = folder(hf, {re.sub(r"gate_up_proj$", "gate_up_proj_blocks", n): t for n, t in state.items()})
    with pytest.raises(ValueError, match="mxfp4") as error:
        load(path)
    one_line(error)
    edit(path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match=r"quantized \(mxfp4\)") as error:
        load(path)
    one_line(error)


def test_fp8_is_refused(folder):
    path = folder(tiny("deepseek_v3"))
    edit(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ValueError, match=r"quantized \(fp8\)") as error:
        load(path)
    one_line(error)


RANKS = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CONTRADICTIONS = [
    ("llama", {"model_type": "gpt_neox"}, "architecture must be one of llama, .* got 'gpt_neox'"),
    ("llama", {"model_type": "mixtral"}, "no experts"),
    ("llama", {"num_experts": 8, "num_experts_per_tok": 2, "mlp_bias": False}, "8 experts; llama has none"),
    ("llama", RANKS, "kv_lora_rank must be none, .* got 8"),
    ("llama", {"rope_theta": 500.0}, "rope_theta is given as 500.0 and as 10000.0"),
    ("mistral", {"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
    ("mistral", {"hidden_act": "relu"}, "activation must be one of silu, .* got 'relu'"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("mistral", {"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must .* got 0"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must .* got -1.0"),
    ("gemma2", {"final_logit_softcapping": "high"}, "final_logit_softcapping must .* got 'high'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"sliding_window": None}, "window"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8, got 9"),
    ("mixtral", {"num_experts": 4}, "num_experts is 4, but num_local_experts is 8"),
    ("mixtral", {"mlp_bias": True}, "mlp_bias"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ("olmoe", {"clip_qkv": 0}, "clip_qkv must .* got 0"),
    ("deepseek_v2", {"n_group": 3}, "groups must be a divisor of"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ("deepseek_v3", {"topk_group": 5}, "topk_groups must be an integer from 1 to 4, got 5"),
    ("deepseek_v3", {"topk_group": 1}, "topk_groups must be at least 2 for top_k=3, got 1"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim must .* got 64"),
    ("deepseek_v3", {"head_dim": 20}, "head_dim must .* got 20"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must .* got 2"),
    ("gpt_oss", {"swiglu_limit": -1.0}, "swiglu_limit"),
    (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}},
        "original_max_position_embeddings.* must .* got None",
    ),
    ("glm4_moe", {"num_attention_heads": 8}, "must be of shape"),
    ("glm4_moe", {"head_dim": 30}, "rotates 15 dimensions"),
]


@pytest.mark.parametrize("name, changes, message", CONTRADICTIONS, ids=lambda v: str(v)[:40])
def test_a_configuration_that_contradicts_itself_or_its_family(name, changes, message):
    """Refused before a tensor is looked at or, if all fields are possible, at the first that does not fit."""
    hf = tiny(name)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as error:
        Decoder(ModelSpec.from_config(hf.config.to_dict() | changes), hf.state_dict())
    one_line(error) if "architecture" not in message else None


@pytest.mark.parametrize("name", SPARSE)
def test_a_missing_expert_is_named(folder, name):
    path = folder(tiny(name))
    tensors = dict(SafeTensors(path))
    gone = next(n for n in sorted(tensors, reverse=True) if "experts." in n and "shared" not in n)
    del tensors[gone]
    hf = tiny(name)
    with pytest.raises(ValueError, match=gone.replace(".", r"\.")):
        load(folder(hf, tensors))


def test_the_mapping_of_a_folder(folder):
    hf = tiny("olmoe")
    tensors = SafeTensors(folder(hf, shard="60KB"))
    assert set(tensors) == stored(tensors.folder) and len(tensors) == len(list(tensors))
    assert "model.norm.weight" in tensors and "model.norm" not in tensors
    with pytest.raises(ValueError, match=r"no tensor 'lm_heat\.weight'"):
        tensors["lm_heat.weight"]
    with torch.inference_mode():
        want = hf(X).logits
        torch.testing.assert_close(
            Decoder(ModelSpec.from_config(hf.config.to_dict()), tensors)(X), want, rtol=0, atol=TOLERANCE
        )
