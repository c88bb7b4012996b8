"""Where in its context the real model finds a fact again, and what is left of that in a cache of 516 tokens.

    python -m benchmarks.recall_position [--threads N] [--haystacks N] [--only NAME ...]

Eight facts ("The secret number of the falcon is 41327.") at evenly spread depths of the frozen text, at
1,024, 2,048 and 4,096 tokens, each asked for at the end over a fork of the cache; right means that all five
digits are the likeliest tokens. Then the same haystacks of 2,048 tokens over a window of 512 tokens with 4
sinks, and over an evicting cache of 516. For every fact: its depth, whether it was right, the negative
log-likelihood of its number, and the share of (layer, key head) pairs that still showed its digits to a
query when the text had been read.

A sample is a haystack: rates over several facts of one haystack have standard errors over haystacks. A bin
has one fact of each haystack; beside its standard error stands Wilson's 95 % interval, as 0 of 16 has no
error. Writes companion/study/results/recall_position.json after each haystack and goes on where it stopped.
About fifteen minutes on one core with 8 haystacks, the default.
"""

import argparse
import math
import sys

import torch

from companion.caches import make_cache
from companion.machine import describe
from companion.model import load
from companion.stats import clustered, estimate, paired
from companion.study import facts as frozen
from companion.study import haystack, recall, store

from .resume import resumed

NEEDLES, CHUNK, EVICTING_STEP = 8, 256, 64
EVICTING = dict(budget=516, recent=258, step=EVICTING_STEP)
SETTINGS = {
    "full 1024": (1024, "contiguous", {}),
    "full 2048": (2048, "contiguous", {}),
    "streaming 2048": (2048, "streaming", dict(window=512, sink_tokens=4, positions="cache", step=CHUNK)),
    "evicting 2048": (2048, "evicting", EVICTING),
    "full 4096": (4096, "contiguous", {}),
}


def held(cache, kind: str, layers: int, where: range) -> float:
    """Of the (layer, key head) pairs, how many have all of these positions where the next token sees them."""
    if kind == "evicting":
        heads = [set(head) for layer in range(layers) for head in cache.positions(layer)]
    elif kind == "streaming":  # of what the ring stores, a token sees its window and the sinks
        first = len(cache) + 1 - cache.spec.window
        heads = [{p for p in cache.positions() if p >= first or p < cache.sink_tokens}]
    else:
        heads = [set(where)]
    return sum(set(where) <= h for h in heads) / len(heads)


@torch.inference_mode()
def one(model, tokenizer, length: int, kind: str, options: dict, seed: int) -> dict:
    """All eight facts of one haystack."""
    hay = haystack(tokenizer, length, needles=NEEDLES, seed=seed)
    cache = make_cache(kind, model.spec, max_tokens=length + 64, **options)
    ids, step = torch.tensor([hay.ids]), options.get("step", CHUNK)
    for start in range(0, length, step):
        model(ids[:, start : start + step], cache, logits="last")
    found = recall(model, cache, hay)
    places = [range(p, p + len(answer)) for p, (_, answer) in zip(hay.positions, hay.queries)]
    return {
        "seed": seed,
        "depth": [round(d, 4) for d in hay.depths],
        "right": [right for right, _ in found],
        "nll": [round(nll, 4) for _, nll in found],
        "held": [round(held(cache, kind, model.spec.layers, where), 4) for where in places],
        "nbytes": cache.nbytes,
    }


def wilson(right: int, n: int, z: float = 1.959964) -> list[float]:
    """95 % interval of a rate (Wilson 1927), which is not empty at 0 and 1."""
    middle, half = right + z * z / 2, z * math.sqrt(right * (n - right) / n + z * z / 4)
    return [max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))]


def finished(results: dict[str, dict]) -> dict[str, dict]:
    """Rates by depth and over all, and differences to the full cache on the same haystacks."""
    for r in results.values():
        rows = r["haystacks"]
        r["n_haystacks"], r["n_facts"] = len(rows), NEEDLES * len(rows)
        r["recall"] = _estimate(clustered([[float(x) for x in row["right"]] for row in rows]))
        r["nll"] = _estimate(clustered([row["nll"] for row in rows]))
        r["bins"] = []
        for i in range(NEEDLES):
            right = [float(row["right"][i]) for row in rows]
            r["bins"].append(
                {
                    "depth": sum(row["depth"][i] for row in rows) / len(rows),
                    "recall": _estimate(estimate(right)),
                    "wilson95": wilson(int(sum(right)), len(right)),
                    "nll": _estimate(estimate([row["nll"][i] for row in rows])),
                    "held": sum(row["held"][i] for row in rows) / len(rows),
                }
            )
        full = results.get(f"full {r['length']}")
        if full is not None and full is not r:
            mean = {row["seed"]: sum(row["right"]) / NEEDLES for row in full["haystacks"]}
            both = [row for row in rows if row["seed"] in mean]
            if len(both) > 1:
                d = paired([sum(b["right"]) / NEEDLES for b in both], [mean[b["seed"]] for b in both])
                r["recall_less_full"] = {"mean": d.difference, "se": d.se, "n": d.n, "p": d.p}
    return results


def _estimate(e) -> dict:
    return {"mean": e.mean, "se": e.se, "n": e.n}


def line(name: str, r: dict) -> str:
    bins = " ".join(f"{b['recall']['mean']:5.2f}" for b in r["bins"])
    se = r["recall"]["se"]
    whole = f"{r['recall']['mean']:.3f}" + (f" ± {se:.3f}" if se is not None else "")
    return f"{name:16} {r['haystacks'][0]['nbytes']:>12,} {r['n_facts']:4}   {bins}   {whole}"


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--haystacks", type=int, default=8)
    parse.add_argument("--only", nargs="*", default=None, metavar="NAME")
    args = parse.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load("smollm2-135m")
    results = resumed("recall_position", {"text_sha256": frozen.SHA256}).get("settings", {})
    for name, (length, kind, options) in SETTINGS.items():
        if args.only is not None and name not in args.only:
            continue
        r = results.get(name)
        if r is None or (r["length"], r["kind"], r["options"]) != (length, kind, options):
            r = results[name] = {"length": length, "kind": kind, "options": options, "haystacks": []}
        for seed in range(len(r["haystacks"]), args.haystacks):
            r["haystacks"].append(one(model, tokenizer, length, kind, options, seed))
            whole = {
                "command": f"python -m benchmarks.recall_position --haystacks {args.haystacks}",
                "model": "smollm2-135m, float32",
                "text_sha256": frozen.SHA256,
                "needles": NEEDLES,
                "settings": {n: s for n, s in finished(results).items() if n in SETTINGS},
            }
            store("recall_position", {**whole, "machine": describe()})
        print(line(name, r), flush=True)


if __name__ == "__main__":
    sys.exit(main())
