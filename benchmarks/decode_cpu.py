"""Decode on a CPU: the companion against transformers, and grouped attention against torch's own.

    python -m benchmarks.decode_cpu [--threads N] [--rounds N] [--out FILE] [--only decode|attention]

Same weights, same prompt, same threads, float32, batch 1. The paths take turns within one run, so that a busy
minute hits all of them; ratios are per round, and the median round is reported with the extremes. Promises:
decode, compiled, at least 1.6 times transformers with its DynamicCache; packed attention, compiled, at least
1.5 times scaled_dot_product_attention(enable_gqa=True) at 4096 keys and more. Numbers are in LEDGER.md.

Attention is timed cold and hot. Cold is what a decode step sees: calls go through the tensors of many layers,
so that keys and values come from memory, as in a model whose weights and layers in between push them out of
the caches. Hot is the same tensors over and over. The promise is about cold. Beside both: how long reading
the keys and values once takes, by the fastest way known here (amax), and so the most that can be hoped for.
With --only, the other part of FILE stays as it is.
"""

import json
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

from companion.attend import products
from companion.attend.by_torch import decode_packed
from companion.caches import make_cache
from companion.cost import kv_bytes
from companion.kernels import cpu, use
from companion.machine import describe
from companion.model import load

from .machine import arguments, read_bandwidth, spread, timed
from .twin import transformers_twin

PROMPT = 512  # tokens
STEPS = 8  # per path and round
COLD = 100_000_000  # bytes of keys and values to go through: more than the caches hold
SHAPES = {
    "smollm2-135m": (9, 3, 64),
    "qwen3-8b": (32, 8, 128),
    "llama-3.1-70b": (64, 8, 128),
    "group 8, D 64": (16, 2, 64),
}


class Companion:
    def __init__(self, model):
        self.model = model

    def prefill(self, ids):
        self.cache = make_cache("contiguous", self.model.spec, max_tokens=ids.shape[1] + 4096)
        self.next = self.model(ids, self.cache, logits="last")[:, -1].argmax(-1, keepdim=True)

    def step(self):
        self.next = self.model(self.next, self.cache, logits="last")[:, -1].argmax(-1, keepdim=True)
        return int(self.next)


class Compiled(Companion):
    """A step through all layers by one compiled call."""

    def step(self):
        with use("compiled"):
            return super().step()


class OneProductEach(Companion):
    """The same decoder with F.linear for every matrix: what `companion.model.products` buys."""

    def step(self):
        few, products.FEW = products.FEW, 0
        try:
            return super().step()
        finally:
            products.FEW = few


