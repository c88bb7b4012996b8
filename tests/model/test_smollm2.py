"""The real model: its file, its logits against transformers on the `gguf` package's weights, its text."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tinymodels import gguf_order

import companion
from companion.caches import make_cache
from companion.cost import kv_bytes_per_token, parameters, weight_bytes
from companion.generate import generate
from companion.model.files import GGUF, SHA256
from companion.model.files import smollm2 as path_of_smollm2

TEXT = """The cache holds a key and a value of every token seen so far, in every layer: 23,040 bytes each
at 16 bits. In 2023 a paper asked how many of 1,024 tokens matter; the answer was not 7.

def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

Ein Satz auf Deutsch, 漢字, and an emoji 🙂.
"""
MARGIN = 1e-3  # below it, two ways of rounding may prefer different tokens


@pytest.fixture(scope="module")
def tensors():
    """Every tensor of the file by the `gguf` package: name -> (reader's entry, float32 array)."""
    reader = gguf.GGUFReader(path_of_smollm2())
    return {
        t.name: (t, gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in t.shape[::-1]]))
        for t in reader.tensors
    }


@pytest.fixture(scope="module")
def theirs(tensors):
    """A transformers Llama with these weights; nothing of the companion is involved."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        x = tensors[names.get_name(name, try_suffixes=(".weight",))][1]
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        if heads:
            back = np.empty_like(x)
            back[gguf_order(np.arange(len(x)), heads)] = x
            x = back
        weights[name] = torch.from_numpy(x if x.flags.writeable else x.copy())
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are in no file
    assert not any(p.is_meta for p in model.parameters())
    return model.eval()


# --- the file -------------------------------------------------------------------------------------


def test_the_file_is_the_one_that_was_checked():
    content = path_of_smollm2().read_bytes()
    assert len(content) == 98_362_432
    assert hashlib.sha256(content).hexdigest() == SHA256
    assert SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_every_tensor_as_the_gguf_package_reads_it(tensors):
    with GGUF(path_of_smollm2()) as file:
        assert file.entries.keys() == tensors.keys() and len(tensors) == 272
        for name, (t, want) in tensors.items():
            entry, got = file.entries[name], file.tensor(name)
            assert (entry.start, entry.nbytes, entry.kind) == (t.data_offset, t.n_bytes, int(t.tensor_type))
            assert got.shape == want.shape and got.dtype == np.float32
            assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), name  # bit for bit
        kinds = [e.kind for e in file.entries.values()]
        assert (kinds.count(3), kinds.count(0), kinds.count(8)) == (210, 61, 1)
        assert sum(math.prod(e.shape) for e in file.entries.values()) == 134_515_008


def test_counted_and_allocated_agree(smollm2):
    decoder, _ = smollm2
    assert sum(p.numel() for p in decoder.parameters()) == parameters("smollm2-135m") == 134_515_008
    assert decoder.weights_bytes == weight_bytes("smollm2-135m", "fp32") == 538_060_032
    cache = make_cache("contiguous", decoder.spec, max_tokens=10)
    assert cache.nbytes == 10 * kv_bytes_per_token("smollm2-135m", dtype="fp32") == 10 * 46_080


# --- logits ---------------------------------------------------------------------------------------


@torch.inference_mode()
def test_logits_equal_those_of_transformers(smollm2, theirs):
    decoder, tokenizer = smollm2
    worst = 0.0
    for text in ("The", "The capital of France is", TEXT):
        ids = torch.tensor([tokenizer.encode(text)])
        want, got = theirs(ids).logits, decoder(ids)
        assert got.dtype == torch.float32 and want.abs().max() > 10
        cache = make_cache("contiguous", decoder.spec, max_tokens=ids.shape[1])
        pieces = torch.cat([decoder(x, cache) for x in ids.split(17, dim=1)], dim=1)
        worst = max(worst, *(float((x - want).abs().max()) for x in (got, pieces)))
    print(f"max abs difference of logits {worst:.1e}")
    assert worst <= 1e-3


# --- greedy ---------------------------------------------------------------------------------------


def agree(tokens, reference, margins):
    """Equal up to the first place where the reference itself is undecided; at least a few are compared."""
    sure = next((i for i, m in enumerate(margins) if m <= MARGIN), len(margins))
    assert sure >= 4
    assert tokens[:sure] == reference[:sure]


@torch.inference_mode()
def reference_greedy(model, prompt, steps):
    """By transformers, the whole sequence again for every token: (tokens, top-two margins)."""
    tokens, margins = [], []
    for _ in range(steps):
        top = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].topk(2)
        tokens.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
    return tokens, margins


PROMPTS = ["The capital of France is", "def fib(n):", "Water boils at 100 degrees"]


@pytest.fixture(scope="module")
def references(smollm2, theirs):
    tokenizer = smollm2[1]
    return {p: reference_greedy(theirs, tokenizer.encode(p), 8) for p in PROMPTS}


def test_greedy_without_a_cache(smollm2, references):
    decoder, tokenizer = smollm2
    for prompt, (tokens, margins) in references.items():
        g = generate(decoder, tokenizer.encode(prompt), cache=None, max_new_tokens=8, stop_ids=())
        agree(g.tokens, tokens, margins)


def test_greedy_with_a_cache_and_every_chunk_of_the_prompt(smollm2, references):
    decoder, tokenizer = smollm2
    prompt = PROMPTS[2]
    ids, (tokens, margins) = tokenizer.encode(prompt), references[prompt]
    for chunk in (None, *range(1, len(ids) + 1)):
        g = generate(decoder, ids, max_new_tokens=8, prefill_chunk=chunk, stop_ids=())
        agree(g.tokens, tokens, margins)


@pytest.mark.parametrize("cache, chunk", [("contiguous", None), ("contiguous", 3), (None, None)])
def test_greedy_in_a_ragged_batch(smollm2, references, cache, chunk):
    decoder, tokenizer = smollm2
    ids = [tokenizer.encode(p) for p in PROMPTS]
    assert len({len(x) for x in ids}) > 1
    out = generate(decoder, ids, cache=cache, max_new_tokens=8, prefill_chunk=chunk, stop_ids=())
    for g, prompt in zip(out, PROMPTS):
        agree(g.tokens, *references[prompt])


def test_it_says_paris(smollm2):
    decoder, tokenizer = smollm2
    prompt = "The capital of France is"
    g = generate(decoder, tokenizer.encode(prompt), max_new_tokens=8, tokenizer=tokenizer)
    assert g.text.startswith(" Paris")
    chat = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    g = generate(decoder, tokenizer.encode(chat), max_new_tokens=24, tokenizer=tokenizer)
    assert g.text == "The capital of France is Paris." and g.finish_reason == "stop"
    assert g.tokens[-1] in tokenizer.eos_ids


# --- memory ---------------------------------------------------------------------------------------

MEMORY = """
import torch, numpy, tokenizers
import companion.model
from companion.generate import generate
from companion.model import load

def kernel_says(field):  # bytes; ru_maxrss would count the parent's memory before the exec
    line = next(x for x in open("/proc/self/status") if x.startswith(field))
    return int(line.split()[1]) * 1024

before = kernel_says("VmRSS")
decoder, tokenizer = load("smollm2-135m")
generate(decoder, tokenizer.encode("The capital of France is"), max_new_tokens=8)
print(before, kernel_says("VmHWM"), decoder.weights_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's own count")
def test_loading_and_decoding_stays_within_two_and_a_half_times_the_weights():
    env = {**os.environ, "PYTHONPATH": str(Path(companion.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, peak, weights = map(int, done.stdout.split())
    assert weights == 538_060_032
    grown = (peak - before) / weights
    print(f"grown by {grown:.2f} times the weights")
    assert 1 < grown <= 2.5
