"""GGUF headers: the package that defines the format writes and reads them beside ours."""

import struct

import gguf
import numpy as np
import pytest

from companion.cost import ModelSpec, kv_bytes, parameters, read_gguf
from companion.cost.checkpoint import find_source
from companion.cost.gguf import TYPES, read_header

Q4_1 = 20 / 32


@pytest.fixture(scope="module")
def real():
    """The real model's file."""
    from companion.model.files import smollm2

    return smollm2()


def test_sizes_of_blocks_are_ggmls():
    for kind, (name, numbers, nbytes) in TYPES.items():
        theirs = gguf.GGMLQuantizationType(kind)
        assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (name, (numbers, nbytes))


def test_the_real_model(real):
    spec, held = read_gguf(real)
    theirs = gguf.GGUFReader(str(real))
    assert held == sum(int(t.n_bytes) for t in theirs.tensors) == 96_576_768
    assert parameters(spec) == sum(int(t.n_elements) for t in theirs.tensors) == 134_515_008
    assert spec.name == "SmolLM2-135M-Instruct.Q4_1" and kv_bytes(spec, 1) == 23_040
    found = find_source(str(real))
    assert found.stored == {"weights_bytes": held} and "5.74 bits" in found.notes[0]


def test_the_same_shape_as_the_loaders(real):
    """`companion.model` reads the numbers too; what both say of the shape is one."""
    from companion.model.files import GGUF
    from companion.model.load import read_spec

    with GGUF(real) as file:
        theirs = read_spec(file, "x")
        ours = read_header(real)
        assert {k: v for k, v in file.meta.items() if not isinstance(v, list)}.items() <= ours.meta.items()
        assert {n: (e.shape, e.kind) for n, e in file.entries.items()} == ours.tensors
        assert sum(e.nbytes for e in file.entries.values()) == ours.nbytes
    mine = read_gguf(real)[0]
    assert ModelSpec.from_config(mine.extra, name="x") == theirs


