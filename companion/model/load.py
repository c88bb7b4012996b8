"""Checkpoints: a GGUF file, a folder of safetensors, or the book's model by name."""

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..cost import ModelSpec
from ..cost.checkpoint import gguf_spec
from .decoder import Decoder
from .files import GGUF, smollm2
from .tokenizer import Tokenizer

NAMES: dict[str, Callable[[], Path]] = {"smollm2-135m": smollm2}

_GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_GGUF_KEYS = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
)
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROUTER = (".gate.weight", ".router.weight", ".router.bias", ".e_score_correction_bias")
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def load(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Decoder, Tokenizer]:
    """Load a model: "smollm2-135m", a path to a .gguf file, or a folder with config.json and safetensors.

    dtype, device: of the weights. On a CPU keep float32; use bfloat16 on GPUs of capability 8.0 and newer.

    Returns (decoder, tokenizer). Raises ValueError, naming the file, for whatever cannot be loaded whole, and
    for a device that is not there.
    """
    check_device(device)
    if str(name) in NAMES:
        return _load_gguf(NAMES[str(name)](), dtype, device, str(name))
    path = Path(name)
    if path.is_dir():
        return _load_folder(path, dtype, device)
    if path.is_file():
        return _load_gguf(path, dtype, device, path.stem)
    near = difflib.get_close_matches(str(name), NAMES, n=3, cutoff=0.3)
    raise ValueError(
        f"model {str(name)!r} is neither a known name ({', '.join(near or NAMES)}) nor a .gguf file "
        "nor a folder of safetensors"
    )


