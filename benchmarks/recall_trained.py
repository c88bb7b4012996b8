"""Key-value heads against recall, on small nets trained for it: 8, 4, 2 or 1 heads, and two latents.

    python -m benchmarks.recall_trained [--seeds N] [--threads N] [--smoke]

Trains every variant of companion.study.nets with every seed by one recipe, to convergence or to the end
of the budget of steps, and reads each net with its cache in fewer bits and with more pairs than in its
training. A head count that did not converge is tried again from the trained kv8 of its seed, heads
averaged: was it too little room, or too little training? Prints a table; stores
companion/study/results/recall_trained.json after every net, and the weights of two nets beside it.
--smoke: tiny, in seconds, stores nothing.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from companion.cost import kv_bytes_per_token
from companion.machine import describe
from companion.study import store
from companion.study.nets import (
    CODECS,
    KEYS,
    VALUES,
    VARIANTS,
    RecallNet,
    accuracy,
    cache_bits,
    load_net,
    save_nets,
)

from .recall_nets import TEST_SEED, Recipe, held_out, pooled, train

RECIPE = Recipe()
ORDER = ("kv8", "latent32", "kv1", "kv4", "latent64", "kv2")  # kv8 first: others are begun again from it
AGAIN = 1000  # steps for those
PAIRS = (4, 8, 16, 32)  # read at; trained on up to RECIPE.pairs
KEPT = (("kv8", 0), ("kv1", 0))  # whose weights are stored; begun again, if that was needed
PILOT = Path(__file__).parent / "results" / "recall_pilot.json"  # what the recipe was chosen by
QUESTIONS = 4096  # per number of pairs
# Student's t, two-sided 95 %, by degrees of freedom: few seeds need a wide margin.
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def read(net: RecallNet, recipe: Recipe, questions: int = QUESTIONS) -> dict:
    """Accuracy by codec and number of pairs; and of the trained number, as far as the most pairs reach."""
    far = 2 * (max(PAIRS) - recipe.pairs) + max(PAIRS) - recipe.pairs
    by_pairs = {}
    for n in PAIRS:
        test = held_out(recipe, TEST_SEED, questions // n, n)
        by_pairs[str(n)] = {c or "fp32": round(accuracy(net, *test, codec=c), 5) for c in (None, *CODECS)}
    test = held_out(recipe, TEST_SEED, questions // recipe.pairs)
    return {"by_pairs": by_pairs, "far": {"gap": far, "fp32": round(accuracy(net, *test, gap=far), 5)}}


def mean_se(values: list[float]) -> dict:
    """Mean and its standard error over seeds; no error from fewer than two."""
    n = len(values)
    se = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return {"n": n, "mean": round(statistics.mean(values), 5), "se": None if se is None else round(se, 5)}


def lost(net: dict, codec: str, pairs: int) -> float:
    at = net["by_pairs"][str(pairs)]
    return at["fp32"] - at[codec]


def difference(a: list[float], b: list[float], wanted: float = 0.01) -> dict:
    """Mean of a minus mean of b, whether the seeds decide its sign, and how many could.

    Decided: beyond Student's t (95 %) at the smaller sample's degrees of freedom, a cautious choice. Seeds to
    decide, per variant: by the same rule and the spread measured, if the difference is as measured, and if it
    is `wanted`; a spread from few seeds is itself rough.
    """
    if min(len(a), len(b)) < 2:
        return {"n": [len(a), len(b)], "decided": None}
    spread = statistics.variance(a) + statistics.variance(b)
    d = statistics.mean(a) - statistics.mean(b)
    se = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return {
        "n": [len(a), len(b)],
        "difference": round(d, 5),
        "se": round(se, 5),
        "decided": abs(d) > t95(min(len(a), len(b)) - 1) * se,
        "wanted": wanted,
        "seeds_to_decide": {
            "measured": seeds_to_decide(d, spread),
            "wanted": seeds_to_decide(wanted, spread),
        },
    }


def t95(freedom: int) -> float:
    """Student's t, two-sided 95 %; beyond the table within 0.01."""
    return T95.get(freedom, 1.96 + 2.72 / freedom)


def seeds_to_decide(difference: float, spread: float) -> int | None:
    """Seeds per variant until `difference` exceeds its error; spread: both variances; None: above 9,999."""
    for n in range(2, 10_000):
        if abs(difference) > t95(n - 1) * math.sqrt(spread / n):
            return n
    return None


