"""Whole GGUF models, written by the `gguf` package from transformers models: weights, shapes, refusals."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from tinymodels import BASE, gguf_order, tiny

from companion.cost import models
from companion.model import from_transformers, load
from companion.model.files import GGUF
from companion.model.load import read_spec, unpermute

IDS = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(3))


def logits(model):
    with torch.inference_mode():
        out = model(IDS)
    return getattr(out, "logits", out)


# --- LD-01: the order of rows ---------------------------------------------------------------------


def test_ld_01_the_order_in_a_head_of_8():
    rows = torch.arange(8)[:, None]
    stored = torch.from_numpy(gguf_order(rows.numpy(), 1))
    assert stored[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert unpermute(stored, 1)[:, 0].tolist() == list(range(8))
    assert unpermute(rows, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("heads, dim", [(1, 8), (3, 8), (4, 6), (9, 64)])
def test_unpermute_undoes_the_converter(heads, dim):
    for shape in ((heads * dim, 5), (heads * dim,)):
        w = torch.randn(shape)
        assert torch.equal(unpermute(torch.from_numpy(gguf_order(w.numpy(), heads)), heads), w)


def test_unpermute_refuses_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="w must be of a multiple of 10 rows.* got 12"):
        unpermute(torch.zeros(12, 2), 5)


# --- the same model, by another way ---------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_in_full_precision(tiny_gguf, tied):
    hf = tiny("llama", tie_word_embeddings=tied)
    path, _ = tiny_gguf(hf)
    decoder, tokenizer = load(path)
    assert torch.equal(logits(decoder), logits(from_transformers(hf)))
    torch.testing.assert_close(logits(decoder), logits(hf), rtol=1e-4, atol=1e-4)
    assert decoder.spec.tied is tied
    assert (decoder.output is decoder.embedding) is tied
    assert decoder.spec.name == "tiny" and decoder.stop_ids == tokenizer.eos_ids == (2, 0)
    assert not decoder.training and not any(p.requires_grad for p in decoder.parameters())


def test_query_and_key_weights_come_back_in_the_order_of_hugging_face(tiny_gguf):
    hf = tiny("llama")
    decoder, _ = load(tiny_gguf(hf)[0])
    for block, layer in zip(decoder.blocks, hf.model.layers):
        q, k, v = block.attention.qkv.split([32, 16, 16])
        assert torch.equal(q, layer.self_attn.q_proj.weight)
        assert torch.equal(k, layer.self_attn.k_proj.weight)
        assert torch.equal(v, layer.self_attn.v_proj.weight)


def test_biases_are_permuted_too(tiny_gguf):
    hf = tiny("llama", attention_bias=True, mlp_bias=True)
    decoder, _ = load(tiny_gguf(hf)[0])
    assert (decoder.spec.qkv_bias, decoder.spec.o_bias, decoder.spec.mlp_bias) == (True, True, True)
    torch.testing.assert_close(logits(decoder), logits(hf), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_families_whose_rows_are_not_permuted(tiny_gguf, kind):
    hf = tiny(kind, head_dim=16) if kind == "qwen3" else tiny(kind)
    meta = {"tokenizer.ggml.pre": "gpt-2"}
    decoder, _ = load(tiny_gguf(hf, arch=kind, meta=meta)[0])
    torch.testing.assert_close(logits(decoder), logits(hf), rtol=1e-4, atol=1e-4)


def test_quantized_weights_are_what_the_package_dequantizes(tiny_gguf):
    """The reference is a transformers model with the package's numbers put in."""
    hf = tiny("llama", tie_word_embeddings=True)
    kinds = {"token_embd.weight": Q.Q8_0}
    for layer in range(3):
        kinds |= {f"blk.{layer}.attn_{n}.weight": Q.Q4_1 for n in ("q", "k", "v", "output")}
        kinds |= {f"blk.{layer}.ffn_gate.weight": Q.Q4_0, f"blk.{layer}.ffn_down.weight": Q.F16}
        kinds |= {f"blk.{layer}.ffn_up.weight": Q.BF16}
    path, content = tiny_gguf(hf, kinds=kinds)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    weights = hf.state_dict()
    for hf_name in weights:
        if hf_name == "lm_head.weight":
            continue
        x = content.stored[names.get_name(hf_name, try_suffixes=(".weight", ".bias"))]
        heads = {"q_proj": 4, "k_proj": 2}.get(hf_name.split(".")[-2])
        if heads:  # back into Hugging Face's order, by index
            at = gguf_order(np.arange(x.shape[0]), heads)
            back = np.empty_like(x)
            back[at] = x
            x = back
        weights[hf_name].copy_(torch.from_numpy(x))
    decoder, _ = load(path)
    assert torch.equal(logits(decoder), logits(from_transformers(hf)))
    torch.testing.assert_close(logits(decoder), logits(hf), rtol=1e-4, atol=1e-4)


