"""Tiny models with random weights: transformers models, and GGUF files written by the `gguf` package."""

import types
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

transformers.logging.set_verbosity_error()

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "Ċ Ċ", "1 2", "Ġ Ġ"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CLASSES = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}


def tiny(kind, dtype=torch.float32, seed=0, **config):
    """A transformers model whose norms and biases are random too, so that a forgotten one shows."""
    model_class, config_class = CLASSES[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**(BASE | config))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(torch.randn_like(p) * 0.2)
    model.set_attn_implementation("sdpa")
    return model.to(dtype)


def widen(model):
    """Make a float64 transformers model compute in float64 throughout; its norms and angles use float32."""

    def norm(self, x):
        eps = self.variance_epsilon
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def angles(self, x, position_ids):
        freqs = position_ids[..., None].double() * self.inv_freq.double()
        both = torch.cat([freqs, freqs], dim=-1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(angles, module)
    return model


def gguf_order(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Llama's q and k as llama.cpp's converter stores them: halves of a rotary pair side by side."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def byte_tokens():
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [m.replace(" ", "") for m in MERGES]
    return tokens + [f"<|spare{i}|>" for i in range(300 - len(tokens))]


@dataclass
class TinyGGUF:
    """What goes into a GGUF file; tests change it before it is written."""

    hf: torch.nn.Module
    arch: str = "llama"
    kinds: dict = field(default_factory=dict)  # tensor name -> quantization type; F32 where absent
    meta: dict = field(default_factory=dict)  # key -> value instead of the right one; None leaves it out
    drop: set = field(default_factory=set)
    change: dict = field(default_factory=dict)  # tensor name -> function of the array
    extra: dict = field(default_factory=dict)  # further tensors
    stored: dict = field(default_factory=dict)  # filled by `write`: tensor name -> what a reader must get

    def write(self, path: Path) -> Path:
        c = self.hf.config
        writer = gguf.GGUFWriter(path, self.arch)
        a = self.arch
        keys = {
            f"{a}.block_count": c.num_hidden_layers,
            f"{a}.embedding_length": c.hidden_size,
            f"{a}.feed_forward_length": c.intermediate_size,
            f"{a}.attention.head_count": c.num_attention_heads,
            f"{a}.attention.head_count_kv": c.num_key_value_heads,
            f"{a}.attention.key_length": getattr(c, "head_dim", None)
            or c.hidden_size // c.num_attention_heads,
            f"{a}.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
            f"{a}.rope.freq_base": float(c.rope_parameters["rope_theta"]),
            f"{a}.context_length": c.max_position_embeddings,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": byte_tokens(),
            "tokenizer.ggml.token_type": [3] * 3 + [1] * 297,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": CHATML,
        }
        for key, value in (keys | self.meta).items():
            if value is None:
                continue
            add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}
            if isinstance(value, (list, tuple)):
                writer.add_array(key, value)
            elif isinstance(value, int) and not isinstance(value, bool):
                (writer.add_uint32 if value < 2**32 else writer.add_uint64)(key, value)
            else:
                add[type(value)](key, value)
        self._tensors(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self, writer):
        arch = {
            "llama": gguf.MODEL_ARCH.LLAMA,
            "qwen2": gguf.MODEL_ARCH.QWEN2,
            "qwen3": gguf.MODEL_ARCH.QWEN3,
        }
        names = gguf.get_tensor_name_map(arch[self.arch], self.hf.config.num_hidden_layers)
        heads = {"q_proj": self.hf.config.num_attention_heads, "k_proj": self.hf.config.num_key_value_heads}
        for hf_name, tensor in self.hf.state_dict().items():
            if hf_name == "lm_head.weight" and self.hf.config.tie_word_embeddings:
                continue
            name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            x = tensor.float().numpy()
            if self.arch == "llama" and (n := heads.get(hf_name.split(".")[-2])):
                x = gguf_order(x, n)
            if name in self.drop:
                continue
            x = np.ascontiguousarray(self.change.get(name, lambda x: x)(x))
            kind = self.kinds.get(name, gguf.GGMLQuantizationType.F32)
            raw = gguf.quants.quantize(x, kind)
            self.stored[name] = gguf.quants.dequantize(raw, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
        for name, x in self.extra.items():
            writer.add_tensor(name, x)
