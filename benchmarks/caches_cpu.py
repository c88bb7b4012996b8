"""Caches on a CPU: what paging costs a decode step, what appending to a quantized cache costs, and memory.

    python -m benchmarks.caches_cpu [--threads N] [--rounds N] [--out FILE]

The real model in float32, batch 1; paths take turns within one run, ratios are per round. Promises: a decode
step with the paged cache at most 1.25 times the contiguous one at 1,024 tokens; appending to the quantized
cache constant per token; 16,384 tokens in int4 with group 32 at most 1.1 times their `nbytes` as the process
grows, and at most 0.2 times float32.
"""

import json
import statistics
import subprocess
import sys
import time

import torch

from companion.caches import make_cache
from companion.cost import models
from companion.kernels import use
from companion.machine import describe
from companion.model import load

from .machine import arguments, spread

KINDS = {
    "contiguous": {},
    "paged": {"block_size": 16},
    "paged, blocks in disorder": {"block_size": 16},
    "contiguous, compiled": {},
    "paged, blocks in disorder, compiled": {"block_size": 16},
    "quantized int8": {"codec": "int8", "residual": 0},
    "quantized kivi4": {"codec": "kivi4", "residual": 32},
}


def filled(name: str, spec, tokens: int):
    """A cache with `tokens` random tokens, given in steps of 512."""
    kind = name.split(",")[0].split(" ")[0]
    cache = make_cache(kind, spec, max_tokens=tokens + 64, **KINDS[name])
    if "disorder" in name:
        shuffle_blocks(cache, tokens + 64)
    g = torch.Generator().manual_seed(0)
    for start in range(0, tokens, 512):
        n = min(512, tokens - start)
        for layer in range(spec.layers):
            shape = 1, spec.kv_heads, n, spec.head_dim
            cache.append(layer, torch.randn(shape, generator=g), torch.randn(shape, generator=g))
    return cache


def shuffle_blocks(cache, tokens: int) -> None:
    """Give the row every second block first, so that no two of its blocks are neighbours."""
    pool = cache.storage.manager.pool
    ids = pool.allocate(pool.num_blocks)
    pool.free(ids[1::2] + ids[0::2])


def decode(rounds: int) -> list[dict]:
    model, _ = load("smollm2-135m")
    rows = []
    for tokens in (1024, 4096, 8192):
        caches = {name: filled(name, model.spec, tokens) for name in KINDS}
        ids, times = torch.tensor([[5]]), {name: [] for name in KINDS}
        for name, cache in caches.items():
            step(model, ids, cache, name)
        for _ in range(rounds):
            for name, cache in caches.items():
                times[name].append(statistics.median(step(model, ids, cache, name) for _ in range(5)))
        base = times["contiguous"]
        rows += [
            {
                "cache": name,
                "tokens": tokens,
                "step_ms": statistics.median(t) * 1e3,
                "times_contiguous": spread([x / y for x, y in zip(t, base)]),
            }
            for name, t in times.items()
        ]
    return rows


def step(model, ids, cache, name: str) -> float:
    """Seconds, with torch alone unless the name says that attention is compiled (`companion.kernels.cpu`)."""
    with use("compiled" if "compiled" in name else "never"):
        start = time.perf_counter()
        model(ids, cache, logits="last")
        return time.perf_counter() - start


def append() -> list[dict]:
    """Microseconds to append one token to one layer, as the context grows."""
    spec, rows = models["smollm2-135m"], []
    for name in ("contiguous", "quantized int8", "quantized kivi4"):
        for tokens in (1024, 4096, 16384):
            cache = filled(name, spec, tokens - 64)
            k = torch.randn(1, spec.kv_heads, 1, spec.head_dim)
            start = time.perf_counter()
            for _ in range(64):
                for layer in range(spec.layers):
                    cache.append(layer, k, k)
            rows.append({
                "cache": name, "tokens": tokens,
                "append_us": (time.perf_counter() - start) / 64 / spec.layers * 1e6,
            })  # fmt: skip
    return rows


GROWTH = """
import sys, torch, psutil
from companion.caches import make_cache
from companion.cost import models
from companion.kernels import use
from companion.quantize import codec
spec, tokens, name = models["smollm2-135m"], 16384, sys.argv[1]
# The library's own pages and threads come with the first calls; they are not the cache's.
warm = make_cache("quantized", spec, max_tokens=512, codec=codec("int4", group=32))
for _ in range(2):
    for layer in range(spec.layers):
        warm.append(layer, *2 * [torch.randn(1, spec.kv_heads, 256, spec.head_dim)])
del warm
before = psutil.Process().memory_info().rss
options = {"codec": codec("int4", group=32)} if name == "quantized" else {}
cache = make_cache(name, spec, max_tokens=tokens, **options)
for start in range(0, tokens, 256):
    for layer in range(spec.layers):
        cache.append(layer, *(torch.randn(1, spec.kv_heads, 256, spec.head_dim) for _ in "kv"))
print(psutil.Process().memory_info().rss - before, cache.nbytes)
"""


def memory() -> dict:
    """Growth of a fresh process while a cache of 16,384 tokens is filled."""
    out = {}
    for name in ("contiguous", "quantized"):
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, name], capture_output=True, text=True, check=True
        )
        grown, nbytes = map(int, done.stdout.split())
        out[name] = {"process_grew": grown, "nbytes": nbytes, "ratio": grown / nbytes}
    out["int4 over fp32"] = out["quantized"]["process_grew"] / out["contiguous"]["process_grew"]
    return out


def main() -> None:
    args = arguments(__doc__)
    with torch.inference_mode():
        result = {
            "machine": describe(),
            "memory": memory(),
            "append": append(),
            "decode": decode(args.rounds),
        }
    for name, m in result["memory"].items():
        print(f"{name}: {m if isinstance(m, float) else ', '.join(f'{k} {v:,.2f}' for k, v in m.items())}")
    for r in result["append"]:
        print(f"{r['cache']:<18} append at {r['tokens']:>6} tokens: {r['append_us']:6.1f} us a layer")
    for r in result["decode"]:
        t = r["times_contiguous"]
        print(f"{r['cache']:<26} {r['tokens']:>6} tokens: {r['step_ms']:6.1f} ms a step, "
              f"{t['median']:.2f} x contiguous "
              f"({t['min']:.2f} to {t['max']:.2f})")  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