def summary(nets: list[dict], again: list[dict], pairs: int) -> dict:
    """Per variant, over the seeds that converged: accuracies and what each codec loses; and against kv8.

    Nets that were begun again are variants of their own: "kv1 from kv8".
    """
    out = {}
    everything = nets + [{**n, "net": f"{n['net']} from kv8"} for n in again]
    for name in dict.fromkeys(n["net"] for n in everything):
        mine = [n for n in everything if n["net"] == name]
        done = [n for n in mine if n["converged"]]
        row = {"trained": len(mine), "converged": len(done), "not_converged_seeds": []}
        row["not_converged_seeds"] = [n["seed"] for n in mine if not n["converged"]]
        if done:
            row["steps_to_0.9"] = mean_se([n["steps_to_0.9"] for n in done])
            row["steps_to_converge"] = mean_se([n["steps_to_converge"] for n in done])
            row["accuracy"] = {
                p: {c: mean_se([n["by_pairs"][p][c] for n in done]) for c in done[0]["by_pairs"][p]}
                for p in done[0]["by_pairs"]
            }
            row["lost"] = {c: mean_se([lost(n, c, pairs) for n in done]) for c in CODECS}
            row["far"] = mean_se([n["far"]["fp32"] for n in done])
            base = [n for n in nets if n["net"] == "kv8" and n["converged"]]
            if name != "kv8" and base:
                row["lost_more_than_kv8"] = {
                    c: difference([lost(n, c, pairs) for n in done], [lost(n, c, pairs) for n in base])
                    for c in CODECS
                }
        out[name] = row
    return out


def shapes() -> dict:
    """Numbers, bits and bytes that one token leaves in the cache."""
    return {
        name: {
            "numbers_per_token_layer": s.cached_width,
            "bytes_per_token_bf16": kv_bytes_per_token(s),
            "bits_per_token_layer": {c or "bf16": cache_bits(s, c) for c in (None, *CODECS)},
        }
        for name, s in VARIANTS.items()
    }


def show(nets: list[dict]) -> None:
    print(
        f"{'net':9} seed  params  numbers  to 0.9  converged",
        *(f"{c:>9}" for c in ("fp32", *CODECS)),
        end=" ",
    )
    print(*(f"n={p:<4}" for p in PAIRS))
    for n in nets:
        at = n["by_pairs"][str(RECIPE.pairs)]
        done = str(n["steps_to_converge"]) if n["converged"] else f"NOT in {n['steps']}"
        print(f"{n['net']:9} {n['seed']:4} {n['parameters']:7,} {VARIANTS[n['net']].cached_width:8}", end=" ")
        print(f"{n['steps_to_0.9'] or 'never':>7} {done:>10}", *(f"{at[c]:9.3f}" for c in at), end=" ")
        print(*(f"{n['by_pairs'][str(p)]['fp32']:.3f} " for p in PAIRS), flush=True)


def tell(*what) -> None:
    if what[2] % 1000 == 0:
        print("  ", *what, flush=True)


def main(argv: list[str] | None = None) -> dict:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--seeds", type=int, default=3)
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--smoke", action="store_true")
    args = parse.parse_args(argv)
    torch.set_num_threads(args.threads)
    recipe, names, questions = RECIPE, list(ORDER), QUESTIONS
    if args.smoke:
        recipe = replace(RECIPE, budget=4, every=2, warmup=2, batch=4, validation=8)
        names, questions = ["kv8", "kv1", "latent32"], 64
    result = {
        "machine": describe(),
        "complete": False,
        "task": {
            "what": "multi-query associative recall: pairs, then every key once in random order",
            "keys": KEYS,
            "values": VALUES,
            "chance": {"any value": 1 / VALUES, "a value of the context": f"about 1 in {recipe.pairs}"},
            "test_questions_per_pairs": questions,
            "held_out": "sequences whose values sum to a multiple of 8; never trained on",
        },
        "recipe": recipe.as_dict(),
        "begun_again_budget": min(AGAIN, recipe.budget),
        "seeds": list(range(args.seeds)),
        "shapes": shapes(),
        "kept": {},
        "pilot": json.loads(PILOT.read_text()),
    }
    nets, again, kept, start = [], [], {}, time.process_time()
    for seed in range(args.seeds):
        for name in names:
            net, record = train(name, seed, recipe, progress=None if args.smoke else tell)
            nets.append({**record, **read(net, recipe, questions)})
            if name == "kv8":
                plain = net
            elif not record["converged"] and not net.spec.mla:
                # Could so few heads hold it at all? Go on from the trained net of eight, its heads averaged.
                short = replace(recipe, budget=min(AGAIN, recipe.budget))
                net, record = train(name, seed, short, init=pooled(plain, name))
                again.append({**record, **read(net, recipe, questions)})
            result |= {
                "complete": len(nets) == args.seeds * len(names),
                "cpu_seconds": round(time.process_time() - start),
                "nets": nets,
                "summary": summary(nets, again, recipe.pairs),
                "pooled_from_kv8": again,
            }
            if (name, seed) in KEPT and not args.smoke:
                kept[name] = net
                save_nets(kept)
                # What a reader recomputes: the stored weights are rounded to 16 bits.
                result["kept"][name] = {
                    "seed": seed,
                    "begun_again": not nets[-1]["converged"],
                    **read(load_net(name), recipe, questions),
                }
            if not args.smoke:
                store("recall_trained", result)
            show(nets[-1:])
    show(nets)
    if again:
        print("\nThose that did not converge, begun again from kv8 of their seed, its heads averaged:")
        show(again)
    return result


if __name__ == "__main__":
    main()