class Transformers:
    def __init__(self, twin):
        self.twin = twin

    def prefill(self, ids):
        from transformers import DynamicCache

        self.cache = DynamicCache()
        self._run(ids)

    def step(self):
        self._run(self.next)
        return int(self.next)

    def _run(self, ids):
        out = self.twin(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.next = out.logits[:, -1].argmax(-1, keepdim=True)


def decode(rounds: int) -> dict:
    model, _ = load("smollm2-135m")
    paths = {
        "companion, compiled": Compiled(model),
        "companion": Companion(model),
        "companion, F.linear": OneProductEach(model),
        "transformers, DynamicCache": Transformers(transformers_twin(model)),
    }
    ids = torch.randint(3, model.spec.vocab, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    prefill_s, per_round, tokens = {}, {name: [] for name in paths}, {name: [] for name in paths}
    for name, path in paths.items():
        start = time.perf_counter()
        path.prefill(ids)
        prefill_s[name] = time.perf_counter() - start
        path.step()
    every = {name: [] for name in paths}
    for _ in range(rounds):
        for name, path in paths.items():
            seconds = []
            for _ in range(STEPS):
                start = time.perf_counter()
                tokens[name].append(path.step())
                seconds.append(time.perf_counter() - start)
            every[name] += seconds
            per_round[name].append(statistics.median(seconds))
    assert len({tuple(t) for t in tokens.values()}) == 1, "the paths chose different tokens"
    bandwidth = read_bandwidth()
    bound = (model.weights_bytes + kv_bytes(model.spec, PROMPT, dtype="fp32")) / bandwidth["best"]
    base = "transformers, DynamicCache"
    return {
        "prompt_tokens": PROMPT,
        "steps": STEPS * rounds,
        "tokens_equal": True,
        "read_bandwidth_bytes_per_s": bandwidth,
        "bound_tokens_per_s": 1 / bound,
        "paths": {
            name: {
                "decode_tokens_per_s": {"median": 1 / statistics.median(s), "best": 1 / min(s)},
                "share_of_bound": {"median": bound / statistics.median(s), "best": bound / min(s)},
                "prefill_tokens_per_s": PROMPT / prefill_s[name],
                "times_transformers": spread([t / own for own, t in zip(per_round[name], per_round[base])]),
            }
            for name, s in every.items()
        },
    }


def attention(rounds: int) -> list[dict]:
    rows = []
    for shape, (heads, kv_heads, width) in SHAPES.items():
        for keys in (512, 1024, 4096, 8192, 16384):
            layers = max(2, COLD // (keys * kv_heads * width * 8))
            k, v = (torch.randn(layers, kv_heads, keys + 64, width) for _ in "kv")
            q = torch.randn(1, heads, 1, width)
            cut = [(k[i : i + 1, :, :keys], v[i : i + 1, :, :keys]) for i in range(layers)]
            row = {"shape": shape, "heads": heads, "kv_heads": kv_heads, "head_dim": width, "keys": keys}
            hot = in_turns(q, cut[:1] * min(layers, 8), rounds)
            rows.append(row | in_turns(q, cut, rounds) | {"hot": hot})
    return rows


def in_turns(q, layers, rounds: int) -> dict:
    """Median microseconds of one layer, for three ways and for reading alone, and how many times sdpa."""
    ways = {
        "compiled": compiled,
        "packed": decode_packed,
        "sdpa": partial(F.scaled_dot_product_attention, enable_gqa=True),
        "read": lambda q, k, v: (k.amax(), v.amax()),
    }
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(statistics.median(timed(partial(over, way, q, layers), 3)) / len(layers))
    result = {f"{name}_us": statistics.median(t) * 1e6 for name, t in times.items()}
    for way, name in (("packed", "times_sdpa"), ("compiled", "compiled_times_sdpa")):
        result[name] = spread([s / p for s, p in zip(times["sdpa"], times[way])])
    return result


def compiled(q, k, v):
    """Packed as well, as one compiled pass: what a cache does with a step that is large enough."""
    return cpu.run(q[:, :, 0], k.transpose(1, 2), v.transpose(1, 2), [k.shape[2]], None)[0][:, :, None]


def over(attend, q, layers):
    for k, v in layers:
        attend(q, k, v)


def main() -> None:
    args = arguments(__doc__, parts=("decode", "attention"))
    result = {}
    if args.only and args.out and args.out.exists():
        result = json.loads(args.out.read_text())
    with torch.inference_mode():
        for part in (decode, attention):
            if args.only in (None, part.__name__):
                machine = "machine" if part is decode else "machine_attention"
                result |= {machine: describe(), part.__name__: part(args.rounds)}
                report_decode(result["decode"]) if part is decode else report_attention(result["attention"])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def report_decode(d: dict) -> None:
    print(
        f"read bandwidth {d['read_bandwidth_bytes_per_s']['best'] / 1e9:.1f} GB/s, "
        f"so at most {d['bound_tokens_per_s']:.1f} tokens/s"
    )
    for name, p in d["paths"].items():
        rate, share, ratio = p["decode_tokens_per_s"], p["share_of_bound"], p["times_transformers"]
        print(
            f"{name:<30} {rate['median']:5.1f} tokens/s (best {rate['best']:.1f}), "
            f"{share['median']:4.0%} of the bound, {ratio['median']:.2f} x transformers "
            f"({ratio['min']:.2f} to {ratio['max']:.2f}), prefill {p['prefill_tokens_per_s']:.0f} tokens/s"
        )


def report_attention(rows: list[dict]) -> None:
    for r in rows:
        t, c, hot = r["times_sdpa"], r["compiled_times_sdpa"], r["hot"]
        print(
            f"{r['shape']:<15} {r['keys']:>6} keys: sdpa {r['sdpa_us']:6.0f} us; "
            f"compiled {r['compiled_us']:6.0f}, {c['median']:.2f} x ({c['min']:.2f} to {c['max']:.2f}); "
            f"packed {r['packed_us']:6.0f}, {t['median']:.2f} x ({t['min']:.2f} to {t['max']:.2f}); "
            f"reading alone {r['read_us']:.0f}, at most {r['sdpa_us'] / r['read_us']:.2f} x; "
            f"hot {hot['compiled_times_sdpa']['median']:.2f} and {hot['times_sdpa']['median']:.2f} x"
        )


if __name__ == "__main__":
    main()