def test_dtype_is_that_asked_for(tiny_gguf):
    path, _ = tiny_gguf()
    wide, _ = load(path, dtype=torch.float64)
    assert wide.dtype == torch.float64 and logits(wide).dtype == torch.float64
    half, _ = load(path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and logits(half).dtype == torch.float32
    assert half.weights_bytes * 4 == wide.weights_bytes


def test_the_spec_of_the_real_file_is_that_of_the_table(smollm2):
    table, spec = models["smollm2-135m"], smollm2[0].spec
    for name in ("layers", "d_model", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "max_context"):
        assert getattr(spec, name) == getattr(table, name), name
    assert (spec.rope_theta, spec.rope_scaling) == (1e5, None)
    assert spec.norm_eps == pytest.approx(1e-5)


# --- LD-03 and what is missing --------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor", ["blk.1.attn_k.weight", "blk.2.ffn_down.weight", "output_norm.weight", "token_embd.weight"]
)
def test_a_missing_tensor(tiny_gguf, tensor):
    with pytest.raises(ValueError, match=r"tiny\.gguf: no (tensor|matrix) '" + tensor.replace(".", r"\.")):
        load(tiny_gguf(drop={tensor})[0])


def test_tied_in_gguf_means_no_output_tensor(tiny_gguf):
    hf = tiny("llama", tie_word_embeddings=False)
    untied, _ = load(tiny_gguf(hf)[0])
    assert not torch.equal(untied.output, untied.embedding)
    tied, _ = load(tiny_gguf(hf, drop={"output.weight"})[0])
    assert tied.output is tied.embedding
    assert tied.output.data_ptr() == tied.embedding.data_ptr()
    assert tied.weights_bytes == untied.weights_bytes - 300 * 32 * 4  # counted once


@pytest.mark.parametrize(
    "tensor, change",
    [
        ("blk.0.attn_q.weight", lambda x: x[:-8]),
        ("blk.0.attn_k.weight", lambda x: x[:, :-1]),
        ("blk.1.attn_v.weight", lambda x: x[:-1]),
        ("blk.1.attn_output.weight", lambda x: x[:-1]),
        ("blk.2.ffn_up.weight", lambda x: x[:-1]),
        ("blk.2.ffn_down.weight", lambda x: x[:, :-1]),
        ("blk.2.ffn_norm.weight", lambda x: x[:-1]),
        ("blk.2.attn_norm.weight", lambda x: np.stack([x, x])),
        ("output_norm.weight", lambda x: x[:-1]),
        ("output.weight", lambda x: x[:-1]),
        ("token_embd.weight", lambda x: x[:, :-1]),
        ("token_embd.weight", lambda x: x.reshape(-1)),
    ],
)
def test_a_tensor_of_the_wrong_shape(tiny_gguf, tensor, change):
    path, _ = tiny_gguf(change={tensor: change})
    with pytest.raises(ValueError, match="of shape|rows|no matrix"):
        load(path)


