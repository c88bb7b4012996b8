"""Speculation from the text's own past on a CPU: where it pays, where it must not cost, what was predicted.

    python -m benchmarks.speculative_cpu [--threads N] [--rounds N] [--out FILE]

SmolLM2, float32, batch 1, greedy, n-gram drafts. Plain decoding and speculation take turns within one run;
ratios are per round, the median round is reported with the extremes. Promises: at least 1.3 times plain
decoding on text that repeats itself, and no more than 1.15 times slower on text that does not.
Beside each stands what `companion.cost.step` says: from the price of a pass by rows, measured first,
and the drafts that were made.
"""

import json
import time

import torch

from companion.cost.step import expected_tokens
from companion.generate import Adaptive, NgramDraft, generate, measure_pass_cost, speculate
from companion.machine import describe
from companion.model import load

from .machine import arguments, spread

LONGEST = 8  # guesses per pass, at most
TOKENS = 64  # new tokens per text
CODE = """import math


class Vector:
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def length(self):
        return math.sqrt(self.x * self.x + self.y * self.y + self.z * self.z)

    def scaled(self, factor):
        return Vector(self.x * factor, self.y * factor, self.z * factor)
"""
TEXTS = {  # what, is it a chat, text
    "second copy of code": ("repeats", False, f"{CODE}\n\n# ----- vector.py, second copy -----\n{CODE[:60]}"),
    "code with a renaming": (
        "repeats",
        False,
        f"# before\n{CODE}\n# after: the same, with Vector renamed to Point\nimport math\n\n\n"
        "class Point:\n    def __init__(self, x, y, z):\n",
    ),
    "explanation": ("does not", True, "Why is the sky blue? Answer in a short paragraph."),
    "list that breaks off": (
        "does not",
        False,
        "- item 1: not started, owner unknown\n- item 2: not started, owner unknown\n"
        "- item 3: not started, owner unknown\n- item 4:",
    ),
}


def one(model, ids, n, way):
    """(seconds per token after the first, generation)."""
    started = time.perf_counter()
    g = way(model, ids, max_new_tokens=n, stop_ids=())
    return (time.perf_counter() - started - g.ttft_s) / (n - 1), g


def predicted(g, price) -> dict[str, float]:
    """Tokens per pass by the formula at the measured acceptance; the speed-up by the price of each pass."""
    by_formula = sum(expected_tokens(g.acceptance, k) for k in g.drafted) / g.passes
    paid = sum(price[1 + k] for k in g.drafted)
    return {
        "tokens_per_pass": by_formula,
        "times_plain": by_formula * g.passes / paid,
        "times_plain_at_counted_tokens": g.tokens_per_pass * g.passes / paid,
    }


def measure(model, tokenizer, n: int, rounds: int, price) -> dict:
    def adaptive(model, ids, **options):
        policy = Adaptive(LONGEST, pass_cost=price)
        return speculate(model, ids, NgramDraft(), draft_tokens=policy, **options)

    def always(model, ids, **options):
        return speculate(model, ids, NgramDraft(), draft_tokens=LONGEST, **options)

    ways = {"plain": generate, "adaptive": adaptive, "always 8": always}
    out = {}
    for name, (what, chat, text) in TEXTS.items():
        ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]) if chat else text)
        times = {way: [] for way in ways}
        last = {}
        for _ in range(rounds):
            for way, run in ways.items():
                seconds, last[way] = one(model, ids, n, run)
                times[way].append(seconds)
        out[name] = {
            "text": what,
            "prompt_tokens": len(ids),
            "plain_tokens_per_s": 1 / sorted(times["plain"])[rounds // 2],
            "ways": {
                way: {
                    "times_plain": spread([p / t for p, t in zip(times["plain"], times[way])]),
                    "tokens_equal_plain": last[way].tokens == last["plain"].tokens,
                    "passes": last[way].passes,
                    "drafted": sum(last[way].drafted),
                    "acceptance": last[way].acceptance,
                    "tokens_per_pass": last[way].tokens_per_pass,
                    "predicted": predicted(last[way], price),
                }
                for way in ways
                if way != "plain"
            },
        }
    return out


def main() -> None:
    args = arguments(__doc__)
    model, tokenizer = load("smollm2-135m")
    with torch.inference_mode():
        price = measure_pass_cost(model, LONGEST, rounds=9)
        texts = measure(model, tokenizer, TOKENS, args.rounds, price)
    result = {"machine": describe(), "new_tokens": TOKENS, "pass_cost": price, "texts": texts}
    print("price of a pass by rows: " + ", ".join(f"{r}: {c:.2f}" for r, c in price.items()))
    for name, t in texts.items():
        for way, w in t["ways"].items():
            r, p = w["times_plain"], w["predicted"]
            print(
                f"{name:<20} ({t['text']}) {way:<9} {r['median']:.2f} x plain "
                f"({r['min']:.2f} to {r['max']:.2f}; predicted {p['times_plain']:.2f}, "
                f"{p['times_plain_at_counted_tokens']:.2f} at the counted tokens), "
                f"acceptance {w['acceptance']:.2f}, tokens per pass {w['tokens_per_pass']:.2f} "
                f"(formula {p['tokens_per_pass']:.2f}), {w['passes']} passes, same text: "
                f"{w['tokens_equal_plain']}"
            )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