def write(path, arch, keys, tensors, dtype=gguf.GGMLQuantizationType.F16):
    """A GGUF file by the package: keys below the architecture, tensors as shapes (row-major)."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in keys.items():
        name = key if key.startswith(("split.", "general.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_string(name, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 512,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}


def llama_tensors(layers=2, d=64, heads=4, kv=2, head=16, ffn=96, vocab=320, tied=False):
    out = {"token_embd.weight": (vocab, d), "output_norm.weight": (d,)}
    if not tied:
        out["output.weight"] = (vocab, d)
    for i in range(layers):
        out |= {
            f"blk.{i}.attn_norm.weight": (d,),
            f"blk.{i}.ffn_norm.weight": (d,),
            f"blk.{i}.attn_q.weight": (heads * head, d),
            f"blk.{i}.attn_k.weight": (kv * head, d),
            f"blk.{i}.attn_v.weight": (kv * head, d),
            f"blk.{i}.attn_output.weight": (d, heads * head),
            f"blk.{i}.ffn_gate.weight": (ffn, d),
            f"blk.{i}.ffn_up.weight": (ffn, d),
            f"blk.{i}.ffn_down.weight": (d, ffn),
        }
    return out


def elements(tensors):
    return sum(int(np.prod(shape)) for shape in tensors.values())


def test_a_written_llama(tmp_path):
    tensors = llama_tensors()
    path = write(tmp_path / "tiny.gguf", "llama", LLAMA, {**tensors, "rope_freqs.weight": (8,)})
    spec, held = read_gguf(path)
    assert parameters(spec) == elements(tensors) and held == 2 * (elements(tensors) + 8)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.tied, spec.max_context) == (2, 2, 16, False, 512)
    tied = write(tmp_path / "tied.gguf", "llama", LLAMA, llama_tensors(tied=True))
    assert read_gguf(tied)[0].tied


def moe(tensors, experts, width, d=64, layers=2, first=0, names=("gate", "up", "down"), bias=False):
    for i in range(first, layers):
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            tensors.pop(f"blk.{i}.{name}.weight")
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = (experts, d)
        for name in names:
            shape = (experts, d, width) if name == "down" else (experts, width, d)
            tensors[f"blk.{i}.ffn_{name}_exps.weight"] = shape
    return tensors


def test_families(tmp_path):
    """Each family's own keys and tensors; every file's elements are the count that follows from its shape."""
    norms = {f"blk.{i}.attn_{x}_norm.weight": (32,) for i in range(2) for x in "qk"}
    wide = dict(head=32)
    qwen3 = {**LLAMA, "attention.key_length": 32, "attention.value_length": 32}
    spec, _ = read_gguf(write(tmp_path / "a.gguf", "qwen3", qwen3, {**llama_tensors(**wide), **norms}))
    assert (spec.architecture, spec.qk_norm, spec.head_dim) == ("qwen3", "head", 32)

    keys = {**qwen3, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40}
    tensors = moe({**llama_tensors(**wide), **norms}, 8, 40)
    spec, _ = read_gguf(write(tmp_path / "b.gguf", "qwen3moe", keys, tensors))
    assert (spec.moe.experts, spec.moe.top_k, spec.moe.ffn) == (8, 2, 40)

    keys = {**LLAMA, "expert_count": 4, "expert_used_count": 2}
    spec, _ = read_gguf(write(tmp_path / "c.gguf", "llama", keys, moe(llama_tensors(), 4, 96)))
    assert (spec.architecture, spec.moe.experts) == ("mixtral", 4)

    keys = {**qwen3, "attention.sliding_window": 16}
    post = {f"blk.{i}.{x}.weight": (64,) for i in range(2) for x in ("post_attention_norm", "post_ffw_norm")}
    tensors = {**llama_tensors(**wide, tied=True), **post}
    spec, _ = read_gguf(write(tmp_path / "d.gguf", "gemma2", keys, tensors))
    assert (spec.layer_types, spec.window, spec.tied) == (("sliding", "full"), 16, True)
    spec, _ = read_gguf(write(tmp_path / "e.gguf", "gemma3", keys, {**tensors, **norms}))
    assert (spec.architecture, spec.sliding_layers, spec.qk_norm) == ("gemma3_text", 2, "head")

    keys = {
        **{k: v for k, v in LLAMA.items() if "head_count_kv" not in k}, "attention.head_count_kv": 1,
        "attention.kv_lora_rank": 32, "attention.q_lora_rank": 48, "rope.dimension_count": 8,
        "attention.key_length_mla": 24, "attention.value_length_mla": 20, "attention.key_length": 40,
        "attention.value_length": 32, "expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1,
        "expert_feed_forward_length": 40, "leading_dense_block_count": 1,
    }  # fmt: skip
    tensors = moe(llama_tensors(), 8, 40, first=1)
    for i in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.pop(f"blk.{i}.{name}.weight")
        tensors |= {
            f"blk.{i}.attn_q_a.weight": (48, 64), f"blk.{i}.attn_q_a_norm.weight": (48,),
            f"blk.{i}.attn_q_b.weight": (4 * 24, 48), f"blk.{i}.attn_kv_a_mqa.weight": (40, 64),
            f"blk.{i}.attn_kv_a_norm.weight": (32,), f"blk.{i}.attn_k_b.weight": (4, 32, 16),
            f"blk.{i}.attn_v_b.weight": (4, 20, 32), f"blk.{i}.attn_output.weight": (64, 80),
        }  # fmt: skip
    for name, shape in (("gate", (40, 64)), ("up", (40, 64)), ("down", (64, 40))):
        tensors[f"blk.1.ffn_{name}_shexp.weight"] = shape
    spec, _ = read_gguf(write(tmp_path / "f.gguf", "deepseek2", keys, tensors))
    assert (spec.architecture, spec.mla.width, spec.mla.nope_dim) == ("deepseek_v2", 40, 16)
    assert kv_bytes(spec, 1) == 2 * 40 * 2
    tensors["blk.1.exp_probs_b.bias"] = (8,)
    spec, _ = read_gguf(write(tmp_path / "g.gguf", "deepseek2", keys, tensors))
    assert spec.architecture == "deepseek_v3"


def test_gpt_oss(tmp_path):
    """Biases on attention, router and experts, sinks, every other layer sliding."""
    keys = {
        **{k: v for k, v in LLAMA.items() if k != "feed_forward_length"}, "attention.key_length": 32,
        "feed_forward_length": 40, "expert_feed_forward_length": 40, "expert_count": 4,
        "expert_used_count": 2,
        "attention.sliding_window": 128,
    }  # fmt: skip
    tensors = moe(llama_tensors(head=32), 4, 40)
    for i in range(2):
        tensors |= {
            f"blk.{i}.attn_q.bias": (128,), f"blk.{i}.attn_k.bias": (64,), f"blk.{i}.attn_v.bias": (64,),
            f"blk.{i}.attn_output.bias": (64,), f"blk.{i}.attn_sinks.weight": (4,),
            f"blk.{i}.ffn_gate_inp.bias": (4,), f"blk.{i}.ffn_gate_exps.bias": (4, 40),
            f"blk.{i}.ffn_up_exps.bias": (4, 40), f"blk.{i}.ffn_down_exps.bias": (4, 64),
        }  # fmt: skip
    spec, _ = read_gguf(write(tmp_path / "oss.gguf", "gpt-oss", keys, tensors))
    assert (spec.layer_types, spec.window, spec.sinks) == (("sliding", "full"), 128, True)
    assert kv_bytes(spec, 1000) == (1000 + 128) * 2 * 2 * 32 * 2


def test_a_file_in_parts(tmp_path):
    tensors = list(llama_tensors().items())
    for i, part in enumerate((dict(tensors[:9]), dict(tensors[9:])), 1):
        keys = {**(LLAMA if i == 1 else {}), "split.count": 2}
        write(tmp_path / f"big-0000{i}-of-00002.gguf", "llama", keys, part)
    first = tmp_path / "big-00001-of-00002.gguf"
    spec, held = read_gguf(first)
    assert parameters(spec) == elements(dict(tensors)) and held == 2 * parameters(spec)
    assert find_source(str(tmp_path)).spec == spec  # a folder with one divided model
    with pytest.raises(ValueError, match="give the first"):
        read_gguf(tmp_path / "big-00002-of-00002.gguf")
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    with pytest.raises(ValueError, match="No such file"):
        read_gguf(first)


REFUSED = [
    ("mamba", LLAMA, {}, "architecture='mamba' is not counted in GGUF"),
    ("llama", {**LLAMA, "block_count": 3}, {}, "describe 133,568 parameters, its tensors hold 102,720"),
    ("llama", {**LLAMA, "attention.head_count_kv": 4}, {}, "its tensors hold"),
    ("llama", {**LLAMA, "attention.head_count_kv": 3}, {}, "num_key_value_heads must be a divisor"),
    ("llama", {**LLAMA, "attention.head_count_kv": [2, 4]}, {}, "differs from layer to layer"),
    ("llama", {k: v for k, v in LLAMA.items() if k != "embedding_length"}, {}, "hidden_size is missing"),
    ("llama", LLAMA, {"blk.0.attn_q.bias": (64,)}, "its tensors hold"),
    ("llama", {**LLAMA, "block_count": "two"}, {}, "num_hidden_layers must be a positive integer, got 'two'"),
    ("deepseek2", {**LLAMA, "attention.kv_lora_rank": 32}, {}, "widths of latent attention are missing"),
]


@pytest.mark.parametrize("arch, keys, more, message", REFUSED, ids=[m[3][:30] for m in REFUSED])
def test_a_header_that_means_something_else_is_no_figure(tmp_path, arch, keys, more, message):
    path = write(tmp_path / "odd.gguf", arch, keys, {**llama_tensors(), **more})
    with pytest.raises(ValueError, match="odd.gguf") as caught:
        read_gguf(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_array_of_equal_heads_is_one_number(tmp_path):
    keys = {**LLAMA, "attention.head_count_kv": [2, 2]}
    assert read_gguf(write(tmp_path / "a.gguf", "llama", keys, llama_tensors()))[0].kv_heads == 2


def test_files_that_are_no_headers(tmp_path):
    whole = write(tmp_path / "whole.gguf", "llama", LLAMA, llama_tensors()).read_bytes()
    path = tmp_path / "cut.gguf"
    contents = [whole[:n] for n in (0, 4, 23, 24, 30, 100, 400, 900)] + [b"hello" * 100]
    contents.append(whole[:8] + struct.pack("<QQ", 2**60, 1) + whole[24:])  # so many tensors
    contents.append(whole[:8] + struct.pack("<QQ", 1, 2**60) + whole[24:])
    contents.append(whole[:4] + struct.pack("<I", 77) + whole[8:])
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cut.gguf") as caught:
            read_gguf(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="directory"):
        read_gguf(tmp_path)


def test_flipped_bytes_never_crash(tmp_path):
    """Each byte of a header turned: a figure like the whole file's, or a ValueError."""
    whole = bytearray(write(tmp_path / "whole.gguf", "llama", LLAMA, llama_tensors()).read_bytes())
    path, right = tmp_path / "flipped.gguf", 0
    for at in range(0, 1500, 7):
        flipped = bytearray(whole)
        flipped[at] ^= 0x5A
        path.write_bytes(flipped)
        try:
            spec, _ = read_gguf(path)
        except ValueError:
            continue
        right += 1
        assert parameters(spec) == elements(llama_tensors())
    assert right < 200