@pytest.mark.parametrize(
    "key, value",
    [
        ("llama.block_count", 0),
        ("llama.block_count", 4),
        ("llama.block_count", 2**31),
        ("llama.block_count", "3"),
        ("llama.block_count", None),
        ("llama.embedding_length", 64),
        ("llama.embedding_length", None),
        ("llama.feed_forward_length", 65),
        ("llama.feed_forward_length", [64, 64, 64]),
        ("llama.feed_forward_length", None),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count", 8),
        ("llama.attention.head_count", None),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", 4),
        ("llama.attention.head_count_kv", [2, 2, 2]),
        ("llama.attention.key_length", 7),
        ("llama.attention.key_length", 16),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", float("nan")),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.freq_base", None),
        ("llama.context_length", 0),
        ("llama.context_length", None),
        ("general.architecture", "phi3"),
        ("general.architecture", 7),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.pre", "llama-bpe"),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1, 2, 3]),
        ("tokenizer.ggml.token_type", [1, 2]),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.merges", ["t"]),
        ("tokenizer.ggml.merges", ["t zzz"]),
        ("tokenizer.ggml.eos_token_id", 300),
        ("tokenizer.ggml.eos_token_id", "two"),
        ("tokenizer.ggml.bos_token_id", 4000),
    ],
)
def test_headers_that_lie(tiny_gguf, key, value):
    path, _ = tiny_gguf(meta={key: value})
    with pytest.raises(ValueError):
        load(path)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_ld_08_and_ld_09_base_and_epsilon_are_read(tiny_gguf, theta):
    rope = {"rope_type": "default", "rope_theta": theta}
    hf = tiny("llama", rope_parameters=rope, rms_norm_eps=1e-2)
    decoder, _ = load(tiny_gguf(hf)[0])
    assert decoder.rope.inv_freq[1] == pytest.approx(theta ** (-2 / 8), rel=1e-6)
    torch.testing.assert_close(logits(decoder), logits(hf), rtol=1e-4, atol=1e-4)


def test_scaled_positions_are_refused_not_forgotten(tiny_gguf):
    """Llama 3.1 in GGUF carries its factors as a tensor; without them a long text goes wrong silently."""
    for meta in ({"llama.rope.scaling.type": "yarn"}, {"llama.rope.scaling.type": "linear"}):
        with pytest.raises(ValueError, match="positions are scaled"):
            load(tiny_gguf(meta=meta)[0])
    with pytest.raises(ValueError, match="rope_freqs"):
        load(tiny_gguf(extra={"rope_freqs.weight": np.ones(4, np.float32)})[0])


def test_a_plain_scaling_type_is_no_scaling(tiny_gguf):
    load(tiny_gguf(meta={"llama.rope.scaling.type": "none"})[0])


def test_heads_that_are_given_by_the_rotated_width(tiny_gguf):
    meta = {"llama.attention.key_length": None, "llama.rope.dimension_count": 8}
    with GGUF(tiny_gguf(meta=meta)[0]) as file:
        assert read_spec(file, "x").head_dim == 8
    with GGUF(tiny_gguf(meta={"llama.attention.key_length": None})[0]) as file:
        spec = read_spec(file, "x")
    assert spec.head_dim == BASE["hidden_size"] // BASE["num_attention_heads"]
    assert (spec.kv_heads, spec.ffn, spec.layers, spec.vocab) == (2, 64, 3, 300)


def test_no_kv_heads_means_one_for_each_query_head(tiny_gguf):
    hf = tiny("llama", num_key_value_heads=4)
    decoder, _ = load(tiny_gguf(hf, meta={"llama.attention.head_count_kv": None})[0])
    assert decoder.spec.kv_heads == 4
    torch.testing.assert_close(logits(decoder), logits(hf), rtol=1e-4, atol=1e-4)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm2-135", "smolm2-135m", "gpt-4", "nowhere/x.gguf", "😀"])
def test_unknown_names_show_the_near_one(name):
    with pytest.raises(ValueError, match="smollm2-135m"):
        load(name)


def test_a_folder_that_holds_no_model(tmp_path):
    with pytest.raises(ValueError, match="config"):
        load(tmp_path)
    with pytest.raises(ValueError, match="config"):
        load("")
