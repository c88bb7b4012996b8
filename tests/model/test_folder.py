"""Folders of safetensors as transformers saves them: one file or shards, tied or not, whole or damaged."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tinymodels import BASE, LLAMA3, MERGES, SPECIALS, byte_tokens, tiny
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from companion.model import from_transformers, load

IDS = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(3))


def backend(bos=None):
    vocab = {t: i for i, t in enumerate(byte_tokens())}
    made = Backend(models.BPE(vocab, [tuple(m.split(" ")) for m in MERGES]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    return made


@pytest.fixture
def folder(tmp_path):
    """save(hf, shard=...) -> folder with config.json, weights and tokenizer.json."""

    def save(hf=None, shard="50GB"):
        hf = tiny("llama") if hf is None else hf
        hf.save_pretrained(tmp_path / "model", max_shard_size=shard)
        backend().save(str(tmp_path / "model" / "tokenizer.json"))
        return tmp_path / "model"

    return save


def edit(path, **changes):
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def logits(model):
    with torch.inference_mode():
        return model(IDS)


CASES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama positions": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
@pytest.mark.parametrize("name", list(CASES))
def test_what_transformers_saves_is_loaded_as_it_was(folder, name, shard):
    hf = tiny(name.split()[0], **CASES[name])
    path = folder(hf, shard)
    assert (path / "model.safetensors.index.json").exists() is (shard == "20KB")
    assert len(list(path.glob("*.safetensors"))) == 1 or shard == "20KB"
    decoder, tokenizer = load(path)
    assert torch.equal(logits(decoder), logits(from_transformers(hf)))
    assert decoder.spec.name == "model"
    assert decoder.stop_ids == tokenizer.eos_ids == (0,)
    if "head_dim" not in CASES[name]:
        assert decoder.spec.d_model == BASE["hidden_size"]


def test_sixteen_bit_files_become_what_is_asked_for(folder):
    hf = tiny("llama", torch.bfloat16)
    path = folder(hf)
    decoder, _ = load(path)
    assert decoder.dtype == torch.float32
    assert torch.equal(decoder.embedding, hf.model.embed_tokens.weight.float())
    assert load(path, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


# --- LD-03: tied or not, there or not -------------------------------------------------------------


def test_tied_and_absent_share(folder):
    decoder, _ = load(folder(tiny("llama", tie_word_embeddings=True)))
    assert decoder.output is decoder.embedding
    assert decoder.output.data_ptr() == decoder.embedding.data_ptr()


def test_tied_and_present_is_accepted_when_equal(folder):
    path = folder(tiny("llama", tie_word_embeddings=True))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    decoder, _ = load(path)
    assert decoder.output is decoder.embedding


def test_tied_and_present_but_different_is_an_error(folder):
    """Either answer would be a guess: the flag or the tensor is wrong."""
    path = folder(tiny("llama"))
    edit(path / "config.json", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load(path)


def test_untied_and_present_is_loaded(folder):
    hf = tiny("llama")
    decoder, _ = load(folder(hf))
    assert torch.equal(decoder.output, hf.lm_head.weight)
    assert not torch.equal(decoder.output, decoder.embedding)


def test_untied_and_absent_is_an_error(folder):
    path = folder(tiny("llama", tie_word_embeddings=True))
    edit(path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"untied.*lm_head\.weight"):
        load(path)


# --- what is damaged ------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_a_missing_tensor(folder, shard):
    path = folder(shard=shard)
    name = "model.layers.1.mlp.up_proj.weight"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(name, None) is not None:
            save_file(tensors, file)
    with pytest.raises(ValueError, match=name):
        load(path)


def test_a_missing_shard(folder):
    path = folder(shard="20KB")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        load(path)


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_a_truncated_file(folder, shard):
    path = folder(shard=shard)
    file = sorted(path.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    for cut in (0, 1, 7, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=file.name):
            load(path)


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64, struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"{]", b"<html></html>"],
)
def test_what_is_no_safetensors(folder, content):
    path = folder()
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none(folder, content):
    path = folder(shard="20KB")
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json|no tensor"):
        load(path)


def test_an_index_that_points_at_the_wrong_shard(folder):
    path = folder(shard="20KB")
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    files = sorted(set(table["weight_map"].values()))
    table["weight_map"]["model.norm.weight"] = next(
        f for f in files if f != table["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load(path)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_field(folder, field):
    path = folder()
    edit(path / "config.json", **{field: ...})
    with pytest.raises(ValueError, match=field):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"intermediate_size": 65},
        {"num_hidden_layers": 4},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 4},
        {"head_dim": 7},
        {"vocab_size": 299},
        {"vocab_size": "many"},
        {"hidden_act": "gelu"},
        {"model_type": "gemma2"},
        {"model_type": ...},
        {"rms_norm_eps": -1},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": 3},
    ],
)
def test_a_configuration_that_does_not_fit(folder, changes):
    path = folder()
    edit(path / "config.json", **changes)
    with pytest.raises(ValueError):
        load(path)


def test_files_that_are_missing(folder):
    for gone in ("config.json", "model.safetensors", "tokenizer.json"):
        path = folder()
        (path / gone).unlink()
        with pytest.raises(ValueError, match=gone.split(".")[0]):
            load(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00\x01"])
def test_a_tokenizer_that_is_none(folder, content):
    path = folder()
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load(path)
