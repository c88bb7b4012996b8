"""Sinks, windows and eviction on the real model: how well it goes on with a long text, and what is held.

    python -m benchmarks.streaming [--threads N] [--only NAME ...]

Negative log-likelihood of each token of the frozen text, given those that the cache still holds, for
- the full cache,
- a window of 256 or 512 tokens with 0, 1, 4 or 16 sink tokens, positions counted in the cache or in the text,
- eviction with as many slots as the window of 4 sinks has;
first over 4,096 tokens, then a few of them over 12,288, where the model was made for 8,192.

Samples are chunks of 256 tokens. Those before token 1,024 are reported, but not averaged: there the windows
are not full, or have only just become so. A difference to the full cache is taken chunk by chunk.
Writes companion/study/results/streaming.json after each setting; a setting that is there already, measured
with the same options on the same text, is kept unless named by --only. About eleven minutes on one core.
"""

import argparse
import sys
import time

import torch

from companion.caches import make_cache
from companion.machine import describe
from companion.model import load
from companion.stats import estimate, paired
from companion.study import facts as frozen
from companion.study import store, text

from .resume import resumed

TOKENS, LONG, CHUNK, FIRST = 4096, 12288, 256, 1024
STEP, EVICTING_STEP = 256, 16


def settings() -> dict[str, tuple[int, str, dict]]:
    """name -> (tokens, kind, options)."""
    found = {"full": (TOKENS, "contiguous", {})}
    for window in (256, 512):
        found[f"window {window}"] = TOKENS, "streaming", dict(window=window, sink_tokens=0, positions="text")
        for sinks in (1, 4, 16):
            for positions in ("text", "cache"):
                options = dict(window=window, sink_tokens=sinks, positions=positions)
                found[f"window {window}, {sinks} sinks, {positions}"] = TOKENS, "streaming", options
    for slots in (260, 516):
        # Never more tokens than slots, a step's own included: eviction between steps of 16 sees 500 to 516.
        options = dict(budget=slots - EVICTING_STEP, recent=(slots - EVICTING_STEP) // 2, step=EVICTING_STEP)
        found[f"evicting {slots}"] = TOKENS, "evicting", options
    found["full, long"] = LONG, "contiguous", {}
    found["window 512, long"] = LONG, "streaming", dict(window=512, sink_tokens=0, positions="text")
    for positions in ("text", "cache"):
        options = dict(window=512, sink_tokens=4, positions=positions)
        found[f"window 512, 4 sinks, {positions}, long"] = LONG, "streaming", options
    return found


@torch.inference_mode()
def nll_per_chunk(model, ids: list[int], cache, step: int) -> list[float]:
    """Mean negative log-likelihood in nats of each 256 tokens, the first aside; read `step` at a time."""
    values, x = [], torch.tensor([ids])
    for start in range(0, len(ids) - 1, step):
        stop = min(start + step, len(ids) - 1)
        logits = model(x[:, start:stop], cache)[0]
        target = x[0, start + 1 : stop + 1, None]
        values.append(torch.logsumexp(logits, -1) - logits.gather(-1, target)[:, 0])
    return [part.double().mean().item() for part in torch.cat(values).split(CHUNK)]


def one(model, ids: list[int], kind: str, options: dict) -> dict:
    spec, tokens = model.spec, len(ids) - 1
    fed = dict(step=STEP) if kind == "streaming" else {}
    cache = make_cache(kind, spec, max_tokens=tokens, **options, **fed)
    step = options.get("step", STEP)
    began = time.process_time()
    chunks = nll_per_chunk(model, ids, cache, step)
    # What a decoder would hold that brings one token at a time; windows give the same results at any step.
    held = make_cache(kind, spec, max_tokens=tokens, **options, step=1) if fed else cache
    return {
        "kind": kind,
        "options": options,
        "tokens": tokens,
        "step": step,
        "nbytes": held.nbytes,
        "tokens_held": held.nbytes // (make_cache("contiguous", spec, max_tokens=1).nbytes),
        "nll_per_chunk": chunks,
        "cpu_s": round(time.process_time() - began, 1),
    }


def finished(results: dict[str, dict]) -> dict[str, dict]:
    """Means over the chunks from token 1,024 on, and differences to the full cache."""
    for name, r in results.items():
        late = r["nll_per_chunk"][FIRST // CHUNK :]
        e = estimate(late)
        r["nll"] = {"mean": e.mean, "se": e.se, "n": e.n}
        full = results.get("full, long" if name.endswith("long") else "full")
        if full is not None and full is not r:
            d = paired(late, full["nll_per_chunk"][FIRST // CHUNK :])
            r["less_full"] = {"mean": d.difference, "se": d.se, "n": d.n, "p": d.p}
    return results


def line(name: str, r: dict) -> str:
    out = f"{name:34} {r['nbytes']:>12,} {r['nll']['mean']:8.3f} ± {r['nll']['se']:.3f}"
    if d := r.get("less_full"):
        out += f"   {d['mean']:+8.4f} ± {d['se']:.4f}"
    return out


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--only", nargs="*", default=None, metavar="NAME")
    args = parse.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load("smollm2-135m")
    ids = tokenizer.encode(text())
    results = resumed("streaming", {"text_sha256": frozen.SHA256}).get("settings", {})
    for name, (tokens, kind, options) in settings().items():
        have = results.get(name)
        if have and (have["kind"], have["options"], have["tokens"]) == (kind, options, tokens):
            if args.only is None or name not in args.only:
                continue
        elif args.only is not None and name not in args.only:
            continue
        results[name] = one(model, ids[: tokens + 1], kind, options)
        print(line(name, finished(results)[name]), flush=True)
        whole = {
            "command": "python -m benchmarks.streaming",
            "model": "smollm2-135m, float32",
            "text_sha256": frozen.SHA256,
            "chunk": CHUNK,
            "averaged_from_token": FIRST,
            "max_context": model.spec.max_context,
            "settings": {n: results[n] for n in settings() if n in results},
        }
        store("streaming", {**whole, "machine": describe()})
    print(f"\n{'':34} {'bytes':>12} {'nats per token':>16}   {'less full cache':>17}")
    for name in settings():
        if name in results:
            print(line(name, results[name]))


if __name__ == "__main__":
    sys.exit(main())
