"""A program that uses the public face with types, as a stranger's would. `make lint` reads it."""

import torch
from torch import Tensor

from companion import doctor
from companion.attention import merge_partials, sdpa
from companion.caches import make_cache
from companion.cost import Deployment, decode_step, hardware, kv_bytes, models, prefill, size, weight_bytes
from companion.engine import Engine, Request
from companion.generate import Generation, generate
from companion.kernels import decode_attention
from companion.model import Decoder, load
from companion.moe import route
from companion.paging import BlockManager, BlockPool, PrefixIndex
from companion.quantize import Codec, QuantizedTensor, codec
from companion.rope import Rope


def attending(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = [sdpa(q, k, v, causal=True, window_size=(16, 0), return_lse=True) for _ in range(2)]
    merge_partials([both[0][0]], [both[0][1]])
    Rope(64, theta=10_000.0)
    out = decode_attention(q, k, v, torch.ones(1, dtype=torch.int32), num_splits=2)
    return out if isinstance(out, Tensor) else out[0]


def coding(x: Tensor) -> Tensor:
    c: Codec = codec("int4", group=32, group_dim=-1)
    qt: QuantizedTensor = c.quantize(x)
    most: int = qt.nbytes
    return c.dequantize(qt) * most


def paging() -> list[int]:
    pool = BlockPool(64, 16)
    pool.check()
    PrefixIndex, BlockManager(64, 16)
    return pool.allocate(3)


def sizing() -> int:
    spec, device = models["llama-3.1-8b"], hardware["h100-sxm"]
    Deployment, decode_step(spec, device, 8, 4096), prefill(spec, device, 1024)
    size(spec, device, batch=8, context=4096)
    stored: int = kv_bytes(spec, 4096, batch=2) + weight_bytes(spec)
    return stored


def writing(prompt: list[int]) -> Generation | list[Generation]:
    model, tokenizer = load("smollm2-135m")
    net: Decoder = model
    engine = Engine(net, 64, 16, tokenizer=tokenizer)
    engine.add(Request(prompt, 8))
    make_cache("contiguous", net.spec, batch=1, max_tokens=64)
    route(torch.zeros(2, 8), top_k=2, renormalize=True)
    doctor.report()
    return generate(net, prompt, cache="contiguous", max_new_tokens=8)