def check_device(device: torch.device | str) -> None:
    """Raise a ValueError, naming it, for a device that torch does not know or this machine lacks."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as e:
        why = str(e).strip().splitlines()[0].split(". ")[0].rstrip(".")[:120]
        raise ValueError(f"device={str(device)!r} cannot be used here: {why}") from None


def _load_gguf(path: Path, dtype, device, name: str) -> tuple[Decoder, Tokenizer]:
    with GGUF(path) as file:
        spec = read_spec(file, name)
        heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}

        def take(hf_name: str) -> Tensor:
            own = _gguf_name(hf_name)
            x = torch.from_numpy(file.tensor(own))
            part = hf_name.split(".")[-2]
            if (
                part in heads and spec.architecture == "llama"
            ):  # biases as well; other families keep the order
                x = unpermute(x, heads[part])
            return x.to(device=device, dtype=dtype)

        tokenizer = Tokenizer.from_gguf(file.meta)
        decoder = Decoder(spec, take).eval()
    decoder.stop_ids = tokenizer.eos_ids
    return decoder, tokenizer


def read_spec(file: GGUF, name: str) -> ModelSpec:
    """The shape of an open GGUF file, read as `companion.cost.checkpoint` reads it.

    Raises ValueError for missing keys, and for what is counted there but not loaded here.
    """
    meta, arch = file.meta, file.meta.get("general.architecture")
    if (
        arch not in _GGUF_FAMILIES or f"{arch}.expert_count" in meta
    ):  # others store heads or experts otherwise
        raise ValueError(
            f"{file.path.name}: architecture={arch!r} is not supported in GGUF; accepted: "
            f"{', '.join(_GGUF_FAMILIES)} without experts, and more from a folder of safetensors"
        )
    for key in _GGUF_KEYS:
        if f"{arch}.{key}" not in meta:
            raise ValueError(f"{file.path.name}: the header lacks {arch}.{key}")
    for key in (*_GGUF_KEYS, "attention.head_count_kv", "attention.key_length"):
        if isinstance(meta.get(f"{arch}.{key}"), list):
            raise ValueError(f"{file.path.name}: {arch}.{key} is a list, one value a layer; need a number")
    layers = meta[f"{arch}.block_count"]
    if isinstance(layers, int) and layers > len(file.entries):
        raise ValueError(f"{file.path.name}: {layers} layers, but {len(file.entries)} tensors")
    _refuse_scaled_positions(file, arch)
    shapes = {tensor: entry.shape for tensor, entry in file.entries.items()}
    return gguf_spec(meta, shapes, file=file.path.name, name=name)


def _refuse_scaled_positions(file: GGUF, arch: str) -> None:
    """Rather an error than a model that is right for short texts only."""
    kind = file.meta.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none" or "rope_freqs.weight" in file.entries:
        raise ValueError(
            f"{file.path.name}: positions are scaled (rope.scaling.type or rope_freqs.weight), which is read "
            "from safetensors only"
        )


def unpermute(w: Tensor, heads: int) -> Tensor:
    """Undo the row order in which GGUF stores Llama's query and key weights.

    GGUF keeps the two halves of a rotary pair side by side; Hugging Face keeps all first halves, then all
    second ones. w: (heads * D, d), or a bias (heads * D,). A head's 8 rows are stored as 0 4 1 5 2 6 3 7.
    """
    if w.shape[0] % (2 * heads):
        raise ValueError(f"w must be of a multiple of {2 * heads} rows, twice heads, got {w.shape[0]} rows")
    return w.view(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)


def _gguf_name(hf_name: str) -> str:
    if hf_name in _GGUF_TOP:
        return _GGUF_TOP[hf_name]
    _, _, layer, rest = hf_name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_NAMES.get(part, part)}.{kind}"


def _load_folder(folder: Path, dtype, device) -> tuple[Decoder, Tokenizer]:
    spec = ModelSpec.from_config(folder / "config.json", name=folder.name)
    tensors = SafeTensors(folder, dtype=dtype, device=device)
    if spec.tied is False and "lm_head.weight" not in tensors:
        raise ValueError(f"{folder}: config.json says untied, but there is no tensor 'lm_head.weight'")
    if spec.tied and "lm_head.weight" in tensors:
        if not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ValueError(
                f"{folder}: config.json says tied, but 'lm_head.weight' differs from the embedding"
            )
    decoder = Decoder(spec, tensors).eval()
    tokenizer = Tokenizer.from_folder(folder)
    decoder.stop_ids = tokenizer.eos_ids
    return decoder, tokenizer


class SafeTensors(Mapping):
    """The tensors of a folder, in one file or in shards, by name; each is read when it is asked for.

    dtype, device: what they are turned into; None leaves the dtype as stored. A router's tensors never get
    less than float32, since a rounded score may choose another expert.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"):
        self.folder, self.dtype, self.device = folder, dtype, device
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            files = {name: folder / file for name, file in _weight_map(index).items()}
        elif single.is_file():
            files = dict.fromkeys(_keys(single), single)
        else:
            raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json")
        gone = {f.name for f in files.values() if not f.is_file()}
        if gone:
            raise ValueError(f"{folder}: the index names {sorted(gone)[0]}, which is not there")
        self.places = {_language_name(name): (file, name) for name, file in files.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.places:
            raise ValueError(f"{self.folder}: no tensor {name!r}")
        file, stored = self.places[name]
        with _opened(file) as f:
            if stored not in f.keys():
                raise ValueError(f"{file.name}: no tensor {stored!r}, although the index says so")
            x = f.get_tensor(stored)
        dtype = x.dtype if self.dtype is None else self.dtype
        if dtype.itemsize < 4 and name.endswith(_ROUTER):
            dtype = torch.float32
        return x.to(device=self.device, dtype=dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self):
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _language_name(name: str) -> str:
    """The name without the prefix that files of a model with a vision tower put before the language model."""
    for prefix, plain in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _weight_map(index: Path) -> dict[str, str]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, TypeError, KeyError):
        table = None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise ValueError(f"{index}: no 'weight_map' from tensors to files in it")
    return table


def _keys(path: Path) -> list[str]:
    with _opened(path) as f:
        return list(f.keys())


def _opened(path: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path.name}: not a whole safetensors file ({e})") from None
