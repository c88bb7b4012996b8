"""What the precision of keys and values costs in memory for facts: hidden numbers, asked for at the end.

    python -m benchmarks.recall_kv [--haystacks N] [--short N] [--smoke] [--threads N]

A haystack is the frozen text with 8 facts at spread depths. It is read once in float32; its keys and values
are put into every cache, and each fact is asked for by itself. Right: all digits are the likeliest ones.
Haystacks share nothing but the text; the facts of one are not independent, so standard errors are over
haystacks, and each setting is compared with float32 on the same ones. A residual window keeps the last
tokens exact: it can only help facts that stand there. --short: haystacks of 512 and 1,024 tokens.

Results are stored after every haystack (companion/study/results/recall_kv.json); a run that was stopped
goes on where it was. --smoke: two settings on one short haystack, printed, not stored.
"""

import argparse
import platform
import time

import torch
import torch.nn.functional as F

from companion.caches import make_cache
from companion.machine import describe
from companion.model import load
from companion.stats import clustered, holm, needed, paired
from companion.study import haystack, recall, store, text
from companion.study.divergence import fill, prompt
from companion.study.facts import AFTER, DIGITS, FACT, QUESTION, SHA256

from .branches import Branches
from .kv_settings import calibrated, settings
from .quality_kv import TRIAL, log
from .resume import resumed

LENGTHS = (512, 1024, 2048, 4096)
NEEDLES = 8  # facts in a haystack
NAMES = (
    "int8", "fp8_e4m3", "kivi4 r0", "kivi4 r32", "kivi4 r128", "int4 token asym g32", "nvfp4",
    "kivi2 r0", "kivi2 r128", "int2 token g32",
)  # fmt: skip
NAME = "recall_kv"


def one(model, tokenizer, length: int, seed: int, table: dict) -> dict:
    """Every setting on one haystack: who was right, and the nll of each answer."""
    start = time.process_time()
    hay = haystack(tokenizer, length, needles=NEEDLES, seed=seed)
    held = prompt(model, torch.tensor([hay.ids]))
    out = {
        "length": length,
        "seed": seed,
        "names": hay.names,
        "positions": hay.positions,
        "right": {},
        "nll": {},
    }
    out["prompt_cpu_s"] = time.process_time() - start
    room = longest(hay)
    for name, choice in {"fp32": None, **table}.items():
        found = asked(model, held if choice is None else read_back(model, held, *choice, room), hay)
        out["right"][name] = [int(right) for right, _ in found]
        out["nll"][name] = [nll for _, nll in found]
    out["cpu_s"] = time.process_time() - start
    return out


def longest(hay) -> int:
    """Tokens of the longest question with its answer, of which the last is never read."""
    return max(len(question) + len(answer) - 1 for question, answer in hay.queries)


@torch.inference_mode()
def asked(model, held, hay) -> list[tuple[bool, float]]:
    """What `companion.study.recall` returns, all questions in one pass."""
    rows = [[*question, *answer[:-1]] for question, answer in hay.queries]
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    logits = model(ids, Branches(held, len(rows), width))
    out = []
    for row, (question, answer) in zip(logits, hay.queries):
        row, target = row[len(question) - 1 :][: len(answer)].double(), torch.tensor(answer)
        nll = float(F.cross_entropy(row, target, reduction="sum"))
        out.append((bool((row.argmax(-1) == target).all()), nll))
    return out


def read_back(model, held, codec, residual, room: int):
    """A plain cache with what a quantized one reads back, for questions of up to `room` tokens.

    A question is one step, and its own tokens are exact. It changes nothing in the cache as long as it does
    not push a group out of the residual window; ValueError for one that would.
    """
    cache = make_cache("quantized", model.spec, max_tokens=len(held), codec=codec, residual=residual)
    fill(cache, held)
    layer = cache._layers[0]
    tail = len(held) - layer.quantized[0]
    if tail and tail + room >= residual + layer.unit:
        raise ValueError(
            f"room={room}; behind a tail of {tail} tokens they would fill a group of {layer.unit}"
        )
    plain = make_cache("contiguous", model.spec, max_tokens=len(held))
    for i in range(model.spec.layers):
        plain.append(i, *cache.read(i))
    return plain


