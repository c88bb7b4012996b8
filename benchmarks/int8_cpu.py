"""Weights in int8 against weights in floats on a CPU: single products, and a whole decode step.

A step that waits for its weights should take as long as their bytes: int8 over float32, a quarter. Whether a
CPU can turn codes into products that fast is what this measures.

    python -m benchmarks.int8_cpu --threads 1 --out benchmarks/results/int8_cpu.json
    COMPANION_KERNELS=compiled python -m benchmarks.int8_cpu --threads 2   # int8_cpu_compiled.json
"""

import json
import time

import torch

from companion.caches import make_cache
from companion.machine import describe
from companion.model import load, quantize_weights
from companion.model.products import Int8Matrix, product

from .machine import arguments, spread

SHAPES = ((3072, 576), (576, 1536), (49152, 576))  # SmolLM2's: gate and up, down, the head
ROWS = (1, 8, 64)
COLD = 64 * 2**20  # bytes written between two products, so that the weights come from memory


def products(dtype: torch.dtype, rounds: int) -> dict:
    """Seconds in floats over seconds in int8, the two taking turns, per shape and number of rows."""
    out, dirt = {}, torch.zeros(COLD // 4)
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        packed = Int8Matrix(weight)
        for rows in ROWS:
            x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
            product(x, weight), product(x, packed)  # some ways have to be tried first
            ratios = []
            for _ in range(rounds):
                took = []
                for matrix in (weight, packed):
                    dirt.add_(1)
                    start = time.perf_counter()
                    product(x, matrix)
                    took.append(time.perf_counter() - start)
                ratios.append(took[0] / took[1])
            out[f"{shape[0]} x {shape[1]}, {rows} rows"] = spread(ratios)
    return out


@torch.inference_mode()
def step(context: int, batch: int, rounds: int) -> dict:
    """A decode step of SmolLM2 in float32: seconds in floats over seconds in int8, and the bytes of both."""
    model, _ = load("smollm2-135m")
    models = {"float32": model, "int8": quantize_weights(model, "int8")}
    token = torch.ones(batch, 1, dtype=torch.long)
    caches = {n: make_cache("contiguous", model.spec, batch=batch, max_tokens=context + 1) for n in models}
    for cache in caches.values():
        for layer in range(model.spec.layers):
            k = torch.randn(batch, model.spec.kv_heads, context, model.spec.head_dim)
            cache.append(layer, k, k)
    ratios = []
    for _ in range(rounds):
        took = []
        for name, m in models.items():
            start = time.perf_counter()
            m(token, caches[name], logits="last")
            took.append(time.perf_counter() - start)
            caches[name].crop(context)
        ratios.append(took[0] / took[1])
    held = {name: m.weights_bytes for name, m in models.items()}
    read = caches["int8"].nbytes_used
    told = (held["float32"] + read) / (held["int8"] + read)
    return {"by bytes": told, "measured": spread(ratios), "weights_bytes": held, "cache_bytes": read}


def main() -> None:
    args = arguments(__doc__)
    found = {"machine": describe()}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            found[name] = products(dtype, 3 * args.rounds)
            for what, ratio in found[name].items():
                print(f"{name:9} {what:26} {ratio['median']:5.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
    for context, batch in ((64, 1), (1024, 1), (64, 8)):
        s = found[f"step, {context} tokens, batch {batch}"] = step(context, batch, 3 * args.rounds)
        print(f"step at {context:5,} tokens, batch {batch}: {s['by bytes']:.2f} by bytes, {s['measured']}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