def summarise(done: dict) -> None:
    """For each length and setting: rate right, nll, standard errors, and the paired difference to float32."""
    done["summary"] = {}
    for length in sorted({h["length"] for h in done["haystacks"]}):
        hays = [h for h in done["haystacks"] if h["length"] == length]
        rows, base = {}, None
        for name in hays[0]["right"]:
            row = {"n": NEEDLES * len(hays), "haystacks": len(hays)}
            means = {}
            for key in ("right", "nll"):
                values = [h[key][name] for h in hays]
                e = clustered(values)
                row[key], row[f"{key}_se"] = e.mean, e.se
                means[key] = [sum(v) / len(v) for v in values]
            base = base or means
            if name != "fp32" and len(hays) > 1:
                for key in ("right", "nll"):
                    t = paired(means[key], base[key])
                    open_ = 0 < abs(t.difference) < 1e9 and abs(t.difference) > 2e-3 * t.sd
                    row[f"{key}_less_fp32"] = {
                        "difference": t.difference, "se": t.se, "p": t.p,
                        "haystacks_needed": needed(t.difference, t.sd) if open_ else None,
                    }  # fmt: skip
            rows[name] = row
        done["summary"][str(length)] = rows
    tests = [
        (r[f"{key}_less_fp32"], key)
        for rows in done["summary"].values()
        for r in rows.values()
        for key in ("right", "nll")
        if f"{key}_less_fp32" in r
    ]
    for key in ("right", "nll"):
        own = [t for t, k in tests if k == key]
        for t, p in zip(own, holm([t["p"] for t in own])):
            t["p_holm"] = p


def run(model, tokenizer, plan: list[tuple[int, int]], *, names=NAMES, keep=True) -> dict:
    """Measure the haystacks of `plan`, (length, seed) each, that are not stored yet."""
    trial = tokenizer.encode(text())[-TRIAL:]
    table = settings(calibrated(model, trial))
    table = {name: table[name] for name in names}
    head = {
        "model": model.spec.name, "text_sha256": SHA256, "needles": NEEDLES, "digits": DIGITS,
        "fact": FACT + "NUMBER" + AFTER, "question": QUESTION, "settings": ["fp32", *names],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    done = {**head, "machine": describe(), "complete": False, "haystacks": []}
    if keep:
        done["haystacks"] = resumed(NAME, head).get("haystacks", [])
    have = {(h["length"], h["seed"]) for h in done["haystacks"]}
    for length, seed in plan:
        if (length, seed) in have:
            continue
        h = one(model, tokenizer, length, seed, table)
        done["haystacks"].append(h)
        summarise(done)
        if keep:
            store(NAME, done)
        rates = "  ".join(f"{k} {sum(v)}" for k, v in h["right"].items())
        seconds = f"{h['cpu_s']:.0f} s of CPU ({h['prompt_cpu_s']:.0f} prompt)"
        log(f"{length} tokens, seed {seed}, {seconds}: {rates}")
    done["one_pass_nll_difference"] = check(model, tokenizer, min(length for length, _ in plan))
    done["complete"] = True
    summarise(done)
    if keep:
        store(NAME, done)
    return done


def check(model, tokenizer, length: int) -> float:
    """Largest difference in nll between `recall`, on forks of the real cache, and this script's one pass."""
    hay = haystack(tokenizer, length, needles=NEEDLES, seed=0)
    room, choice = longest(hay), settings("nvfp4")["int4 token asym g32"]
    held = prompt(model, torch.tensor([hay.ids]))
    cache = make_cache("quantized", model.spec, max_tokens=length + room, codec=choice[0])
    fill(cache, held)
    fast = asked(model, read_back(model, held, *choice, room), hay)
    return max(abs(a - b) for (_, a), (_, b) in zip(recall(model, cache, hay), fast))


def show(done: dict) -> None:
    for length, rows in done["summary"].items():
        print(f"{length} tokens")
        for name, r in rows.items():
            print(f"  {name:<22} right {r['right']:.3f} se {r['right_se'] or 0:.3f}  nll {r['nll']:6.3f} "
                  f"se {r['nll_se'] or 0:.3f}  n {r['n']} in {r['haystacks']}", end="")  # fmt: skip
            for key in ("right", "nll"):
                if t := r.get(f"{key}_less_fp32"):
                    print(f"  d{key} {t['difference']:+.3f} se {t['se']:.3f} p {t['p_holm']:.2g}", end="")
            print()


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--haystacks", type=int, default=8)
    parse.add_argument("--short", type=int, default=16)
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--threads", type=int, default=None)
    args = parse.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load("smollm2-135m")
    if args.smoke:
        show(run(model, tokenizer, [(256, 0)], names=("int8", "int2 token g32"), keep=False))
        return
    plan = [(length, seed) for seed in range(args.haystacks) for length in LENGTHS]
    plan += [(length, seed) for seed in range(args.haystacks, args.short) for length in (512, 1024)]
    show(run(model, tokenizer, plan))


if __name__ == "__main__":
    main()
